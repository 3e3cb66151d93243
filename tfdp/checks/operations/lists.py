"""Lists of tensors, as loops have them: described as if they were stacked."""

from typing import Any

from tfdp.checks.sizes import (
    same,
)
from tfdp.checks.step import (
    COUNTS,
    Step,
    counting,
    rule,
)
from tfdp.checks.values import FREE, NEW_LIST, NO_NUMBERS, Value


@rule("TensorListReserve")
def _reserved(step: Step) -> Value:
    number = step.inputs[1]
    if number.axis is not None:
        return step.mixed("has a length that depends on rows")
    known = number.numbers
    # Of the axes of its tensors nothing is known yet.
    lengths = None if known is None else (known.item(),)
    return FREE._replace(lengths=lengths, causes=number.causes, variable=NEW_LIST)


@rule("EmptyTensorList")
def _empty_list(step: Step) -> Value:
    return FREE._replace(numbers=NO_NUMBERS, variable=NEW_LIST)


@rule("TensorListFromTensor")
def _list(step: Step) -> Value:
    value = step.inputs[0]
    return value._replace(numbers=None)


@rule("TensorListStack")
def _stacked(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis is None:
        return step.output(None, lengths=value.lengths, causes=value.causes)
    return step.output(
        value.axis, value.layout, lengths=value.lengths, causes=value.causes
    )


@rule("TensorListLength", "TensorListElementShape")
def _about_list(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed(COUNTS)
    lengths = value.lengths
    if lengths is None or not lengths:
        return step.output(None, causes=step.causes | counting(step))
    shown = lengths[:1] if step.op.type == "TensorListLength" else lengths[1:]
    if any(not isinstance(length, int) for length in shown):
        return step.output(None, causes=step.causes | counting(step))
    return step.output(None)


@rule("TensorListGetItem")
def _item(step: Step) -> Value:
    value, index, *_ = step.inputs
    if index.axis is not None:
        return step.mixed("takes a part that depends on rows")
    return _element(step, value, 0, index.causes)


def _element(step: Step, value: Value, number: int, causes: Any = frozenset()) -> Value:
    causes = causes | value.causes
    if value.axis == 0:
        return step.mixed(
            "takes the rows of a batch apart", number=number, causes=causes
        )
    rows = None if value.axis is None else value.axis - 1
    lengths = None if value.lengths is None else value.lengths[1:]
    return step.output(
        rows,
        value.layout,
        lengths=lengths,
        number=number,
        numbers=None if value.numbers is NO_NUMBERS else value.numbers,
        causes=causes,
    )


@rule("TensorListSetItem")
def _with_item(step: Step) -> Value:
    value, index, item, *_ = step.inputs
    if index.axis is not None:
        return step.mixed("takes a part that depends on rows")
    return _grown(step, value, item, index.causes)


@rule("TensorListPushBack")
def _pushed(step: Step) -> Value:
    value, item = step.inputs
    if value.axis == 0:
        return step.mixed("puts other entries behind the rows")
    return _grown(step, value, item)


def _grown(step: Step, value: Value, item: Value, causes: Any = frozenset()) -> Value:
    own = (value.lengths or (None,))[:1]
    lengths = None if item.lengths is None else (*own, *item.lengths)
    rows = None if item.axis is None else item.axis + 1
    causes = value.causes | item.causes | causes
    is_new = value.numbers is NO_NUMBERS
    if value.axis is not None and (
        item.axis is not None and (rows, item.layout) != (value.axis, value.layout)
    ):
        return step.mixed("puts rows on different axes of a list", causes=causes)
    if rows is None and value.axis is not None:
        rows = value.axis
    layout = item.layout if item.axis is not None else value.layout
    numbers = item.numbers if is_new or same(value.numbers, item.numbers) else None
    if value.lengths is not None and lengths is not None:
        lengths = value.lengths if len(value.lengths) == len(lengths) else lengths
    elif lengths is None:
        lengths = value.lengths
    return Value(rows, layout, lengths, numbers, causes)


@rule("TensorListPopBack")
def _popped(step: Step) -> list[Value]:
    value = step.inputs[0]
    if value.axis == 0:
        why = "takes the rows of a batch apart"
        return [step.mixed(why, number=n) for n in range(2)]
    return [value, _element(step, value, 1)]


@rule("TensorListResize")
def _resized(step: Step) -> Value:
    value, number = step.inputs
    if value.axis == 0 or number.axis is not None:
        return step.mixed("puts other entries behind the rows")
    lengths = None if value.lengths is None else (None, *value.lengths[1:])
    return value._replace(lengths=lengths, numbers=None, causes=step.causes)


@rule("TensorListConcatV2", "TensorListConcat")
def _concatenated(step: Step) -> list[Value]:
    value = step.inputs[0]
    causes = step.causes
    if not value.lengths or not isinstance(value.lengths[0], int):
        causes |= counting(step)
    if value.axis is None:
        return [step.output(None, number=n, causes=causes) for n in range(2)]
    if value.axis == 1 or value.axis == 0:
        return [
            step.mixed("puts other entries behind the rows", number=n) for n in (0, 1)
        ]
    return [
        step.output(value.axis - 1, value.layout, number=0, causes=causes),
        step.output(None, number=1, causes=causes),
    ]
