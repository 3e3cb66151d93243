"""Export of a privately trained model to TensorFlow Serving, with a privacy report."""

import contextlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from absl.logging import get_absl_logger

import tfdp
from tfdp import _keras, _tree, _validate
from tfdp._types import Array, Config, Nest, Tensor
from tfdp._warmup import given_rows, made_up_rows, prediction_log
from tfdp.accounting import privacy_report, privacy_statement
from tfdp.errors import NotPrivateError
from tfdp.model import DPModel
from tfdp.runs.histories import was_trained
from tfdp.training.model_ledger import steps_of_plain_keras

_SIGNATURE = "serving_default"


def export_private_model(
    private: DPModel, path: str | os.PathLike[str], *, delta: float, warmup: Nest = None
) -> Config:
    """Write a private model as a SavedModel for TensorFlow Serving, with its report.

    The SavedModel has the tag ``serve`` and one signature, ``serving_default``, whose
    inputs and outputs have the model's own names and a batch of any size. In the names
    of inputs, ``_`` stands for what is neither an ASCII letter nor a digit. Nothing of
    the training is inside: no optimizer, ledger, noise key, training metric or row of
    the data. It loads where neither tfdp nor Keras is installed. Moving averages of the
    weights (``use_ema``), which `fit` puts into the model when it ends, are exported
    also after single steps; the model keeps its weights then.

    Beside it, in ``assets.extra``, which TensorFlow Serving leaves alone but for the
    warm-up requests:

    * ``privacy_report.json``: see below;
    * ``privacy_statement.txt``: `DPModel.privacy_statement`, and what else is in the
      report, for people;
    * ``tf_serving_warmup_requests``: one request, which a server replays before it
      takes others.

    On a file system the folder appears at `path` when all of it is written, so that a
    server that watches its parent never sees half a version.

    Args:
        private: A trained model.
        path: Folder to be made. Its name is the version, a whole number, and that of
            its parent the model's: ``"models/digits/1"``.
        delta: In (0, 1); smaller than one over the number of examples.
        warmup: Rows for the warm-up request, as for `predict`: a nest of arrays. They
            are stored as they are, so they must be public; never take rows that the
            model was trained on. By default one row of zeros (of empty strings).

    Returns:
        The report, as it is in the file: all of `tfdp.accounting.privacy_report`, and

        * ``report_version``: 1;
        * ``steps``: noised steps that were taken, of whatever batches;
        * ``l2_norm_clip``: the clip norm of the last of them, which epsilon does not
          depend on; ``noise_multiplier`` is relative to the sensitivity, which is twice
          that for units of several examples; None if there was no step;
        * ``covered``: what epsilon is a bound for, a sentence;
        * ``not_trained``: paths of the weights that none of these steps updated. The
          guarantee says nothing about their values;
        * ``versions``: of tfdp, of what it stands on, and of Python.

    Raises:
        TypeError: If `private` is no DPModel or `delta` no number.
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
    report = _report(private, _validate.probability("delta", delta))
    statement = privacy_statement(private.ledger, delta) + _supplement(report)
    inputs = _inputs(private, warmup)
    rows = made_up_rows(inputs) if warmup is None else given_rows(inputs, warmup)
    # TensorFlow Serving takes only folders whose names are numbers.
    unfinished = f"{path}-unfinished-{uuid.uuid4().hex}"
    try:
        with _averaged_weights(private), _quiet():
            _write(private.model, inputs, unfinished)
        _rehearse(unfinished, inputs, rows, model=private.model)
        extra = f"{unfinished}/assets.extra"
        tf.io.gfile.makedirs(extra)
        with tf.io.gfile.GFile(f"{extra}/privacy_report.json", "w") as file:
            file.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
        with tf.io.gfile.GFile(f"{extra}/privacy_statement.txt", "w") as file:
            file.write(statement)
        requests = f"{extra}/tf_serving_warmup_requests"
        with tf.io.TFRecordWriter(requests) as writer:
            writer.write(prediction_log(name, _SIGNATURE, rows))
        tf.io.gfile.rename(unfinished, path)
    except tf.errors.AlreadyExistsError as error:
        raise FileExistsError(_exists(path)) from error
    finally:
        if tf.io.gfile.exists(unfinished):
            tf.io.gfile.rmtree(unfinished)
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


def _report(private: DPModel, delta: float) -> Config:
    if not isinstance(private, DPModel):
        raise TypeError(
            "`private` must be a `tfdp.DPModel`, which knows what was run. Received: "
            f"private of type {type(private).__name__}. Use "
            "`export_private_model(tfdp.DPModel(model), ...)` after training that."
        )
    report = privacy_report(private.ledger, delta)
    if not report["differentially_private"]:
        raise NotPrivateError(
            f"Model `{private.model.name}` is not differentially private: steps ran "
            "without noise. Received: a ledger with "
            f"noise_multiplier={report['noise_multiplier']}. Train with "
            "`noise_multiplier=1.0` or so, or export without a report: "
            "`private.model.export(path)`."
        )
    own_steps = steps_of_plain_keras(private.model)
    if own_steps:
        raise NotPrivateError(
            f"Model `{private.model.name}` was trained by an optimizer of its own, "
            f"without noise, after it had become private. Received: {private.model.optimizer!r} after "
            f"{own_steps} steps. Use `private.fit(...)` only, from the start."
        )
    recorder = private.recorder
    return {
        "report_version": 1,
        **report,
        "steps": recorder.all_steps,
        "l2_norm_clip": recorder.last_clip,
        "covered": (
            "The weights that trained, after every step and in this export: every "
            "output that is computed from them and from public inputs."
        ),
        "not_trained": [
            weight.path for weight in private.model.weights if not was_trained(weight)
        ],
        "versions": {
            "tfdp": tfdp.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
            "dp-accounting": importlib.metadata.version("dp-accounting"),
            "python": platform.python_version(),
        },
    }


def _supplement(report: Config) -> str:
    """Say what else is in the report than in the statement."""
    untrained = "".join(f"\n- {path}" for path in report["not_trained"]) or " none"
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items())
    return (
        f"\nCovered: {report['covered']}\n\nWeights that no private step updated, of "
        f"whose values this says nothing:{untrained}\n\nSteps: {report['steps']}; clip "
        f"norm of the last: {report['l2_norm_clip']}.\nMade with {versions}.\n"
    )


def _inputs(private: DPModel, warmup: Nest) -> Nest:
    """Find out what the model takes: a nest of `tf.TensorSpec`, each with its name."""
    model = private.model
    nest = _keras.input_signature(model)
    if nest is None:
        seen = private.fitted_signature if warmup is None else warmup
        if seen is None:
            raise ValueError(
                f"The inputs of model `{model.name}` are not known: it is not "
                "functional, and has seen no data here. Received: warmup=None. Use "
                "`export_private_model(..., warmup=rows)` with public rows."
            )
        nest = _tree.map_tensors(lambda rows: _spec_like(rows, model), seen)
    leaves = keras.tree.flatten_with_path(nest)
    names = _distinct(_input_name(*leaf, alone=len(leaves) == 1) for leaf in leaves)
    specs = [
        tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, name)
        for name, (_, spec) in zip(names, leaves, strict=True)
    ]
    return keras.tree.pack_sequence_as(nest, specs)


def _spec_like(
    rows: Array | Tensor | tf.TensorSpec, model: keras.Model
) -> tf.TensorSpec:
    """Describe rows as Keras hands them to the model."""
    if not isinstance(rows, tf.TensorSpec):
        rows = tf.convert_to_tensor(rows)
    dtype = model.input_dtype if rows.dtype.is_floating else rows.dtype
    return tf.TensorSpec(rows.shape, dtype)


def _input_name(
    path: tuple[str | int, ...], spec: tf.TensorSpec, *, alone: bool
) -> str:
    """Return the key in the innermost dictionary, the input's name, or a number."""
    keys = [key for key in path if isinstance(key, str)]
    number = "_".join(map(str, path))
    name = keys[-1] if keys else spec.name or ("inputs" if alone else f"input_{number}")
    # No other names can be arguments of a TensorFlow function.
    valid = re.sub("[^A-Za-z0-9]", "_", name)
    return valid if valid[0].isalpha() else f"input_{valid}"


def _distinct(names: Iterable[str]) -> list[str]:
    """Number names that are there already, which to TensorFlow ``X`` and ``x`` are."""
    distinct: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        candidates = itertools.chain([name], numbered)
        new = next(each for each in candidates if each.lower() not in distinct)
        distinct[new.lower()] = new
    return list(distinct.values())


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
        return _named(_predicted(model, inputs, tensors), _keras.output_names(model))

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


def _named(outputs: Nest, names: list[str] | None) -> dict[str, Tensor]:
    """Name outputs by their keys, or as the model does, or as Keras does: by number."""
    leaves = keras.tree.flatten_with_path(outputs)
    leaves = [(path, tensor) for path, tensor in leaves if tensor is not None]
    if isinstance(outputs, Mapping):
        names = ["_".join(map(str, path)) for path, _ in leaves]
    elif names is None or len(names) != len(leaves):
        names = [f"output_{number}" for number in range(len(leaves))]
    return dict(zip(_distinct(names), (tensor for _, tensor in leaves), strict=True))


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
