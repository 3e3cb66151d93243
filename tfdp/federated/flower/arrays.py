"""What server and clients send each other: weights, gradients and the clip norm."""

import keras
import numpy as np
import tensorflow as tf
from flwr.app import Array, ArrayRecord

# What the server asks for, in a ConfigRecord of its message.
CLIP_KEY = "l2-norm-clip"


def set_weights(model: keras.Model, arrays: ArrayRecord) -> None:
    """Give a model the weights that a server sent.

    Args:
        model: A Keras model, built.
        arrays: The trainable weights, as `LDPFedSGD.initial_arrays` names them: by
            their places in ``model.trainable_variables``.

    Raises:
        ValueError: If they are those of another model.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> set_weights(model, ArrayRecord([np.ones((2, 1)), np.zeros(1)]))
        >>> model.layers[0].kernel.numpy().ravel()
        array([1., 1.], dtype=float32)
    """
    for variable, value in zip(
        model.trainable_variables, values_for(model, arrays), strict=True
    ):
        variable.assign(value)


def values_for(model: keras.Model, arrays: ArrayRecord) -> list[np.ndarray]:
    """Return arrays for a model's trainable variables, in order, or raise."""
    values = {name: to_numpy(array) for name, array in arrays.items()}
    variables = model.trainable_variables
    wanted = {str(n): tuple(variable.shape) for n, variable in enumerate(variables)}
    shapes = {name: value.shape for name, value in values.items()}
    if shapes != wanted or not all(is_floating(v.dtype) for v in values.values()):
        raise ValueError(
            f"Arrays must be those of the trainable variables of model `{model.name}`. "
            f"Received: shapes {shapes}, where it has {wanted}. Use the same "
            "architecture on both sides."
        )
    # Too large a number becomes infinite, so that it can be found.
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            values[str(n)].astype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            for n, variable in enumerate(variables)
        ]


def to_numpy(array: Array) -> np.ndarray:
    """Return the values of a Flower array, bfloat16 included."""
    values: np.ndarray = array.numpy()
    if values.dtype.kind == "V":
        # NumPy's format has no name for bfloat16; Flower's has.
        values = values.view(tf.as_dtype(array.dtype).as_numpy_dtype)
    return values


def is_floating(dtype: np.dtype) -> bool:
    """Tell whether numbers of a type can be noised."""
    return np.issubdtype(dtype, np.floating) or dtype == tf.bfloat16.as_numpy_dtype
