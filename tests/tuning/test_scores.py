import math

import keras
import pytest

import tfdp
from tfdp.accounting import Segment
from tfdp.sampling import Poisson
from tfdp.tuning.scores import (
    check_callbacks,
    check_is_released,
    check_score,
    value_of,
)


def test_public_metrics_need_public_rows():
    check_score("val_accuracy", has_public_rows=True)
    check_score("private_accuracy", has_public_rows=False)
    with pytest.raises(ValueError, match="nobody has said to be public"):
        check_score("val_accuracy", has_public_rows=False)


def test_each_released_metric_may_be_a_score():
    names = ("private_this and that", "private_accuracy")
    segment = Segment(Poisson(60, 60), 1, 20.0, ", ".join(names))
    for name in names:
        check_is_released(name, [segment])
    with pytest.raises(ValueError, match="which no callback releases"):
        check_is_released("private_this", [segment])
    with pytest.raises(ValueError, match="in any epoch"):
        check_is_released("private_accuracy", [segment.with_count(0)])


def test_callbacks_decide_by_what_is_released_or_public():
    evaluation = tfdp.callbacks.PrivateEvaluation(["accuracy"], noise_multiplier=20.0)
    for monitor in ("val_loss", "private_accuracy"):
        check_callbacks([keras.callbacks.EarlyStopping(monitor), evaluation])
    for monitor in ("loss", "accuracy", "private_loss"):
        with pytest.raises(ValueError, match=f"monitor='{monitor}'"):
            check_callbacks([evaluation, keras.callbacks.EarlyStopping(monitor)])


def test_a_stop_at_a_private_loss_is_refused():
    with pytest.raises(
        ValueError, match=r"would decide.*with `TerminateOnNaN`. Leave it"
    ):
        check_callbacks([keras.callbacks.TerminateOnNaN()])


def value(values, direction=1, *, is_complete=True):
    return value_of("s", {"s": values}, direction, is_complete=is_complete)


def test_the_last_value_counts_and_nan_is_the_worst():
    assert value([1.0, 0.5]) == 0.5
    assert value([1.0, 0.5], -1) == -0.5
    assert value([1.0, math.nan]) == value([math.nan], -1) == -math.inf
    assert value([math.inf], -1) == -math.inf


def test_without_a_value():
    assert value([], is_complete=False) == -math.inf
    with pytest.raises(ValueError, match="has no score"):
        value([])
