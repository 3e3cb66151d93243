"""Operations that ask for shapes, or give tensors other ones."""

from tfdp._types import Array
from tfdp.checks.node import (
    ANY,
    COUNTS,
    NONE,
    Node,
    axis_from,
    counting,
    is_same_length,
    known_product,
    lengths_from,
    of_numbers,
    rule,
    static_lengths,
)
from tfdp.checks.open_lengths import Open, may_be_negative
from tfdp.checks.sizes import (
    UNKNOWN,
    Length,
    Lengths,
    Size,
    constant,
    is_fixed,
    product,
    reduced_axes,
    same,
    settled,
)
from tfdp.checks.values import PLAIN, Cause, Layout, Value, fixed, known


@rule("Shape", "ShapeN", "Size", rows_in=ANY)
def _shape(node: Node) -> Value:
    value = node.inputs[node.number]
    if value.layout.words:
        # How many words there are is in the data.
        return node.unknown()
    lengths = value.lengths
    causes = value.causes
    if lengths is None or None in lengths:
        causes |= counting(node)
    elif is_fixed(lengths) or all(each.why == COUNTS for each in causes):
        numbers = constant(lengths)
        if node.op.type == "Size":
            numbers = constant(product(list(numbers)))
        return of_numbers(node, numbers)
    # Where something is the matter, what looks like the number of rows may not be.
    own = static_lengths(node.tensor)
    return Value(lengths=None if own is None else tuple(own), causes=causes)


@rule("Rank")
def _rank(node: Node) -> Value:
    return of_numbers(node, constant(len(node.inputs[0].shape)))


@rule("Range", rows_in=NONE)
def _range(node: Node) -> Value:
    start, limit, step = (
        None if each.numbers is None else each.numbers.item() for each in node.inputs
    )
    # As many numbers as there are rows, or as a row has entries times rows, are theirs.
    if limit is None or start != 0 or not isinstance(step, int) or step <= 0:
        return node.free()
    if isinstance(limit, Open) and not (limit.is_length and step == 1):
        # Of what is below 0 there are none.
        return node.free((Open.unknown("range", limit, step),))
    return node.free((limit // step if isinstance(limit, Size) else -(-limit // step),))


@rule("BroadcastGradientArgs", rows_in=NONE)
def _broadcast_gradient_args(node: Node) -> Value:
    first, second = (each.numbers for each in node.inputs)
    axes = None
    if first is not None and second is not None:
        axes = reduced_axes(first, second)[node.number]
        if _may_be_one(first, second) and not _are_put_back(node):
            axes = None
    if axes is None:
        return node.free()
    return node.free(causes=frozenset())._replace(numbers=axes)


def _differ_in_one(own: Lengths, lengths: Lengths, rows: int) -> bool:
    """Tell whether a tensor has the same axes as before, but for one that has no rows."""
    if len(own) != len(lengths):
        return False
    other = [
        axis
        for axis, pair in enumerate(zip(own, lengths, strict=True))
        if pair[0] != pair[1]
    ]
    return len(other) <= 1 and rows not in other


def _may_be_one(first: Array, second: Array) -> bool:
    """Tell whether shapes that differ have open lengths: along those of 1 is summed, too."""
    return not same(first, second) and any(
        map(_is_open, (*first.ravel(), *second.ravel()))
    )


def _are_put_back(node: Node) -> bool:
    """Tell whether all that is summed over axes gets the shape of its operand again."""
    # As in TensorFlow's gradients: whichever lengths are 1, rows stay where they are.
    shape = node.op.inputs[node.number]
    sums = node.tensor.consumers()
    readers = [op for each in sums for op in each.outputs[0].consumers()]
    return all(op.type == "Sum" for op in sums) and all(
        op.type == "Reshape"
        and op.inputs[1].op.name == shape.op.name
        and op.inputs[1].value_index == shape.value_index
        for op in readers
    )


def reshaped(node: Node, value: Value, lengths: tuple[Length, ...]) -> Value:
    """Describe a tensor that is given other lengths, in the same order."""
    causes = value.causes
    if value.axis is None:
        return node.free(lengths, causes)
    own, past = value.lengths or (), value.axis + 1
    is_behind = own[:past] == lengths[:past]
    if own and (is_behind or _differ_in_one(own, lengths, value.axis)):
        # What lies behind the rows, or along the one axis, is as much as it was, or this
        # fails.
        return node.like(Value(value.axis, value.layout, lengths), causes)
    # Flat, the entries are: before, times, rows, entries, after.
    times, entries = value.layout.times, value.layout.entries
    ahead = known_product([*own[: value.axis], times])
    behind = known_product([*own[past:], entries])
    # The rows go to an axis whose length is a multiple of theirs, if as many entries
    # come before and behind as before: then each row has the same ones as it had.
    for axis, length in enumerate(lengths):
        of_row = node.entries_of(length)
        new_behind = product(lengths[axis + 1 :])
        if (
            not of_row
            or isinstance(behind, Size | None)
            or isinstance(new_behind, Size)
        ):
            continue
        if not new_behind or behind % new_behind or of_row % (behind // new_behind):
            continue
        layout = Layout(of_row // (behind // new_behind), behind // new_behind)
        if is_same_length(product([*lengths[:axis], layout.times]), ahead):
            return node.like(Value(axis, layout, lengths), causes)
    # With whole rows somewhere they may only be in another order; after what is not
    # known, they may be elsewhere.
    has_rows = any(node.entries_of(length) for length in lengths)
    # Of some lengths they may be kept together.
    may_be_open = any(map(_is_open, (*own, *lengths, times, entries)))
    is_certain = not (has_rows or may_be_open) and all(c.is_certain for c in causes)
    why = "puts parts of different rows together"
    return node.mixed(why, is_certain=is_certain, causes=causes)


def _is_open(length: Length | None) -> bool:
    return isinstance(length.block if isinstance(length, Size) else length, Open)


@rule("Reshape", rows_in=ANY)
def _reshape(node: Node) -> Value:
    value, shape = node.inputs
    lengths = [length for length in value.lengths or () if length is not None]
    new = shape.numbers
    if new is None and shape.axis is None:
        own = static_lengths(node.tensor)
        if own is not None and own.count(None) <= 1:
            new = constant([-1 if n is None else n for n in own])
    if value.lengths is None or len(lengths) < len(value.lengths) or new is None:
        return node.mixed("has a shape that is not known", is_certain=False)
    # What may be -1 at some length stands for what is left then, whatever that is.
    numbers = [
        Open.unknown("given", place, *new.ravel(), *value.lengths)
        if may_be_negative(n)
        else n
        for place, n in enumerate(new.ravel())
    ]
    return reshaped(node, value, settled(constant(numbers), lengths))


@rule("ExpandDims")
def _expand_dims(node: Node) -> Value:
    value, along = node.inputs
    axis = axis_from(along, len(value.shape) + 1)
    return node.like(value.inserted(axis, 1), value.causes)


@rule("Squeeze")
def _squeeze(node: Node) -> Value:
    value = node.inputs[0]
    lengths = value.shape
    gone = [axis % len(lengths) for axis in node.attr("squeeze_dims")]
    if not gone:
        if None in lengths or any(map(_is_open, lengths)):
            return node.mixed("has a shape that is not known", is_certain=False)
        gone = [axis for axis, n in enumerate(lengths) if n == 1]
        is_open = node.rows is None and static_lengths(node.tensor) is None
        if is_open and not is_fixed(lengths):
            # With one row the row axis would be gone, too.
            return node.mixed("drops the axis of the rows if there is one row")
    if value.axis in gone:
        return node.mixed("drops the axis of the rows")
    return node.like(value.dropped(gone))


@rule("Transpose", "ConjugateTranspose")
def _transpose(node: Node) -> Value:
    value, order = node.inputs
    lengths = value.shape
    permutation = [int(n) % len(lengths) for n in known(order.numbers).ravel()]
    rows = None if value.axis is None else permutation.index(value.axis)
    moved = Value(rows, value.layout, tuple(lengths[axis] for axis in permutation))
    return node.like(moved, value.causes)


@rule("BroadcastTo")
def _broadcast_to(node: Node) -> Value:
    value, shape = node.inputs
    lengths = lengths_from(shape)
    rows = None if value.from_end is None else len(lengths) + value.from_end
    spread = node.like(Value(rows, value.layout, lengths), value.causes)
    if value.axis is not None or spread.axis is None:
        return spread
    own = spread.axis + len(value.shape) - len(lengths)
    return _alike(spread) if own < 0 or value.shape[own] == 1 else spread


def _alike(value: Value) -> Value:
    """Say that entries are all equal along the axis of the rows."""
    if value.layout == PLAIN:
        return value
    return value._replace(layout=value.layout._replace(is_alike=True))


_SPREADS = "spreads what depends on rows over a whole tensor"


@rule("Fill", rows_in=NONE, otherwise=_SPREADS)
def _fill(node: Node) -> Value:
    shape, value = node.inputs
    if shape.numbers is None:
        return node.free()
    return _alike(node.free(lengths_from(shape), value.causes))


@rule("Empty", rows_in=NONE)
def _empty(node: Node) -> Value:
    shape = node.inputs[0]
    if not node.attr("init"):
        return node.unknown()  # Whatever was there before.
    # A shape has no part in what is filled.
    causes = frozenset[Cause]()
    return node.free(None if shape.numbers is None else lengths_from(shape), causes)


@rule("Tile")
def _tile(node: Node) -> Value:
    value, multiples = node.inputs
    times = lengths_from(multiples)
    lengths = [
        # A length that nobody knows counts rows if it is taken as often as they are.
        known_product([n, m]) if n is not None or isinstance(m, int) else UNKNOWN
        for n, m in zip(value.shape, times, strict=True)
    ]
    if value.axis is not None and not is_fixed(times):
        return node.mixed("repeats rows as often as there are rows")
    again = 1 if value.axis is None else times[value.axis]
    if again != 1:
        if isinstance(again, Size) or fixed(again) < 1 or value.layout.words:
            return node.mixed("repeats all rows one after the other")
        layout = value.layout._replace(times=value.layout.times * again)
        value = value._replace(layout=layout)
    return node.like(value.with_lengths(lengths), value.causes)
