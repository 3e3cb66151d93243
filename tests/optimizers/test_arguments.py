"""What private optimizers refuse to be made with."""

import math

import keras
import pytest

from tfdp.optimizers import DPSGD, DPAdam, DPOptimizer
from tfdp.optimizers.arguments import LEAST_CLIP, checked_clip

PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1}


def make_with(name):
    return lambda value: DPSGD(0.1, **PRIVATE | {name: value})


def set_on(name):
    return lambda value: setattr(DPSGD(0.1, **PRIVATE), name, value)


NOT_POSITIVE = (0, -1, -1e-300, math.nan, math.inf, -math.inf)
NO_NUMBER = (True, "1", b"1", [1.0, 2.0], {})
REFUSED = [
    *[("l2_norm_clip", value, ValueError) for value in NOT_POSITIVE],
    *[("l2_norm_clip", value, TypeError) for value in (*NO_NUMBER, None)],
    *[("noise_multiplier", value, ValueError) for value in NOT_POSITIVE[1:]],
    *[("noise_multiplier", value, TypeError) for value in (*NO_NUMBER, None)],
    *[("expected_batch_size", value, ValueError) for value in NOT_POSITIVE],
    *[("expected_batch_size", value, TypeError) for value in NO_NUMBER],
    *[("num_microbatches", value, ValueError) for value in (*NOT_POSITIVE, 1.5)],
    *[("num_microbatches", value, TypeError) for value in NO_NUMBER],
]


@pytest.mark.parametrize(("name", "value", "error"), REFUSED)
def test_numbers_out_of_range_are_refused(name, value, error):
    with pytest.raises(error, match=rf"`{name}` must be .*Received: {name}="):
        make_with(name)(value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [case for case in REFUSED if case[0] in {"l2_norm_clip", "noise_multiplier"}],
)
def test_setters_refuse_the_same_and_change_nothing(name, value, error):
    optimizer = DPSGD(0.1, **PRIVATE)
    with pytest.raises(error, match=rf"`{name}` must be .*Received: {name}="):
        setattr(optimizer, name, value)
    assert float(getattr(optimizer, name)) == PRIVATE[name]


@pytest.mark.parametrize("make", [make_with, set_on])
def test_no_noise_warns(make):
    with pytest.warns(UserWarning, match=r"not private.*Received: noise_multiplier=0"):
        make("noise_multiplier")(0)


@pytest.mark.parametrize("value", [LEAST_CLIP, 1, 1 / LEAST_CLIP])
def test_clip_norms_that_noise_can_be_drawn_for(value):
    assert checked_clip(value) == value


@pytest.mark.parametrize("value", [LEAST_CLIP / 2, 2 / LEAST_CLIP])
def test_clip_norms_whose_noise_would_be_zero_or_infinite_are_refused(value):
    with pytest.raises(ValueError, match=r"where float32 noise.*Received: l2_norm"):
        checked_clip(value)


@pytest.mark.parametrize(
    ("argument", "value", "fix"),
    [
        ("gradient_accumulation_steps", 2, "physical_batch_size"),
        ("clipnorm", 1.0, "`l2_norm_clip` alone"),
        ("clipvalue", 1.0, "`l2_norm_clip` alone"),
        ("global_clipnorm", 1.0, "`l2_norm_clip` alone"),
        ("loss_scale_factor", 2.0, "no loss scale"),
    ],
)
@pytest.mark.parametrize("is_family", [False, True])
def test_an_inner_optimizer_that_changes_gradients_is_refused(
    argument, value, fix, is_family
):
    def make():
        if is_family:
            return DPAdam(0.1, **PRIVATE, **{argument: value})
        return DPOptimizer(keras.optimizers.Adam(0.1, **{argument: value}), **PRIVATE)

    with pytest.raises(ValueError, match=rf"`{argument}`.*Received: {argument}=") as e:
        make()
    assert fix in str(e.value)


@pytest.mark.parametrize(
    "inner",
    [
        lambda: DPSGD(0.1, **PRIVATE),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        lambda: keras.optimizers.SGD,
        lambda: 0.1,
        lambda: None,
    ],
    ids=["private", "loss_scale", "class", "number", "none"],
)
def test_what_is_no_plain_optimizer_is_refused(inner):
    with pytest.raises(TypeError, match=r"`inner`.*Received: inner of type.*Use `tfdp"):
        DPOptimizer(inner(), **PRIVATE)
