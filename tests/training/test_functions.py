"""The functions that `fit` and `evaluate` call for each batch."""

import pytest

from tests.small import data, optimizer, private


def test_the_training_function_is_made_once():
    model = private(opt=optimizer(expected_batch_size=12))
    first = model.make_train_function()
    assert model.make_train_function() is first
    assert model.make_train_function(force=True) is not first


def test_xla_compiles_the_passes_and_not_all_of_the_function():
    model = private(opt=optimizer(expected_batch_size=12), jit_compile=True)
    model.make_train_function()
    assert model.jit_compile


def test_only_what_the_function_calls_takes_the_batches_of_fit():
    model = private(run_eagerly=True)
    seen = []

    def take_step(rows, fingerprint=None):
        seen.append(model._is_in_train_function)
        if len(seen) > 1:
            raise RuntimeError("stopped")
        return {}

    object.__setattr__(model, "_take_step", take_step)
    x, y = data()
    model.train_step((x, y))
    with pytest.raises(RuntimeError, match="stopped"):
        model.make_train_function()(iter([(x, y)]))
    assert seen == [False, True]
    assert not model._is_in_train_function


def test_evaluation_has_the_metrics_of_the_model():
    model = private(metrics=["accuracy"])
    logs = model.evaluate(*data(), verbose=0, return_dict=True)
    assert set(logs) == {"loss", "accuracy"}
