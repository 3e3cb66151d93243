"""Lists of tensors, as loops have them: described as if they were stacked."""

from typing import Any

from tfdp.checks.sizes import (
    same,
)
from tfdp.checks.step import (
    Step,
    rule,
)
from tfdp.checks.values import FREE, NO_NUMBERS, Value


@rule("TensorListReserve")
def _reserved(step: Step) -> Value:
    number = step.inputs[1].numbers
    # Of the axes of its tensors nothing is known yet.
    return FREE if number is None else FREE._replace(lengths=(number.item(),))


@rule("EmptyTensorList")
def _empty_list(step: Step) -> Value:
    return FREE._replace(numbers=NO_NUMBERS)


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
        return step.mixed("counts the rows of a batch")
    return step.output(None, causes=frozenset())


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
    return [value, _element(step, value, 1)]


@rule("TensorListResize")
def _resized(step: Step) -> Value:
    return step.inputs[0]


@rule("TensorListConcatV2", "TensorListConcat")
def _concatenated(step: Step) -> list[Value]:
    value = step.inputs[0]
    if value.axis is None:
        return [step.output(None, number=n) for n in range(2)]
    if value.axis == 1 or value.axis == 0:
        return [
            step.mixed("puts other entries behind the rows", number=n) for n in (0, 1)
        ]
    return [
        step.output(value.axis - 1, value.layout, number=0),
        step.output(None, number=1, causes=frozenset()),
    ]
