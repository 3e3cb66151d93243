"""Layers are called by their rules while a pass is recorded, and only then."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.problems import PROBLEMS, register, sequential
from tfdp import rules
from tfdp.engines import passes
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules.recording import Recording

pytestmark = pytest.mark.keras_private


def recorded_here(model, x, rows):
    """Call a model while recording, in a graph."""
    recording = Recording(model, rows)
    with recording.observing():
        outputs = model(x)
    return recording, outputs


def recorded(model, x, rows=None):
    """Return what was recorded in a graph, and what the model has returned."""
    found, rows = [], len(x) if rows is None else rows

    @tf.function(autograph=False)
    def run(x):
        recording, outputs = recorded_here(model, x, rows)
        found.append(recording)
        return outputs

    outputs = run(keras.tree.map_structure(tf.constant, x))
    return found[0], outputs


def paths(recording):
    return [watched.path for watched in recording.watched]


@pytest.mark.parametrize(
    "name",
    ["attention", "bidirectional_modes", "cnn", "dict_losses", "group_norm", "nested"],
)
def test_outputs_are_those_of_the_model(name):
    problem = PROBLEMS[name]
    model, x = problem.build(), problem.batch(3).x
    _, outputs = recorded(model, x, rows=3)
    for left, right in zip(
        keras.tree.flatten(outputs), keras.tree.flatten(model(x)), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def calls_of(model):
    return [vars(layer).get("call") for layer in model._flatten_layers()]


@pytest.mark.parametrize("fails", [False, True])
def test_layers_get_their_calls_back(fails):
    model = PROBLEMS["mlp_logits"].build()
    own = vars(model.layers[0])["call"] = model.layers[0].call
    before = calls_of(model)
    x = np.ones((2, 9 if fails else 4), "float32")
    try:
        recorded(model, x)
    except ValueError:
        assert fails
    assert calls_of(model) == before
    assert model.layers[0].call is own


def test_a_layer_with_one_call_in_another_is_named_by_its_path():
    recording, _ = recorded(PROBLEMS["nested"].build(), np.ones((2, 3), "float32"))
    assert [path.split("/")[-1] for path in paths(recording)] == [
        "dense",
        "dense_1",
        "layer_normalization",
        "dense_2",
    ]
    assert all(watched.rule for watched in recording.watched)


def test_each_call_of_a_shared_layer_is_watched():
    recording, _ = recorded(
        PROBLEMS["called_twice"].build(), np.ones((2, 3), "float32")
    )
    assert paths(recording)[:2] == ["shared", "shared"]


@pytest.mark.skipif("reversible_masked" not in PROBLEMS, reason="needs Keras 3.15")
def test_masks_pass_through():
    model = PROBLEMS["reversible_masked"].build()
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    _, outputs = recorded(model, ids)
    np.testing.assert_allclose(outputs, model(ids), rtol=1e-5)


@register
class Masking(layers.Layer):
    """A leaf that attaches a mask to its outputs in its own code."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale")

    def call(self, x):
        outputs = x * self.scale
        outputs._keras_mask = ops.any(x != 0, axis=-1)
        return outputs


def test_masks_that_a_layer_attaches_itself_stay():
    model = sequential((3, 2), Masking())

    @tf.function(autograph=False)
    def mask():
        return recorded_here(model, tf.ones([2, 3, 2]), 2)[1]._keras_mask

    np.testing.assert_array_equal(mask(), np.ones((2, 3), bool))


def test_rows_must_be_those_of_the_batch():
    model = sequential((3,), layers.Dense(1, name="head"))
    with pytest.raises(
        UnsupportedLayerError, match="with leading axis of length 4 in a batch of 2"
    ):
        recorded(model, np.ones((4, 3), "float32"), rows=2)


def test_rows_must_be_those_of_the_batch_where_only_the_data_tell():
    model = sequential((3,), layers.Dense(1, name="head"))

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.int32)]
    )
    def run(x, rows):
        recording, outputs = recorded_here(model, x, rows)
        return recording.lengths.checked(outputs)

    run(tf.ones([4, 3]), 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="in `head` must be those"):
        run(tf.ones([4, 3]), 2)


# ---------------------------------------------------------------- frozen trunks


def trunk_and_head():
    """Layers that do not train under one that does: convolutions, a recurrent layer."""
    trunk = sequential(
        (8, 8, 1),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Reshape((16, 4)),
        layers.LSTM(5),
    )
    trunk.trainable = False
    return sequential((8, 8, 1), trunk, layers.Dense(2, name="head"))


BACKWARD = ("Backprop", "Grad", "TensorListPushBack", "While")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [BookkeepingEngine(), GhostEngine()])
def test_the_backward_pass_ends_above_a_frozen_trunk(engine):
    model = trunk_and_head()
    x, y = np.ones((3, 8, 8, 1), "float32"), np.ones((3, 2), "float32")
    recording, _ = recorded(model, x)
    assert paths(recording) == ["head"]
    objective = Objective.of(model, "mse")

    def clip(x, y):
        return passes.run(
            lambda batch: engine.clip_and_sum(
                objective, batch, l2_norm_clip=tf.constant(1.0), rows_per_unit=1
            ),
            (x, y, None),
            rows_per_unit=1,
        )[:2]

    def kinds(function, *inputs):
        graph = tf.function(function, autograph=False).get_concrete_function(*inputs)
        found = [op.type for op in graph.graph.get_operations()]
        return [kind for kind in found if any(name in kind for name in BACKWARD)]

    x, y = tf.constant(x), tf.constant(y)
    # What the forward pass holds, and no more: the gradient of the loss alone.
    forward = kinds(lambda x: model(x, training=True), x)
    backward = [kind for kind in kinds(clip, x, y) if kind not in forward]
    assert not [kind for kind in backward if "Conv" in kind or "Relu" in kind]
    assert kinds(clip, x, y).count("While") == forward.count("While")


def test_only_what_trains_is_computed():
    model = PROBLEMS["frozen_kernel"].build()
    with tf.__internal__.FuncGraph("pass").as_default():
        recording, _ = recorded_here(model, tf.ones([2, 3]), 2)
        terms = [
            term
            for watched in recording.watched
            for term in watched.terms_of([tf.zeros_like(t) for t in watched.tensors])
        ]
    names = {term.variable.path for term in terms if term.variable.trainable}
    assert names == {variable.path for variable in model.trainable_variables}
    x, y = np.ones((2, 3), "float32"), np.ones((2, 2), "float32")
    result = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0)
    assert [g.shape for g in result.gradients] == [
        v.shape for v in model.trainable_variables
    ]


class Adapted(layers.Layer):
    def build(self, shape):
        self.base = self.add_weight(shape=(shape[-1], 2), name="base")
        self.low = self.add_weight(shape=(shape[-1], 2), name="low")

    @property
    def kernel(self):
        return self.base + self.low

    def call(self, x):
        return ops.matmul(x, self.kernel)


def names_a_tensor(call):
    def terms(g):
        return [rules.OuterProducts(call.layer.kernel, call.inputs, g)]

    return call.watch(tf.matmul(call.inputs, call.layer.kernel), terms)


def test_a_rule_that_names_a_tensor_instead_of_its_variables_is_refused(monkeypatch):
    monkeypatch.setitem(rules.registry.RULES, Adapted, names_a_tensor)
    model = sequential((3,), Adapted(name="adapted"))
    data = (np.ones((4, 3)), np.ones((4, 2)))
    options = {"l2_norm_clip": 1.0, "engine": "bookkeeping"}
    with pytest.raises(UnsupportedLayerError, match=r"share .* is lost.*`adapted`"):
        tfdp.clipped_gradients(model, "mse", *data, **options)
