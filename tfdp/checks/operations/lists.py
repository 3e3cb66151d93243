"""Lists of tensors, as loops have them: described as if they were stacked."""

from tfdp.checks.sizes import same
from tfdp.checks.step import COUNTS, Step, counting, rule
from tfdp.checks.values import FREE, NEW_LIST, NO_NUMBERS, Cause, Value


@rule("TensorListReserve")
def _reserved(step: Step) -> Value:
    number = step.inputs[1]
    if number.axis is not None:
        return step.mixed("has a length that depends on rows")
    # Of the axes of its tensors nothing is known yet.
    lengths = None if number.numbers is None else (number.numbers.item(),)
    return FREE._replace(lengths=lengths, causes=number.causes, variable=NEW_LIST)


@rule("EmptyTensorList")
def _empty_list(step: Step) -> Value:
    return FREE._replace(numbers=NO_NUMBERS, variable=NEW_LIST)


@rule("TensorListFromTensor")
def _list(step: Step) -> Value:
    return step.inputs[0]._replace(numbers=None)


@rule("TensorListStack")
def _stacked(step: Step) -> Value:
    value = step.inputs[0]
    return step.output(
        value.axis, value.layout, lengths=value.lengths, causes=value.causes
    )


@rule("TensorListLength", "TensorListElementShape")
def _about_list(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed(COUNTS)
    lengths = value.lengths or (None,)
    shown = lengths[:1] if step.op.type == "TensorListLength" else lengths[1:]
    is_known = value.lengths and all(isinstance(length, int) for length in shown)
    causes = step.causes if is_known else step.causes | counting(step)
    return step.output(None, causes=causes)


@rule("TensorListGetItem")
def _item(step: Step) -> Value:
    value, index, *_ = step.inputs
    if index.axis is not None:
        return step.mixed("takes a part that depends on rows")
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
    if item.rank is not None and (lengths is None or len(lengths) != item.rank + 1):
        # Of a list that was empty only its own length was known.
        lengths = (*(lengths or (None,))[:1], *(item.lengths or ()))
    # What is in each of its tensors is known if they are all alike.
    is_alike = value.numbers is NO_NUMBERS or same(value.numbers, item.numbers)
    return Value(axis, layout, lengths, item.numbers if is_alike else None, causes)


@rule("TensorListPopBack")
def _popped(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed("takes the rows of a batch apart")
    return _element(step, value, value.causes) if step.number else value


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
    length, *_ = value.lengths or (None,)
    causes = step.causes if isinstance(length, int) else step.causes | counting(step)
    if value.axis is None or step.number:
        return step.output(None, causes=causes)
    return step.output(value.axis - 1, value.layout, causes=causes)
