"""Layers without a rule: what they may do, and what sends them elsewhere."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.problems import Problem, floats, register, sequential
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.checks.engine import choose
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ROWS = 4


@register
class Leaf(layers.Layer):
    """A layer with one matrix, for those below."""

    def build(self, *_, **__):
        self.kernel = self.add_weight(shape=(2, 2), initializer="orthogonal")


@register
class TwoTensors(Leaf):
    """Takes two tensors with rows, and a number."""

    def call(self, x, scale, temperature=None):
        return ops.matmul(x, self.kernel) * scale / temperature


@register
class TwoOutputs(Leaf):
    """Returns numbers and, beside them, whole numbers."""

    def call(self, x):
        z = ops.tanh(ops.matmul(x, self.kernel))
        return {"z": z, "best": ops.argmax(z, -1)}


@register
class Loop(Leaf):
    """Runs over the positions itself."""

    def call(self, x):
        def body(i, h):
            return i + 1, ops.tanh(ops.matmul(h, self.kernel) + x[:, i])

        start = (0, ops.zeros_like(x[:, 0]))
        return ops.while_loop(lambda i, _: i < x.shape[1], body, start)[1]


@register
class Positions(Leaf):
    """Takes a tensor of which all examples see the whole."""

    def call(self, x, positions):
        scale = ops.cast(positions, x.dtype)[None, :, None]
        return ops.matmul(x, self.kernel) * scale


@register
class Scan(Leaf):
    """Runs over the positions in a way that TensorFlow cannot vectorize."""

    def call(self, x):
        def step(h, x):
            h = ops.tanh(ops.matmul(h, self.kernel) + x)
            return h, h

        start = ops.zeros_like(x[:, 0])
        return ops.scan(step, start, ops.transpose(x, (1, 0, 2)))[0]


@register
class Calling(keras.Model):
    """Calls a leaf in its own way, and a head on what it returns."""

    def __init__(self, leaf, **options):
        super().__init__(**options)
        self.leaf, self.head = leaf, layers.Dense(2)

    def call(self, x):
        if isinstance(self.leaf, TwoTensors):
            hidden = self.leaf(x, x[..., :1], temperature=tf.constant(2, x.dtype))
        else:
            hidden = self.leaf(x, tf.range(3))
        return self.head(hidden)


def two_outputs():
    x = keras.Input((3, 2))
    return keras.Model(x, layers.Dense(2)(TwoOutputs()(x)["z"]))


def problem_of(make_model, targets=(3, 2)):
    return Problem("generic", make_model, floats((3, 2), targets), "mse")


def check(problem, engine):
    batch, clip = problem.batch(ROWS), 0.1
    result = tfdp.clipped_gradients(
        problem.build(),
        problem.loss(),
        *batch[:2],
        l2_norm_clip=clip,
        engine=engine,
    )
    expected, norms = clipped_sum(problem_gradients(problem, batch), clip)
    np.testing.assert_allclose(result.norms, norms, rtol=2e-5)
    assert_all_close(result.gradients, expected, rtol=0, atol=2e-5 * clip * ROWS)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(lambda: Calling(TwoTensors())), id="two_tensors"),
        pytest.param(problem_of(two_outputs), id="two_outputs"),
        pytest.param(
            problem_of(lambda: sequential((3, 2), Loop(), layers.Dense(2)), 2),
            id="loop",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_leaves_of_all_kinds_keep_book_keeping(problem, caplog):
    with caplog.at_level(logging.WARNING, "absl"):
        check(problem, "bookkeeping")
    (line,) = (text for text in caplog.messages if "no rule" in text)
    assert "together 4 numbers" in line
    assert "tfdp.rules.register(" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaf", "rule_broken"),
    [
        (Positions, "of which each row is one example's"),
        (Scan, "that can be vectorized"),
    ],
)
def test_other_leaves_are_refused_by_name_or_vectorized(leaf, rule_broken, caplog):
    def make_model():
        if leaf is Scan:
            return sequential((3, 2), Scan(), layers.Dense(2))
        return Calling(leaf())

    problem = problem_of(make_model, 2 if leaf is Scan else (3, 2))
    objective = Objective.of(problem.build(), problem.loss())
    with pytest.raises(UnsupportedLayerError) as refusal:
        choose("bookkeeping", objective, tuple(problem.batch(ROWS)))
    assert rule_broken in str(refusal.value)
    assert leaf.__name__.lower() in str(refusal.value).lower()
    with caplog.at_level(logging.INFO, "absl"):
        check(problem, "auto")
    assert "tfdp takes" in caplog.text
