"""Static shapes."""

from collections.abc import Sequence

import tensorflow as tf


def with_shape(tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Tell a tensor what its shape is known to be.

    Unlike `tf.ensure_shape` this is no operation: that one has no forward-mode
    derivative.

    Args:
        tensor: The tensor.
        shape: Its shape, None where it is not static.

    Returns:
        The same tensor.
    """
    tensor.set_shape(shape)
    return tensor
