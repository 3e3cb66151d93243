"""Lengths that stand for open ones differ as much behind windows as before."""

import pytest
import tensorflow as tf

from tfdp.checks.windows import Windows


def causes(lengths, positions, stride=1):
    windows = Windows()
    with tf.Graph().as_default():
        op = tf.zeros([]).op
    for length, number in zip(lengths, positions, strict=True):
        windows.note(op, 1, length=length, positions=number, stride=stride)
    return windows.causes()


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
        # Short ones have no place in it.
        ([11, 1031, 131_072, 99_992, 150_001], [0, 32, 130_073, 98_993, 149_002], 1),
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
        # One length alone, or none at all.
        ([11, 13, 1031], [0, 0, 31], 1),
        ([11, 13, 1031], [0, 0, 0], 1),
    ],
)
def test_lengths_that_are_too_much_alike(lengths, positions, stride):
    (cause,) = causes(lengths, positions, stride)
    assert not cause.is_certain
    assert "too much alike" in cause.why
