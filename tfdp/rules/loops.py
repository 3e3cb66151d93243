"""Takes loops whole: what a step does with variables is recorded for all steps at once.

In the graph of a loop's step a variable is followed to where it meets the rows, as in
`tfdp.rules.elsewhere`. The loop is then made once more, from the operations of its step:
zeros are added to what such a use makes, whose gradients are those of all steps, and what
it is made of is kept. With that the use is repeated outside, where all steps of a row are
consecutive entries of it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor, Variable
from tfdp.rules.copies import Copies
from tfdp.rules.counting import count_steps
from tfdp.rules.free import Free
from tfdp.rules.handles import Handles
from tfdp.rules.loop_uses import seen_by
from tfdp.rules.places import Place
from tfdp.rules.unrolling import while_loop
from tfdp.rules.uses import NotFollowedError, Pass, Use, made_as

# TensorFlow's counter and limit come before what the caller gives a loop.
_OWN_INPUTS = 2

# Options of loops, and those that the loop that is made once more has too.
_OPTIONS = {"maximum_iterations", "parallel_iterations", "swap_memory", "name"}
_KEPT_OPTIONS = ("parallel_iterations", "swap_memory")


class NotTakenWholeError(Exception):
    """A loop uses variables in a way of which nothing is known; the message says where."""


class Tap(NamedTuple):
    """What stands for a use of variables in all steps of a loop.

    Attributes:
        zeros: Shape ``(T, N, ...)`` for T steps and N rows: what is added to what each step
            makes, and has its gradients.
        steps: T.
        positions: How many entries of the first axis a use makes of a row in a step.
        rows: What the use is made of, the T steps of each row consecutive entries of the
            first axis.
        variables: Paths of the variables.
    """

    zeros: Tensor
    steps: int
    positions: int
    rows: Tensor
    variables: set[str]

    @property
    def place(self) -> Place:
        """Where rows lie in what the use makes outside of the loop."""
        return Place(entries=self.steps * self.positions)

    def gradients(self, of_zeros: Tensor) -> Tensor:
        """Bring the gradients of the zeros into the order of the rows."""
        found = _rows_first(of_zeros, self.steps)
        return (
            found if self.positions == 1 else tf.reshape(found, [-1, found.shape[-1]])
        )


class Taken(NamedTuple):
    """A loop that was taken whole.

    Attributes:
        results: What `tf.while_loop` returns.
        taps: Of the uses of variables that are repeated outside, by the names of their
            operations.
        is_differentiated: Tells whether somebody has gone back through the loop since it
            was made.
    """

    results: Nest
    taps: dict[str, Tap]
    is_differentiated: Callable[[], bool]


def taken_whole(
    variables: Iterable[Variable],
    rows: int | Tensor,
    free: Free,
    tapes: list[tf.GradientTape],
    cond: Callable[..., Nest],
    body: Callable[..., Nest],
    loop_vars: Nest,
    *args: Nest,
    **kwargs: Nest,
) -> Taken | None:
    """Do what `tf.while_loop` does, and record what each step does with variables.

    Args:
        variables: The variables.
        rows: How many rows there are.
        free: Knows what is made without rows, in the graph that is being made.
        tapes: Those of the pass, of which the first one records it. Others may ask for
            gradients that the loop does not give them: those of the variables.
        cond: As in `tf.while_loop`.
        body: Likewise.
        loop_vars: Likewise.
        *args: Likewise.
        **kwargs: Likewise.

    Returns:
        The loop; None if no step uses one of the variables.

    Raises:
        NotTakenWholeError: If something in the loop is not known, how many steps it has, or
            who asks for its gradients.
    """
    leaves = tf.nest.flatten(loop_vars)
    handles = Handles(variables, free)

    def traced() -> None:
        while_loop(cond, body, loop_vars, *args, **kwargs)

    try:
        # Code in the loop may have tapes of its own, which record. With those of the pass
        # TensorFlow would put the loop into one more function.
        with _keras.paused(tapes):
            graph = tf.function(traced, autograph=False).get_concrete_function().graph
        if not any(handles.of(e) or handles.paths_behind(e) for e, _ in graph.captures):
            return None
        (op,) = (op for op in graph.get_operations() if op.type.endswith("While"))
        if (
            args
            or kwargs.keys() - _OPTIONS
            or len(leaves) != len(tf.nest.flatten(loop_vars, expand_composites=True))
        ):
            raise NotTakenWholeError("a loop with other options, or not over tensors")
        options = {name: kwargs[name] for name in _KEPT_OPTIONS if name in kwargs}
        loop = _Loop(op, graph, handles, free)
        with _keras.paused(tapes):
            if any(map(_keras.is_recorded, loop.differentiable)):
                raise NotTakenWholeError(
                    "a loop whose gradients another tape may ask for"
                )
        values, taps = loop.remade(rows, tapes[0], options)
    except Exception as error:
        # Whatever it is: there are other ways to take a loop.
        raise NotTakenWholeError(str(error)) from error
    results = [
        _keras.array_with_flow(leaf, value)
        if isinstance(leaf, tf.TensorArray)
        else value
        for leaf, value in zip(leaves, values, strict=False)
    ]
    packed = tf.nest.pack_sequence_as(loop_vars, results)
    return Taken(packed, taps, loop.is_differentiated)


class _Root(NamedTuple):
    """Something of variables that each step of a loop is given.

    Attributes:
        paths: Of the variables.
        made: Operations that make something of it and of no data, by their names.
        uses: Where that meets the rows.
    """

    paths: list[str]
    made: dict[str, tf.Operation]
    uses: list[Use]


class _Loop:
    """A loop of TensorFlow's that is to be made once more.

    Args:
        op: The loop, in a graph of its own.
        graph: That graph.
        handles: The variables whose uses are recorded.
        free: What is made without rows, in the graph that is being made.

    Attributes:
        is_differentiated: See `Taken`; once it is made.

    Raises:
        NotFollowedError: If something in it is not known.
    """

    is_differentiated: Callable[[], bool]

    def __init__(
        self,
        op: tf.Operation,
        graph: tf.Graph,
        handles: Handles,
        free: Free,
    ) -> None:
        self._cond, self._body = (
            _keras.function_graph(graph, op.get_attr(name).name)
            for name in ("cond", "body")
        )
        outside = Copies({inner.name: outer for outer, inner in graph.captures})
        self._start = [outside.of(each) for each in op.inputs]
        given, made = self._body.inputs, self._body.outputs
        # What steps pass on as it is need not be carried.
        self._carried = [
            place
            for place in range(_OWN_INPUTS, len(given))
            if made_as(made[place]).name != given[place].name
        ]
        self._steps = count_steps(self._cond, self._body, self._start)
        self._free = Free(free.number)
        for place, each in enumerate(given):
            is_kept = place >= _OWN_INPUTS and place not in self._carried
            is_free = is_kept and free.holds(self._start[place])
            self._free.note([each], is_free=is_free)
        self._outside = Copies({
            given[place].name: self._start[place]
            for place in range(_OWN_INPUTS, len(given))
            if place not in self._carried
        })
        self._roots = self._follow(handles)
        self._made = {name for root in self._roots for name in root.made}
        self._seen = {
            use.op.name: seen_by(use, self._free)
            for root in self._roots
            for use in root.uses
        }
        if self._steps == 0 or not self._seen:
            raise NotFollowedError("no step that uses variables")
        self._operations = [
            op
            for op in self._body.get_operations()
            if op.type != "Placeholder" and op.name not in self._made
        ]

    @property
    def differentiable(self) -> list[Tensor]:
        """What gradients may come back to, variables included."""
        read = [
            self._outside.known[each.name]
            for root in self._roots
            for op in root.made.values()
            for each in op.outputs
            if each.name in self._outside.known
        ]
        differentiable = [
            each
            for each in self._start
            if each.dtype.is_floating or each.dtype == tf.variant
        ]
        return [*differentiable, *read]

    def _follow(self, handles: Handles) -> list[_Root]:
        """Follow what a step is given of variables to where it meets the rows."""
        given = [
            (inner, start)
            for place, (inner, start) in enumerate(
                zip(self._body.inputs, self._start, strict=True)
            )
            if place not in self._carried and place >= _OWN_INPUTS
        ]
        variables = [
            (inner, *known) for inner, start in given if (known := handles.of(start))
        ]
        captures = [(copy.handle, inner) for inner, _, copy in variables]
        roots = []
        with self._body.as_default():
            operations = Pass(0, self._free, [], [], captures)
            for _, variable, _ in variables:
                followed = operations.follow(variable)
                roots.append(_Root([variable.path], followed.made, followed.uses))
            for inner, start in given:
                paths = handles.paths_behind(start)
                if paths:
                    made = {inner.op.name: inner.op}
                    roots.append(_Root(paths, made, operations.uses_of([inner], made)))
        # Read outside, once: the gradients are those of uses that are repeated there.
        for inner, _, copy in variables:
            for read in inner.consumers():
                if read.type == "ReadVariableOp":
                    self._outside.known[read.outputs[0].name] = copy.read_value()
        returned = {self._body.outputs[place].op.name for place in self._carried}
        for root in roots:
            if returned & root.made.keys():
                raise NotFollowedError("a variable that steps pass on")
        return roots

    def remade(
        self,
        rows: int | Tensor,
        tape: tf.GradientTape,
        options: dict[str, Nest],
    ) -> tuple[list[Tensor], dict[str, Tap]]:
        """Make the loop, and the uses outside.

        Args:
            rows: See `taken_whole`.
            tape: Records the pass.
            options: Of the loop.

        Returns:
            What comes out for the caller's tensors and all that is given beside, and the
            taps.
        """
        zeros = {
            name: tf.zeros([self._steps, rows, *seen.lengths], seen.op.outputs[0].dtype)
            for name, seen in self._seen.items()
        }
        for each in zeros.values():
            tape.watch(each)
        # In the shape of what is made, positions being entries.
        added = {
            name: each
            if self._seen[name].positions == 1
            else tf.reshape(each, [self._steps, -1, each.shape[-1]])
            for name, each in zeros.items()
        }
        carried, of_steps = self._run(added, options)
        values = list(self._start)
        for place, value in zip(self._carried, carried, strict=True):
            values[place] = value
        return values[_OWN_INPUTS:], self._repeated_outside(zeros, of_steps)

    def _run(
        self, added: dict[str, Tensor], options: dict[str, Nest]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run the loop.

        Args:
            added: What is added in all steps, by the names of the uses.
            options: Of the loop.

        Returns:
            What is carried, after the last step; and what the uses are made of, by the
            names in a step, the steps of each row consecutive entries.
        """
        kept = {each.name: each for seen in self._seen.values() for each in seen.rows}
        arrays = [
            tf.TensorArray(_integers_for(t.dtype), self._steps, element_shape=t.shape)
            for t in kept.values()
        ]
        # Lists that steps take the last of: their gradients are put behind one by one.
        lists = {
            name: tf.raw_ops.TensorListFromTensor(
                tensor=each, element_shape=_shape_of_entries(each)
            )
            for name, each in added.items()
        }
        # No gradient comes back to variables in the loop: it would be that of all rows.
        fixed = {
            each.name: tf.stop_gradient(self._outside.of(each))
            for op in self._operations
            for each in op.inputs
            if each.op.name in self._made
        }

        def step(number: Tensor, carried: Nest, lists: Nest, arrays: Nest) -> Nest:
            left, of_step = {}, {}
            for name, each in lists.items():
                left[name], of_step[name] = tf.raw_ops.TensorListPopBack(
                    input_handle=each,
                    element_shape=_shape_of_entries(added[name]),
                    element_dtype=added[name].dtype,
                )
            copies = self._step(number, carried, fixed, of_step)
            outputs = [copies.known[self._body.outputs[n].name] for n in self._carried]
            # Among the kept, a step's place is that of what it has taken from the lists.
            arrays = [
                array.write(self._steps - 1 - number, _as_integers(copies.known[name]))
                for array, name in zip(arrays, kept, strict=True)
            ]
            return number + 1, outputs, left, arrays

        carried = [self._start[place] for place in self._carried]
        with _keras.without_tapes():
            _, made, _, arrays = while_loop(
                lambda number, *_: number < self._steps,
                step,
                (tf.constant(0), carried, lists, arrays),
                maximum_iterations=self._steps,
                **options,
            )
        unchanged = [
            start
            for place, (start, each) in enumerate(
                zip(self._start, self._body.inputs, strict=True)
            )
            if place not in self._carried and not self._free.holds(each)
        ]
        _keras.record_loop(made, [*lists.values(), *carried, *unchanged])
        self._note_uses(made_as(arrays[0].flow).op, list(fixed.values()))
        return made, {
            name: _rows_first(_as_before(array.stack(), kept[name]), self._steps)
            for name, array in zip(kept, arrays, strict=True)
        }

    def _note_uses(self, loop: tf.Operation, given: list[Tensor]) -> None:
        """Note who uses what, to tell later whether gradients have been taken."""

        def uses() -> int:
            # A gradient asks for what was given, or makes the loop keep more than it did.
            return len(loop.outputs) + sum(len(each.consumers()) for each in given)

        before = uses()
        self.is_differentiated = lambda: uses() > before

    def _repeated_outside(
        self, zeros: dict[str, Tensor], of_steps: dict[str, Tensor]
    ) -> dict[str, Tap]:
        """Repeat the uses of all steps at once.

        Args:
            zeros: What was added in the steps, by the names of the uses.
            of_steps: See `_run`.

        Returns:
            Their taps, by the names of their operations.
        """
        self._outside.known |= of_steps
        taps = {}
        for name, seen in self._seen.items():
            of_rows = of_steps[seen.rows[0].name]
            if seen.positions > 1:
                flat = tf.reshape(of_rows, [-1, of_rows.shape[-1]])
                self._outside.known[seen.op.inputs[0].name] = flat
            for each in seen.op.inputs:
                self._outside.of(each)
            outside = self._outside.copy(seen.op)
            used = {
                path
                for root in self._roots
                if any(use.op.name == name for use in root.uses)
                for path in root.paths
            }
            taps[outside.name] = Tap(
                zeros[name], self._steps, seen.positions, of_rows, used
            )
        return taps

    def _step(
        self,
        number: Tensor,
        carried: list[Tensor],
        fixed: dict[str, Tensor],
        added: dict[str, Tensor],
    ) -> Copies:
        """Copy the operations of one step, and add what is to be."""
        given = self._body.inputs
        values = [number, *self._start[1:]]
        for place, value in zip(self._carried, carried, strict=True):
            values[place] = value
        pairs = zip(given, values, strict=True)
        copies = Copies({each.name: value for each, value in pairs} | fixed)
        for op in self._operations:
            made = copies.copy(op)
            for old, new in zip(op.outputs, made.outputs, strict=True):
                # Code may have known more of it than TensorFlow finds out.
                new.set_shape(old.shape)
            if op.name in added:
                (output,) = made.outputs
                copies.known[op.outputs[0].name] = output + added[op.name]
        return copies


def _rows_first(of_steps: Tensor, steps: int) -> Tensor:
    """``(T, N, ...) -> (N * T, ...)``, the T steps of each row one after the other."""
    flat = tf.reshape(of_steps, [-1, *of_steps.shape[2:]])
    return Place(times=steps).rows_first(flat)


def _shape_of_entries(tensor: Tensor) -> Tensor:
    """Return the shape behind the first axis for a list, -1 where it is not static."""
    return tf.constant([-1 if n is None else n for n in tensor.shape[1:]], tf.int32)


# Of whole numbers a loop keeps no gradients, which would be computed in every step.
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def _integers_for(dtype: tf.DType) -> tf.DType:
    return _INTEGERS[dtype.size] if dtype.is_floating else dtype


def _as_integers(tensor: Tensor) -> Tensor:
    """Take numbers for whole ones of the same bits."""
    dtype = _integers_for(tensor.dtype)
    return tensor if dtype == tensor.dtype else tf.bitcast(tensor, dtype)


def _as_before(tensor: Tensor, like: Tensor) -> Tensor:
    """Undo `_as_integers`."""
    return tensor if tensor.dtype == like.dtype else tf.bitcast(tensor, like.dtype)
