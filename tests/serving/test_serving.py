"""Exported models are served where neither tfdp nor Keras is, and loaded from C.

The server is a stand-in for TensorFlow Serving, `stand_in.py`: its own messages over
real sockets, but not its binary. The C program calls the same loader.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)

import tfdp
from tests.exports import EXPORTS, by_name, predictions, trained
from tests.serving import stand_in
from tfdp.export import export_private_model

HERE = Path(__file__).parent
SECONDS = 60
LATEST = 2


class Served(NamedTuple):
    """A running server, and what it must answer."""

    stub: prediction_service_pb2_grpc.PredictionServiceStub
    rest: str
    inputs: dict
    wanted: dict


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export every model, one of them in an older version too."""
    folder, inputs, wanted = tmp_path_factory.mktemp("models"), {}, {}
    for name, export in EXPORTS.items():
        private, _ = trained(name)
        for version in (1, LATEST) if name == "digits" else (LATEST,):
            export_private_model(private, folder / name / str(version), delta=1e-3)
        fresh = export.x(np.random.default_rng(1), 5)
        inputs[name] = by_name(name, fresh)
        wanted[name] = predictions(private.model, name, fresh)
    return folder, inputs, wanted


@pytest.fixture(scope="module")
def served(exported):
    """Start the stand-in in a process that does not see this one's paths."""
    folder, inputs, wanted = exported
    process = subprocess.Popen(
        [sys.executable, "-I", "-W", "ignore", HERE / "stand_in.py", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1])
        ports = json.loads(line)
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
            yield Served(
                prediction_service_pb2_grpc.PredictionServiceStub(channel),
                f"http://127.0.0.1:{ports['rest']}/v1/models/",
                inputs,
                wanted,
            )
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(SECONDS)
        process.stdout.close()
        process.stderr.close()


def request_of(name, arrays):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = name
    for key, array in arrays.items():
        dtype = {"i": tf.int64, "f": tf.float32}.get(array.dtype.kind, tf.string)
        if name == "tokens":
            dtype = tf.int32
        request.inputs[key].CopyFrom(tf.make_tensor_proto(array, dtype))
    return request


def rest(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=SECONDS) as response:
        return json.load(response)


@pytest.mark.slow
def test_requests_are_answered_in_this_process(tmp_path, rng):
    """Without sockets, by the newest of two versions."""
    name = "two_heads"
    private = tfdp.DPModel(EXPORTS[name].model())
    for version in (1, LATEST):
        export_private_model(private, tmp_path / name / str(version), delta=1e-3)
    servable = stand_in.Models(tmp_path).find(name)
    x = EXPORTS[name].x(rng, 5)
    arrays, wanted = by_name(name, x), predictions(private.model, name, x)
    response = servable.predict(request_of(name, arrays))
    assert response.model_spec.version.value == LATEST
    assert set(response.outputs) == set(wanted)
    columns = {key: array.tolist() for key, array in arrays.items()}
    outputs = stand_in.predict_json(servable, {"inputs": columns})["outputs"]
    for key, value in wanted.items():
        got = tf.make_ndarray(response.outputs[key])
        np.testing.assert_allclose(got, value, atol=1e-5)
        np.testing.assert_allclose(outputs[key], value, atol=1e-5)
    with pytest.raises(stand_in.RefusedError, match="inputs must be"):
        servable.predict(request_of(name, {"age": arrays["age"]}))


# -------------------------------------------------------------------- over sockets


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_grpc_predict(served, name):
    request = request_of(name, served.inputs[name])
    response = served.stub.Predict(request, timeout=SECONDS)
    assert response.model_spec.version.value == LATEST
    assert set(response.outputs) == set(EXPORTS[name].outputs)
    for key, wanted in served.wanted[name].items():
        got = tf.make_ndarray(response.outputs[key])
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
def test_grpc_predict_of_a_version_a_signature_and_some_outputs(served):
    request = request_of("two_heads", served.inputs["two_heads"])
    request.model_spec.version.value = LATEST
    request.model_spec.signature_name = "serving_default"
    request.output_filter.append("risk")
    response = served.stub.Predict(request, timeout=SECONDS)
    assert list(response.outputs) == ["risk"]


@pytest.mark.slow
def test_grpc_refusals(served):
    arrays = served.inputs["digits"]
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

    def code(request):
        with pytest.raises(grpc.RpcError) as raised:
            served.stub.Predict(request, timeout=SECONDS)
        return raised.value.code()

    assert code(request_of("nobody", arrays)) == missing
    request = request_of("digits", arrays)
    request.model_spec.version.value = 7
    assert code(request) == missing
    request = request_of("digits", arrays)
    request.model_spec.signature_name = "train"
    assert code(request) == invalid
    assert code(request_of("digits", {"pixels": arrays["image"]})) == invalid
    assert code(request_of("digits", {"image": arrays["image"][:, :7]})) == invalid
    whole = arrays["image"].astype("int64")
    assert code(request_of("digits", {"image": whole})) == invalid


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_grpc_metadata(served, name):
    request = get_model_metadata_pb2.GetModelMetadataRequest()
    request.model_spec.name = name
    request.metadata_field.append("signature_def")
    response = served.stub.GetModelMetadata(request, timeout=SECONDS)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert list(signatures.signature_def) == ["serving_default"]
    signature = signatures.signature_def["serving_default"]
    assert signature.method_name == "tensorflow/serving/predict"
    assert set(signature.inputs) == set(EXPORTS[name].inputs)
    assert set(signature.outputs) == set(EXPORTS[name].outputs)
    for tensor in signature.inputs.values():
        assert tensor.tensor_shape.dim[0].size == -1


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_rest_predict_by_columns(served, name):
    columns = {key: array.tolist() for key, array in served.inputs[name].items()}
    outputs = rest(f"{served.rest}{name}:predict", {"inputs": columns})["outputs"]
    if len(EXPORTS[name].outputs) == 1:
        outputs = {EXPORTS[name].outputs[0]: outputs}
    for key, wanted in served.wanted[name].items():
        np.testing.assert_allclose(outputs[key], wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "two_heads"])
def test_rest_predict_by_rows(served, name):
    arrays = served.inputs[name]
    rows = [
        {key: array[row].tolist() for key, array in arrays.items()} for row in range(5)
    ]
    if len(arrays) == 1:
        rows = [next(iter(row.values())) for row in rows]
    url = f"{served.rest}{name}/versions/{LATEST}:predict"
    predicted = rest(url, {"instances": rows})["predictions"]
    for key, wanted in served.wanted[name].items():
        several = isinstance(predicted[0], dict)
        got = [row[key] for row in predicted] if several else predicted
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
def test_rest_status_metadata_and_refusals(served):
    status = rest(f"{served.rest}digits")["model_version_status"]
    assert status == [{"version": str(LATEST), "state": "AVAILABLE"}]
    metadata = rest(f"{served.rest}digits/metadata")
    assert metadata["modelSpec"]["name"] == "digits"
    for path, body, code in (
        ("nobody:predict", {"inputs": []}, 404),
        ("digits:predict", {"inputs": [[1.0]]}, 400),
        ("digits:predict", {}, 400),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            rest(served.rest + path, body)
        assert raised.value.code == code
        raised.value.close()


# -------------------------------------------------------------------- from C


@pytest.fixture(scope="module")
def predict(tmp_path_factory):
    """Compile the program against the TensorFlow that is installed."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        assert "CI" not in os.environ
        pytest.skip("there is no C compiler")
    libraries = Path(tf.sysconfig.get_lib())
    program = tmp_path_factory.mktemp("c") / "predict"
    subprocess.run(
        [
            *(compiler, "-Wall", "-Wextra", "-Werror", "-o", program),
            *("-isystem", tf.sysconfig.get_include(), HERE / "predict.c"),
            *(next(libraries.glob("libtensorflow_cc.so.?")), f"-Wl,-rpath,{libraries}"),
            next(libraries.glob("libtensorflow_framework.so.?")),
        ],
        check=True,
    )
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "scores", "called_twice"])
def test_a_c_program_predicts_the_same(exported, predict, tmp_path, name):
    folder, inputs, wanted = exported
    version = folder / name / str(LATEST)
    saved = saved_model_pb2.SavedModel.FromString(
        (version / "saved_model.pb").read_bytes()
    )
    signature = saved.meta_graphs[0].signature_def["serving_default"]
    (source,) = signature.inputs.values()
    (array,) = inputs[name].values()
    array.tofile(tmp_path / "rows")
    for key, target in signature.outputs.items():
        operation, index = target.name.split(":")
        process = subprocess.run(
            [
                *(predict, version, source.name.partition(":")[0], operation, index),
                *(tmp_path / "rows", *map(str, array.shape)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        got = np.array(process.stdout.split(), "float32")
        np.testing.assert_allclose(got, wanted[name][key].ravel(), atol=1e-5)
