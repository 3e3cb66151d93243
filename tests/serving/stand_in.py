"""A stand-in for TensorFlow Serving, which is not run here: its messages, real sockets.

    python -I stand_in.py MODELS_FOLDER

Serves the newest version of every model in the folder as the real server would be
asked for it: gRPC `PredictionService` (Predict, GetModelMetadata) and the REST API
(predict, status, metadata), both on free ports of 127.0.0.1. Their numbers are printed
as JSON when the warm-up requests were answered. It ends when its standard input does.

The folder is all that it knows: models are loaded by `tf.saved_model.load`, and neither
tfdp nor Keras can be imported.
"""

import base64
import json
import re
import sys
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

if __name__ == "__main__":
    # Imports of these raise from here on.
    sys.modules |= {"tfdp": None, "keras": None}

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)

STATUS_OF_HTTP = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
}


class RefusedError(Exception):
    """A request that cannot be answered, with the status that says why."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Servable:
    """One version of one model."""

    def __init__(self, folder, version):
        path = folder / str(version)
        self.name, self.version = folder.name, version
        self.loaded = tf.saved_model.load(str(path), tags=["serve"])
        saved = saved_model_pb2.SavedModel.FromString(
            (path / "saved_model.pb").read_bytes()
        )
        (graph,) = [g for g in saved.meta_graphs if "serve" in g.meta_info_def.tags]
        self.signatures = {
            name: signature
            for name, signature in graph.signature_def.items()
            if not name.startswith("__")
        }
        self.warm_up(path / "assets.extra" / "tf_serving_warmup_requests")

    def warm_up(self, path):
        """Answer the recorded requests."""
        for record in tf.data.TFRecordDataset(str(path)):
            log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
            self.predict(log.predict_log.request)

    def signature(self, name):
        name = name or "serving_default"
        if name not in self.signatures:
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"no signature {name!r}"
            )
        return name, self.signatures[name]

    def predict(self, request):
        """Answer a PredictRequest."""
        name, signature = self.signature(request.model_spec.signature_name)
        if set(request.inputs) != set(signature.inputs):
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"inputs must be {sorted(signature.inputs)}, not "
                f"{sorted(request.inputs)}",
            )
        for key, wanted in signature.inputs.items():
            given = request.inputs[key]
            shape = tf.TensorShape(given.tensor_shape)
            if given.dtype != wanted.dtype:
                problem = f"dtype {tf.as_dtype(given.dtype).name}"
            elif not shape.is_compatible_with(tf.TensorShape(wanted.tensor_shape)):
                problem = f"shape {shape}"
            else:
                continue
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"input {key!r} cannot have {problem}"
            )
        outputs = self.loaded.signatures[name](**{
            key: tf.constant(tf.make_ndarray(value))
            for key, value in request.inputs.items()
        })
        response = predict_pb2.PredictResponse()
        self.fill(response.model_spec, name)
        for key in request.output_filter or outputs:
            response.outputs[key].CopyFrom(tf.make_tensor_proto(outputs[key]))
        return response

    def metadata(self):
        """Answer a GetModelMetadataRequest."""
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        self.fill(response.model_spec, "")
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for name, signature in self.signatures.items():
            signatures.signature_def[name].CopyFrom(signature)
        response.metadata["signature_def"].Pack(signatures)
        return response

    def fill(self, model_spec, signature_name):
        model_spec.name = self.name
        model_spec.version.value = self.version
        model_spec.signature_name = signature_name


class Models:
    """The newest version of each model in a folder."""

    def __init__(self, folder):
        self.servables = {}
        for model in sorted(folder.iterdir()):
            versions = [int(v.name) for v in model.iterdir() if v.name.isdigit()]
            self.servables[model.name] = Servable(model, max(versions))

    def find(self, name, version=None):
        servable = self.servables.get(name)
        if servable is None or version not in {None, servable.version}:
            raise RefusedError(
                grpc.StatusCode.NOT_FOUND, f"no model {name!r}, version {version}"
            )
        return servable

    def of(self, model_spec):
        has_version = model_spec.HasField("version")
        version = model_spec.version.value if has_version else None
        return self.find(model_spec.name, version)


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """The gRPC service; its other methods answer "unimplemented"."""

    def __init__(self, models):
        self.models = models

    def Predict(self, request, context):  # noqa: N802
        try:
            return self.models.of(request.model_spec).predict(request)
        except RefusedError as refusal:
            return context.abort(refusal.status, str(refusal))

    def GetModelMetadata(self, request, context):  # noqa: N802
        try:
            return self.models.of(request.model_spec).metadata()
        except RefusedError as refusal:
            return context.abort(refusal.status, str(refusal))


def decoded(value):
    """Return a value of a JSON request with its binary strings decoded."""
    if isinstance(value, dict):
        return base64.b64decode(value["b64"])
    return [decoded(each) for each in value] if isinstance(value, list) else value


def predict_json(servable, body):
    """Answer a REST request, by rows ("instances") or by columns ("inputs")."""
    name, signature = servable.signature(body.get("signature_name"))
    by_rows = "instances" in body
    given = body["instances" if by_rows else "inputs"]
    if by_rows:
        rows = given
        if not (isinstance(rows[0], dict) and set(rows[0]) == set(signature.inputs)):
            (only,) = signature.inputs
            rows = [{only: row} for row in rows]
        columns = {key: [row[key] for row in rows] for key in signature.inputs}
    elif isinstance(given, dict) and set(given) == set(signature.inputs):
        columns = given
    else:
        (only,) = signature.inputs
        columns = {only: given}
    request = predict_pb2.PredictRequest()
    request.model_spec.signature_name = name
    for key, column in columns.items():
        dtype = tf.as_dtype(signature.inputs[key].dtype)
        request.inputs[key].CopyFrom(tf.make_tensor_proto(decoded(column), dtype))
    response = servable.predict(request)
    arrays = {key: tf.make_ndarray(value) for key, value in response.outputs.items()}
    if not by_rows:
        lists = {key: array.tolist() for key, array in arrays.items()}
        return {"outputs": lists if len(lists) > 1 else next(iter(lists.values()))}
    if len(arrays) == 1:
        return {"predictions": next(iter(arrays.values())).tolist()}
    count = len(next(iter(arrays.values())))
    return {
        "predictions": [
            {key: np.asarray(array[row]).tolist() for key, array in arrays.items()}
            for row in range(count)
        ]
    }


def rest_handler(models):
    """Make the class that answers REST requests."""
    path = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?(:predict|/metadata)?")

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body):
            match = path.fullmatch(self.path)
            try:
                if match is None or (match[3] == ":predict") != (body is not None):
                    raise RefusedError(grpc.StatusCode.NOT_FOUND, "malformed request")
                version = match[2] and int(match[2])
                servable = models.find(match[1], version)
                if match[3] == ":predict":
                    status, answer = 200, predict_json(servable, body)
                elif match[3] == "/metadata":
                    status = 200
                    answer = json_format.MessageToDict(servable.metadata())
                else:
                    state = {"version": str(servable.version), "state": "AVAILABLE"}
                    status, answer = 200, {"model_version_status": [state]}
            except RefusedError as refusal:
                status, answer = STATUS_OF_HTTP[refusal.status], {"error": str(refusal)}
            except (KeyError, TypeError, ValueError) as error:
                status, answer = 400, {"error": str(error)}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            self.answer(json.loads(self.rfile.read(length)))

        def log_message(self, *_):
            """Keep quiet."""

    return Handler


def main():
    models = Models(Path(sys.argv[1]))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(models), server
    )
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    http = ThreadingHTTPServer(("127.0.0.1", 0), rest_handler(models))
    Thread(target=http.serve_forever, daemon=True).start()
    ports = {"grpc": grpc_port, "rest": http.server_address[1]}
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(None)
    http.shutdown()


if __name__ == "__main__":
    main()
