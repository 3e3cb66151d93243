"""What the server does with a mean of replies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.federated.server import apply_mean, checked_optimizer
from tfdp.optimizers import DPSGD


def test_applies_the_mean_and_the_gradients_of_regularizers():
    dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))
    dense.build((None, 2))
    dense.kernel.assign([[1.0], [2.0]])
    mean = [tf.constant([[3.0], [4.0]], tf.float64), tf.constant([5.0])]
    apply_mean(keras.optimizers.SGD(0.1), mean, dense.trainable_variables)
    np.testing.assert_allclose(dense.kernel, [[1 - 0.4], [2 - 0.6]], rtol=1e-6)
    np.testing.assert_allclose(dense.bias, [-0.5], rtol=1e-6)


def test_takes_names():
    assert isinstance(checked_optimizer("adam"), keras.optimizers.Adam)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: 0.1,
    ],
)
def test_others_are_refused(build):
    with pytest.raises(TypeError, match=r"plain Keras optimizer.*Received"):
        checked_optimizer(build())
