import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests import small
from tfdp import clipping, engines
from tfdp.audit import replay
from tfdp.engines import bookkeeping
from tfdp.engines.traced import TracedPass
from tfdp.losses.batch import Batch
from tfdp.mechanisms import mechanism
from tfdp.mechanisms.mechanism import add_noise
from tfdp.training import batch_clipper, checked_model

ROWS = 60


def data(rows=ROWS):
    return small.data(rows)


def kinds(report):
    return [finding.what for finding in report.nonprivate_findings]


def replayed(private, rows=ROWS, neighbours=8, **options):
    options = {"batch_size": 8} | options
    return replay(private, *data(rows), neighbours=neighbours, **options)


def unproven_pass(engine, objective, batch, rows_per_unit):
    def run(*batch_and_clip):
        *batch, clip = batch_and_clip
        return engine.clip_and_sum(
            objective, Batch(*batch), l2_norm_clip=clip, rows_per_unit=rows_per_unit
        )

    function = tf.function(run, autograph=False)
    traced = function.get_concrete_function(*batch, tf.TensorSpec([]))
    return TracedPass(engine, objective, batch, rows_per_unit, traced)


@pytest.fixture
def unchecked(monkeypatch):
    """Models that DPModel would refuse go into the engine that would be the quickest."""
    monkeypatch.setattr(batch_clipper, "proven_pass", unproven_pass)
    monkeypatch.setattr(
        checked_model, "choose", lambda *_, **__: engines.get("bookkeeping")
    )


@pytest.mark.slow
def test_nothing_is_found_in_what_is_right():
    report = replayed(small.private(), neighbours=20)
    assert report.nonprivate_passed, report
    assert report.neighbours == 20
    assert 0 < report.nonprivate_clipped <= 20
    assert report.l2_sensitivity == small.CLIP
    assert 0.99 * small.CLIP < report.nonprivate_largest_change <= 1.001 * small.CLIP
    assert report.nonprivate_noise_stddev == pytest.approx(small.CLIP, rel=0.2)
    assert "nothing found" in str(report)


WAYS = {
    "ghost": {"wrap": {"engine": "ghost"}},
    "vectorized": {"wrap": {"engine": "vectorized"}},
    "apart": {"wrap": {"engine": "apart"}},
    "passes": {"wrap": {"physical_batch_size": 3}},
    "shuffle": {"wrap": {"sampling": "shuffle"}},
    "bins": {"wrap": {"sampling": "balls_in_bins"}},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *("ghost", "vectorized", "apart", "passes", "xla"),
        # As the bugs below are found.
        pytest.param("eager", marks=pytest.mark.exhaustive),
        pytest.param("bins", marks=pytest.mark.exhaustive),
        # As microbatches are drawn.
        pytest.param("shuffle", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_found_whatever_the_way(way):
    report = replayed(small.private(**WAYS[way]))
    assert report.nonprivate_passed, report


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [tfdp.losses.BAM, tfdp.losses.SAT])
def test_nothing_is_found_where_gradients_are_taken_uphill(wrap):
    private = small.private(loss=wrap(small.logits_loss()))
    private.fit(*data(), batch_size=8, verbose=0)
    before = values(private)
    report = replayed(private)
    assert report.nonprivate_passed, report
    assert_same(before, values(private))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "size"), [(9, 1), (8, 8), (2, 2), (3, 1)])
def test_few_rows_are_enough(rows, size):
    report = replayed(small.private(run_eagerly=True), rows, batch_size=size)
    assert report.nonprivate_passed, report
    assert 0 < report.neighbours <= 8


@pytest.mark.slow
def test_microbatches_have_twice_the_sensitivity():
    private = small.private(
        opt=small.optimizer(num_microbatches=2), wrap={"sampling": "shuffle"}
    )
    report = replayed(private)
    assert report.nonprivate_passed, report
    assert report.l2_sensitivity == 2 * small.CLIP


@pytest.mark.slow
@pytest.mark.parametrize("rows_of_each", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_users_are_emptied_with_all_their_rows(rows_of_each):
    private = small.private(wrap={"unit": "user"})
    ids = np.arange(ROWS) // rows_of_each
    report = replayed(private, user_ids=ids, examples_per_user=2)
    assert report.nonprivate_passed, report
    assert report.batch_size == 8


@pytest.mark.slow
def test_masks_of_dropout_are_the_same_in_both_steps():
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(6),
        layers.Dropout(0.5),
        layers.Dense(2),
    ])
    report = replayed(small.private(model))
    assert report.nonprivate_passed, report


@pytest.mark.slow
def test_integers_and_nested_inputs_are_taken():
    ids, numbers = keras.Input((4,), dtype="int32"), keras.Input((3,))
    embedded = layers.Flatten()(layers.Embedding(5, 2)(ids))
    model = keras.Model(
        [ids, numbers], layers.Dense(2)(layers.Concatenate()([embedded, numbers]))
    )
    x, y = data()
    words = np.random.default_rng(0).integers(0, 5, (ROWS, 4)).astype("int32")
    report = replay(small.private(model), [words, x], y, 5, batch_size=8)
    assert report.nonprivate_passed, report


# Bugs. Eagerly, which takes less time to trace.


def eager(*args, **options):
    return small.private(*args, run_eagerly=True, **options)


@pytest.mark.parametrize(
    ("engine", "module"),
    [
        ("bookkeeping", bookkeeping),
        pytest.param("vectorized", clipping, marks=pytest.mark.slow),
    ],
)
def test_a_doubled_clip_norm_is_named(monkeypatch, engine, module):
    original = clipping.clip_factors
    monkeypatch.setattr(
        module,
        "clip_factors",
        lambda norms, *, l2_norm_clip: original(norms, l2_norm_clip=2 * l2_norm_clip),
    )
    report = replayed(eager(wrap={"engine": engine}))
    [finding] = report.nonprivate_findings
    assert finding.what == "sensitivity"
    assert "the clipped sum, most in variable" in finding.where
    assert report.nonprivate_largest_change == pytest.approx(2 * small.CLIP, rel=1e-3)
    assert "NOT as it must be" in str(report)


@pytest.mark.slow
@pytest.mark.statistical
def test_halved_noise_is_named_with_its_variables(monkeypatch):
    monkeypatch.setattr(
        mechanism,
        "add_noise",
        lambda clipped_sum, *, noise_multiplier, stream: add_noise(
            clipped_sum, noise_multiplier=noise_multiplier / 2, stream=stream
        ),
    )
    report = replayed(eager(), neighbours=30)
    assert set(kinds(report)) == {"noise"}
    assert any("kernel" in each.where for each in report.nonprivate_findings)
    assert report.nonprivate_noise_stddev == pytest.approx(small.CLIP / 2, rel=0.2)


@pytest.mark.slow
@pytest.mark.statistical
def test_noise_that_leaves_a_variable_out_is_named(monkeypatch):
    def all_but_the_last(clipped_sum, **options):
        noised = add_noise(clipped_sum, **options)
        return [*noised[:-2], clipped_sum.gradients[-2], noised[-1]]

    monkeypatch.setattr(mechanism, "add_noise", all_but_the_last)
    [finding] = replayed(eager()).nonprivate_findings
    assert finding.what == "noise"
    assert finding.where == "variable `dense_1/kernel`" or "/kernel" in finding.where


@pytest.mark.slow
def test_noise_that_comes_again_is_named(monkeypatch):
    monkeypatch.setattr(
        mechanism.Mechanism, "stream", lambda self, step: self._key + 0 * step
    )
    found = replayed(eager()).nonprivate_findings
    assert "another step or variable has the same" in str(found)


@pytest.mark.slow
def test_batch_normalization_is_named(unchecked):
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4),
        layers.BatchNormalization(center=False, scale=False, name="mixes"),
        layers.Dense(2),
    ])
    report = replayed(eager(model))
    assert "rows: layer `mixes`" in str(report)
    assert "state: variable `mixes/moving_mean`" in str(report).replace(
        "sequential/", ""
    )


class BySize(tfdp.optimizers.DPSGD):
    """Divides by how many units there were."""

    def take_step(self, clipped_sum, *args, **options):
        units = tf.cast(tf.size(clipped_sum.norms), tf.float64)
        self._expected_batch_size.assign(units)
        return super().take_step(clipped_sum, *args, **options)


@pytest.mark.slow
def test_a_divisor_that_is_the_size_of_the_batch_is_named():
    optimizer = BySize(0.1, l2_norm_clip=small.CLIP, noise_multiplier=1.0)
    private = eager(opt=optimizer)
    report = replayed(private)
    assert kinds(report) == ["divisor"]
    assert "7 in a batch of 7, and 8 is the public one" in str(report)


class Centred(keras.losses.Loss):
    """Compares with the batch's mean."""

    def call(self, y_true, y_pred):
        centred = y_pred - tf.reduce_mean(y_pred, 0, keepdims=True)
        return tf.reduce_mean(tf.square(centred), -1)


@pytest.mark.slow
def test_a_loss_that_couples_rows_is_named(unchecked):
    report = replayed(eager(loss=Centred()))
    assert "rows: the loss" in str(report)


@keras.saving.register_keras_serializable("test_replay")
class Centre(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, 0, keepdims=True)


@pytest.mark.slow
def test_a_layer_that_couples_rows_is_named_and_not_those_behind_it(unchecked):
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4),
        Centre(name="centre"),
        layers.Dense(2),
    ])
    found = replayed(eager(model)).nonprivate_findings
    named = [each.where for each in found if each.what == "rows"]
    assert [where for where in named if "layer" in where] == ["layer `centre`"]


class Counts(layers.Layer):
    """Remembers how large its inputs were."""

    def build(self, input_shape):
        self.seen = self.add_weight(name="seen", trainable=False, initializer="zeros")

    def call(self, inputs):
        self.seen.assign_add(tf.reduce_sum(inputs))
        return inputs


@pytest.mark.slow
def test_state_that_data_enter_is_named(unchecked):
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4),
        Counts(name="counts"),
        layers.Dense(2),
    ])
    report = replayed(eager(model))
    assert kinds(report) == ["state"]
    assert "counts/seen" in report.nonprivate_findings[0].where


class Branches(layers.Layer):
    """Runs one of two layers, by what is in the rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.one, self.other = layers.Activation("tanh"), layers.Activation("relu")

    def call(self, inputs):
        if tf.executing_eagerly():
            is_far = tf.reduce_max(tf.abs(inputs)) > 100  # Outliers have any sign.
            return (self.one if is_far else self.other)(inputs)
        return self.other(inputs)


@pytest.mark.slow
def test_layers_that_run_by_what_is_in_a_row_are_named(unchecked):
    model = keras.Sequential([
        keras.Input((3,)),
        Branches(name="branches"),
        layers.Dense(2),
    ])
    # Nobody else is far away: the batch without the row runs the other layer.
    report = replay(eager(model), *small.data(ROWS, outlier=False), 8, batch_size=8)
    assert "control flow: layer `branches/activation" in str(report)


@pytest.mark.slow
def test_no_noise_is_what_it_must_be_where_it_is_claimed():
    report = replayed(eager(opt=small.noiseless()))
    assert report.nonprivate_passed, report
    assert report.noise_stddev == 0


# What a replay leaves behind.


def values(private):
    """All that a model and its optimizer have, and the ledger."""
    optimizer = private.optimizer
    variables = [
        *private.variables,
        *private.metrics_variables,
        *optimizer.variables,
        optimizer.mechanism._key,
        optimizer.mechanism._number,
        optimizer._expected_batch_size,
        *private._checked.released._gradients,
    ]
    ledgers = [private.ledger, optimizer.ledger, private.recorder.steps]
    return [np.array(each.numpy()) for each in variables], ledgers


def assert_same(before, after):
    assert before[1] == after[1]
    for one, other in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(one, other)


def trained(**options):
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(6),
        layers.Dropout(0.5),
        layers.Dense(2),
    ])
    optimizer = tfdp.optimizers.DPAdam(
        0.1, l2_norm_clip=small.CLIP, noise_multiplier=1.0
    )
    private = small.private(model, optimizer, metrics=["accuracy"], **options)
    private.fit(*data(), batch_size=6, verbose=0)
    return private


@pytest.mark.slow
def test_everything_is_as_it_was():
    private = trained()
    function, before = private.train_function, values(private)
    report = replay(private, *data(), neighbours=3)
    assert report.batch_size == 6
    assert report.nonprivate_passed, report
    assert_same(before, values(private))
    assert private.train_function is function
    private.fit(*data(), batch_size=6, verbose=0)
    assert private.ledger.steps == 20


@pytest.mark.slow
def test_everything_is_as_it_was_after_an_error(monkeypatch):
    private = trained(run_eagerly=True)
    before, calls = values(private), []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) > 5:
            raise RuntimeError("broken")
        return add_noise(*args, **options)

    monkeypatch.setattr(mechanism, "add_noise", fails)
    with pytest.raises(RuntimeError, match="broken"):
        replay(private, *data(), neighbours=3)
    assert_same(before, values(private))


@pytest.mark.slow
def test_a_model_that_never_trained_has_nothing_in_its_ledger():
    private = small.private()
    weights = private.model.get_weights()
    replayed(private, neighbours=2)
    assert private.epsilon(1e-5) == 0
    assert private.optimizer.expected_batch_size is None
    for one, other in zip(weights, private.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_budgets_do_not_see_it():
    private = trained()
    budget = tfdp.callbacks.PrivacyBudget(1e-3, target_epsilon=private.epsilon(1e-3))
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        private.fit(*data(), batch_size=6, callbacks=[budget], verbose=0)
    replay(private, *data(), neighbours=2)


@pytest.mark.slow
def test_a_report_is_json():
    report = replayed(small.private(), neighbours=3)
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["audit"] == "replay"
    assert fields["nonprivate_passed"] is True
    assert fields["nonprivate_findings"] == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"neighbours": 0}, ValueError, "neighbours"),
        ({"neighbours": math.nan}, ValueError, "neighbours"),
        ({"batch_size": -1}, ValueError, "batch_size"),
        ({"user_ids": np.arange(ROWS)}, ValueError, "examples_per_user"),
        ({"user_ids": np.arange(ROWS), "examples_per_user": 1}, ValueError, "unit"),
    ],
)
def test_bad_arguments_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        replay(small.private(), *data(), **options)


def test_other_models_and_data_are_refused():
    x, y = data()
    with pytest.raises(TypeError, match="DPModel"):
        replay(small.network(), x, y)
    with pytest.raises(TypeError, match="arrays"):
        replay(small.private(), tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    with pytest.raises(tfdp.errors.NotPrivateError, match="compile"):
        replay(tfdp.DPModel(small.network()), x, y)
    with pytest.raises(ValueError, match="two examples"):
        replay(small.private(), x[:1], y[:1])
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        private = small.private()
    with pytest.raises(ValueError, match="one device"):
        replay(private, x, y)
