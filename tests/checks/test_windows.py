"""Lengths that stand for open ones differ as much behind windows as before."""

import pytest
import tensorflow as tf

from tfdp.checks.windows import NoPlaceError, Windows


def causes(lengths, positions, stride=1):
    windows = Windows()
    with tf.Graph().as_default():
        op = tf.zeros([]).op
    for length, number in zip(lengths, positions, strict=True):
        windows.note(op, 1, length=length, positions=number, stride=stride)
    return windows.causes([])


@pytest.mark.parametrize(
    ("lengths", "positions", "stride"),
    [
        # Shifted, all of them.
        ([11, 13, 1031, 131_072], [9, 11, 1029, 131_070], 1),
        # Halved.
        ([11, 13, 1031, 131_072], [5, 6, 515, 65_536], 2),
        # Of a length that is known.
        ([20, 20, 20], [10, 10, 10], 2),
        # What was even stays so, or is halved.
        ([22, 26, 2062], [20, 24, 2060], 1),
        ([22, 26, 2062], [11, 13, 1031], 2),
    ],
)
def test_lengths_that_differ_enough(lengths, positions, stride):
    assert not causes(lengths, positions, stride)


@pytest.mark.parametrize(
    ("lengths", "positions", "stride"),
    [
        # All even, which a reshape to pairs would count on; all odd likewise.
        ([5, 6, 515, 65_536], [2, 2, 172, 21_846], 3),
        ([5, 6, 515, 65_536], [3, 3, 173, 21_847], 3),
        # Of lengths that are even a third of them are not.
        ([12, 14, 1032], [4, 6, 344], 3),
    ],
)
def test_lengths_that_are_too_much_alike(lengths, positions, stride):
    (cause,) = causes(lengths, positions, stride)
    assert not cause.is_certain
    assert "too much alike" in cause.why


def test_lengths_that_are_too_short_are_left_out_but_not_most_of_them():
    windows = Windows()
    with tf.Graph().as_default():
        op = tf.zeros([]).op
    with pytest.raises(NoPlaceError) as raised:
        windows.note(op, 1, length=11, positions=0, stride=1)
    assert not windows
    assert not windows.causes([raised.value.cause] * 3)
    assert windows.causes([raised.value.cause] * 4) == [raised.value.cause]
