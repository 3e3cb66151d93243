"""A cell that runs over time, with a gradient of its own.

It needs nothing of the loop but the states, and multiplies by the recurrent matrix once in
each step.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor
from tfdp.rules.moves import Move
from tfdp.rules.terms import Term


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recurrent cell, its products with the matrices taken out.

    Attributes:
        matrices: What the state h is multiplied by.
        step: ``(*projected, states) -> new states``; see `projected`. States are a list
            that h is the first of.
        terms: ``(g, other, h) -> terms`` of the recurrent matrix, all of shape
            ``(R, T, ...)``: other is the gradient of inner where `inner_differs`, and
            the projected inputs where it does not.
        bias_terms: ``(g, g_inner) -> terms`` of the bias; g twice where the two do not
            differ.
        inner_differs: Whether the products of h have other gradients than the projected
            inputs.
    """

    matrices: "Matrices"
    step: Callable[..., list[Tensor]]
    terms: Callable[..., list[Term]]
    bias_terms: Callable[..., list[Term]]
    inner_differs: bool = False

    def projected(self, x: Tensor, inner: Tensor) -> list[Tensor]:
        """Return what a step takes of the projected inputs and of the products of h.

        Both if they have gradients of their own, else their sum, which the way back need not
        add up again.
        """
        if self.inner_differs:
            return [x, inner]
        # What a step multiplies itself comes behind.
        more = x.shape[-1] - inner.shape[-1]
        return [x + (tf.pad(inner, [(0, 0), (0, more)]) if more else inner)]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Some columns of a matrix, and what each unit has added to them.

    Attributes:
        value: The columns, shape ``(units, K)``.
        added: What products with the whole matrix gain, or None.
        before: Columns of the whole matrix before these.
        behind: Columns behind them.
    """

    value: Tensor
    added: Move | None
    before: int = 0
    behind: int = 0

    def times(self, rows: Tensor) -> Tensor:
        """``(R, units) -> (R, K)``."""
        products = tf.matmul(rows, self.value)
        if self.added is not None:
            gained = self.added.times(rows)
            products += gained[:, self.before : self.before + self.value.shape[1]]
        return products

    def times_transposed(self, rows: Tensor) -> Tensor:
        """``(R, K) -> (R, units)``."""
        products = tf.matmul(rows, self.value, transpose_b=True)
        if self.added is not None:
            whole = tf.pad(rows, [(0, 0), (self.before, self.behind)])
            products += self.added.times_transposed(whole)
        return products


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Blocks of columns side by side, which see a state under masks of their own.

    Attributes:
        blocks: The blocks, from the first column to the last.
        kept: Dropout mask of what each block sees, shape ``(R, units)``. Or none.
    """

    blocks: list[Matrix]
    kept: list[Tensor]

    @classmethod
    def of(
        cls, value: Tensor, added: Move | None, widths: list[int], kept: list[Tensor]
    ) -> "Matrices":
        """Split the columns of a matrix into blocks of some widths."""
        blocks, before = [], 0
        for columns in tf.split(value, widths, -1):
            behind = value.shape[1] - before - columns.shape[1]
            blocks.append(Matrix(columns, added, before, behind))
            before += columns.shape[1]
        return cls(blocks, kept)

    def split(self, block: int) -> tuple["Matrices", "Matrices"]:
        """Return the blocks before one, and the others."""
        return (
            Matrices(self.blocks[:block], self.kept[:block]),
            Matrices(self.blocks[block:], self.kept[block:]),
        )

    @property
    def widths(self) -> list[int]:
        """How many columns each block has."""
        return [block.value.shape[1] for block in self.blocks]

    def seen(self, h: Tensor) -> list[Tensor]:
        """Return what each block sees of ``(R, units)``, or of ``(R, T, units)``."""
        if not self.kept:
            return [h] * len(self.blocks)
        masks = self.kept if h.shape.rank == 2 else [m[:, None] for m in self.kept]
        return [h * mask for mask in masks]

    def times(self, h: Tensor) -> Tensor:
        """``(R, units) -> (R, columns)``, of all blocks."""
        return self.products(self.seen(h))

    def products(self, seen: list[Tensor]) -> Tensor:
        """Multiply what each block sees, all of shape ``(R, units)``."""
        pairs = zip(self.blocks, seen, strict=True)
        products = [block.times(rows) for block, rows in pairs]
        return products[0] if len(products) == 1 else tf.concat(products, -1)

    def times_transposed(self, rows: Tensor) -> Tensor:
        """``(R, columns) -> (R, units)``, under the masks."""
        parts = [rows] if len(self.blocks) == 1 else tf.split(rows, self.widths, -1)
        pairs = zip(self.blocks, parts, strict=True)
        products = [block.times_transposed(part) for block, part in pairs]
        if self.kept:
            products = [a * mask for a, mask in zip(products, self.kept, strict=True)]
        return products[0] if len(products) == 1 else tf.add_n(products)


@dataclasses.dataclass(frozen=True)
class Scan:
    """A cell that runs over time, with a gradient of its own.

    Attributes:
        cell: The cell.
        mask: bool, shape ``(T, R, 1)``: where it is False the states stay. Or None.
    """

    cell: Cell
    mask: Tensor | None

    def run(
        self, over_time: list[Tensor], states: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the cell.

        Args:
            over_time: The projected inputs, shape ``(T, R, ...)``, and perhaps what
                is added to the inner products.
            states: What they are at first, shapes ``(R, units)``.

        Returns:
            h before each step, h after each step, both of shape ``(T, R, units)``,
            and the last states.
        """

        @tf.custom_gradient
        def run(*tensors: Tensor) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
            inputs, first = tensors[: len(over_time)], tensors[len(over_time) :]
            with _keras.without_tapes():
                reads, written, last = self._forward(list(inputs), list(first))
                before = written[1].stack()
            after = tf.concat([before[1:], last[0][None]], 0)

            def gradient(*upstream: Tensor) -> list[Tensor]:
                # The states before are the states after, a step later: their own
                # gradient is never asked for.
                _, of_after, *of_last = upstream
                # Stacked, what each step has left would be copied twice.
                x = reads[:1] if self.cell.inner_differs else []
                masks = reads[len(inputs) :]
                arrays = [*_readable([of_after]), *x, *written, *masks]
                return self._backward(list(inputs), arrays, of_last)

            return [before, after, *last], gradient

        before, after, *last = run(*over_time, *states)
        # What comes from before a step has no gradient of its own.
        return tf.stop_gradient(before), after, last

    def run_plainly(
        self, over_time: list[Tensor], states: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Do what `run` does with TensorFlow's gradient, which has one itself."""
        _, written, last = self._forward(over_time, states)
        before = written[1].stack()
        return before, tf.concat([before[1:], last[0][None]], 0), last

    def _forward(
        self, inputs: list[Tensor], states: list[Tensor]
    ) -> tuple[list[tf.TensorArray], list[tf.TensorArray], list[Tensor]]:
        """Run the steps.

        Args:
            inputs: See `run`.
            states: See `run`.

        Returns:
            The inputs and the mask, if there is one; the last of what is projected, and the
            states before each step; and the last states.
        """
        steps = tf.shape(inputs[0])[0]
        reads = _readable(inputs if self.mask is None else [*inputs, self.mask])

        def body(time: Tensor, states: Nest, written: Nest) -> Nest:
            (x, *more), mask = self._read(reads, time)
            inner = tf.add_n([self.cell.matrices.times(states[0]), *more])
            projected = self.cell.projected(x, inner)
            written = _write(written, time, [projected[-1], *states])
            return time + 1, self._step(projected, states, mask), written

        # Sums have the width of x, inner products that of what is added to them.
        like = [inputs[-1][0], *states]

        _, last, written = tf.while_loop(
            lambda time, *_: time < steps,
            body,
            (0, states, _writable(like, steps)),
            parallel_iterations=1,
            maximum_iterations=steps,  # XLA cannot do without.
        )
        return reads, written, last

    def _backward(
        self, inputs: list[Tensor], reads: list[tf.TensorArray], of_last: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of the inputs and of the first states.

        Args:
            inputs: See `run`.
            reads: The gradients of the outputs, what is projected, and the states before
                each step; and the mask, if there is one.
            of_last: Gradients of the last states.
        """
        steps = tf.shape(inputs[0])[0]

        def body(time: Tensor, of_states: Nest, written: Nest) -> Nest:
            time -= 1
            (of_output, *others), mask = self._read(reads, time)
            projected, states = others[: len(inputs)], others[len(inputs) :]
            of_states = [of_states[0] + of_output, *of_states[1:]]
            # From behind: what a state is worth is known from the steps after it.
            # One step is computed once more: nothing inside of it is held over time.
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([projected, states])
                new = self._step(projected, states, mask)
            of_projected, of_states = tape.gradient(
                new,
                [projected, states],
                output_gradients=of_states,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            # h reaches the next states directly and by way of its inner product.
            of_inner = of_projected[-1][:, : sum(self.cell.matrices.widths)]
            of_h = self.cell.matrices.times_transposed(of_inner)
            written = _write(written, time, of_projected)
            return time, [of_states[0] + of_h, *of_states[1:]], written

        like = [each[0] for each in inputs]
        _, of_first, written = tf.while_loop(
            lambda time, *_: time > 0,
            body,
            (steps, of_last, _writable(like, steps)),
            parallel_iterations=1,
            maximum_iterations=steps,
        )
        return [*(array.stack() for array in written), *of_first]

    def _step(
        self, projected: list[Tensor], states: list[Tensor], mask: Tensor | None
    ) -> list[Tensor]:
        new = self.cell.step(*projected, states)
        if mask is None:
            return new
        return [tf.where(mask, a, b) for a, b in zip(new, states, strict=True)]

    def _read(
        self, arrays: list[tf.TensorArray], time: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        found = [array.read(time) for array in arrays]
        mask = None if self.mask is None else found.pop()
        return found, mask


def _readable(tensors: list[Tensor]) -> list[tf.TensorArray]:
    """Put tensors where loops read them, as often as they go through them."""
    steps = tf.shape(tensors[0])[0]
    return [
        tf.TensorArray(
            t.dtype, steps, clear_after_read=False, element_shape=t.shape[1:]
        ).unstack(t)
        for t in tensors
    ]


def _writable(like: list[Tensor], steps: Tensor) -> list[tf.TensorArray]:
    return [
        tf.TensorArray(t.dtype, steps, clear_after_read=False, element_shape=t.shape)
        for t in like
    ]


def _write(
    arrays: list[tf.TensorArray], time: Tensor, tensors: list[Tensor]
) -> list[tf.TensorArray]:
    return [
        array.write(time, tensor) for array, tensor in zip(arrays, tensors, strict=True)
    ]
