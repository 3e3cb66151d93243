"""A ledger has every run that a weight comes from, whoever ran it, whenever."""

import copy
import gc
import os
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests import forks
from tests.runs.models import (
    DELTA,
    NOISE,
    ROWS,
    both_of,
    data,
    fit,
    ledger_of,
    loop,
    optimizer,
    part,
    private,
)
from tfdp.runs import histories
from tfdp.runs.histories import history_of
from tfdp.runs.recorder import LedgerRecorder

# ------------------------------------------------------------------- one of several


@pytest.mark.slow
@pytest.mark.smoke
def test_a_model_of_two_has_what_its_parts_run_later():
    one, other = part("one"), part("other")
    first, second = private(one), private(other)
    fit(first)
    fit(second)
    both = private(both_of(one, other))
    assert both.ledger.steps == 8
    fit(both)
    fit(second, epochs=2)
    for model in (both, first, second):
        # Each has read what the others have made.
        assert model.ledger.steps == 20
        assert model.epsilon(DELTA) == both.epsilon(DELTA)


def test_values_that_a_model_began_with_are_no_copies():
    one, other = part("one"), part("other")
    other.set_weights(one.get_weights())
    first, second = private(one), private(other)
    # What has trained is what it began with.
    first.optimizer.learning_rate = 0.0
    fit(first)
    fit(second)
    assert [each.ledger.steps for each in (first, second)] == [4, 4]


@pytest.mark.slow
def test_models_that_never_met_have_nothing_of_each_other():
    one, other = part("one"), part("other")
    first, second = private(one), private(other)
    fit(first)
    fit(second)
    both = private(both_of(one, other))
    assert [each.ledger.steps for each in (first, second, both)] == [4, 4, 8]


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_of_a_loop_count_in_every_model_of_its_variables(traced):
    one, other = part("one"), part("other")
    opt = optimizer()
    step = loop(one, opt, traced=traced)
    for _ in range(3):
        step()
    first, both = private(one), private(both_of(one, other))
    fit(both)
    for _ in range(2):
        step()
    assert first.ledger.steps == both.ledger.steps == opt.ledger.steps == 9


@pytest.mark.slow
def test_what_was_trained_on_top_of_private_weights_depends_on_them():
    """Also where those do not train any more, and when they are gone."""
    base, head = part("base", units=3), part("head")
    fit(private(both_of(base, part("first", units=3))))
    base.trainable = False
    inputs = keras.Input((3,))
    whole = keras.Model(inputs, head(base(inputs)))
    step = loop(whole, optimizer(), traced=False)
    step()
    del base, whole, step
    gc.collect()
    assert private(head).ledger.steps == 5


@pytest.mark.slow
def test_what_a_base_is_trained_to_later_is_not_in_its_old_heads():
    base, head = part("base", units=3), part("head")
    of_base = private(both_of(base, part("first", units=3)))
    fit(of_base)
    base.trainable = False
    inputs = keras.Input((3,))
    fit(private(keras.Model(inputs, head(base(inputs)))))
    base.trainable = True
    fit(of_base, epochs=2)
    assert private(head).ledger.steps == 8
    assert of_base.ledger.steps == 12


def test_a_new_loss_in_every_step_leaves_no_traces():
    model = part("model")
    opt = optimizer()
    x, y = map(tf.constant, data())
    for _ in range(5):
        clipped = tfdp.clipped_gradients(
            model, lambda y, p: (y - p)[:, 0] ** 2, x, y, l2_norm_clip=1.0
        )
        opt.apply_clipped_sum(clipped, model.trainable_variables)
    assert len(history_of(model.weights[0]).sources) == 2


# --------------------------------------------------------------------------- copies


def cloned(model):
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "clone_model": cloned,
}


@pytest.mark.parametrize(
    "way",
    [
        "deepcopy",
        *(pytest.param(way, marks=pytest.mark.slow) for way in list(COPIES)[1:]),
    ],
)
def test_a_copy_of_trained_weights_continues_their_runs(way):
    model = part("model")
    original = private(model)
    fit(original)
    taken = COPIES[way](model)
    assert private(taken).ledger == original.ledger
    fit(original)
    # When it was made, the original had taken four steps.
    assert private(taken).ledger.steps == 4
    copied = private(taken)
    fit(copied)
    assert copied.ledger.steps == 8
    assert original.ledger.steps == 8


def test_a_copy_is_recognised_when_the_original_is_gone():
    model = part("model")
    original = private(model)
    fit(original)
    taken = copy.deepcopy(model)
    gone = weakref.ref(original)
    del original, model
    gc.collect()
    assert gone() is None
    assert private(taken).ledger.steps == 4


@pytest.mark.slow
def test_a_copy_of_what_a_loop_has_trained_is_recognised():
    model = part("model")
    step = loop(model, optimizer(), traced=True)
    step()
    taken = both_of(cloned(model), part("other"))
    assert private(taken).ledger.steps == 1


@pytest.mark.slow
def test_weights_that_were_set_after_wrapping_are_recognised():
    original, other = private(part("model")), private(part("model"))
    fit(original)
    other.model.set_weights(original.model.get_weights())
    assert other.ledger.steps == 4
    # Those of its own training are replaced by others.
    third = private(part("model"))
    fit(third)
    third.model.set_weights(original.model.get_weights())
    fit(third)
    assert third.ledger.steps == 12


def train_on_batch(model):
    private_ = private(model)
    private_.train_on_batch(*data())
    return private_.ledger


def train_step(model):
    private_ = private(model)
    private_.train_step(tuple(map(tf.constant, data())))
    return private_.ledger


def train_in_a_loop(model):
    opt = optimizer()
    loop(model, opt, traced=True)()
    return opt.ledger


@pytest.mark.parametrize(
    "train",
    [train_on_batch]
    + [
        pytest.param(each, marks=pytest.mark.slow)
        for each in (train_step, train_in_a_loop)
    ],
)
def test_a_copy_is_recognised_before_its_first_step(train):
    original = private(part("model"))
    fit(original)
    assert train(copy.deepcopy(original.model)).steps == 5


@pytest.mark.slow
def test_weights_that_are_set_between_single_steps_are_recognised():
    original, other = private(part("model")), private(part("model"))
    fit(original)
    other.train_on_batch(*data())
    other.model.set_weights(original.model.get_weights())
    other.train_on_batch(*data())
    assert other.ledger.steps == 6


@pytest.mark.slow
def test_a_copy_of_a_loaded_model_is_recognised(tmp_path):
    model = private(part("model"))
    fit(model)
    model.save(tmp_path / "model.keras")
    del model
    result = forks.run(f"""
import keras
from tests.runs.models import private
from tests.runs.test_histories import cloned
loaded = keras.models.load_model({str(tmp_path / "model.keras")!r})
assert private(cloned(loaded.model)).ledger.steps == 4
""")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_second_copy_has_what_the_original_ran_since():
    original, other = private(part("model")), private(part("model"))
    for steps in (4, 8, 12):
        fit(original)
        other.model.set_weights(original.model.get_weights())
        assert other.ledger.steps == steps
    other.train_on_batch(*data())
    fit(original)
    other.model.layers[-1].bias.assign(original.model.layers[-1].bias + 0.0)
    other.train_on_batch(*data())
    assert other.ledger.steps == 18


@pytest.mark.slow
def test_weights_that_are_set_between_steps_of_a_loop_are_recognised():
    original, model = private(part("model")), part("model")
    fit(original)
    opt = optimizer()
    step = loop(model, opt, traced=False)
    step()
    model.set_weights(original.model.get_weights())
    step()
    assert opt.ledger.steps == private(model).ledger.steps == 6


@pytest.mark.slow
def test_steps_of_a_loop_inside_of_fit_are_no_draws():
    model = private(part("model"))
    step = loop(model.model, model.optimizer, traced=False)
    steps = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: step()
    )
    fit(model, callbacks=[steps])
    assert set(model.ledger.segments) == {
        *ledger_of(4).segments,
        tfdp.accounting.UnamplifiedSteps(4, NOISE),
    }


@pytest.mark.slow
def test_copies_of_every_epoch_are_recognised():
    original = private(part("model"))
    copies = []
    keeps = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: copies.append(original.model.get_weights())
    )
    fit(original, epochs=3, callbacks=[keeps])
    found = []
    for weights in copies:
        model = part("model")
        model.set_weights(weights)
        found.append(private(model).ledger.steps)
    assert found == [4, 8, 12]


@pytest.mark.slow
def test_what_models_share_and_nobody_has_trained_is_no_copy():
    """Frozen public weights, and initial ones that are put back."""
    base = part("base", units=3)
    base.trainable = False

    def on_base():
        return keras.Sequential([keras.Input((3,)), base, layers.Dense(1)])

    first = private(on_base())
    fit(first)
    fit(private(copy.deepcopy(first.model)))
    for _ in range(2):
        model = on_base()
        start = model.get_weights()
        last = private(model)
        fit(last)
        assert last.ledger.steps == 4
        model.set_weights(start)
        again = on_base()
        again.set_weights(start)
        assert private(again).ledger.steps == 0


@pytest.mark.slow
def test_the_same_training_twice_is_no_copy():
    for _ in range(2):
        keras.utils.set_random_seed(0)
        with pytest.warns(UserWarning, match="reproducible"):
            model = private(part("model"), noise_seed=1)
        for _ in range(2):
            # Of no use whatever the draws are: the noise alone moves the weights.
            fit(model, steps_per_epoch=1, sample_weight=np.zeros(ROWS))
        assert model.ledger.steps == 2


@pytest.mark.slow
def test_models_that_are_gone_leave_no_recorder():
    def recorders():
        gc.collect()
        return sum(isinstance(each, LedgerRecorder) for each in gc.get_objects())

    before = recorders()
    for number in range(8):
        model = private(part("model"))
        if number < 2:
            fit(model)
    del model
    assert recorders() <= before


# ------------------------------------------------------------------ files and forks


@pytest.mark.slow
def test_files_of_parts_and_of_the_whole_count_each_run_once(tmp_path):
    one, other = part("one"), part("other")
    first = private(one)
    fit(first)
    first.save_weights(tmp_path / "part.weights.h5")
    both = private(both_of(one, other))
    fit(both)
    both.save(tmp_path / "both.keras")
    fit(first)
    again = keras.models.load_model(tmp_path / "both.keras")
    assert again.ledger.steps == 8
    fresh = private(part("one"))
    fresh.load_weights(tmp_path / "part.weights.h5")
    assert fresh.ledger.steps == 4
    first.load_weights(tmp_path / "part.weights.h5")
    assert first.ledger.steps == both.ledger.steps == 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="There are no forks here.")
def test_a_forked_process_counts_in_a_run_of_its_own():
    recorder = LedgerRecorder()
    run = recorder.run
    receive, send = os.pipe()
    if not os.fork():
        os.write(send, recorder.run.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as of_child:
        assert of_child.read() not in {"", run}
    assert recorder.run == run


def test_a_value_that_is_looked_at_is_no_copy_and_stays():
    variable = keras.Variable(np.ones(5, "float32"))
    seen = histories._value(variable)
    assert not seen.flags.owndata
    variable.assign_add(np.ones(5, "float32"))
    np.testing.assert_array_equal(seen, 1)
    np.testing.assert_array_equal(histories._value(variable), 2)
