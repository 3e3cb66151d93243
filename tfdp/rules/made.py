"""Takes gradients of what was made of variables alone to those of the variables."""

import inspect
import itertools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._mapping import vectorized_map
from tfdp._tracing import tracing
from tfdp._types import Tensor, Variable
from tfdp.rules.terms import OuterProducts, PerRow, Term
from tfdp.rules.uses import Followed

# Elementwise, with broadcasting.
ELEMENTWISE = frozenset({
    "Add", "AddV2", "Atan2", "BiasAdd", "Cast", "Ceil", "Cos", "Cosh", "Div",
    "DivNoNan", "Elu", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Identity", "Inv",
    "LeakyRelu", "Log", "Log1p", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow",
    "RealDiv", "Reciprocal", "Relu", "Relu6", "Rsqrt", "SelectV2", "Selu", "Sigmoid",
    "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square",
    "SquaredDifference", "Sub", "Tan", "Tanh", "Xdivy", "Xlogy",
})  # fmt: skip

# The same numbers in the same order.
AS_IT_IS = frozenset({"Identity", "Cast"})
_SAME_ORDER = AS_IT_IS | {"Reshape", "ExpandDims", "Squeeze"}

_MASKS = (
    *("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask"),
    "shrink_axis_mask",
)


def through(
    together: Sequence[Followed], tensor: Tensor
) -> Callable[[Tensor], list[Term]]:
    """Return what takes the rows' gradients of a tensor to those of variables.

    Args:
        together: The variables, and what becomes of them.
        tensor: What is made of them alone.

    Returns:
        From gradients of shape ``(N, *tensor.shape)`` to a term of each variable.
    """
    short = [_short_way(followed, tensor) for followed in together]
    others = [
        followed for followed, way in zip(together, short, strict=True) if way is None
    ]

    def terms(g: Tensor) -> list[Term]:
        found = [way(g) for way in short if way is not None]
        if not others:
            return found
        # One way back for all of them: a network that sees no row has dozens.
        back = _way_back(others, tensor, g.dtype)
        trace = tracing()
        if trace is not None:
            gradients = trace.alone(lambda row: back(row[0]), [g])
        else:
            gradients = vectorized_map(back, g)
        return found + [
            PerRow(followed.variable, each)
            for followed, each in zip(others, gradients, strict=True)
        ]

    return terms


def _short_way(followed: Followed, tensor: Tensor) -> Callable[[Tensor], Term] | None:
    """Return what goes back to a variable without a map over rows, if there is one."""
    variable = followed.variable
    line = followed.line_to(tensor)
    if line is not None and all(_only_moves(op, followed) for op in line):
        return lambda g: PerRow(variable, _unsliced(line, g, tuple(variable.shape)))
    lookup = None if line is None else _lookup_of(line)
    if lookup is not None:
        ids = lookup.inputs[1]

        def looked_up(g: Tensor) -> Term:
            shape = [tf.shape(g)[0], *lengths_of(ids)]
            g = tf.reshape(g, [*shape, *variable.shape[1:]])
            return term_of_lookup(variable, tf.broadcast_to(ids[None], shape), g)

        return looked_up

    if not _is_elementwise(followed, tensor):
        return None

    def scaled(g: Tensor) -> Term:
        (derivatives,) = _way_back([followed], tensor, g.dtype)(None)
        return PerRow(variable, g * derivatives)

    return scaled


def _way_back(
    together: Sequence[Followed], tensor: Tensor, dtype: tf.DType
) -> Callable[[Tensor | None], list[Tensor]]:
    """Return what takes one gradient of a tensor, or ones, to those of variables."""
    variables = [followed.variable for followed in together]
    values = [tf.cast(tf.convert_to_tensor(variable), dtype) for variable in variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        made = _made_again(together, tensor, values)

    def back(g: Tensor | None) -> list[Tensor]:
        found = tape.gradient(
            made,
            values,
            output_gradients=g,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [
            tf.ensure_shape(tf.convert_to_tensor(each), variable.shape)
            for each, variable in zip(found, variables, strict=True)
        ]

    return back


def _only_moves(op: tf.Operation, followed: Followed) -> bool:
    """Tell whether an operation has numbers of the variable, each once, elsewhere."""
    is_slice = op.type == "StridedSlice" and op.inputs[0].op.name in followed.made
    return is_slice or op.type in _SAME_ORDER


def _unsliced(line: list[tf.Operation], g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Put gradients of rows where slices were taken from, and zeros elsewhere."""
    # In a map over rows each slice would take dozens of operations.
    for op in reversed(line):
        if op.type != "StridedSlice":
            continue
        # All of the axis of rows, before the others.
        begin, end, strides = (
            tf.concat([[tf.constant(first, each.dtype)], each], 0)
            for first, each in zip((0, 0, 1), op.inputs[1:], strict=True)
        )
        masks = {name: op.get_attr(name) << 1 for name in _MASKS}
        masks["begin_mask"] |= 1
        masks["end_mask"] |= 1
        rows = tf.shape(g)[0]
        whole = tf.stack([rows, *lengths_of(op.inputs[0])])
        g = tf.raw_ops.StridedSliceGrad(
            shape=tf.cast(whole, begin.dtype),
            begin=begin,
            end=end,
            strides=strides,
            dy=tf.reshape(g, [rows, *lengths_of(op.outputs[0])]),
            **masks,
        )
    return tf.reshape(g, [-1, *shape])


def _lookup_of(line: list[tf.Operation]) -> tf.Operation | None:
    """Return the operation that looks rows of a matrix up, if there is one alone."""
    lookups = [op for op in line if op.type == "GatherV2"]
    if len(lookups) != 1 or not looks_up_rows(lookups[0]):
        return None
    place = line.index(lookups[0])
    before, after = line[:place], line[place + 1 :]
    is_plain = all(op.type in AS_IT_IS for op in before)
    is_plain &= all(op.type in _SAME_ORDER for op in after)
    return lookups[0] if is_plain else None


def _is_elementwise(followed: Followed, tensor: Tensor) -> bool:
    """Tell whether each number of a tensor is made of one of the variable's."""
    shape = tuple(followed.variable.shape)
    stack, seen = [tensor], set()
    while stack:
        op = stack.pop().op
        if op.name in seen or op.type == "ReadVariableOp":
            continue
        seen.add(op.name)
        if op.type not in ELEMENTWISE or tuple(op.outputs[0].shape) != shape:
            return False
        stack += [each for each in op.inputs if each.op.name in followed.made]
    return True


def _made_again(
    together: Sequence[Followed], tensor: Tensor, values: Sequence[Tensor]
) -> Tensor:
    """Make a tensor once more, of other values of variables."""
    known: dict[str, list[Tensor]] = {
        op.name: [value]
        for followed, value in zip(together, values, strict=True)
        for op in followed.made.values()
        if op.type == "ReadVariableOp"
    }
    dtype = values[0].dtype

    def again(each: Tensor) -> Tensor:
        op = each.op
        if not any(op.name in followed.made for followed in together):
            return each
        if op.name not in known:
            made = again_on(op, [again(one) for one in op.inputs], dtype)
            known[op.name] = list(made) if isinstance(made, list | tuple) else [made]
        return known[op.name][each.value_index]

    return again(tensor)


def again_on(op: tf.Operation, inputs: list[Tensor], dtype: tf.DType) -> Tensor:
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


def looks_up_rows(op: tf.Operation) -> bool:
    """Tell whether a `GatherV2` looks up along the first axis."""
    axis = tf.get_static_value(op.inputs[2])
    return axis is not None and int(axis) == 0 and op.get_attr("batch_dims") == 0


def term_of_lookup(variable: Variable, ids: Tensor, g: Tensor) -> Term:
    """Return the term of a lookup in a variable.

    Args:
        variable: The Keras variable.
        ids: Whole numbers of shape ``(N, ...)``.
        g: Gradients of what is found, shape ``(N, ..., *variable.shape[1:])``.
    """
    between = ids.shape.rank
    size = math.prod(variable.shape[1:])
    shape = tf.concat([tf.shape(g)[:between], [size]], 0)
    g = tf.ensure_shape(tf.reshape(g, shape), [*g.shape[:between], size])
    return OuterProducts(variable, tf.cast(ids, tf.int32), g)


def lengths_of(tensor: Tensor) -> list[int | Tensor]:
    """List the lengths of the axes, as ints where they are static."""
    return [
        tf.shape(tensor)[axis] if length is None else length
        for axis, length in enumerate(tensor.shape)
    ]
