"""The graph of the proof is the graph that runs, where it is what the step would trace."""

import contextlib
import dataclasses
import itertools
import queue

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.reference import clipped_sum
from tfdp.engines import BookkeepingEngine, GhostEngine
from tfdp.engines.traced import TracedPass
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore:Training without noise")

ROWS = 12


def model():
    return keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4, activation="tanh"),
        layers.Dropout(0.5),
        layers.Lambda(noted),
        layers.Dense(2),
    ])


# Of Python's own: what it holds is no reason to prove a model again.
CALLS = queue.SimpleQueue()


def calls():
    """Return the shapes of the calls that were noted since this was asked."""
    return [CALLS.get() for _ in range(CALLS.qsize())]


def noted(x):
    CALLS.put(x.shape)
    return x


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    x[1] *= 1e4
    return x, rng.normal(size=(ROWS, 2)).astype("float32")


def private(inner, loss="mse", optimizer=None, *, expected_batch_size=None, **options):
    wrapped = tfdp.DPModel(inner, **options)
    wrapped.compile(
        tfdp.optimizers.DPOptimizer(
            optimizer or keras.optimizers.SGD(1.0),
            l2_norm_clip=0.5,
            noise_multiplier=0.0,
            expected_batch_size=expected_batch_size,
        ),
        loss,
    )
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "ghost"},
        {"physical_batch_size": 5, "optimizer": keras.optimizers.Adam()},
    ],
    ids=["whole", "ghost", "passes"],
)
def test_a_model_is_traced_once(options):
    wrapped = private(model(), **options)
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    assert len(calls()) == 1


SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.2])


@pytest.mark.parametrize("radius", [0.1, SCHEDULE], ids=["number", "schedule"])
def test_uphill_too_there_and_here(radius):
    wrapped = private(model(), tfdp.losses.BAM("mse", radius=radius))
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    assert len(calls()) == 2


@pytest.mark.slow
def test_derivatives_are_traced_once_for_their_number_of_rows():
    loss = tfdp.losses.BAM("mse", ascent="exact")
    wrapped = private(model(), loss, expected_batch_size=ROWS)
    x, y = data()

    def traced(rows):
        calls()
        wrapped.train_on_batch(x[:rows], y[:rows])
        return [shape[0] for shape in calls()]

    assert [rows for rows in traced(ROWS) if rows] == [ROWS, ROWS]
    assert ROWS in [each.signature.x.shape[0] for each in wrapped._checked.passes]
    # TensorFlow takes a second number for any: that pass was kept as well.
    assert traced(4) == []
    assert traced(ROWS) == traced(4) == []


class Counting(layers.Layer):
    """Asks how many rows there are, which is one where each is taken by itself."""

    def call(self, x):
        return x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


@pytest.mark.slow
def test_units_that_are_taken_apart_run_in_the_graph_that_was_tried():
    """Variables of the optimizer are made before: a graph that makes them is another."""
    inner = keras.Sequential([
        keras.Input((3,)),
        Counting(),
        layers.Lambda(noted),
        layers.Dense(2),
    ])
    wrapped = private(inner, optimizer=keras.optimizers.Adam())
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    taken_apart = sum(shape[0] == 1 for shape in calls())
    # One looks at a single row to tell the rules of the layers, and the other is the map.
    assert (wrapped._checked.engine.name, taken_apart) == ("apart", 2)
    assert wrapped.optimizer.iterations.numpy() == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 5}])
def test_losses_that_change_are_traced_anew(options):
    """Each of them is the one that is clipped, also after `compile`."""
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    x, y = data()
    for loss in ("mse", "mae"):
        wrapped = private(inner, loss, **options)
        rows = []
        for row in range(ROWS):
            with tf.GradientTape() as tape:
                y_pred = inner(x[row : row + 1])
                value = keras.losses.get(loss)(y[row : row + 1], y_pred)
            rows.append(tape.gradient(value, inner.trainable_variables))
        stacked = [np.stack(of_variable) for of_variable in zip(*rows, strict=True)]
        expected, _ = clipped_sum(stacked, 0.5)
        before = inner.get_weights()
        wrapped.fit(x, y, batch_size=ROWS, verbose=0)
        moved = [a - b for a, b in zip(before, inner.get_weights(), strict=True)]
        for each, total in zip(moved, expected, strict=True):
            np.testing.assert_allclose(each * ROWS, total, atol=1e-4)


def rows_like(rows, length=3, dtype=tf.float32, sample_weight=None):
    return Batch(
        tf.TensorSpec([rows, length], dtype),
        tf.TensorSpec([rows], tf.int32),
        sample_weight and tf.TensorSpec([rows]),
        tf.TensorSpec([rows], tf.bool),
    )


def test_a_pass_fits_what_it_was_traced_for():
    inner = model()
    known, other = (Objective.of(inner, loss) for loss in ("mse", "mae"))
    engine = BookkeepingEngine()

    def fits(engine=engine, objective=known, batch=rows_like(ROWS), units=1, to=None):  # noqa: B008
        traced = TracedPass(BookkeepingEngine(), known, to or rows_like(None), 1, None)
        return traced.fits(engine, objective, batch, units)

    assert fits()
    assert fits(batch=rows_like(None))
    assert fits(objective=dataclasses.replace(known))
    assert not fits(objective=dataclasses.replace(known, views=2))
    assert not fits(objective=other)
    assert not fits(GhostEngine())
    assert not fits(units=2)
    assert not fits(units=tf.constant(1))
    for of_another in ({"length": 4}, {"dtype": tf.float64}, {"sample_weight": True}):
        assert not fits(batch=rows_like(ROWS, **of_another))
        assert not fits(to=rows_like(None, **of_another))
    assert fits(to=rows_like(None, length=None))
    assert not fits(batch=rows_like(ROWS, length=None))
    assert fits(to=rows_like(ROWS))
    for rows in (None, ROWS + 1):
        assert not fits(batch=rows_like(rows), to=rows_like(ROWS))


# Nothing that a layer, a loss or a function has: nobody sees what is in it.
MEETING = queue.SimpleQueue()


@pytest.fixture
def rows_meet():
    """Return what lets rows meet from then on, in all that is traced later."""
    yield lambda: MEETING.put(True)
    while not MEETING.empty():
        MEETING.get()


class MeetingLater(layers.Layer):
    """Lets rows meet from some time on."""

    def call(self, x):
        return x + 0.0 * x if MEETING.empty() else x * keras.ops.sum(x, 0)


def meeting_later(layer=None):
    keras.utils.set_random_seed(1)
    layer = layer or MeetingLater()
    return keras.Sequential([keras.Input((3,)), layer, layers.Dense(2)])


def effect_of_the_first(clip):
    """Return how far one row moves what comes out, over the clip norm."""
    x, y = data()
    x[0] *= 1e3
    whole = clip(x, y)
    weight = np.ones(ROWS, np.float32)
    weight[0] = 0.0
    without = clip(x * weight[:, None], y, weight)
    moved = [a - b for a, b in zip(whole, without, strict=True)]
    return np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in moved))


MARKED = np.zeros(ROWS, bool)
LOOPS = {
    "eager": {},
    "ghost": {"engine": "ghost"},
    "vectorized": {"engine": "vectorized"},
    "apart": {"engine": "apart"},
    "passes": {"physical_batch_size": 5},
    "microbatches": {"num_microbatches": 6},
    "users": {"examples_per_user": 2},
    "padding": {"is_padding": MARKED},
    "uphill": {"loss": tfdp.losses.BAM("mse", radius=0.1)},
    "exact": {"loss": tfdp.losses.BAM("mse", ascent="exact")},
}
WAYS = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function, autograph=False),
    "xla": lambda function: tf.function(function, autograph=False, jit_compile=True),
}

QUICK = {
    (True, "eager", "eager"),
    (False, "eager", "graph"),
    (False, "microbatches", "eager"),
}


# What XLA compiles is what a graph runs: these stand for all others.
COMPILED = {"eager", "passes", "vectorized"}


def loops_and_ways():
    """Every loop in every way, of which half are one more: known or not, in turns."""
    for place, each in enumerate(itertools.product(LOOPS, WAYS)):
        loop, way = each
        for is_known in (True, False):
            is_one_more = is_known == bool(place % 2)
            is_one_more |= way == "xla" and loop not in COMPILED
            marks = pytest.mark.exhaustive if is_one_more else pytest.mark.slow
            case = is_known, *each
            yield pytest.param(*case, marks=() if case in QUICK else marks)


@pytest.mark.parametrize(("is_known", "name", "way"), list(loops_and_ways()))
def test_loops_run_what_was_proven(name, way, is_known, rows_meet):
    """Whatever code has become since then."""
    inner = meeting_later()
    options = {"l2_norm_clip": 1.0, "loss": "mse", **LOOPS[name]}

    def clip(x, y, sample_weight):
        return tfdp.clipped_gradients(
            inner, x=x, y=y, sample_weight=sample_weight, **options
        ).gradients

    x, y = data()
    # What is known was proven for such rows, and what is not for others.
    ones = np.ones(ROWS, np.float32) if is_known else None
    WAYS[way](clip)(x, y, ones)
    rows_meet()

    def once_more(x, y, sample_weight=np.ones(ROWS, np.float32)):  # noqa: B008
        return [each.numpy() for each in WAYS[way](clip)(x, y, sample_weight)]

    # One microbatch may become another.
    bound = 2.0 if name == "microbatches" else 1.0
    try:
        effect = effect_of_the_first(once_more)
    except tfdp.errors.UnsupportedLayerError:
        assert not is_known or way == "xla" or name in {"microbatches", "users"}
    else:
        assert 0 < effect < bound * 1.0001


class ByNames(keras.Model):
    """Lets rows meet that come by names."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        if isinstance(inputs, dict):
            inputs = [each - keras.ops.mean(each, 0) for each in inputs.values()]
        return self.dense(keras.ops.concatenate(inputs, axis=1))


def test_inputs_in_another_nest_are_proven_anew():
    x, y = data()
    inner = ByNames()
    inner((x, x))

    def clip(x):
        tfdp.clipped_gradients(inner, "mse", x, y, l2_norm_clip=1.0)

    clip((x, x))
    # A list is no tuple.
    clip([x, x])
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        clip({"a": x, "b": x})


@pytest.mark.parametrize(
    "num_microbatches", [pytest.param(None, marks=pytest.mark.slow), 4]
)
def test_a_replica_clips_in_a_graph_of_ones_own(num_microbatches):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        inner = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    x, y = data()
    options = {"l2_norm_clip": 1.0, "num_microbatches": num_microbatches}

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])],
        autograph=False,
    )
    def clip(x, y):
        def of_replica(x, y):
            return tfdp.clipped_gradients(inner, "mse", x, y, **options).gradients

        return strategy.run(of_replica, (x, y))

    expected = tfdp.clipped_gradients(inner, "mse", x, y, **options).gradients
    for one, other in zip(clip(x, y), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


FITS = {
    "graph": ({}, {}),
    "eager": ({}, {"run_eagerly": True}),
    "xla": ({}, {"jit_compile": True}),
    "passes": ({"physical_batch_size": 5}, {}),
    "vectorized": ({"engine": "vectorized"}, {}),
    "views": ({"augmentation": layers.Identity(), "augmentation_multiplicity": 2}, {}),
    "eager_views": (
        {"augmentation": layers.Identity(), "augmentation_multiplicity": 2},
        {"run_eagerly": True},
    ),
    "other_views": (
        {"augmentation": MeetingLater(), "augmentation_multiplicity": 2},
        {},
    ),
    "replica": ({}, {}),
    "eager_replica": ({}, {"run_eagerly": True}),
}


# What is proven of these is traced once more, and proven once more before.
REFUSED = {"xla", "vectorized", "replica", "eager_replica"} | {
    name for name in FITS if "views" in name
}


@pytest.mark.parametrize("name", FITS)
def test_fit_runs_what_was_proven(name, rows_meet):
    """Also if code has become another between the check and the first step."""
    wrap, compiled = FITS[name]
    scope = contextlib.nullcontext
    if "replica" in name:
        scope = tf.distribute.MirroredStrategy(["/cpu:0"]).scope
    with scope():
        inner = meeting_later(layers.Identity() if name == "other_views" else None)
    weights = inner.get_weights()

    def clip(x, y, sample_weight=np.ones(ROWS, np.float32)):  # noqa: B008
        with scope():
            wrapped = tfdp.DPModel(inner, sampling="shuffle", **wrap)
            optimizer = tfdp.optimizers.DPSGD(
                1.0, l2_norm_clip=1.0, noise_multiplier=0.0
            )
            wrapped.compile(optimizer, "mse", **compiled)
        inner.set_weights(weights)
        begin = keras.callbacks.LambdaCallback(on_train_begin=lambda _: rows_meet())
        while not MEETING.empty():
            MEETING.get()
        wrapped.fit(x, y, ROWS, 1, 0, [begin], sample_weight=sample_weight)
        return [
            (a - b) * ROWS for a, b in zip(inner.get_weights(), weights, strict=True)
        ]

    try:
        effect = effect_of_the_first(clip)
    except tfdp.errors.UnsupportedLayerError:
        assert name in REFUSED
    else:
        assert name not in REFUSED
        assert 0 < effect < 1.0001


@pytest.mark.slow
def test_masks_differ_between_steps():
    """What is drawn in the pass goes on from step to step."""
    inner = keras.Sequential([
        keras.Input((200,)),
        layers.Dropout(0.5, seed=1),
        layers.Dense(1, use_bias=False, kernel_initializer="ones", trainable=True),
    ])
    wrapped = private(inner)
    moves = []
    for _ in range(2):
        before = inner.get_weights()[0]
        wrapped.fit(np.ones((1, 200)), np.zeros((1, 1)), batch_size=1, verbose=0)
        moves.append(before != inner.get_weights()[0])
    assert (moves[0] != moves[1]).mean() > 0.3
