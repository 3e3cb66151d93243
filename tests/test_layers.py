"""Layers: values, configs, saved files, wrong arguments."""

import math
import subprocess
import sys

import keras
import numpy as np
import pytest

from tfdp.layers import WSConv2D


def built(**options):
    layer = WSConv2D(4, 3, **options)
    layer.build((None, 6, 6, 4))
    for variable in layer.weights:
        value = keras.random.normal(variable.shape, seed=len(variable.shape))
        variable.assign(variable.value + value)
    return layer


def by_hand(layer, x):
    """The convolution of Keras with a kernel that was standardised in NumPy."""
    kernel = layer.kernel.numpy().astype("float64")
    kernel -= kernel.mean((0, 1, 2))
    squares = np.maximum(np.sum(kernel**2, (0, 1, 2)), layer.epsilon)
    kernel *= layer.gain.numpy() / np.sqrt(squares)
    config = layer.get_config()
    del config["epsilon"]
    plain = keras.layers.Conv2D.from_config(config)
    plain.build(x.shape)
    plain.kernel.assign(kernel)
    if layer.use_bias:
        plain.bias.assign(layer.bias)
    return plain(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "padding": "same", "activation": "relu"},
        {"groups": 2, "dilation_rate": 2, "use_bias": False},
        {"epsilon": 100.0},
    ],
    ids=str,
)
def test_the_kernel_is_standardised(options, rng):
    layer = built(**options)
    x = rng.normal(size=(2, 6, 6, 4)).astype("float32")
    np.testing.assert_allclose(layer(x), by_hand(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_standardises_in_float32(dtype, rng):
    half, layer = built(dtype=dtype), built()
    # Squares of these are too large for float16.
    layer.kernel.assign(layer.kernel.value * 1000)
    half.set_weights(layer.get_weights())
    x = rng.normal(size=(2, 6, 6, 4)).astype("float32")
    outputs = half(x)
    assert outputs.dtype.name == dtype.removeprefix("mixed_")
    assert np.abs(np.asarray(outputs, "float32") - layer(x)).max() < 0.1


@pytest.mark.slow
def test_is_saved_and_loaded_in_a_fresh_process(tmp_path, rng):
    model = keras.Sequential([keras.Input((6, 6, 4)), built(epsilon=0.1)])
    x = rng.normal(size=(2, 6, 6, 4)).astype("float32")
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "values.npz", x=x, y=model(x))
    program = """
import sys, keras, numpy as np, tfdp
model = keras.models.load_model(sys.argv[1])
values = np.load(sys.argv[2])
assert model.layers[0].epsilon == 0.1
np.testing.assert_allclose(model(values["x"]), values["y"], rtol=1e-5, atol=1e-5)
"""
    subprocess.run(
        [sys.executable, "-c", program, "model.keras", "values.npz"],
        check=True,
        cwd=tmp_path,
    )


@pytest.mark.parametrize("when", ["built", "later"])
def test_adapters_are_saved_and_loaded(when, tmp_path, rng):
    layer = WSConv2D(4, 3, lora_rank=2 if when == "built" else None)
    model = keras.Sequential([keras.Input((6, 6, 4)), layer])
    if when == "later":
        layer.enable_lora(2)
    layer.gain.assign(rng.normal(size=4))
    layer.lora_kernel_b.assign(rng.normal(size=(2, 4)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = rng.normal(size=(2, 6, 6, 4)).astype("float32")
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-4, atol=1e-4)


def test_whole_numbers_are_refused_as_keras_does():
    with pytest.raises(Exception, match="type"):
        WSConv2D(4, 3)(np.ones((2, 6, 6, 4), "int32"))


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf])
def test_epsilon_is_positive(epsilon):
    with pytest.raises(ValueError, match="`epsilon` must be positive"):
        WSConv2D(4, 3, epsilon=epsilon)
