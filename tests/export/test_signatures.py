"""Names in signatures are the same in every version, whatever Keras calls its own."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests import forks
from tfdp.export import export_private_model, next_version
from tfdp.export.signatures import inputs_of, named_outputs

pytestmark = pytest.mark.keras_private


def sequential():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dense(1)])


def without_an_input():
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    model.build((None, 3))
    return model


def several():
    first, second = keras.Input((3,)), keras.Input((3,))
    both = layers.Concatenate()([first, second])
    heads = [layers.Dense(1)(both), layers.Dense(2, name="risk")(both), both + 1.0]
    return keras.Model([first, second], heads)


def some_named():
    first, second = keras.Input((3,), name="age"), keras.Input((3,))
    return keras.Model([first, second], layers.Dense(1)(first + second))


def dictionaries():
    age, dose = keras.Input((3,), name="age"), keras.Input((3,), name="dose")
    outputs = {"risk": layers.Dense(1)(age), "help": layers.Dense(1)(dose)}
    return keras.Model({"age": age, "dose": dose}, outputs)


def nested():
    return keras.Sequential([keras.Input((3,)), sequential()])


def from_the_middle():
    model = sequential()
    return keras.Model(model.layers[0].output, model.outputs)


def operation():
    x = keras.Input((3,))
    return keras.Model(x, keras.ops.softmax(layers.Dense(2)(x)))


MODELS = {
    sequential: (["inputs"], ["output_0"]),
    without_an_input: (["inputs"], ["output_0"]),
    several: (["input_0", "input_1"], ["output_0", "risk", "output_2"]),
    some_named: (["age", "input_1"], ["output_0"]),
    dictionaries: (["age", "dose"], ["help", "risk"]),
    nested: (["inputs"], ["output_0"]),
    from_the_middle: (["inputs"], ["output_0"]),
    operation: (["inputs"], ["output_0"]),
}


def names_of(model):
    specs = keras.tree.flatten(inputs_of(model, None))
    rows = keras.tree.map_structure(
        lambda spec: np.zeros([1, *spec.shape[1:]], "float32"), inputs_of(model, None)
    )
    return [spec.name for spec in specs], list(named_outputs(model, model(rows)))


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_names_are_those_that_somebody_gave_or_places(build, tmp_path):
    for _ in range(2):
        model = build()
        assert names_of(model) == MODELS[build]
    model.save(tmp_path / "model.keras")
    assert names_of(keras.saving.load_model(tmp_path / "model.keras")) == MODELS[build]
    assert names_of(keras.models.clone_model(model)) == MODELS[build]


@pytest.mark.parametrize(
    "name", ["keras_tensors", "my_keras_tensor_1", "input_layer_x", "inputs_3", "x"]
)
def test_names_that_look_like_keras_own_are_kept(name):
    x = keras.Input((3,), name=name)
    model = keras.Model(x, layers.Dense(1, name="dense_one")(x))
    assert names_of(model) == ([name], ["dense_one"])


def test_layers_named_as_another_kind_keep_their_names():
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(1, name="softmax_1")(x))
    assert names_of(model) == (["inputs"], ["softmax_1"])


def test_a_given_name_that_is_a_place_is_told_apart():
    first, second = keras.Input((3,)), keras.Input((3,), name="input_0")
    model = keras.Model([first, second], layers.Dense(1)(first + second))
    assert names_of(model)[0] == ["input_0", "input_0_1"]


def signature_of(path):
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    return sorted(served.structured_input_signature[1]), sorted(
        served.structured_outputs
    )


@pytest.mark.slow
def test_the_second_model_of_a_process_is_served_as_the_first(tmp_path):
    found = []
    for _ in range(2):
        path = next_version(tmp_path / "m")
        export_private_model(tfdp.DPModel(several()), path, delta=1e-3)
        found.append(signature_of(path))
    assert found[0] == found[1]
    assert found[0] == (["input_0", "input_1"], ["output_0", "output_2", "risk"])


FRESH = """
import sys
import numpy as np
import tfdp
from tests.export.test_signatures import several, sequential

for _ in range(int(sys.argv[2])):
    sequential()
private = tfdp.DPModel(several())
private.compile(
    tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
    loss=["mse"] * 3,
    run_eagerly=True,
)
x = [np.ones((20, 3), "float32")] * 2
y = [np.ones((20, n), "float32") for n in (1, 2, 6)]
private.fit(x, y, batch_size=10, verbose=0)
tfdp.export.export_private_model(private, sys.argv[1], delta=1e-3)
"""

LOAD = """
import json
import sys

# Imports of these raise from here on.
sys.modules |= {"tfdp": None, "keras": None}
import tensorflow as tf

served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
rows = {name: tf.ones((2, 3)) for name in served.structured_input_signature[1]}
outputs = {name: value.shape.as_list() for name, value in served(**rows).items()}
print(json.dumps([sorted(rows), outputs]))
"""


@pytest.mark.slow
def test_fresh_processes_give_the_same_names_and_load_without_tfdp(tmp_path):
    found = []
    for version, models_before in enumerate((0, 2), 1):
        path = str(tmp_path / "m" / str(version))
        done = forks.run(FRESH, path, models_before)
        assert done.returncode == 0, done.stderr
        done = subprocess.run(
            [sys.executable, "-c", LOAD, path],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    assert found[0] == [
        ["input_0", "input_1"],
        {"output_0": [2, 1], "risk": [2, 2], "output_2": [2, 6]},
    ]
