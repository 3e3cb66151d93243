"""Lengths of open axes are sums of products, equal where they are so for all lengths."""

import pytest

from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import UNKNOWN, Size

T, U = Open.unknown("given", 0, 1), Open.unknown("given", 0, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (T + 0, T),
        (T - T, 0),
        (T + 3 - T, 3),
        (0 * T, 0),
        (2 * T - T, T),
        (-T + U, U - T),
        (1 - (1 - T), T),
        ((T + 1) * (T - 1), T * T - 1),
        ((T + U) * (T + U), T * T + 2 * T * U + U * U),
        # Without a rest, whatever the lengths are.
        (T * 6 // 3, 2 * T),
        (T * U * 8 // (U * 8), T),
        ((T * T - 1) // (T + 1), T - 1),
        ((2 * T * U + 4 * U) // (2 * U), T + 2),
        (T // T, 1),
        (0 // T, 0),
        (T * 6 % 3, 0),
        (T * 8 * U % (4 * T), 0),
        # What is made of the same in the same way.
        (T // 2, T // 2),
        ((T + 1) % 4, (T + 1) % 4),
        (7 // T, 7 // T),
        (Open.unknown("window", T, 3, 2), Open.unknown("window", T, 3, 2)),
        # Of rows.
        (Size(1) * T, T * Size(1)),
        (Size(T * 4) // 4, Size(T)),
        (Size(T * U) // Size(U), T),
    ],
)
def test_what_is_equal_for_all_lengths(first, second):
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (T, U),
        (T, 8),
        (T, 1),
        (T + 1, T),
        (2 * T, T),
        (T * U, T),
        # Some lengths have a rest.
        (2 * (T // 2), T),
        ((T + 1) // 2 * 2, T + 1),
        (T % 2, 0),
        (T * 3 // 2, T),
        (T * T // (T + 1), T - 1),
        (T // 2, U // 2),
        (Open.unknown("window", T, 3, 2), Open.unknown("window", T, 3, 1)),
        (Size(T), Size(U)),
        (Size(T), Size(1)),
        (Size(T) // 2, UNKNOWN),
    ],
)
def test_what_may_differ(first, second):
    assert first != second


@pytest.mark.parametrize(
    "ask",
    [
        int,
        range,
        lambda length: [0][length],
        lambda length: length < 8,
        lambda length: max(length, 8),
    ],
)
def test_nobody_knows_how_long_it_is(ask):
    with pytest.raises(TypeError):
        ask(T)


def test_nothing_is_divided_by_zero():
    with pytest.raises(ZeroDivisionError):
        T // 0
