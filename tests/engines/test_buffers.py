"""No tensor of a pass holds a gradient of each unit, unless the engine must."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdp.ascent.losses import Ascent
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.layers import WSConv2D
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

ROWS = 16
ASCENTS = {"plain": None, "sam": (0.1, 1.0, False), "exact": (0.1, 1.0, True)}


def attention():
    inputs = keras.Input((4, 96))
    x = layers.MultiHeadAttention(4, 24)(inputs, inputs)
    return keras.Model(inputs, layers.LayerNormalization()(x))


MODELS = {
    "dense": lambda: keras.Sequential([
        keras.Input((128,)),
        layers.Dense(192, activation="relu"),
        layers.Dense(3),
    ]),
    "conv": lambda: keras.Sequential([
        keras.Input((4, 4, 96)),
        layers.Conv2D(96, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(64, 3, padding="same"),
    ]),
    "ws_conv": lambda: keras.Sequential([
        keras.Input((4, 4, 96)),
        WSConv2D(96, 3, padding="same", activation="relu"),
        layers.GroupNormalization(8),
        WSConv2D(64, 3, strides=2, padding="same"),
    ]),
    "attention": attention,
    "lstm": lambda: keras.Sequential([keras.Input((3, 64)), layers.LSTM(96)]),
}


def largest(model, engine, ascent):
    """Count the numbers of the largest tensor in the graph of a pass."""
    objective = Objective.of(model, "mse")
    if ascent is not None:
        radius, mix, is_exact = ascent
        step = Ascent(lambda: tf.constant(radius, tf.float64), mix, is_exact)
        objective = dataclasses.replace(objective, ascent=step)

    @tf.function(autograph=False)
    def run(x, y, is_padding):
        batch = Batch(x, y, None, is_padding)
        clip = tf.constant(1.0, tf.float64)
        return engine.clip_and_sum(
            objective, batch, l2_norm_clip=clip, rows_per_unit=1
        )[:2]

    specs = [
        tf.TensorSpec((ROWS, *shape[1:]))
        for shape in (model.input_shape, model.output_shape)
    ]
    graph = run.get_concrete_function(*specs, tf.TensorSpec([ROWS], tf.bool)).graph
    definition = graph.as_graph_def(add_shapes=True)
    # What nobody asks for is never computed.
    outputs = [tensor.op.name for tensor in graph.outputs]
    definition = tf.compat.v1.graph_util.extract_sub_graph(definition, outputs)
    nodes = [
        *definition.node,
        *(node for f in definition.library.function for node in f.node_def),
    ]
    return max(
        np.prod([axis.size for axis in shape.dim])
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
    )


# Others than the first are dear to trace.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "dense"),
        ("plain", "conv"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("plain", "ws_conv"),
                ("plain", "lstm"),
                ("exact", "dense"),
                ("sam", "attention"),
                ("exact", "conv"),
            ]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("plain", "attention"), ("sam", "dense")]
        ),
    ],
)
def test_no_gradient_of_each_unit_is_held(kind, name):
    model = MODELS[name]()
    of_a_unit = max(np.prod(v.shape) for v in model.trainable_variables)
    for engine in (BookkeepingEngine(), GhostEngine()):
        assert largest(model, engine, ASCENTS[kind]) < ROWS * of_a_unit


@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("exact", marks=pytest.mark.slow)]
)
def test_the_vectorized_engine_holds_them(kind):
    model = MODELS["dense"]()
    of_a_unit = max(np.prod(v.shape) for v in model.trainable_variables)
    assert largest(model, VectorizedEngine(), ASCENTS[kind]) >= ROWS * of_a_unit
