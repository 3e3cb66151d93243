"""What is exported is the model and a true report, and nothing else."""

import functools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import prediction_log_pb2

import tfdp
from tests.exports import EXPORTS, by_name, predictions, trained
from tfdp import export
from tfdp.errors import NotPrivateError
from tfdp.export import export_private_model

DELTA = 1e-3


def untrained(model=None, **options):
    model = model or EXPORTS["digits"].model()
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, **options),
        loss="mse",
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


@pytest.fixture(scope="module")
def trained_once():
    """Train each model once; tests leave them as they are."""
    return functools.cache(lambda name: trained(name)[0])


# -------------------------------------------------------------------- the SavedModel


@pytest.mark.parametrize("name", EXPORTS)
def test_it_predicts_the_same_for_batches_of_any_size(name, tmp_path, trained_once):
    private = trained_once(name)
    path = tmp_path / name / "1"
    export_private_model(private, path, delta=DELTA)
    for rows in (1, 7):
        x = EXPORTS[name].x(np.random.default_rng(1), rows)
        served = serve(path, by_name(name, x))
        wanted = predictions(private.model, name, x)
        assert set(served) == set(wanted) == set(EXPORTS[name].outputs)
        for key, value in wanted.items():
            np.testing.assert_allclose(served[key], value, atol=1e-5)


def test_only_weights_of_the_model_are_stored(tmp_path, trained_once):
    private = trained_once("digits")
    path = tmp_path / "digits" / "1"
    export_private_model(private, path, delta=DELTA)
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


def test_no_number_of_the_training_data_is_in_any_file(tmp_path):
    marker = np.float32(1234.5678)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    private = untrained(model)
    x = np.full((50, 3), marker)
    private.fit(x, np.full((50, 2), marker), batch_size=10, verbose=0)
    export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        assert marker.tobytes() not in path.read_bytes(), path
        assert b"1234.5" not in path.read_bytes(), path


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
    report = export_private_model(private, tmp_path / "model" / "1", delta=DELTA)
    for weight, value in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(weight, value)
    served = serve(tmp_path / "model" / "1", {"x": x})["y"]
    assert np.abs(served - model(x)).max() > 1e-3
    private.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_allclose(served, model(x), atol=1e-6)
    assert report["weights"] == "moving average"


def test_after_fit_the_averages_are_the_weights(tmp_path):
    private, x = trained("digits", use_ema=True)
    export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    served = serve(tmp_path / "digits" / "1", {"image": x})["digit"]
    np.testing.assert_allclose(served, private.predict(x, verbose=0), atol=1e-5)


def test_a_saved_private_model_is_exported_in_the_same_way(tmp_path):
    private, x = trained("digits")
    private.save(tmp_path / "private.keras")
    loaded = keras.saving.load_model(tmp_path / "private.keras")
    first = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    second = export_private_model(loaded, tmp_path / "digits" / "2", delta=DELTA)
    assert first == second
    one, two = (serve(tmp_path / "digits" / n, {"image": x}) for n in "12")
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
def test_onnx_through_keras(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    private, x = trained("digits")
    private.export(tmp_path / "digits.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "digits.onnx")
    (source,) = session.get_inputs()
    (predicted,) = session.run(None, {source.name: x})
    np.testing.assert_allclose(predicted, private.predict(x, verbose=0), atol=1e-5)


# -------------------------------------------------------------------- the report


def test_the_report_says_what_was_run(tmp_path, trained_once):
    private = trained_once("digits")
    path = tmp_path / "digits" / "1"
    report = export_private_model(private, path, delta=DELTA)
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
        "steps": 8,
        "noise_multiplier": pytest.approx(1.1),
        "number_of_examples": 40,
        "expected_batch_size": 10,
    }
    assert report["segments"] == report["planned_segments"] == [segment]
    assert report["steps"] == 8
    assert report["noise_multiplier"] == pytest.approx(1.1)
    assert report["l2_norm_clip"] == 1.0
    assert report["weights"] == "last step"
    assert report["not_trained"] == []
    assert "zero-out" in report["neighbouring_relation"]
    assert "one row of x" in report["unit"]
    assert any("Validation rows" in each for each in report["not_covered"])
    assert report["versions"]["tfdp"] == tfdp.__version__
    assert report["versions"]["tensorflow"] == tf.__version__


def test_a_copy_for_people(tmp_path, trained_once):
    private = trained_once("digits")
    export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    path = tmp_path / "digits" / "1" / "assets.extra" / "privacy_statement.txt"
    assert path.read_text() == private.privacy_statement(DELTA)


def test_it_holds_no_measurement_of_the_data(tmp_path, trained_once):
    """Neither metrics nor norms nor the sizes of the batches that were drawn."""
    private = trained_once("digits")
    report = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    assert set(report) == {
        *("report_version", "differentially_private", "epsilon", "delta", "accountant"),
        *("bounds", "neighbouring_relation", "unit", "sampling", "segments"),
        *("planned_segments", "noise_multiplier", "noise_seed_fixed"),
        *("sampling_seed_fixed", "not_covered", "steps", "l2_norm_clip", "weights"),
        *("covered", "not_trained", "versions"),
    }


def test_the_smallest_noise_that_ran_is_reported_not_what_was_assigned_later(tmp_path):
    private, _ = trained("digits")
    private.optimizer.noise_multiplier = 50.0
    report = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    assert report["noise_multiplier"] == pytest.approx(1.1)


def test_a_shuffled_run(tmp_path):
    private, _ = trained("digits", sampling="shuffle")
    report = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    assert report["sampling"] == ["shuffled_passes"]
    assert report["steps"] == 8
    ran, poisson = report["bounds"]
    assert ran["holds"]
    assert not poisson["holds"]
    assert report["epsilon"] == min(ran["RDP"], ran["PLD"]) > poisson["PLD"]


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


def test_weights_that_did_not_train_are_named(tmp_path):
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4, name="trunk", trainable=False),
        layers.Dense(1, name="head"),
    ])
    report = export_private_model(
        untrained(model), tmp_path / "model" / "1", delta=DELTA
    )
    assert [path.split("/")[-2] for path in report["not_trained"]] == ["trunk"] * 2


def test_a_model_that_never_trained(tmp_path):
    private = tfdp.DPModel(EXPORTS["digits"].model())
    report = export_private_model(private, tmp_path / "digits" / "1", delta=DELTA)
    assert (report["epsilon"], report["steps"], report["segments"]) == (0.0, 0, [])
    assert report["l2_norm_clip"] is report["noise_multiplier"] is None


# -------------------------------------------------------------------- the warm-up


@pytest.mark.parametrize("name", EXPORTS)
def test_a_made_up_row_warms_up(name, tmp_path, trained_once):
    private = trained_once(name)
    export_private_model(private, tmp_path / "my_model" / "1", delta=DELTA)
    model_name, arrays = request_in(tmp_path / "my_model" / "1")
    assert model_name == "my_model"
    assert set(arrays) == set(EXPORTS[name].inputs)
    for array in arrays.values():
        assert len(array) == 1
        assert not np.any(array == 1)
        assert not np.any(array.astype(bool))


@pytest.mark.parametrize("pack", ["as predict takes them", "by name"])
@pytest.mark.parametrize("name", EXPORTS)
def test_given_rows_warm_up(name, pack, tmp_path, trained_once):
    private = trained_once(name)
    rows = EXPORTS[name].x(np.random.default_rng(2), 3)
    warmup = by_name(name, rows) if pack == "by name" else rows
    path = tmp_path / name / "1"
    export_private_model(private, path, delta=DELTA, warmup=warmup)
    _, arrays = request_in(path)
    for key, value in by_name(name, rows).items():
        wanted = value.astype("S") if value.dtype.kind == "U" else value
        np.testing.assert_array_equal(arrays[key], wanted.astype(arrays[key].dtype))


NAN = np.full((2, 8, 8, 1), np.nan)


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
    ],
)
def test_rows_that_the_model_does_not_take_are_refused(name, warmup, tmp_path):
    private = tfdp.DPModel(EXPORTS[name].model())
    with pytest.raises(ValueError, match=r"`warmup` must be .* Received: .* Use "):
        export_private_model(private, tmp_path / "m" / "1", delta=DELTA, warmup=warmup)
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


@settings(deadline=None)
@given(
    st.text(max_size=300),
    st.dictionaries(st.text(max_size=200), st.integers(0, 70), max_size=4),
)
def test_requests_are_tensorflow_servings(name, sizes):
    rows = {key: tf.range(float(size)) for key, size in sizes.items()}
    encoded = export._prediction_log(name, rows)
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.name = name
    log.predict_log.request.model_spec.signature_name = "serving_default"
    for key, value in rows.items():
        log.predict_log.request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    assert prediction_log_pb2.PredictionLog.FromString(encoded) == log


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "path",
    ["digits", "digits/v1", "digits/1.5", "digits/-1", "", "/", "digits/" + 20 * "9"],
)
def test_the_folder_must_be_a_version(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"must end in a version.* Received: path="):
        export_private_model(untrained(), path, delta=DELTA)
    assert not list(tmp_path.iterdir())


def test_a_version_is_never_overwritten(tmp_path):
    path = tmp_path / "digits" / "3"
    path.mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"never overwritten.*digits/4'"):
        export_private_model(untrained(), path, delta=DELTA)
    assert not list(path.iterdir())


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2, math.nan, math.inf])
def test_delta_is_checked_first(delta, tmp_path):
    with pytest.raises(ValueError, match="`delta`"):
        export_private_model(untrained(), tmp_path / "m" / "1", delta=delta)
    assert not list(tmp_path.iterdir())


def test_only_private_models_are_exported(tmp_path):
    with pytest.raises(TypeError, match=r"`private` must be a `tfdp.DPModel`"):
        export_private_model(EXPORTS["digits"].model(), tmp_path / "1", delta=DELTA)


def test_a_model_that_trained_without_noise_is_refused(tmp_path):
    private = tfdp.DPModel(keras.Sequential([keras.Input((3,)), layers.Dense(1)]))
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0)
    private.compile(optimizer, loss="mse")
    private.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=10, verbose=0)
    with pytest.raises(NotPrivateError, match=r"private\.model\.export"):
        export_private_model(private, tmp_path / "m" / "1", delta=DELTA)
    assert not list(tmp_path.iterdir())


def test_delta_that_means_nothing_draws_a_warning(tmp_path, trained_once):
    private = trained_once("digits")
    with pytest.warns(UserWarning, match="well below"):
        export_private_model(private, tmp_path / "m" / "1", delta=0.1)


def test_an_export_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(export, "_prediction_log", fail)
    with pytest.raises(OSError, match="disk full"):
        export_private_model(untrained(), tmp_path / "m" / "1", delta=DELTA)
    assert not list((tmp_path / "m").iterdir())
