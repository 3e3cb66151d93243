"""Layers without a rule: what they may do, and what sends them elsewhere."""

import dataclasses
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import OUTLIER, Uphill, runner
from tests.engine_checks import check as check_engines
from tests.problems import Problem, floats, logits, register, sequential
from tests.problems.building import labelled
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp import rules
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules.generic import vectors

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
            h = tf.nn.silu(ops.matmul(h, self.kernel) + x)
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
def test_leaves_of_all_kinds_keep_book_keeping(problem, caplog, monkeypatch):
    # What else would follow their weights.
    monkeypatch.setattr("tfdp.checks.engine.has_leaves", lambda model: False)
    with caplog.at_level(logging.WARNING, "absl"):
        check(problem, "bookkeeping")
    (line,) = (text for text in caplog.messages if "no rule" in text)
    assert "together 4 numbers" in line
    assert "tfdp.rules.register(" in line


@pytest.mark.slow
def test_other_leaves_are_refused_by_name_or_vectorized(caplog):
    problem = problem_of(lambda: sequential((65, 2), Scan(), layers.Dense(2)), 2)
    problem = dataclasses.replace(problem, make_example=floats((65, 2), 2))
    objective = Objective.of(problem.build(), problem.loss())
    with pytest.raises(UnsupportedLayerError, match=r"that can be vectorized.*`scan`"):
        choose("bookkeeping", objective, tuple(problem.batch(ROWS)))
    with caplog.at_level(logging.INFO, "absl"):
        engine = choose("auto", objective, tuple(problem.batch(ROWS)))
    assert engine.name == "apart"
    assert "tfdp takes" in caplog.text


@pytest.mark.slow
def test_leaves_without_rows_are_followed():
    check(problem_of(lambda: Calling(Positions()), (3, 2)), "bookkeeping")


class Vectors(layers.Layer):
    """A layer with nothing but two vectors, for those below."""

    def build(self, *_, **__):
        self.scale = self.add_weight(shape=(2,), initializer="ones")
        self.offset = self.add_weight(shape=(1, 1, 2))


@register
class RootMeanSquare(Vectors):
    """Normalizes, as the layers of many language models do."""

    def call(self, x):
        x /= ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3)
        return x * ops.exp(self.scale) + self.offset


@register
class ReadsItsMask(Vectors):
    """Sees a mask which nobody gives it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def call(self, x):
        mask = getattr(x, "_keras_mask", None)
        kept = 1 if mask is None else ops.cast(mask, x.dtype)[..., None]
        return x * self.scale + self.offset * kept


@register
class SeveralOutputs(Vectors):
    """Takes two tensors, and returns numbers of two kinds."""

    def call(self, inputs):
        x, y = inputs
        z = x * self.scale + y * self.offset
        return {"best": ops.argmax(z, -1), "all": [z, ops.sum(z, axis=1)]}


@register
class Centred(Vectors):
    """Subtracts the mean of a batch."""

    def call(self, x):
        return (x - ops.mean(x, axis=0)) * self.scale + self.offset


@register
class Hidden(Vectors):
    """Reads a variable in a way that nothing can stand in for."""

    def call(self, x):
        return x * tf.identity(self.scale._value) + self.offset


@register
class Looped(Vectors):
    """Does so in a loop that is neither taken whole nor, as long as it is, unrolled."""

    def call(self, x):
        scale = lambda _, h: tf.nn.silu(h) * tf.identity(self.scale._value)  # noqa: E731
        return ops.fori_loop(0, 65, scale, x) + self.offset


# Of no layer, whose state it would be.
SEEDS = keras.random.SeedGenerator(0)


@register
class Noisy(Vectors):
    """Draws."""

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=SEEDS)
        return (x + noise) * self.scale + self.offset


@register
class NoisyLoop(Noisy):
    """Draws, and multiplies in such a loop."""

    def call(self, x):
        step = lambda _, h: tf.nn.silu(h) * self.scale  # noqa: E731
        return ops.fori_loop(0, 65, step, super().call(x))


def called_twice():
    x = keras.Input((3, 2))
    layer = RootMeanSquare()
    z = layers.Dense(2)(layer(layers.Dense(2)(layer(x))))
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(z)))


def several_outputs():
    x = keras.Input((3, 2))
    z = SeveralOutputs()([x, layers.Dense(2)(x)])["all"]
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(z[0]) + 0 * z[1][:, :1]))


def reads_a_mask():
    return sequential((3, 2), layers.Masking(0.0), ReadsItsMask())


def masked_floats(rng):
    x, y = floats((3, 2), (3, 2))(rng)
    x[1 + rng.integers(2)] = 0
    return x, y


OF_VECTORS = [
    Problem("called_twice", called_twice, labelled((3, 2), 2), logits),
    Problem("several_outputs", several_outputs, labelled((3, 2), 2), logits),
    Problem("mask", reads_a_mask, masked_floats, "mse"),
]


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            problem,
            id=problem.name,
            marks=[] if problem.name == "called_twice" else pytest.mark.slow,
        )
        for problem in OF_VECTORS
    ],
)
def test_vectors_run_once_with_copies(problem):
    engines = [BookkeepingEngine(), GhostEngine()]
    check_engines(problem, runner(problem, engines), OUTLIER)


@pytest.mark.slow
def test_vectors_with_xla():
    run = runner(OF_VECTORS[0], [BookkeepingEngine()], "xla")
    check_engines(OF_VECTORS[0], run, OUTLIER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_exact", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_units_can_have_vectors_of_their_own(is_exact):
    """As `tfdp.losses.BAM` needs, whatever the layer does with them."""
    ascent = Uphill(0.3, 0.7, is_exact=is_exact)
    run = runner(OF_VECTORS[0], [BookkeepingEngine()], ascent=ascent)
    check_engines(OF_VECTORS[0], run, OUTLIER, ascent=ascent)


@pytest.mark.slow
def test_vectors_that_are_followed_instead():
    problem = problem_of(lambda: sequential((3, 2), Hidden(), layers.Dense(2)))
    check(problem, "bookkeeping")


def test_vectors_say_nothing(caplog):
    model = OF_VECTORS[0].build()
    assert rules.find(model.layers[1]) is vectors
    objective = Objective.of(model, OF_VECTORS[0].loss())
    data = tuple(OF_VECTORS[0].batch(ROWS))
    with caplog.at_level(logging.INFO, "absl"):
        assert isinstance(choose("auto", objective, data), BookkeepingEngine)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("leaf", "refusal"),
    [
        (Centred, "rows of a batch meet"),
        *(
            pytest.param(leaf, refusal, marks=pytest.mark.slow)
            for leaf, refusal in (
                (Looped, "must read its variables by their `value`"),
                (NoisyLoop, "must not be random"),
            )
        ),
    ],
)
def test_vectors_that_are_refused(leaf, refusal):
    problem = problem_of(lambda: sequential((3, 2), leaf(), layers.Dense(2)))
    objective = Objective.of(problem.build(), problem.loss())
    with pytest.raises(UnsupportedLayerError, match=refusal):
        choose("bookkeeping", objective, tuple(problem.batch(ROWS)))
