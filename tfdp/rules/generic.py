"""Rules of layers that have none: each row by itself, by vectorizing.

They are for where a layer's weights are not followed: uphill, in a function.
"""

from collections.abc import Callable
from typing import NoReturn

import keras
import tensorflow as tf

from tfdp import _keras, _seeds
from tfdp._mapping import vectorized_map
from tfdp._tracing import tracing
from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.registry import RULES, Leaves, rule
from tfdp.rules.terms import PerRow, Term


@rule(Leaves.OTHERS)
def generic(call: Call) -> Nest:
    """Rule of any layer that is deterministic and treats rows separately.

    Each row goes through the layer's own code once more, in a vectorized map: Fast
    Gradient Clipping, layer by layer [1]_.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If the layer keeps state, is random, or cannot be
            vectorized.

    References:
        .. [1] Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library
           in PyTorch", 2021. https://arxiv.org/abs/2109.12298
    """
    variables = call.layer.trainable_variables
    rows = _Rows(call)
    # Run once more for the gradients, it would draw other numbers.
    outputs = rows.without_chance(*call.args, **call.kwargs)

    def of_row(row: list[Tensor]) -> list[Tensor]:
        values = [variable.value for variable in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            results = keras.tree.flatten(rows.run(row))
        found = tape.gradient(
            results,
            values,
            output_gradients=[g[None] for g in row[len(rows.tensors) :]],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]

    def terms(*gradients: Tensor) -> list[Term]:
        of_rows = rows.mapped(of_row, *gradients)
        return [
            PerRow(variable, gradient)
            for variable, gradient in zip(variables, of_rows, strict=True)
        ]

    watched = call.watch_all(keras.tree.flatten(outputs), terms, linear_terms=None)
    return keras.tree.pack_sequence_as(outputs, watched)


@rule(Leaves.VECTORS)
def vectors(call: Call) -> Nest:
    """Rule of any such layer whose variables are vectors: scales and offsets.

    Each row goes through the layer's own code by itself, with copies of the variables
    that are its own: the ordinary backward pass leaves the gradients of the rows apart.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: See `generic`; also if it takes variables from where
            copies cannot stand in for them.
    """
    variables = call.layer.trainable_variables
    known = {id(v) for each in variables for v in _keras.tensorflow_variables(each)}
    rows = _Rows(call)
    copies = [call.per_row(variable) for variable in variables]
    structure: list[Nest] = []

    def of_row(row: list[Tensor]) -> list[Tensor]:
        own = list(zip(variables, row[len(rows.tensors) :], strict=True))
        with tf.GradientTape() as tape, keras.StatelessScope(state_mapping=own):
            outputs = rows.run(row)
        if any(id(variable) in known for variable in tape.watched_variables()):
            rows.refuse("must read its variables by their `value`")
        structure[:] = [outputs]
        return [tf.ensure_shape(t, [1, *t.shape[1:]])[0] for t in _with_masks(outputs)]

    if tracing() is None:
        return _packed(rows.mapped(of_row, *copies), structure[0])
    # Of one row alone nothing tells what the layer does to the rows of a batch.
    outputs = rows.without_chance(*call.args, **call.kwargs)
    (sums,) = rows.mapped(lambda row: [_sum(of_row(row))], *copies)
    return keras.tree.map_structure(lambda each: _plus_rows(each, sums), outputs)


def _with_masks(outputs: Nest) -> list[Tensor]:
    """List the tensors that a layer returns, and then the masks that it attached."""
    results: list[Tensor] = keras.tree.flatten(outputs)
    masks = [_keras.keras_mask(result) for result in results]
    return results + [mask for mask in masks if mask is not None]


def _packed(tensors: list[Tensor], outputs: Nest) -> Nest:
    """Undo `_with_masks`, with other tensors in place of those of `outputs`."""
    remaining = iter(tensors)
    packed = keras.tree.map_structure(lambda _: next(remaining), outputs)
    for tensor, output in zip(
        keras.tree.flatten(packed), keras.tree.flatten(outputs), strict=True
    ):
        if _keras.keras_mask(output) is not None:
            _keras.with_mask(tensor, next(remaining))
    return packed


def _sum(tensors: list[Tensor]) -> Tensor:
    return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in tensors])


def _plus_rows(tensor: Tensor, of_rows: Tensor) -> Tensor:
    """Add a number of each row to a tensor, if it can have gradients."""
    if not tensor.dtype.is_floating:
        return tensor
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    total = tensor + tf.cast(tf.reshape(of_rows, shape), tensor.dtype)
    return _keras.with_mask_of(total, tensor)


class _Rows:
    """The rows of a call of a layer without a rule, which may neither keep nor draw.

    Args:
        call: The call.

    Attributes:
        tensors: What has a row for each example: arguments, and masks of theirs.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        if call.layer.non_trainable_variables:
            self.refuse("must keep no state")
        self.tensors: list[Tensor] = []
        for leaf in keras.tree.flatten((call.args, call.kwargs)):
            if _has_rows(leaf):
                mask = _keras.keras_mask(leaf)
                self.tensors += [leaf] if mask is None else [leaf, mask]
        # With as many rows as another axis has numbers, nobody could tell them apart.
        rows = keras.tree.flatten(call.inputs)[0].shape[0]
        if any(tensor.shape[0] != rows for tensor in self.tensors):
            self.refuse("must take tensors of which each row is one example's")

    def refuse(self, rule_broken: str, error: Exception | None = None) -> NoReturn:
        """Raise, with what the layer does and what to do about it."""
        kind = type(self._call.layer)
        # That of the class that it is derived from may do; it is compared on rows.
        known = [RULES[each] for each in kind.__mro__ if each in RULES]
        names = [f"{each.__module__}.{getattr(each, '__name__', '')}" for each in known]
        may_do = next((name for name in names if name.startswith("tfdp.")), "rule")
        raise UnsupportedLayerError(
            f"A layer without a rule {rule_broken}. Received: `{self._call.path}` "
            f"({kind.__name__}). Register a rule for it: "
            f"`tfdp.rules.register({kind.__name__}, {may_do})`."
        ) from error

    def run(self, row: list[Tensor]) -> Nest:
        """Run the layer's own code on one row of `tensors`."""
        remaining = iter(row)

        def of_row(leaf: Nest) -> Nest:
            if not _has_rows(leaf):
                return leaf
            tensor = next(remaining)[None]
            if _keras.keras_mask(leaf) is None:
                return tensor
            return _keras.with_mask(tensor, next(remaining)[None])

        arguments = (self._call.args, self._call.kwargs)
        args, kwargs = keras.tree.map_structure(of_row, arguments)
        return self.without_chance(*args, **kwargs)

    def without_chance(self, *args: Nest, **kwargs: Nest) -> Nest:
        """Run the layer's own code on these arguments."""
        try:
            with _seeds.without_chance():
                return self._call.run(*args, **kwargs)
        except _seeds.RandomError as error:
            self.refuse("must not be random", error)

    def mapped(
        self, function: Callable[[list[Tensor]], Nest], *more: Tensor
    ) -> list[Tensor]:
        """Apply a function to each row of `tensors` and of others."""
        trace = tracing()
        rows = [*self.tensors, *more]
        try:
            if trace is None:
                of_rows: list[Tensor] = vectorized_map(function, rows)
                return of_rows
            _check_that_it_can_be_vectorized(function, rows)
            return list(trace.alone(function, rows))
        except UnsupportedLayerError:
            raise
        # Whatever stops the tracing: an error of the layer itself came before.
        except Exception as error:  # noqa: BLE001
            self.refuse("must be one that can be vectorized", error)


def _has_rows(leaf: Nest) -> bool:
    return bool(tf.is_tensor(leaf) and leaf.shape.rank)


def _check_that_it_can_be_vectorized(
    function: Callable[[list[Tensor]], Nest], rows: list[Tensor]
) -> None:
    """Raise whatever a vectorized map raises while it is traced."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in rows]
    tf.function(
        lambda rows: vectorized_map(function, rows), autograph=False
    ).get_concrete_function(specs)
