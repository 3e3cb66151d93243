"""What callbacks are told of releases, and what is made of logs for others."""

import keras
import pytest

from tfdp.callbacks import PrivateEarlyStopping, PrivateEvaluation
from tfdp.errors import NotPrivateError
from tfdp.training.fit_callbacks import sorted_callbacks
from tfdp.training.releases import Columns, OnlyReleased, check_logs, direction_of


def evaluation(metric="accuracy"):
    return PrivateEvaluation([metric], noise_multiplier=4.0)


def test_a_log_of_somebody_else_is_refused():
    check_logs({"loss": 1.0}, "private_accuracy", None)
    check_logs({"private_accuracy": 0.5}, "private_accuracy", 0.5)
    check_logs(None, "private_accuracy", 0.5)
    for logs, released in (({"a": 0.5}, None), ({"a": 0.5}, 0.4), ({}, 0.5)):
        with pytest.raises(NotPrivateError, match="somebody else"):
            check_logs(logs, "a", released)


def test_columns_are_there_for_the_logger_alone():
    logs = {"loss": 1.0, "a": 0.5}
    Columns(("a", "b"), are_added=True).on_epoch_end(0, logs)
    assert logs == {"loss": 1.0, "a": 0.5, "b": "NA"}
    Columns(("a", "b"), are_added=False).on_epoch_end(0, logs)
    assert logs == {"loss": 1.0, "a": 0.5}


def test_what_releases_runs_first_and_what_reads_is_guarded():
    released, stop = evaluation(), PrivateEarlyStopping()
    best = keras.callbacks.ModelCheckpoint("a.keras", monitor="private_accuracy")
    log, other = keras.callbacks.CSVLogger("a.csv"), keras.callbacks.History()
    found = sorted_callbacks([log, best, other, stop, released])
    kinds = [type(each) for each in found]
    assert found[:2] == [released, stop]
    assert kinds[2:] == [
        Columns,
        keras.callbacks.CSVLogger,
        Columns,
        OnlyReleased,
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.History,
    ]
    assert sorted_callbacks([log, other]) == [log, other]


def test_a_name_is_released_once():
    with pytest.raises(ValueError, match="two of them"):
        sorted_callbacks([evaluation(), evaluation()])
    x = [[0.0, 0.0, 0.0]]
    own = PrivateEvaluation(["accuracy"], noise_multiplier=1.0, x=keras.ops.array(x))
    assert sorted_callbacks([evaluation(), own])[1] is own
    assert own.names == ("private_val_accuracy", "private_val_accuracy_standard_error")


@pytest.mark.parametrize(
    ("score", "direction"),
    [
        ("private_accuracy", 1),
        ("val_loss", -1),
        ("val_auc", 1),
        ("val_mean_absolute_error", -1),
    ],
)
def test_names_tell_the_direction(score, direction):
    assert direction_of(score, "auto") == direction
    assert direction_of(score, "max") == 1
    assert direction_of(score, "min") == -1
