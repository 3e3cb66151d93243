"""A small network with posteriors."""

import keras
import pytest

from tfdp.variational import VariationalDense


@pytest.fixture
def model(rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(4, number_of_examples=10, activation="tanh", name="one"),
        VariationalDense(1, number_of_examples=10, use_bias=False, name="two"),
    ])
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape, scale=0.5))
    return model
