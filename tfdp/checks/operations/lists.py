"""Lists of tensors, as loops have them: described as if they were stacked."""

import tensorflow as tf

from tfdp.checks.node import COUNTS, NONE, Node, counting, lengths_from, rule
from tfdp.checks.open_lengths import Open, may_be_negative
from tfdp.checks.sizes import Lengths, constant, is_fixed, same
from tfdp.checks.values import (
    NEW_LIST,
    NO_NUMBERS,
    OF_LISTS,
    PERHAPS_NEW,
    PLAIN,
    Cause,
    Value,
    is_open,
    with_shape,
)

_PART_BY_ROWS = "takes a part that depends on rows"
_PUTS_BEHIND = "puts other entries behind the rows"


@rule(
    *("TensorListReserve", "EmptyTensorList"),
    rows_in=NONE,
    otherwise="has a length that depends on rows",
)
def _new_list(node: Node) -> Value:
    shape, number = node.inputs
    is_empty = node.op.type == "EmptyTensorList"
    own = None if is_empty or number.numbers is None else number.numbers.item()
    lengths, causes = None, shape.causes
    if shape.numbers is not None:
        lengths, causes = (own, *_shape_from(shape)), frozenset[Cause]()
    if not is_empty:
        causes |= number.causes
    numbers = NO_NUMBERS if is_empty else None
    return Value(None, PLAIN, lengths, numbers, causes, NEW_LIST)


def _shape_from(shape: Value) -> Lengths:
    """Read the shape of a list's tensors; nothing where it leaves open all of it."""
    if shape.lengths == ():
        return ()
    lengths = lengths_from(shape)
    return tuple(None if n == -1 or may_be_negative(n) else n for n in lengths)


def _asked(node: Node, value: Value, shape: Value) -> Value:
    """Return a list whose tensors, if it has none, have the shape that is asked for."""
    if not is_open(value) or node.attr("element_dtype") == tf.variant:
        # The shape of a list in a list says nothing of its tensors.
        return value
    if shape.numbers is None or value.lengths is None:
        causes = value.causes | shape.causes | counting(node)
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
        causes |= counting(node)
    return value._replace(lengths=None, causes=causes)


@rule("TensorListFromTensor")
def _list(node: Node) -> Value:
    return node.inputs[0]._replace(numbers=None)


@rule("TensorListStack")
def _stacked(node: Node) -> Value:
    value = _asked(node, *node.inputs)
    return node.like(value, value.causes)


@rule("TensorListLength", "TensorListElementShape")
def _about_list(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis == 0:
        return node.mixed(COUNTS)
    is_shape = node.op.type == "TensorListElementShape"
    if is_shape and value.variable == OF_LISTS:
        # That of lists, not of what is in them.
        return node.unknown()
    lengths = value.lengths or (None,)
    shown = lengths[1:] if is_shape else lengths[:1]
    causes = node.causes
    if not value.lengths or not all(isinstance(each, int | Open) for each in shown):
        causes |= counting(node)
    # Gradients of loops make lists of tensors of this shape.
    # For them alone: of a list that has none the shape may be open, whatever it has now.
    readers = node.tensor.consumers()
    is_of_lists = readers and all("TensorList" in op.type for op in readers)
    is_known = is_shape and is_of_lists and shown and None not in shown
    numbers = constant(shown) if is_known else None
    return node.free(causes=causes)._replace(numbers=numbers)


@rule("TensorListGetItem", otherwise=_PART_BY_ROWS)
def _item(node: Node) -> Value:
    value, index, shape = node.inputs
    value = _asked(node, value, shape)
    return _element(node, value, value.causes | index.causes)


def _element(node: Node, value: Value, causes: frozenset[Cause]) -> Value:
    if value.axis == 0:
        return node.mixed("takes the rows of a batch apart", causes=causes)
    numbers = None if value.numbers is NO_NUMBERS else value.numbers
    element = value.dropped([0])
    if node.tensor.dtype == tf.variant:
        # A list that was put into a list, whatever was in it: the graph has no shape.
        return Value(*element[:3], numbers, causes, PERHAPS_NEW)
    return node.like(element, causes)._replace(numbers=numbers)


@rule("TensorListSetItem", rows_in=[0, 2], otherwise=_PART_BY_ROWS)
def _with_item(node: Node) -> Value:
    value, index, item, *_ = node.inputs
    causes = value.causes | item.causes | index.causes
    if value.axis == 0:
        return node.mixed("writes an item over one of the rows", causes=causes)
    grown = _grown(node, value, item, causes)
    if node.attr("resize_if_index_out_of_bounds"):
        grown = _of_any_number(grown)
    # There may be others in it that nobody has set.
    if is_open(value) and grown.variable is None:
        return grown._replace(variable=PERHAPS_NEW)
    return grown


def _of_any_number(value: Value) -> Value:
    """Forget how many tensors are in a list."""
    if value.lengths is None:
        return value
    return value._replace(lengths=(None, *value.lengths[1:]))


@rule("TensorListPushBack", rows_in=[0, 1])
def _pushed(node: Node) -> Value:
    value, item = node.inputs
    if value.axis == 0:
        return node.mixed(_PUTS_BEHIND)
    return _of_any_number(_grown(node, value, item, node.causes))


def _grown(node: Node, value: Value, item: Value, causes: frozenset[Cause]) -> Value:
    """Describe a list with one more tensor in it."""
    axis, layout, lengths, *_ = value
    is_of_lists = node.attr("element_dtype") == tf.variant
    if is_of_lists and item.variable == OF_LISTS:
        # What comes out of it would have to be told from a list of tensors.
        return node.unknown()
    rows = item.inserted(0, None)
    if rows.axis is not None:
        if axis is not None and (axis, layout) != rows[:2]:
            return node.mixed("puts rows on different axes of a list", causes=causes)
        axis, layout = rows[:2]
    if value.variable == NEW_LIST and item.lengths is not None:
        lengths = ((lengths or (None,))[0], *item.lengths)
    elif lengths is not None:
        lengths = _common(lengths, item.lengths)
        if axis is not None and lengths is not None and lengths[axis] is None:
            return node.mixed("puts rows to tensors without any", causes=causes)
    # What is in each of its tensors is known if they are all alike.
    is_alike = value.numbers is NO_NUMBERS or same(value.numbers, item.numbers)
    numbers = item.numbers if is_alike else None
    name = OF_LISTS if is_of_lists else None
    return Value(axis, layout, lengths, numbers, causes, name)


def _common(lengths: Lengths, of_item: Lengths | None) -> Lengths | None:
    """Return the lengths that a list keeps with one more tensor in it."""
    if of_item is None or len(lengths) != 1 + len(of_item):
        return None
    both = zip(lengths[1:], of_item, strict=True)
    return (lengths[0], *(a if a == b else None for a, b in both))


@rule("TensorListPopBack")
def _popped(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis == 0:
        return node.mixed("takes the rows of a batch apart")
    if node.number == 0:
        return _of_any_number(value)
    value = _asked(node, value, node.inputs[1])
    return _element(node, value, value.causes)


@rule("TensorListResize", otherwise=_PUTS_BEHIND)
def _resized(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis == 0:
        return node.mixed(_PUTS_BEHIND)
    lengths = None if value.lengths is None else (None, *value.lengths[1:])
    # What it is longer by, nobody has set.
    name = value.variable if value.variable in (NEW_LIST, OF_LISTS) else PERHAPS_NEW
    return Value(value.axis, value.layout, lengths, None, node.causes, name)


@rule("TensorListConcatV2", "TensorListConcat")
def _concatenated(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis in (0, 1):
        return node.mixed(_PUTS_BEHIND)
    # Of a list that may have no tensors nobody knows how many entries they have.
    length = None if is_open(value) or not value.lengths else value.lengths[0]
    is_known = isinstance(length, int | Open)
    causes = node.causes if is_known else node.causes | counting(node)
    if value.axis is None or node.number:
        return node.free(causes=causes)
    return node.like(Value(value.axis - 1, value.layout), causes)
