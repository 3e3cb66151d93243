"""Gradients of variables that are used elsewhere than in calls that have a rule.

A layer that has layers in it has weights of its own, a matrix is borrowed for logits,
positions are looked up once for all rows. On the graph of the pass such a variable is
followed to where it meets the rows: there, each row gets a copy of its own of what has
been made of the variable, and the gradient of that copy is the row's.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdp._tracing import tracing
from tfdp._types import Tensor, Variable
from tfdp.rules.terms import OuterProducts, PerRow, Term
from tfdp.rules.uses import (
    COPIES,
    Followed,
    NotFollowedError,
    Use,
    named,
    rows_of_copies,
)

# From the gradients of what a use makes to those of what it has of the variable, each
# row's for itself: (N, ...) -> (N, *shape).
_OfRows = Callable[[Tensor], Tensor]

# Number by number, with broadcasting.
_BY_NUMBER = frozenset({
    "Add", "AddV2", "Atan2", "BiasAdd", "Cast", "Ceil", "Cos", "Cosh", "Div",
    "DivNoNan", "Elu", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Identity", "Inv",
    "LeakyRelu", "Log", "Log1p", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow",
    "RealDiv", "Reciprocal", "Relu", "Relu6", "Rsqrt", "SelectV2", "Selu", "Sigmoid",
    "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square",
    "SquaredDifference", "Sub", "Tan", "Tanh", "Xdivy", "Xlogy",
})  # fmt: skip

# What multiplies matrices, and names for which of the two are transposed.
_FLAGS = {
    "MatMul": ("transpose_a", "transpose_b"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
}

# The same numbers in the same order.
_AS_IT_IS = frozenset({"Identity", "Cast"})
_SAME_ORDER = _AS_IT_IS | {"Reshape", "ExpandDims", "Squeeze"}


class Met(NamedTuple):
    """What to ask of a use.

    Attributes:
        terms: From the gradient of what the operation makes to terms of the variable.
        rows: A tensor that has the rows.
        axis: On which axis.
    """

    terms: Callable[[Tensor], list[Term]]
    rows: Tensor
    axis: int


def met(followed: Followed, use: Use, rows: int | None) -> Met:
    """Say what the gradient of what a use makes adds to that of the variable.

    Args:
        followed: The variable, and what becomes of it.
        use: One of its uses.
        rows: How many rows there are, None where that is not static.

    Returns:
        What to ask of it.

    Raises:
        NotFollowedError: If nothing is known of the operation.
    """
    op = use.op
    if len(op.outputs) != 1 or use.tensor.shape.rank is None:
        raise NotFollowedError(named(op))
    if op.type == "GatherV2" and use.place == 0:
        return _met_by_lookup(followed, use)
    if op.type in _FLAGS and use.place == 1 and use.tensor.shape.rank == 2:
        return _met_by_matrix(followed, use)
    of_rows, axis = _of_rows(use, rows)
    through = _through(followed, use.tensor)
    return Met(lambda g: [through(of_rows(g))], use.output, axis)


# ------------------------------------------------------------- where it meets the rows


def _of_rows(use: Use, rows: int | None) -> tuple[_OfRows, int]:
    """Return what takes gradients to those of the rows' copies, and where rows are."""
    op = use.op
    if op.type in COPIES and use.place == 0:
        return _of_copies(use, rows_of_copies(op, rows))
    if op.type == "Einsum":
        return _of_einsum(use, rows)
    made, given = use.output.shape, use.tensor.shape
    # An axis before its own is that of the rows.
    has_room = made.rank is not None and (
        given.rank < made.rank or (given.rank == made.rank and given[0] == 1)
    )
    is_known = op.type in _BY_NUMBER or (op.type in _FLAGS and op.type != "MatMul")
    if op.type == "BiasAdd":
        is_known = op.get_attr("data_format") == b"NHWC"
    if not is_known or not has_room:
        raise NotFollowedError(named(op))
    return _of_broadcast(use), 0


def _of_broadcast(use: Use) -> _OfRows:
    """Do it once more, with a copy for each row in place of one for all."""
    op, tensor = use.op, use.tensor
    missing = use.output.shape.rank - tensor.shape.rank
    lengths = [*[1] * missing, *_lengths(tensor)][1:]

    def of_rows(g: Tensor) -> Tensor:
        copies = tf.reshape(tf.cast(tensor, g.dtype), [1, *lengths])
        copies = tf.broadcast_to(copies, [tf.shape(g)[0], *lengths])
        inputs = list(op.inputs)
        inputs[use.place] = copies
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(copies)
            made = _again(op, inputs, g.dtype)
        found = tape.gradient(made, copies, output_gradients=g)
        return tf.reshape(found, [-1, *_lengths(tensor)])

    return of_rows


def _lengths(tensor: Tensor) -> list[int | Tensor]:
    """List the lengths of the axes, as ints where they are static."""
    return [
        tf.shape(tensor)[axis] if length is None else length
        for axis, length in enumerate(tensor.shape)
    ]


def _of_einsum(use: Use, rows: int | None) -> tuple[_OfRows, int]:
    left, made = use.op.get_attr("equation").decode().split("->")
    labels = left.split(",")
    if len(labels) != 2 or "." in left:
        raise NotFollowedError(named(use.op))
    own, other = labels[use.place], labels[1 - use.place]
    x, output = use.op.inputs[1 - use.place], use.output
    row = [
        label
        for label, length in zip(made, output.shape, strict=True)
        if length == rows and label in other and label not in own
    ]
    # Axes that are summed over alone, or diagonals, are not followed.
    if not row or not set(own) <= set(other + made) or len(set(own)) < len(own):
        raise NotFollowedError(named(use.op))
    equation = f"{other},{made}->{row[0]}{own}"

    def of_rows(g: Tensor) -> Tensor:
        return tf.einsum(equation, tf.cast(x, g.dtype), g)

    return of_rows, made.index(row[0])


def _of_copies(use: Use, axis: int | None) -> tuple[_OfRows, int]:
    """Add up, of each row, what was copied along other axes."""
    made, given = use.output.shape.as_list(), use.tensor.shape.as_list()
    if axis is None or None in made[:axis] + made[axis + 1 :]:
        raise NotFollowedError(named(use.op))
    lengths = [1] * (len(made) - len(given)) + given
    copied = [
        (copies // length, length)
        for place, (copies, length) in enumerate(zip(made, lengths, strict=True))
        if place != axis
    ]
    order = [axis, *(place for place in range(len(made)) if place != axis)]

    def of_rows(g: Tensor) -> Tensor:
        g = tf.reshape(tf.transpose(g, order), [-1, *itertools.chain(*copied)])
        g = tf.reduce_sum(g, list(range(1, 2 * len(copied), 2)))
        return tf.reshape(g, [-1, *given])

    return of_rows, axis


def _met_by_matrix(followed: Followed, use: Use) -> Met:
    """Take factors, where the last axis of rows is multiplied by a matrix."""
    op, variable = use.op, followed.variable
    of_rows, of_matrix = map(op.get_attr, _FLAGS[op.type])
    if of_rows:
        raise NotFollowedError(named(op))
    x = op.inputs[0]
    sizes = use.tensor.shape[::-1] if of_matrix else use.tensor.shape
    # Positions that became rows are positions again.
    if x.op.type == "Reshape" and x.op.inputs[0].shape[-1:] == sizes[:1]:
        x = x.op.inputs[0]
    if x.shape.rank is None or not use.tensor.shape.is_fully_defined():
        raise NotFollowedError(named(op))
    line = followed.line_to(use.tensor)
    through: Callable[[Tensor], Term] | None = None
    if line is None or not all(
        each.type in _AS_IT_IS or _transposes(each) for each in line
    ):
        through = _through(followed, use.tensor)
    elif sum(map(_transposes, line)) % 2 == 1:
        of_matrix = not of_matrix

    def terms(g: Tensor) -> list[Term]:
        g = tf.reshape(g, [*_lengths(x)[:-1], sizes[1]])
        factors = (g, x) if of_matrix else (x, g)
        if through is None:
            return [OuterProducts(variable, *factors)]
        left, right = (
            tf.reshape(tf.cast(each, g.dtype), [tf.shape(x)[0], -1, size])
            for each, size in zip(factors, use.tensor.shape, strict=True)
        )
        return [through(tf.matmul(left, right, transpose_a=True))]

    return Met(terms, x, 0)


def _transposes(op: tf.Operation) -> bool:
    if op.type != "Transpose" or op.inputs[0].shape.rank != 2:
        return False
    order = tf.get_static_value(op.inputs[1])
    return order is not None and list(order) == [1, 0]


def _met_by_lookup(followed: Followed, use: Use) -> Met:
    variable, ids = followed.variable, use.op.inputs[1]
    line = followed.line_to(use.tensor)
    is_own = line is not None and all(each.type in _AS_IT_IS for each in line)
    if not is_own or not _looks_up_rows(use.op):
        raise NotFollowedError(named(use.op))
    return Met(lambda g: [_lookup(variable, ids, g)], use.output, 0)


def _looks_up_rows(op: tf.Operation) -> bool:
    axis = tf.get_static_value(op.inputs[2])
    return axis is not None and int(axis) == 0 and op.get_attr("batch_dims") == 0


def _lookup(variable: Variable, ids: Tensor, g: Tensor) -> Term:
    """Return the term of a lookup of rows of a variable."""
    between = ids.shape.rank
    size = math.prod(variable.shape[1:])
    shape = tf.concat([tf.shape(g)[:between], [size]], 0)
    g = tf.ensure_shape(tf.reshape(g, shape), [*g.shape[:between], size])
    return OuterProducts(variable, tf.cast(ids, tf.int32), g)


# ----------------------------------------------------------- back to the variable


def _through(followed: Followed, tensor: Tensor) -> Callable[[Tensor], Term]:
    """Return what takes the rows' gradients of a tensor to those of the variable."""
    variable = followed.variable
    line = followed.line_to(tensor)
    if line is not None and all(op.type in _SAME_ORDER for op in line):
        return lambda g: PerRow(variable, tf.reshape(g, [-1, *variable.shape]))
    lookup = None if line is None else _lookup_of(line)
    if lookup is not None:
        ids = lookup.inputs[1]

        def looked_up(g: Tensor) -> Term:
            shape = [tf.shape(g)[0], *_lengths(ids)]
            g = tf.reshape(g, [*shape, *variable.shape[1:]])
            return _lookup(variable, tf.broadcast_to(ids[None], shape), g)

        return looked_up

    def term(g: Tensor) -> Term:
        value = tf.cast(tf.convert_to_tensor(variable), g.dtype)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(value)
            made = _made_again(followed, tensor, value)

        def back(g: Tensor | None) -> Tensor:
            found = tape.gradient(
                made,
                value,
                output_gradients=g,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return tf.ensure_shape(tf.convert_to_tensor(found), variable.shape)

        if _is_by_number(followed, tensor):
            return PerRow(variable, g * back(None))

        trace = tracing()
        if trace is not None:
            return PerRow(variable, trace.alone(lambda row: back(row[0]), [g]))
        return PerRow(variable, tf.vectorized_map(back, g, warn=False))

    return term


def _lookup_of(line: list[tf.Operation]) -> tf.Operation | None:
    """Return the operation that looks rows of a matrix up, if there is one alone."""
    lookups = [op for op in line if op.type == "GatherV2"]
    if len(lookups) != 1 or not _looks_up_rows(lookups[0]):
        return None
    place = line.index(lookups[0])
    before, after = line[:place], line[place + 1 :]
    is_plain = all(op.type in _AS_IT_IS for op in before)
    is_plain &= all(op.type in _SAME_ORDER for op in after)
    return lookups[0] if is_plain else None


def _is_by_number(followed: Followed, tensor: Tensor) -> bool:
    """Tell whether each number of a tensor is made of one of the variable's."""
    shape = tuple(followed.variable.shape)
    stack, seen = [tensor], set()
    while stack:
        op = stack.pop().op
        if op.name in seen or op.type == "ReadVariableOp":
            continue
        seen.add(op.name)
        if op.type not in _BY_NUMBER or tuple(op.outputs[0].shape) != shape:
            return False
        stack += [each for each in op.inputs if each.op.name in followed.made]
    return True


def _made_again(followed: Followed, tensor: Tensor, value: Tensor) -> Tensor:
    """Make a tensor once more, of another value of the variable."""
    known: dict[str, list[Tensor]] = {}

    def again(each: Tensor) -> Tensor:
        op = each.op
        if op.name not in followed.made:
            return each
        if op.type == "ReadVariableOp":
            return value
        if op.name not in known:
            made = _again(op, [again(one) for one in op.inputs], value.dtype)
            known[op.name] = list(made) if isinstance(made, list | tuple) else [made]
        return known[op.name][each.value_index]

    return again(tensor)


def _again(op: tf.Operation, inputs: list[Tensor], dtype: tf.DType) -> Tensor:
    """Do an operation on other inputs, in another precision.

    Args:
        op: The operation.
        inputs: In place of its own.
        dtype: Of all that is not of whole numbers.

    Returns:
        What it makes of them; a list if that is several tensors.
    """
    inputs = [
        tf.cast(each, dtype) if each.dtype.is_floating else each for each in inputs
    ]
    if op.type == "Cast" and op.outputs[0].dtype.is_floating:
        return tf.cast(inputs[0], dtype)
    if op.type == "BiasAdd":  # It takes no biases of rows.
        return tf.add(*inputs)
    remaining = iter(inputs)
    given: dict[str, object] = {}
    function = getattr(tf.raw_ops, op.type)
    parameters = list(inspect.signature(function).parameters)
    for place, argument in enumerate(op.op_def.input_arg):
        # Some have other names in Python.
        name = argument.name if argument.name in parameters else parameters[place]
        several = argument.number_attr or argument.type_list_attr
        if several:
            number = op.get_attr(several)
            number = number if isinstance(number, int) else len(number)
            given[name] = list(itertools.islice(remaining, number))
        else:
            given[name] = next(remaining)
    given |= {
        attribute.name: op.get_attr(attribute.name)
        for attribute in op.op_def.attr
        if attribute.name in parameters
    }
    return function(**given)
