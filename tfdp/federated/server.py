"""What a server does with the mean of clients' replies."""

import keras
import tensorflow as tf

from tfdp._types import Variable
from tfdp.optimizers.dp_optimizer import DPOptimizer, with_regularizer


def checked_optimizer(optimizer: object) -> keras.optimizers.Optimizer:
    """Return a plain Keras optimizer, or raise.

    Args:
        optimizer: The server's optimizer, or the name of one.

    Raises:
        TypeError: If it is something else, or clips, noises or scales itself.
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    wrapper = isinstance(optimizer, (DPOptimizer, keras.optimizers.LossScaleOptimizer))
    if not isinstance(optimizer, keras.optimizers.Optimizer) or wrapper:
        raise TypeError(
            "`optimizer` must be a plain Keras optimizer: clients have clipped and "
            "noised what it gets. Received: optimizer of type "
            f"{type(optimizer).__name__}. Use `keras.optimizers.SGD(1.0)`."
        )
    return optimizer


def apply_mean(
    optimizer: keras.optimizers.Optimizer,
    mean: list[tf.Tensor],
    variables: list[Variable],
) -> None:
    """Let the optimizer apply noised gradients and those of weight regularizers.

    Args:
        optimizer: See `checked_optimizer`.
        mean: One gradient for each variable.
        variables: The trainable Keras variables.
    """
    gradients = [
        with_regularizer(tf.cast(gradient, variable.dtype), variable)
        for gradient, variable in zip(mean, variables, strict=True)
    ]
    optimizer.apply(gradients, variables)
