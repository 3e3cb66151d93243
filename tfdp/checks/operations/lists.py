"""Lists of tensors, as loops have them: described as if they were stacked."""

from tfdp.checks.sizes import Length, constant, is_fixed, same
from tfdp.checks.step import COUNTS, Step, counting, lengths_from, rule
from tfdp.checks.values import (
    NEW_LIST,
    NO_NUMBERS,
    PLAIN,
    Cause,
    Value,
    have_rows,
    is_open,
    with_shape,
)


@rule("TensorListReserve", "EmptyTensorList")
def _new_list(step: Step) -> Value:
    shape, number = step.inputs
    if have_rows(step.inputs):
        return step.mixed("has a length that depends on rows")
    is_empty = step.op.type == "EmptyTensorList"
    own = None if is_empty or number.numbers is None else number.numbers.item()
    lengths, causes = None, shape.causes
    if shape.numbers is not None:
        lengths, causes = (own, *_shape_from(shape)), frozenset[Cause]()
    if not is_empty:
        causes |= number.causes
    numbers = NO_NUMBERS if is_empty else None
    return Value(None, PLAIN, lengths, numbers, causes, NEW_LIST)


def _shape_from(shape: Value) -> list[Length | None]:
    """Read the shape of a list's tensors; nothing where it leaves open all of it."""
    if shape.lengths == ():
        return []
    return [None if n == -1 else n for n in lengths_from(shape) or ()]


def _asked(step: Step, value: Value, shape: Value) -> Value:
    """Return a list whose tensors, if it has none, have the shape that is asked for."""
    if not is_open(value):
        return value
    if shape.numbers is None or value.lengths is None:
        causes = value.causes | shape.causes | counting(step)
        return value._replace(lengths=None, causes=causes)
    asked, own = _shape_from(shape), value.lengths[1:]
    if shape.lengths == ():
        # No shape is asked for: the list says which, or has tensors, or this fails.
        return value if own else value._replace(lengths=None)
    if value.variable == NEW_LIST:
        return value._replace(lengths=with_shape(value.lengths, asked))
    # They are what they were when they came into the list, or what is asked for.
    if len(asked) == len(own) and all(
        b in (None, a) for a, b in zip(own, asked, strict=True)
    ):
        return value
    causes = value.causes | shape.causes
    others = [n for axis, n in enumerate(value.lengths) if axis != value.axis]
    if not is_fixed(others):
        # Of a length that counts rows it is forgotten now that it does.
        causes |= counting(step)
    return value._replace(lengths=None, causes=causes)


@rule("TensorListFromTensor")
def _list(step: Step) -> Value:
    return step.inputs[0]._replace(numbers=None)


@rule("TensorListStack")
def _stacked(step: Step) -> Value:
    value = _asked(step, *step.inputs)
    return step.output(
        value.axis, value.layout, lengths=value.lengths, causes=value.causes
    )


@rule("TensorListLength", "TensorListElementShape")
def _about_list(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed(COUNTS)
    is_shape = step.op.type == "TensorListElementShape"
    lengths = value.lengths or (None,)
    shown = lengths[1:] if is_shape else lengths[:1]
    causes = step.causes
    if not value.lengths or not all(isinstance(length, int) for length in shown):
        causes |= counting(step)
    # Gradients of loops make lists of tensors of this shape.
    is_known = is_shape and shown and None not in shown
    numbers = constant(shown) if is_known else None
    return step.output(None, numbers=numbers, causes=causes)


@rule("TensorListGetItem")
def _item(step: Step) -> Value:
    value, index, shape = step.inputs
    if index.axis is not None:
        return step.mixed("takes a part that depends on rows")
    value = _asked(step, value, shape)
    return _element(step, value, value.causes | index.causes)


def _element(step: Step, value: Value, causes: frozenset[Cause]) -> Value:
    if value.axis == 0:
        return step.mixed("takes the rows of a batch apart", causes=causes)
    return step.output(
        None if value.axis is None else value.axis - 1,
        value.layout,
        lengths=None if value.lengths is None else value.lengths[1:],
        numbers=None if value.numbers is NO_NUMBERS else value.numbers,
        causes=causes,
    )


@rule("TensorListSetItem")
def _with_item(step: Step) -> Value:
    value, index, item, *_ = step.inputs
    if index.axis is not None:
        return step.mixed("takes a part that depends on rows")
    return _grown(step, value, item, value.causes | item.causes | index.causes)


@rule("TensorListPushBack")
def _pushed(step: Step) -> Value:
    value, item = step.inputs
    if value.axis == 0:
        return step.mixed("puts other entries behind the rows")
    return _grown(step, value, item, step.causes)


def _grown(step: Step, value: Value, item: Value, causes: frozenset[Cause]) -> Value:
    """Describe a list with one more tensor in it."""
    axis, layout, lengths, *_ = value
    if item.axis is not None:
        place = (item.axis + 1, item.layout)
        if axis is not None and (axis, layout) != place:
            return step.mixed("puts rows on different axes of a list", causes=causes)
        axis, layout = place
    if value.variable == NEW_LIST and item.lengths is not None:
        lengths = ((lengths or (None,))[0], *item.lengths)
    elif lengths is not None:
        lengths = _common(lengths, item.lengths)
        if axis is not None and lengths is not None and lengths[axis] is None:
            return step.mixed("puts rows to tensors without any", causes=causes)
    # What is in each of its tensors is known if they are all alike.
    is_alike = value.numbers is NO_NUMBERS or same(value.numbers, item.numbers)
    return Value(axis, layout, lengths, item.numbers if is_alike else None, causes)


def _common(
    lengths: tuple[Length | None, ...], of_item: tuple[Length | None, ...] | None
) -> tuple[Length | None, ...] | None:
    """Return the lengths that a list keeps with one more tensor in it."""
    if of_item is None or len(lengths) != 1 + len(of_item):
        return None
    both = zip(lengths[1:], of_item, strict=True)
    return (lengths[0], *(a if a == b else None for a, b in both))


@rule("TensorListPopBack")
def _popped(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed("takes the rows of a batch apart")
    if step.number == 0:
        return value
    value = _asked(step, value, step.inputs[1])
    return _element(step, value, value.causes)


@rule("TensorListResize")
def _resized(step: Step) -> Value:
    value, number = step.inputs
    if value.axis == 0 or number.axis is not None:
        return step.mixed("puts other entries behind the rows")
    lengths = None if value.lengths is None else (None, *value.lengths[1:])
    return value._replace(lengths=lengths, numbers=None, causes=step.causes)


@rule("TensorListConcatV2", "TensorListConcat")
def _concatenated(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis in (0, 1):
        return step.mixed("puts other entries behind the rows")
    # Of a list that may have no tensors nobody knows how many entries they have.
    length = None if is_open(value) or not value.lengths else value.lengths[0]
    causes = step.causes if isinstance(length, int) else step.causes | counting(step)
    if value.axis is None or step.number:
        return step.output(None, causes=causes)
    return step.output(value.axis - 1, value.layout, causes=causes)
