"""What a served model takes and gives, under names that stay from run to run."""

import itertools
import re
from collections.abc import Iterable, Mapping

import keras
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._types import Array, Nest, Tensor


def inputs_of(model: keras.Model, seen: Nest) -> Nest:
    """Find out what a model takes.

    Names are the innermost keys of dictionaries, or those that somebody has given to
    the inputs. Keras numbers its own anew in every process, ``keras_tensor_4``: these
    become ``inputs``, or with others beside it ``input_0`` by its place. In all of
    them ``_`` stands for what is neither an ASCII letter nor a digit.

    Args:
        model: A Keras model.
        seen: Rows that it has taken, or `tf.TensorSpec` of them; None if there are
            none.

    Returns:
        A nest of `tf.TensorSpec`, each with its name.

    Raises:
        ValueError: If it is not known.
    """
    nest = _keras.input_signature(model)
    if nest is None:
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


def named_outputs(model: keras.Model, outputs: Nest) -> dict[str, Tensor]:
    """Name what a model gives: by keys, by layers that somebody named, or by number.

    Args:
        model: A Keras model.
        outputs: What it has given.

    Returns:
        The tensors by name. Keras's own names of layers, ``dense_3``, become
        ``output_0`` by its place, as the outputs of models that are not functional.
    """
    leaves = keras.tree.flatten_with_path(outputs)
    leaves = [(path, tensor) for path, tensor in leaves if tensor is not None]
    names = _keras.output_names(model)
    if isinstance(outputs, Mapping):
        names = ["_".join(map(str, path)) for path, _ in leaves]
    elif names is None or len(names) != len(leaves):
        names = [None] * len(leaves)
    numbered = (name or f"output_{number}" for number, name in enumerate(names))
    return dict(zip(_distinct(numbered), (tensor for _, tensor in leaves), strict=True))


def _distinct(names: Iterable[str]) -> list[str]:
    """Number names that are there already, which to TensorFlow ``X`` and ``x`` are."""
    distinct: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        candidates = itertools.chain([name], numbered)
        new = next(each for each in candidates if each.lower() not in distinct)
        distinct[new.lower()] = new
    return list(distinct.values())
