"""Checks of arguments: NaN fails all of them, and numbers become Python's own."""

import fractions
import math

import keras
import numpy as np
import pytest

from tfdp import _validate

HUGE = 10**400
NAN = float("nan")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_validate.positive, (1e-300, 2, 1e300), (0, -1, NAN, math.inf, HUGE, -HUGE)),
        (_validate.non_negative, (0, 2.5), (-1e-300, NAN, math.inf, HUGE, -HUGE)),
        (_validate.probability, (1e-300, 0.5), (0, 1, NAN, -math.inf, HUGE, -HUGE)),
        (_validate.positive_int, (1, 2.0, 2**70), (0, 1.5, NAN, math.inf, HUGE)),
        (_validate.seed, (0, 2**200), (-1, -HUGE)),
    ],
    ids=lambda check: getattr(check, "__name__", ""),
)
def test_ranges(check, good, bad):
    for value in good:
        assert check("name", value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^`name` must .*\. Received: name=-?\w"):
            check("name", value)


@pytest.mark.parametrize("value", [None, True, "1", b"1", [1.0, 2.0], {}])
@pytest.mark.parametrize(
    "check", [_validate.number, _validate.positive_int, _validate.seed]
)
def test_what_is_no_number_is_a_type_error(check, value):
    with pytest.raises(TypeError, match=r"^`name` must be .*\. Received: name="):
        check("name", value)


@pytest.mark.parametrize(
    "value",
    [np.float32(2), np.int64(2), np.array(2.0), fractions.Fraction(2), 2],
    ids=lambda value: type(value).__name__,
)
def test_numbers_become_floats(value):
    assert type(_validate.number("name", value)) is float
    assert _validate.number("name", value) == 2


def test_variables_become_floats():
    assert type(_validate.positive("name", keras.Variable(2.0))) is float


def test_the_fix_comes_last():
    with pytest.raises(ValueError, match=r"Received: name=0\. Use `name=1`\.$"):
        _validate.positive("name", 0, "Use `name=1`.")
    with pytest.raises(ValueError, match=r"Received: name=-3\. Use `name=3`\.$"):
        _validate.seed("name", -3)


def test_one_of_names_the_choices():
    assert _validate.one_of("name", "b", ("a", "b")) == "b"
    with pytest.raises(ValueError, match=r"one of 'a', 'b'\. Received: name='c'\."):
        _validate.one_of("name", "c", ("a", "b"))


def test_instance_names_the_types():
    _validate.instance("name", 1, str, int)
    with pytest.raises(
        TypeError, match=r"`str` or `bytes`\. Received: name of type int\."
    ):
        _validate.instance("name", 1, str, bytes)


def test_what_most_people_give_has_an_example():
    with pytest.raises(
        ValueError, match=r"l2_norm_clip=nan\. Use, for example, `l2_norm_clip=1"
    ):
        _validate.positive("l2_norm_clip", NAN)


@pytest.mark.parametrize("name", _validate._EXAMPLES)
def test_examples_are_good(name):
    value = eval(_validate._EXAMPLES[name], {"len": len, "x": [0]})
    check = _validate.positive
    if name in ("delta", "sampling_probability"):
        check = _validate.probability
    elif isinstance(value, int):
        check = _validate.positive_int
    assert check(name, value) == value
