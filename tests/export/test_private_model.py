"""What is exported is the model and a true report, and nothing else."""

import functools
import json
import logging
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import prediction_log_pb2

import tfdp
from tests.exports import EXPORTS, by_name, predictions, trained
from tfdp.errors import NotPrivateError
from tfdp.export import export_private_model, next_version, private_model

pytestmark = pytest.mark.keras_private

DELTA = 1e-3


def untrained(model, **options):
    private = tfdp.DPModel(model, engine="bookkeeping")
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, **options),
        loss="mse",
        run_eagerly=True,
    )
    return private


def serve(path, x):
    """Return what the SavedModel answers, as arrays."""
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    wanted = signature.structured_input_signature[1]
    rows = {
        name: tf.cast(value, wanted[name].dtype)
        if wanted[name].dtype != tf.string
        else tf.constant(value)
        for name, value in x.items()
    }
    return {name: value.numpy() for name, value in signature(**rows).items()}


def request_in(path):
    """Return the model's name and the arrays of the only warm-up request."""
    requests = path / "assets.extra" / "tf_serving_warmup_requests"
    (record,) = tf.data.TFRecordDataset(str(requests))
    log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
    request = log.predict_log.request
    assert request.model_spec.signature_name == "serving_default"
    arrays = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
    return request.model_spec.name, arrays


@functools.cache
def bare(name):
    """Wrap each model once; tests leave it as it is."""
    return tfdp.DPModel(EXPORTS[name].model())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Train and export once: the private model, the folder and the report."""
    private, _ = trained("digits")
    path = tmp_path_factory.mktemp("models") / "digits" / "1"
    return private, path, export_private_model(private, path, delta=DELTA)


# -------------------------------------------------------------------- the SavedModel


@pytest.mark.slow
def test_it_predicts_the_same_for_batches_of_any_size(digits):
    private, path, _ = digits
    for rows in (1, 7):
        x = EXPORTS["digits"].x(np.random.default_rng(1), rows)
        served = serve(path, by_name("digits", x))
        wanted = predictions(private.model, "digits", x)
        assert set(served) == set(wanted) == set(EXPORTS["digits"].outputs)
        for key, value in wanted.items():
            np.testing.assert_allclose(served[key], value, atol=1e-5)


@pytest.mark.slow
@pytest.mark.smoke
def test_only_weights_of_the_model_are_stored(digits):
    private, path, _ = digits
    stored = dict(tf.train.list_variables(str(path / "variables" / "variables")))
    del stored["_CHECKPOINTABLE_OBJECT_GRAPH"]
    weights = [tuple(weight.shape) for weight in private.model.weights]
    assert sorted(map(tuple, stored.values())) == sorted(weights)
    saved = saved_model_pb2.SavedModel.FromString(
        (path / "saved_model.pb").read_bytes()
    )
    (graph,) = saved.meta_graphs
    assert list(graph.meta_info_def.tags) == ["serve"]
    signatures = {name for name in graph.signature_def if not name.startswith("__")}
    assert signatures == {"serving_default"}
    text = str(saved).lower()
    for word in ("tfdp", "private", "adam", "momentum", "noise", "philox", "ledger"):
        assert word not in text, word


@pytest.mark.slow
def test_no_number_of_the_training_data_is_in_any_file(tmp_path):
    marker = np.float32(1234.5678)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    private = untrained(model)
    private.run_eagerly = False
    x = np.full((50, 3), marker)
    private.fit(x, np.full((50, 2), marker), batch_size=50, verbose=0)
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        assert marker.tobytes() not in path.read_bytes(), path
        assert b"1234.5" not in path.read_bytes(), path


@pytest.mark.slow
class Measuring(layers.Layer):
    """Keeps a sum over all that it has seen."""

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Sum()

    def call(self, x):
        self.total.update_state(x)
        return x


def scalars_of(path):
    """All floats in a SavedModel that stand alone."""
    checkpoint = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    names = checkpoint.get_variable_to_shape_map()
    values = [np.asarray(checkpoint.get_tensor(name)) for name in names]
    return [
        float(value) for value in values if value.ndim == 0 and value.dtype.kind == "f"
    ]


def of_a_step(private):
    private.train_on_batch(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"))
    assert float(private.model.layers[0].total.result()) > 0


@pytest.mark.slow
def test_what_layers_have_measured_is_not_exported(tmp_path):
    inner = keras.Sequential([keras.Input((3,)), Measuring(), layers.Dense(1)])
    private = untrained(inner, expected_batch_size=8)
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    private.fit(x, y, batch_size=8, verbose=0)
    inner.export(str(tmp_path / "keras"), verbose=False)
    of_a_step(private)
    private.export(str(tmp_path / "private"), verbose=False)
    of_a_step(private)
    export_private_model(private, tmp_path / "serving" / "1", delta=DELTA)
    for folder in ("keras", "private", "serving/1"):
        assert scalars_of(tmp_path / folder) == [0.0]


@pytest.mark.slow
def test_moving_averages_are_exported_and_the_model_keeps_its_weights(tmp_path):
    model = keras.Sequential([
        keras.Input((3,), name="x"),
        layers.Dense(2, name="y"),
    ])
    private = untrained(model, use_ema=True, ema_momentum=0.5, expected_batch_size=10)
    x, y = np.ones((10, 3), "float32"), np.ones((10, 2), "float32")
    for _ in range(3):
        private.train_on_batch(x, y)
    kept = [weight.numpy() for weight in model.weights]
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    for weight, value in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(weight, value)
    served = serve(tmp_path / "model" / "1", {"x": x})["y"]
    assert np.abs(served - model(x)).max() > 1e-3
    private.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_allclose(served, model(x), atol=1e-6)


def two_layers():
    return keras.Sequential([
        keras.Input((3,), name="x"),
        layers.Dense(3, name="a", use_bias=False),
        layers.Dense(3, name="b", use_bias=False),
    ])


def steps_on_batches(private, steps=3):
    for _ in range(steps):
        private.train_on_batch(np.ones((10, 3), "float32"), np.ones((10, 3), "float32"))


@pytest.mark.slow
def test_averages_go_where_they_belong_when_a_layer_was_frozen(tmp_path):
    model = two_layers()
    private = untrained(model, use_ema=True, ema_momentum=0.5, expected_batch_size=10)
    steps_on_batches(private)
    model.layers[0].trainable = False
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    x = np.eye(3, dtype="float32")
    served = serve(tmp_path / "model" / "1", {"x": x})["b"]
    model.layers[0].trainable = True
    private.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_allclose(served, model(x), atol=1e-6)


@pytest.mark.slow
def test_weights_chosen_after_fit_are_exported_not_the_averages(tmp_path):
    model = two_layers()
    private = untrained(model, use_ema=True, ema_momentum=0.5)
    x, y = np.ones((20, 3), "float32"), np.ones((20, 3), "float32")
    private.fit(x, y, batch_size=10, verbose=0)
    chosen = [weight + 1 for weight in model.get_weights()]
    model.set_weights(chosen)
    private.save(tmp_path / "private.keras")
    for number, each in enumerate([
        private,
        keras.saving.load_model(tmp_path / "private.keras"),
    ]):
        path = tmp_path / "model" / str(number)
        export_private_model(each, path, delta=DELTA)
        np.testing.assert_allclose(serve(path, {"x": x})["b"], model(x), rtol=1e-5)


def test_averages_before_the_first_step_are_not_exported(tmp_path):
    model = two_layers()
    private = untrained(model, use_ema=True)
    private.optimizer.build(model.trainable_variables)
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    x = np.eye(3, dtype="float32")
    served = serve(tmp_path / "model" / "1", {"x": x})["b"]
    np.testing.assert_allclose(served, model(x), rtol=1e-5)


@pytest.mark.slow
def test_after_fit_the_averages_are_the_weights(tmp_path):
    private, x = trained("digits", use_ema=True)
    export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    served = serve(tmp_path / "digits" / "1", {"image": x})["digit"]
    np.testing.assert_allclose(served, private.predict(x, verbose=0), atol=1e-5)


@pytest.mark.slow
def test_a_saved_private_model_is_exported_in_the_same_way(tmp_path, digits, rng):
    private, path, first = digits
    private.save(tmp_path / "private.keras")
    loaded = keras.saving.load_model(tmp_path / "private.keras")
    second = export_private_model(loaded, tmp_path / "digits" / "2", delta=DELTA)
    assert first == second
    x = EXPORTS["digits"].x(rng, 5)
    one, two = (serve(p, {"image": x}) for p in (path, tmp_path / "digits" / "2"))
    np.testing.assert_allclose(one["digit"], two["digit"], atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_other_precisions(policy, tmp_path):
    with_policy = {"dtype": keras.DTypePolicy(policy)}
    model = keras.Sequential([
        keras.Input((3,), name="x", dtype="float64" if policy == "float64" else None),
        layers.Dense(2, name="y", **with_policy),
    ])
    private = tfdp.DPModel(model)
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    x = np.ones((2, 3))
    served = serve(tmp_path / "model" / "1", {"x": x})["y"]
    wanted = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(served.astype("float64"), wanted.astype("float64"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning")
def test_onnx_through_keras(tmp_path, digits, rng):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    private, x = digits[0], EXPORTS["digits"].x(rng, 5)
    private.export(tmp_path / "digits.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "digits.onnx")
    (source,) = session.get_inputs()
    (predicted,) = session.run(None, {source.name: x})
    np.testing.assert_allclose(predicted, private.predict(x, verbose=0), atol=1e-5)


# -------------------------------------------------------------------- the report


def test_the_report_says_what_was_run(digits):
    private, path, report = digits
    text = (path / "assets.extra" / "privacy_report.json").read_text()
    assert json.loads(text) == report
    rdp, pld = (private.ledger.epsilon(DELTA, name) for name in ("RDP", "PLD"))
    assert report["epsilon"] == min(rdp, pld)
    assert report["accountant"] == ("RDP" if rdp < pld else "PLD")
    assert report["delta"] == DELTA
    assert report["differentially_private"] is True
    ran, shuffled = report["bounds"]
    assert (ran["label"], ran["holds"]) == ("what ran", True)
    assert (ran["RDP"], ran["PLD"]) == (rdp, pld)
    assert "this run's were not" in shuffled["label"]
    assert shuffled["holds"] is False
    assert shuffled["PLD"] > pld
    assert report["sampling"] == ["poisson_steps"]
    segment = {
        "kind": "poisson_steps",
        "steps": 4,
        "noise_multiplier": pytest.approx(1.1),
        "number_of_examples": 20,
        "expected_batch_size": 10,
    }
    assert report["segments"] == report["planned_segments"] == [segment]
    assert report["steps"] == 4
    assert report["noise_multiplier"] == pytest.approx(1.1)
    assert report["l2_norm_clip"] == 1.0
    assert report["not_trained"] == []
    assert "zero-out" in report["neighbouring_relation"]
    assert "one row of x" in report["unit"]
    assert any("Validation rows" in each for each in report["not_covered"])
    assert report["versions"]["tfdp"] == tfdp.__version__
    assert report["versions"]["tensorflow"] == tf.__version__


def test_a_copy_for_people(digits):
    private, path, _ = digits
    text = (path / "assets.extra" / "privacy_statement.txt").read_text()
    assert text.startswith(private.privacy_statement(DELTA))
    assert "no private step updated, of whose values this says nothing: none" in text
    assert "Steps: 4; clip norm of the last: 1.0." in text
    assert f"tensorflow {tf.__version__}" in text


def test_it_holds_no_measurement_of_the_data(digits):
    """Neither metrics nor norms nor the sizes of the batches that were drawn."""
    assert set(digits[2]) == {
        *("report_version", "differentially_private", "epsilon", "delta", "accountant"),
        *("bounds", "neighbouring_relation", "unit", "sampling", "segments"),
        *("planned_segments", "noise_multiplier", "noise_seed_fixed"),
        *("sampling_seed_fixed", "ended_by_release", "saw_other_rows"),
        *("not_covered", "steps", "l2_norm_clip"),
        *("covered", "not_trained", "versions"),
        # Since version 2.
        *("date", "model", "weights", "best_attack", "units", "trust_model", "budget"),
        *(
            "trainings",
            "numbers_of_examples",
            "plain_keras_steps",
            "pretrained",
            "settings",
        ),
        *("audits", "answers", "questions"),
    }


@pytest.mark.slow
def test_a_shuffled_run(tmp_path):
    private, _ = trained("digits", sampling="shuffle")
    report = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    assert report["sampling"] == ["shuffled_passes"]
    assert report["steps"] == 4
    ran, poisson = report["bounds"]
    assert ran["holds"]
    assert not poisson["holds"]
    assert report["epsilon"] == min(ran["RDP"], ran["PLD"]) > poisson["PLD"]


@pytest.mark.slow
def test_a_run_that_was_cut_short_is_reported_as_planned(tmp_path):
    private = untrained(keras.Sequential([keras.Input((3,)), layers.Dense(1)]))
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    x, y = np.ones((40, 3)), np.ones((40, 1))
    with pytest.warns(UserWarning, match="EarlyStopping"):
        private.fit(x, y, batch_size=10, epochs=9, callbacks=[stop], verbose=0)
    report = export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    assert report["segments"] != report["planned_segments"]
    run, planned = report["bounds"][:2]
    assert (run["holds"], planned["holds"]) == (False, True)
    assert report["epsilon"] == min(planned["RDP"], planned["PLD"]) > run["PLD"]
    assert report["planned_segments"][0]["steps"] == 9 * 4


def fitted(model):
    private = untrained(model)
    width = model.output_shape[-1]
    x, y = np.ones((20, 3), "float32"), np.ones((20, width), "float32")
    private.fit(x, y, batch_size=10, verbose=0)
    return private


def exported(model, folder):
    private = model if isinstance(model, tfdp.DPModel) else tfdp.DPModel(model)
    path = next_version(folder)
    return export_private_model(private, path, delta=DELTA)


def layers_in(paths):
    return sorted({path.split("/")[-2] for path in paths})


@pytest.mark.slow
def test_weights_that_did_not_train_are_named_in_both_also_after_loading(tmp_path):
    model = two_layers()
    model.layers[0].trainable = False
    private = fitted(model)
    private.save(tmp_path / "private.keras")
    loaded = keras.saving.load_model(tmp_path / "private.keras")
    for version, each in enumerate((private, loaded), 1):
        report = exported(each, tmp_path / "m")
        assert layers_in(report["not_trained"]) == ["a"]
        assert report["l2_norm_clip"] == 1.0
        folder = tmp_path / "m" / str(version) / "assets.extra"
        text = (folder / "privacy_statement.txt").read_text()
        assert f"says nothing:\n- {report['not_trained'][0]}\n" in text


def test_what_is_changed_after_training_changes_no_report(digits, tmp_path):
    """The smallest noise that ran is reported, and frozen weights have trained."""
    private, _, report = digits
    layer, noise = private.model.layers[0], float(private.optimizer.noise_multiplier)
    layer.trainable, private.optimizer.noise_multiplier = False, 50.0
    try:
        assert exported(private, tmp_path) == report
    finally:
        layer.trainable, private.optimizer.noise_multiplier = True, noise


def frozen_under_softmax(model):
    model.trainable = False
    x = keras.Input((3,))
    return keras.Model(x, layers.Softmax()(model(x)))


@pytest.mark.slow
def test_what_is_made_of_private_weights_has_their_history(tmp_path):
    private = fitted(two_layers())
    wanted = exported(private, tmp_path / "m")
    for derive in (
        lambda model: keras.Model(model.inputs, model.layers[0].output),
        lambda model: keras.Sequential([keras.Input((3,)), *model.layers]),
        tfdp.fix_model,
        frozen_under_softmax,
    ):
        report = exported(derive(private.model), tmp_path / "m")
        for key in ("epsilon", "segments", "steps", "l2_norm_clip", "not_trained"):
            assert report[key] == wanted[key], key
    # A new head on them is not trained.
    head = layers.Dense(1, name="head")(private.model.outputs[0])
    report = exported(keras.Model(private.model.inputs[0], head), tmp_path / "m")
    assert layers_in(report["not_trained"]) == ["head"]
    assert report["steps"] == 2


@pytest.mark.slow
def test_a_second_stage_on_frozen_private_weights_adds_to_the_first(tmp_path):
    first = fitted(two_layers())
    wanted = first.ledger
    first.model.trainable = False
    head = layers.Dense(1, name="head")(first.model.outputs[0])
    second = fitted(keras.Model(first.model.inputs[0], head))
    both = tfdp.accounting.compose(wanted, wanted).merged()
    assert second.ledger.merged() == both
    assert exported(second, tmp_path)["not_trained"] == []


@pytest.mark.slow
def test_steps_of_a_loop_of_ones_own_count(tmp_path):
    model = two_layers()
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=2.0, noise_multiplier=1.1, expected_batch_size=10
    )
    x, y = np.ones((10, 3), "float32"), np.ones((10, 3), "float32")
    for _ in range(3):
        clipped = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=2.0)
        optimizer.apply_clipped_sum(clipped, model.trainable_variables)
    report = exported(model, tmp_path)
    assert report["steps"] == 3
    assert report["epsilon"] == pytest.approx(optimizer.ledger.epsilon(DELTA))
    assert report["l2_norm_clip"] == 2.0
    # Also after a fit, by another optimizer.
    private = fitted(model)
    clipped = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=2.0)
    optimizer.apply_clipped_sum(clipped, model.trainable_variables)
    report = exported(private, tmp_path)
    assert report["steps"] == 3 + 2 + 1
    assert report["epsilon"] == exported(model, tmp_path)["epsilon"]


def test_training_without_noise_after_wrapping_is_refused(tmp_path):
    private = untrained(two_layers())
    private.model.compile("sgd", "mse", run_eagerly=True)
    private.model.fit(np.ones((10, 3)), np.ones((10, 3)), verbose=0)
    with pytest.raises(NotPrivateError, match="an optimizer of its own, without noise"):
        exported(private, tmp_path / "m")


@pytest.mark.slow
def test_a_schedule_reports_the_last_clip_norm(tmp_path):
    private = untrained(two_layers())
    schedule = keras.optimizers.schedules.PolynomialDecay(4.0, 8, 1.0)
    x, y = np.ones((40, 3), "float32"), np.ones((40, 3), "float32")
    private.fit(
        *(x, y),
        batch_size=10,
        epochs=2,
        callbacks=[tfdp.callbacks.ClipNormScheduler(schedule)],
        verbose=0,
    )
    last = float(schedule(7))
    assert exported(private, tmp_path)["l2_norm_clip"] == pytest.approx(last)


class KeepsLast(layers.Layer):
    def build(self, shape):
        self.last = self.add_weight(shape=shape[1:], trainable=False, name="last")

    def call(self, x, training=None):
        if not training:
            self.last.assign(x[0])
        return x


@pytest.mark.slow
def test_a_model_that_keeps_rows_at_inference_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), KeepsLast(), layers.Dense(3)])
    private = untrained(model)
    model.predict(np.full((10, 3), 7.0), verbose=0)
    # Zeros may be what it keeps already.
    warmup = np.ones((1, 3), "float32")
    path = tmp_path / "m" / "1"
    with pytest.raises(ValueError, match=r"keep nothing of the rows.*keeps_last.*last"):
        export_private_model(private, path, delta=DELTA, warmup=warmup)
    assert not list((tmp_path / "m").iterdir())


def test_a_model_that_never_trained(tmp_path):
    path = tmp_path / "digits" / "1"
    report = export_private_model(bare("digits"), path, delta=DELTA)
    assert (report["epsilon"], report["steps"], report["segments"]) == (0.0, 0, [])
    assert report["l2_norm_clip"] is report["noise_multiplier"] is None


# -------------------------------------------------------------------- the warm-up


@pytest.mark.parametrize(
    "name",
    [
        # Its inputs are known by training only.
        pytest.param(name, marks=[pytest.mark.slow] * (name == "scores"))
        for name in EXPORTS
    ],
)
def test_a_made_up_row_warms_up(name, tmp_path):
    private = trained(name)[0] if name == "scores" else bare(name)
    export_private_model(private, tmp_path / "my_model" / "1", delta=DELTA)
    model_name, arrays = request_in(tmp_path / "my_model" / "1")
    assert model_name == "my_model"
    assert set(arrays) == set(EXPORTS[name].inputs)
    for array in arrays.values():
        assert len(array) == 1
        assert not np.any(array == 1)
        assert not np.any(array.astype(bool))


@pytest.mark.parametrize(
    ("name", "is_by_name"),
    [
        *(("digits", True), ("tokens", False), ("two_heads", False)),
        *(("two_heads", True), ("words", False), ("scores", True)),
        ("called_twice", False),
    ],
)
def test_given_rows_warm_up(name, is_by_name, tmp_path):
    rows = EXPORTS[name].x(np.random.default_rng(2), 3)
    warmup = by_name(name, rows) if is_by_name else rows
    path = tmp_path / name / "1"
    export_private_model(bare(name), path, delta=DELTA, warmup=warmup)
    _, arrays = request_in(path)
    for key, value in by_name(name, rows).items():
        wanted = value.astype("S") if value.dtype.kind == "U" else value
        np.testing.assert_array_equal(arrays[key], wanted.astype(arrays[key].dtype))


NAN = np.full((2, 8, 8, 1), np.nan)


@pytest.mark.slow
def test_a_loaded_model_knows_the_length_that_it_was_trained_with(tmp_path):
    inner = keras.Sequential([
        keras.Input((None,), dtype="int32", name="words"),
        keras.layers.Embedding(5, 2),
        keras.layers.Conv1D(2, 40),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ])
    private = tfdp.DPModel(inner)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    private.fit(np.ones((8, 64), "int32"), np.ones((8, 1)), batch_size=4, verbose=0)
    private.save(tmp_path / "private.keras")
    loaded = keras.models.load_model(tmp_path / "private.keras")
    assert loaded.fitted_signature.shape.as_list() == [None, 64]
    # Rows of 32 words, which stand for unknown lengths, are too short for the kernel.
    path = tmp_path / "model" / "1"
    export_private_model(loaded, path, delta=0.01)
    _, arrays = request_in(path)
    assert arrays["words"].shape == (1, 64)


@pytest.mark.parametrize(
    ("name", "warmup"),
    [
        ("digits", np.zeros((2, 8, 8))),
        ("digits", np.zeros((2, 7, 8, 1))),
        ("digits", np.zeros((0, 8, 8, 1))),
        ("digits", NAN),
        ("digits", np.full((2, 8, 8, 1), np.inf)),
        ("digits", np.full((2, 8, 8, 1), "a")),
        ("digits", 3.0),
        ("digits", {"pixels": np.zeros((2, 8, 8, 1)), "image": np.zeros((2, 8, 8, 1))}),
        ("tokens", np.zeros((2, 6), "float32")),
        ("two_heads", [np.zeros((2, 1))]),
        ("two_heads", [np.zeros((2, 1)), np.zeros((3, 3))]),
        ("words", np.zeros((2, 3))),
        ("digits", tf.ragged.constant([[1.0], [2.0, 3.0]])),
        ("digits", (row for row in [1, 2])),
        ("digits", [[1.0], [2.0, 3.0]]),
        ("two_heads", [np.full((2, 1), 1e300), np.zeros((2, 3))]),
    ],
)
def test_rows_that_the_model_does_not_take_are_refused(name, warmup, tmp_path):
    path = tmp_path / "m" / "1"
    with pytest.raises(ValueError, match=r"`warmup` must be .* Received: .* Use "):
        export_private_model(bare(name), path, delta=DELTA, warmup=warmup)
    assert not list(tmp_path.iterdir())


def test_rows_that_the_model_fails_on_leave_nothing_behind(tmp_path):
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(5, 4)(ids) + layers.Embedding(8, 4)(
        keras.ops.arange(8)[None, :]
    )
    model = keras.Model(ids, layers.GlobalAveragePooling1D()(x))
    private = tfdp.DPModel(model)
    with pytest.raises(ValueError, match=r"cannot answer .* \(1, 32\).*warmup=rows"):
        export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    assert not list((tmp_path / "model").iterdir())
    rows = np.zeros((1, 8), "int32")
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA, warmup=rows)


@pytest.mark.smoke
def test_a_model_whose_inputs_are_not_known_needs_rows(tmp_path):
    model = EXPORTS["scores"].model()
    private = tfdp.DPModel(model)
    with pytest.raises(ValueError, match=r"inputs of model .* not known.*warmup=rows"):
        export_private_model(private, tmp_path / "m" / "1", delta=DELTA)
    warmup = {"features": np.zeros((1, 3))}
    model(warmup)
    export_private_model(private, tmp_path / "m" / "1", delta=DELTA, warmup=warmup)
    served = serve(tmp_path / "m" / "1", {"features": np.ones((2, 3), "float32")})
    np.testing.assert_allclose(
        served["score"], model({"features": np.ones((2, 3))})["score"], atol=1e-6
    )


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "path",
    [
        "digits",
        "digits/01",
        "digits/v1",
        "digits/1.5",
        "digits/-1",
        "",
        "/",
        "digits/" + 20 * "9",
    ],
)
def test_the_folder_must_be_a_version(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"must end in a version.* Received: path="):
        export_private_model(bare("digits"), path, delta=DELTA)
    assert not list(tmp_path.iterdir())


def test_the_exporter_warns_and_is_quiet_otherwise(tmp_path, monkeypatch):
    said = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    listener = Listener()
    for name in ("absl", "tensorflow"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [listener])
        monkeypatch.setattr(logger, "level", logging.INFO)
        # What a level means is remembered.
        monkeypatch.setattr(logger, "_cache", {})
    write = private_model._write

    def with_a_warning(*args):
        tf.get_logger().warning("a warning")
        write(*args)

    monkeypatch.setattr(private_model, "_write", with_a_warning)
    export_private_model(bare("digits"), tmp_path / "m" / "1", delta=DELTA)
    assert set(said) == {"a warning"}
    # Afterwards they say what they did before.
    tf.get_logger().info("done")
    assert said[-1] == "done"


def test_the_next_version(tmp_path):
    assert next_version(tmp_path / "none") == str(tmp_path / "none" / "1")
    for name in ("2", "10", "draft", "7-unfinished-0"):
        (tmp_path / name).mkdir()
    assert next_version(tmp_path) == next_version(f"{tmp_path}/")
    assert next_version(tmp_path) == str(tmp_path / "11")


def test_a_version_is_never_overwritten(tmp_path):
    path = tmp_path / "digits" / "3"
    path.mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"never overwritten.*digits/4'"):
        export_private_model(bare("digits"), path, delta=DELTA)
    assert not list(path.iterdir())


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2, math.nan, math.inf])
def test_delta_is_checked_first(delta, tmp_path):
    with pytest.raises(ValueError, match="`delta`"):
        export_private_model(bare("digits"), tmp_path / "m" / "1", delta=delta)
    assert not list(tmp_path.iterdir())


def test_only_private_models_are_exported(tmp_path):
    with pytest.raises(TypeError, match=r"`private` must be a `tfdp.DPModel`"):
        export_private_model(EXPORTS["digits"].model(), tmp_path / "1", delta=DELTA)


@pytest.mark.slow
def test_a_model_that_trained_without_noise_is_refused(tmp_path):
    private = tfdp.DPModel(keras.Sequential([keras.Input((3,)), layers.Dense(1)]))
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0)
    private.compile(optimizer, loss="mse", run_eagerly=True)
    private.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=20, verbose=0)
    with pytest.raises(NotPrivateError, match=r"private\.model\.export"):
        export_private_model(private, tmp_path / "m" / "1", delta=DELTA)
    assert not list(tmp_path.iterdir())


def test_delta_that_means_nothing_draws_a_warning(tmp_path, digits):
    with pytest.warns(UserWarning, match="well below"):
        export_private_model(digits[0], tmp_path / "m" / "1", delta=0.1)


def test_an_export_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(private_model, "prediction_log", fail)
    with pytest.raises(OSError, match="disk full"):
        export_private_model(bare("digits"), tmp_path / "m" / "1", delta=DELTA)
    assert not list((tmp_path / "m").iterdir())
