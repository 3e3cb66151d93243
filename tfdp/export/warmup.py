"""The request that a server answers first, to be warm when others come."""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor

# Stands for the axes of made-up rows whose length the model leaves open.
_LENGTH = 32


def made_up_rows(inputs: Nest, fitted: Nest = None) -> dict[str, Tensor]:
    """Make a row of zeros, or of empty strings.

    Args:
        inputs: Nest of `tf.TensorSpec` of what the model takes.
        fitted: The same of what `fit` was given, whose lengths such a row has where
            the model leaves them open; None if that is not known.

    Returns:
        Tensors of one row by the names of the inputs.
    """
    specs, seen = _tree.tensors(inputs), _tree.tensors(fitted)
    if len(seen) != len(specs):
        seen = specs
    return {
        spec.name: tf.zeros([1, *_lengths(spec.shape, other.shape)], spec.dtype)
        for spec, other in zip(specs, seen, strict=True)
    }


def _lengths(wanted: tf.TensorShape, fitted: tf.TensorShape) -> list[int]:
    """Return the sizes of a row's axes."""
    if fitted.rank is None or not wanted[1:].is_compatible_with(fitted[1:]):
        fitted = wanted
    pairs = zip(wanted[1:], fitted[1:], strict=True)
    return [one or other or _LENGTH for one, other in pairs]


def given_rows(inputs: Nest, warmup: Nest) -> dict[str, Tensor]:
    """Take the user's rows by name, or refuse what the model does not take."""
    specs = {spec.name: spec for spec in keras.tree.flatten(inputs)}
    if not (isinstance(warmup, Mapping) and set(warmup) == set(specs)):
        arrays = _tree.tensors(warmup)
        if len(arrays) != len(specs):
            raise ValueError(_misfit(specs, f"{len(arrays)} arrays"))
        warmup = dict(zip(specs, arrays, strict=True))
    try:
        rows = {name: tf.convert_to_tensor(warmup[name]) for name in specs}
    except (TypeError, ValueError) as error:
        raise ValueError(_misfit(specs, f"{warmup!r:.200}")) from error
    fit = all(_fits(rows[name], spec) for name, spec in specs.items())
    if not fit or len({len(each) for each in rows.values()}) != 1:
        found = (
            f"{name}: {each.dtype.name}{each.shape}" for name, each in rows.items()
        )
        raise ValueError(_misfit(specs, ", ".join(found)))
    return {name: tf.cast(each, specs[name].dtype) for name, each in rows.items()}


def _fits(rows: Tensor, spec: tf.TensorSpec) -> bool:
    """Tell whether there are rows, of the shape, finite, of a dtype that converts."""
    if not (spec.shape.is_compatible_with(rows.shape) and len(rows)):
        return False
    if rows.dtype == spec.dtype == tf.string:
        return True
    if spec.dtype.is_floating and (rows.dtype.is_floating or rows.dtype.is_integer):
        return bool(np.isfinite(tf.cast(tf.cast(rows, spec.dtype), tf.float64)).all())
    are_whole = rows.dtype.is_integer and spec.dtype.is_integer
    return bool(are_whole or rows.dtype == spec.dtype)


def _misfit(specs: Mapping[str, tf.TensorSpec], found: str) -> str:
    wanted = ", ".join(f"{name}: {s.dtype.name}{s.shape}" for name, s in specs.items())
    return (
        f"`warmup` must be rows of what the model takes, {wanted}. Received: {found}. "
        "Use the nest of arrays that `model.predict` takes."
    )


def prediction_log(
    model_name: str, signature: str, rows: Mapping[str, Tensor]
) -> bytes:
    """Encode a request as TensorFlow Serving's message `PredictionLog`."""
    # tensorflow-serving-api, which has the message, would be needed for this only. The
    # numbers are those of the fields in its `.proto` files.
    model_spec = _field(1, model_name.encode()) + _field(3, signature.encode())
    inputs = [
        _field(1, name.encode())
        + _field(2, tf.make_tensor_proto(tensor).SerializeToString())
        for name, tensor in rows.items()
    ]
    request = _field(1, model_spec) + b"".join(_field(2, entry) for entry in inputs)
    predict_log = _field(1, request)
    return _field(6, predict_log)


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of a protocol buffer: its number and type, its length, itself."""
    length_delimited = 2
    return _varint(number << 3 | length_delimited) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encode a whole number, seven bits a byte, the lowest first."""
    encoded = []
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
