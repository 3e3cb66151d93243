"""Export of a privately trained model to TensorFlow Serving, with a privacy report."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from absl.logging import get_absl_logger

from tfdp import _keras
from tfdp._types import Config, Nest, Tensor
from tfdp.accounting import privacy_statement
from tfdp.errors import NotPrivateError
from tfdp.export.folders import appearing
from tfdp.export.signatures import inputs_of, named_outputs
from tfdp.export.warmup import given_rows, made_up_rows, prediction_log
from tfdp.model import DPModel

_SIGNATURE = "serving_default"


def export_private_model(
    private: DPModel,
    path: str | os.PathLike[str],
    *,
    delta: float,
    warmup: Nest = None,
    answers: Mapping[str, str] | None = None,
    audits: Iterable[object] = (),
) -> Config:
    """Write a private model as a SavedModel for TensorFlow Serving, with its report.

    The SavedModel has the tag ``serve`` and one signature, ``serving_default``, whose
    inputs and outputs have the model's own names and a batch of any size. Names are the
    same in every version: where nobody gave one, and Keras numbers its own anew in
    every process (``keras_tensor_4``, ``dense_3``), a single input is ``inputs``, others
    are ``input_0`` and ``output_0`` by their places. In the names of inputs, ``_``
    stands for what is neither an ASCII letter nor a digit.

    Nothing of the training is inside: no optimizer, ledger, noise key, training metric
    or row of the data. It loads where neither tfdp nor Keras is installed. Moving
    averages of the weights (``use_ema``), which `fit` puts into the model when it ends,
    are exported also after single steps; the model keeps its weights then.

    Beside it, in ``assets.extra``, which TensorFlow Serving leaves alone but for the
    warm-up requests:

    * ``privacy_report.json``: see below;
    * ``privacy_statement.txt``: `DPModel.privacy_statement`, and what else is in the
      report, for people;
    * ``tf_serving_warmup_requests``: one request, which a server replays before it
      takes others.

    On a file system the folder appears at `path` when all of it is written, so that a
    server that watches its parent never sees half a version. What an export that was
    killed has left beside it is removed by the next one, unless it is being written.

    Args:
        private: A trained model.
        path: Folder to be made. Its name is the version, a whole number, and that of
            its parent the model's: ``"models/digits/1"``.
        delta: In (0, 1); smaller than one over the number of examples.
        warmup: Rows for the warm-up request, as for `predict`: a nest of arrays. They
            are stored as they are, so they must be public; never take rows that the
            model was trained on. By default one row of zeros (of empty strings), as
            long as those of `fit` where the model leaves that open; if it is not known,
            as after loading, of length 32.
        answers: To questions that no program can answer: see `DPModel.privacy_report`.
        audits: Results of audits, for the report. They are not private.

    Returns:
        The report, as it is in the file: `DPModel.privacy_report` of the weights that
        were written.

    Raises:
        TypeError: If `private` is no DPModel, `delta` no number, or answers or audits
            are none.
        ValueError: If `delta` is outside (0, 1), the folder's name is no version, the
            inputs of the model are not known, `warmup` does not fit them, or the model
            keeps something of the rows that it predicts for.
        FileExistsError: If there is something at `path`.
        NotPrivateError: If steps ran without noise, or the model was trained by an
            optimizer of its own after it had become private.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((2,), name="pixels"),
        ...     keras.layers.Dense(1, name="score"),
        ... ])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1),
        ...     loss="mse",
        ... )
        >>> x, y = np.ones((100, 2)), np.ones((100, 1))
        >>> history = private.fit(x, y, batch_size=10, epochs=2, verbose=0)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as models:
        ...     path = f"{models}/score/1"
        ...     report = export_private_model(private, path, delta=1e-3)
        ...     served = tf.saved_model.load(path).signatures["serving_default"]
        >>> round(report["epsilon"], 2), report["steps"]
        (1.76, 20)
        >>> list(served(pixels=tf.ones((1, 2))))
        ['score']
    """
    path, name = _checked_path(path)
    _check_type(private)
    with _averaged_weights(private):
        report = private.privacy_report(delta, answers=answers, audits=audits)
    _check_private(private.model, report)
    statement = privacy_statement(private.ledger, delta) + _supplement(report)
    fitted = private.fitted_signature
    inputs = inputs_of(private.model, fitted if warmup is None else warmup)
    rows = (
        made_up_rows(inputs, fitted) if warmup is None else given_rows(inputs, warmup)
    )
    # What layers have measured of rows is exact, and part of the model.
    _keras.reset_metrics(private.model)
    try:
        with appearing(path) as folder:
            with _averaged_weights(private), _quiet():
                _write(private.model, inputs, folder)
            _rehearse(folder, inputs, rows, model=private.model)
            extra = f"{folder}/assets.extra"
            tf.io.gfile.makedirs(extra)
            with tf.io.gfile.GFile(f"{extra}/privacy_report.json", "w") as file:
                file.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
            with tf.io.gfile.GFile(f"{extra}/privacy_statement.txt", "w") as file:
                file.write(statement)
            requests = f"{extra}/tf_serving_warmup_requests"
            with tf.io.TFRecordWriter(requests) as writer:
                writer.write(prediction_log(name, _SIGNATURE, rows))
    except tf.errors.AlreadyExistsError as error:
        raise FileExistsError(_exists(path)) from error
    return report


def next_version(models: str | os.PathLike[str]) -> str:
    """Return the path of a version newer than all that a model has.

    Args:
        models: Folder of the model's versions, which need not exist.

    Returns:
        A path for `export_private_model`, in that folder.

    Example:
        >>> next_version("there/is/none")
        'there/is/none/1'
    """
    models = os.fsdecode(models).rstrip("/")
    names = tf.io.gfile.listdir(models) if tf.io.gfile.isdir(models) else []
    versions = [int(name.rstrip("/")) for name in names if name.rstrip("/").isdecimal()]
    return f"{models}/{max(versions, default=0) + 1}"


def _checked_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the version, and the name of the model."""
    path = os.fsdecode(path).rstrip("/")
    parent, _, version = path.rpartition("/")
    # More digits might not fit into TensorFlow Serving's 64 bits.
    if not re.fullmatch("0|[1-9][0-9]{0,17}", version):
        raise ValueError(
            "`path` must end in a version, a whole number, by which TensorFlow Serving "
            f"knows it. Received: path={path!r}. Use `path={f'{path}/1'!r}`."
        )
    if tf.io.gfile.exists(path):
        raise FileExistsError(_exists(path))
    return path, parent.rpartition("/")[2] or "model"


def _exists(path: str) -> str:
    parent = path.rpartition("/")[0] or "."
    return (
        "`path` must not exist: a version is never overwritten. Received: "
        f"path={path!r}. Use `path={next_version(parent)!r}`."
    )


def _check_type(private: DPModel) -> None:
    if not isinstance(private, DPModel):
        raise TypeError(
            "`private` must be a `tfdp.DPModel`, which knows what was run. Received: "
            f"private of type {type(private).__name__}. Use "
            "`export_private_model(tfdp.DPModel(model), ...)` after training that."
        )


def _check_private(model: keras.Model, report: Config) -> None:
    """Refuse a model that no epsilon holds for."""
    own_steps = report["plain_keras_steps"]
    if own_steps:
        raise NotPrivateError(
            f"Model `{model.name}` was trained by an optimizer of its own, without "
            f"noise, after it had become private. Received: {model.optimizer!r} after "
            f"{own_steps} steps. Use `private.fit(...)` only, from the start."
        )
    if not report["differentially_private"]:
        raise NotPrivateError(
            f"Model `{model.name}` is not differentially private: steps ran without "
            "noise. Received: a ledger with "
            f"noise_multiplier={report['noise_multiplier']}. Train with "
            "`noise_multiplier=1.0` or so, or export without a report: "
            "`private.model.export(path)`."
        )


def _supplement(report: Config) -> str:
    """Say what else is in the report than in the statement."""
    untrained = "".join(f"\n- {path}" for path in report["not_trained"]) or " none"
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items())
    return (
        f"\nCovered: {report['covered']}\n\nWeights that no private step updated, of "
        f"whose values this says nothing:{untrained}\n\nSteps: {report['steps']}; clip "
        f"norm of the last: {report['l2_norm_clip']}.\nMade with {versions}.\n"
    )


@contextlib.contextmanager
def _averaged_weights(private: DPModel) -> Iterator[None]:
    """Let the weights be their moving averages, where these are still to come."""
    if not (private.compiled and private.optimizer.averages_wait):
        yield
        return
    inner = private.optimizer.inner_optimizer
    # Some may be frozen by now.
    variables = _keras.trained_by(inner)
    kept = [variable.numpy() for variable in variables]
    try:
        inner.finalize_variable_values(variables)
        yield
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let TensorFlow's exporter warn, and leave out what it tells of its progress."""

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    loggers = tf.get_logger(), get_absl_logger()
    for logger in loggers:
        logger.addFilter(is_warning)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_warning)


def _write(model: keras.Model, inputs: Nest, path: str) -> None:
    """Write the SavedModel."""

    def serve(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return named_outputs(model, _predicted(model, inputs, tensors))

    archive = keras.export.ExportArchive()
    # Lookup tables must be tracked. A model that is tracked by itself has its weights
    # stored a second time, and the random seeds of training.
    holder = tf.Module()
    holder.model = model
    archive.track(holder)
    specs = {spec.name: spec for spec in keras.tree.flatten(inputs)}
    archive.add_endpoint(_SIGNATURE, serve, [specs])
    archive.write_out(path, verbose=False)


def _predicted(model: keras.Model, inputs: Nest, tensors: Mapping[str, Tensor]) -> Nest:
    rows = keras.tree.map_structure(lambda spec: tensors[spec.name], inputs)
    return _keras.run_model(model, rows, training=False)


def _rehearse(
    path: str, inputs: Nest, rows: Mapping[str, Tensor], model: keras.Model
) -> None:
    """Answer the warm-up request, which would otherwise stop a server."""
    serve = tf.saved_model.load(path).signatures[_SIGNATURE]
    try:
        serve(**rows)
    except (tf.errors.OpError, ValueError) as error:
        shapes = ", ".join(f"{name}: {value.shape}" for name, value in rows.items())
        raise ValueError(
            f"Model `{model.name}` cannot answer the warm-up request. Received: rows "
            f"of shape {shapes}. Use `export_private_model(..., warmup=rows)` with "
            f"public rows that it can. {error}"
        ) from error
    _check_keeps_nothing(model, inputs, rows)


def _check_keeps_nothing(
    model: keras.Model, inputs: Nest, rows: Mapping[str, Tensor]
) -> None:
    """Refuse a model whose predictions change it, random seeds apart."""
    before = [variable.numpy() for variable in model.variables]
    _predicted(model, inputs, rows)
    changed = []
    for variable, value in zip(model.variables, before, strict=True):
        if not np.array_equal(variable.numpy(), value):
            variable.assign(value)
            if "seed_generator" not in variable.path:
                changed.append(f"`{variable.path}`")
    if changed:
        raise ValueError(
            f"Model `{model.name}` must keep nothing of the rows that it predicts for: "
            "what is kept of one request, or of private rows in `evaluate`, would go "
            f"into the export. Received: changed {', '.join(changed)}. Assign no "
            "variable in `call`; use `stateful=False`."
        )
