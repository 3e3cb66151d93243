"""A layer, its rule and its kind of term: all of one's own, and in one file."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.engine_checks import BATCHES, Uphill, check, runner
from tests.problems import Problem, register, sequential
from tfdp.engines import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError


@register
class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        return x * self.scale


class Products(tfdp.rules.Term):
    """``sum_t a_t g_t``, number by number."""

    def __init__(self, variable, a, g):
        self.variable, self.a, self.g = variable, a, g

    def factors(self, units):
        return [units.view(each, self.variable.shape) for each in (self.a, self.g)]

    def instantiate(self, units):
        a, g = self.factors(units)
        return tf.reduce_sum(a * g, 1)

    def lengths(self, units):
        a, g = (tf.norm(each, axis=2) for each in self.factors(units))
        return tf.reduce_sum(tf.cast(a * g, tf.float64), 1)

    def weighted_sum(self, factors, weights):
        a, g = factors
        return tf.einsum("utp,utp,u->p", a, g, tf.cast(weights, g.dtype))

    def read(self):
        return [self.a, self.g]


def scaled(call):
    x, scale = call.inputs, call.layer.scale
    return call.watch(x * scale, lambda g: [Products(scale, x, g)], is_linear=True)


PROBLEM = Problem(
    "scaled",
    lambda: sequential((3, 4), layers.Dense(5), Scaled(), layers.Dense(2)),
    lambda rng: (rng.normal(size=(3, 4)), rng.normal(size=(3, 2))),
    "mse",
)
ENGINES = [
    BookkeepingEngine(),
    BookkeepingEngine(norms="gram"),
    GhostEngine(norms="instantiate"),
]
SAM = Uphill(0.3, 0.7, is_exact=False)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """Register the rule, and forget it again."""
    registry = tfdp.rules.registry
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    tfdp.rules.register(Scaled, scaled)


@pytest.mark.parametrize(
    "rows",
    [BATCHES[0], *(pytest.param(rows, marks=pytest.mark.slow) for rows in BATCHES[1:])],
    ids=str,
)
def test_norms_and_sums_are_those_of_single_examples(rows):
    check(PROBLEM, runner(PROBLEM, ENGINES), rows)


@pytest.mark.slow
def test_a_model_trains_by_it():
    private = tfdp.DPModel(PROBLEM.build(), engine="bookkeeping")
    optimizer = tfdp.optimizers.DPSGD(
        learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0
    )
    private.compile(optimizer, "mse")
    before = private.model.layers[1].scale.numpy()
    private.fit(*PROBLEM.batch(5)[:2], batch_size=3, verbose=0)
    assert np.all(private.model.layers[1].scale != before)
    assert "scaled" in private.explain()


@pytest.mark.slow
def test_units_go_uphill_along_it():
    check(PROBLEM, runner(PROBLEM, ENGINES[:1], ascent=SAM), BATCHES[0], ascent=SAM)


@pytest.mark.slow
def test_what_cannot_be_moved_is_not_differentiated_twice():
    with pytest.raises(UnsupportedLayerError, match=r"linear in them.*scale"):
        runner(PROBLEM, ENGINES[:1], ascent=SAM._replace(is_exact=True))(
            PROBLEM.batch(2), 1.0
        )
