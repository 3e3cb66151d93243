"""The table of rules: every one is tried, and users may add their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import length
from tests.problems import PROBLEMS, register, sequential
from tests.problems.variables import WideDense
from tfdp import _keras, rules
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.losses.objective import Objective
from tfdp.rules.generic import generic

ROWS = 4


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """Forget what a test registers."""
    monkeypatch.setattr(rules.registry, "RULES", dict(rules.registry.RULES))


@register
class Squared(layers.Layer):
    """A layer that multiplies by a matrix and then squares."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, x):
        return ops.square(ops.matmul(x, self.kernel))


@register
class Cubed(Squared):
    """A subclass of a class with a rule."""

    def call(self, x):
        return super().call(x) * ops.matmul(x, self.kernel)


class Calls(list):
    """The rule of `Squared`, which notes what it was called for."""

    def __call__(self, call):
        self.append(type(call.layer))
        kernel, x = call.layer.kernel, call.inputs
        z = call.watch(x @ kernel, lambda g: [tfdp.rules.OuterProducts(kernel, x, g)])
        return ops.square(z)


def check_norms(model, engine):
    """Compare norms with those of the gradients of single rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 2))
    x, y = x.astype("float32"), y.astype("float32")
    result = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1e9, engine=engine)
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[row : row + 1]) - y[row]))
        gradients = tape.gradient(loss, model.trainable_variables)
        np.testing.assert_allclose(result.norms[row], length(gradients), rtol=1e-5)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(BookkeepingEngine(norms="gram"), marks=pytest.mark.smoke),
        GhostEngine(norms="instantiate"),
    ],
    ids=repr,
)
def test_a_registered_rule_is_used(engine):
    rule = Calls()
    rules.register(Squared, rule)
    check_norms(sequential((3,), layers.Dense(3), Squared()), engine)
    assert set(rule) == {Squared}


def test_the_last_rule_that_was_registered_counts():
    first, second = Calls(), Calls()
    rules.register(Squared, first)
    rules.register(Squared, second)
    check_norms(sequential((3,), Squared()), "bookkeeping")
    assert second
    assert not first


@pytest.mark.slow
def test_a_rule_is_for_no_subclass():
    rule = Calls()
    rules.register(Squared, rule)
    model = sequential((3,), Cubed())
    assert rules.find(model.layers[0]) is generic
    check_norms(model, "bookkeeping")
    assert not rule


@register
class Doubled(layers.Dense):
    """A subclass that computes something else than its base."""

    def call(self, x):
        return super().call(2 * x)


@pytest.mark.slow
def test_rules_of_tfdp_are_compared_where_somebody_registers_them():
    rules.register(Doubled, rules.dense.dense)
    model = sequential((3,), Doubled(2))
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="On a few rows"):
        check_norms(model, "bookkeeping")
    rules.register(WideDense, rules.generic.generic)
    check_norms(sequential((3,), WideDense(2)), "bookkeeping")


class Cell(layers.GRUCell):
    """A subclass that does what its base does; its seeds are a state."""


class Recurrent(layers.SimpleRNN):
    """A subclass whose base calls its cell in a loop."""


@pytest.mark.slow
def test_what_is_said_of_subclasses_helps():
    data = np.ones((ROWS, 3, 2), "float32"), np.ones((ROWS, 2), "float32"), None
    in_loop, of_cell, loop, unrolled = (
        Objective.of(sequential((3, 2), layer), "mse")
        for layer in (
            layers.RNN(Cell(2)),
            layers.RNN(Cell(2), unroll=True),
            Recurrent(2),
            Recurrent(2, unroll=True),
        )
    )
    # Where layers see the number of rows, rules are asked; elsewhere weights are followed.
    for objective in (in_loop, loop):
        assert choose("bookkeeping", objective, data).unrolls_loops is None
    advice = r"`tfdp.rules.register\(Cell, tfdp.rules.recurrent.gru\)`"
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match=advice):
        choose("bookkeeping", of_cell, data, ROWS)
    rules.register(Cell, rules.recurrent.gru)
    assert choose("bookkeeping", of_cell, data) == BookkeepingEngine()
    assert choose("bookkeeping", loop, data, ROWS).unrolls_loops is None
    assert choose("bookkeeping", unrolled, data) == BookkeepingEngine()


@pytest.mark.slow
def test_a_subclass_of_a_keras_layer_has_not_its_rule():
    model = sequential((3,), WideDense(4, "tanh"), layers.Dense(2))
    found = [rules.find(layer) for layer in model.layers]
    assert found[0] is generic
    assert found[1] is not generic
    check_norms(model, "bookkeeping")


def test_layers_are_looked_into_if_they_have_no_rule():
    attention = layers.MultiHeadAttention(2, 2)
    attention.build((None, 3, 4), (None, 3, 4))
    assert rules.find(attention) is None
    inner = [layer for _, layer in _keras.layers_by_path(attention)]
    assert all(
        rules.find(layer) for layer in inner if type(layer) is layers.EinsumDense
    )


@pytest.mark.parametrize("wrong", [Squared(), "Dense", None, int, keras.Variable])
def test_only_classes_of_layers_have_rules(wrong):
    with pytest.raises(TypeError, match=r"`layer_class` must .* Received: .* Use "):
        rules.register(wrong, Calls())


@pytest.mark.parametrize("wrong", [None, "generic", 3])
def test_only_functions_are_rules(wrong):
    before = dict(rules.registry.RULES)
    with pytest.raises(TypeError, match=r"`rule` must .* Received: .* Use "):
        rules.register(Squared, wrong)
    assert before == rules.registry.RULES


@pytest.mark.slow
def test_every_rule_has_a_problem():
    # Examples in the documentation may have registered others.
    classes = {
        rules.registry.imported(known) if isinstance(known, str) else known
        for known in rules.registry.RULES
    }
    untried = {
        kind for kind in classes if kind and kind.__module__.startswith("keras.")
    }
    for problem in PROBLEMS.values():
        if untried:
            layers_ = _keras.layers_by_path(problem.make_model())
            untried -= {type(layer) for _, layer in layers_ if layer.built}
    assert untried == set()
