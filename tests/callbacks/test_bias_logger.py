"""BiasLogger: the numbers are what they are defined as, and logging changes nothing."""

import csv
import math

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tests.problems import PROBLEMS, precision, scale_outlier
from tests.reference import clipped_sum, problem_gradients
from tfdp.callbacks import BiasLogger
from tfdp.training.batch_clipper import BatchClipper

NAMES = (
    "bias_magnitude",
    "bias_scale",
    "bias_direction",
    "clip_cosine",
    "clipped_fraction",
    "norm_q10",
    "norm_q50",
    "norm_q90",
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Training without noise",
    "ignore:The privacy noise is reproducible",
    "ignore:Draws made with a `seed`",
)


def definition(gradients, clip, units=None):
    """What is logged, from per-example gradients, with NumPy in float64."""
    clipped, norms = clipped_sum(gradients, clip)
    whole, _ = clipped_sum(gradients, 1e300)
    units = units or len(norms)
    g_clip, g = (
        np.concatenate([part.ravel() for part in parts]) / units
        for parts in (clipped, whole)
    )
    scale = g_clip @ g / (g @ g)
    rest = g_clip - scale * g
    return dict(
        zip(
            NAMES,
            [
                np.linalg.norm(g_clip - g),
                scale,
                np.linalg.norm(rest),
                g_clip @ g / np.linalg.norm(g) / np.linalg.norm(g_clip),
                np.mean(norms > clip),
                *np.quantile(norms, [0.1, 0.5, 0.9], method="inverted_cdf"),
            ],
            strict=True,
        )
    )


def logged(history, prefix="nonprivate_"):
    return {name: history.history[prefix + name][-1] for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen_kernel", "positions_weighted"])
def test_is_what_it_is_defined_as(name):
    problem = PROBLEMS[name]
    batch = problem.batch(6, "float64")
    scaled = scale_outlier(batch, 2, 10)
    if scaled.sample_weight is None:  # Keras does not weigh rows of many positions.
        batch = scaled
    gradients = problem_gradients(problem, batch)
    _, norms = clipped_sum(gradients, 1.0)
    clip = float(np.median(norms)) * 0.9
    assert 0 < clip < math.inf
    with precision("float64"):
        private = tfdp.DPModel(problem.build("float64"), sampling="shuffle")
        private.compile(
            tfdp.optimizers.DPSGD(0.0, l2_norm_clip=clip, noise_multiplier=0.0),
            problem.loss("float64"),
            loss_weights=problem.loss_weights,
            run_eagerly=True,
        )
        history = private.fit(
            batch.x,
            batch.y,
            sample_weight=batch.sample_weight,
            batch_size=6,
            callbacks=[BiasLogger()],
            verbose=0,
        )
    found, expected = logged(history), definition(gradients, clip)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-7, abs=1e-7 * clip)


def private(l2_norm_clip=0.5, *, dropout=0.0, noise_multiplier=0.0, **options):
    model = keras.Sequential([
        keras.Input((4,)),
        layers.Dense(6, "tanh", kernel_initializer=keras.initializers.HeNormal(seed=1)),
        layers.Dropout(dropout, seed=3),
        layers.Dense(1, kernel_initializer=keras.initializers.HeNormal(seed=2)),
    ])
    engine = options.pop("engine", "auto")
    wrapped = tfdp.DPModel(
        model,
        engine=engine,
        sampling="shuffle",
        physical_batch_size=options.pop("physical_batch_size", None),
    )
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            noise_seed=7,
            **{k: options.pop(k) for k in ("num_microbatches",) if k in options},
        ),
        "mse",
        **options,
    )
    return wrapped


def data(rows=20):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    x[0] *= 1000
    return x, rng.normal(size=(rows, 1)).astype("float32")


def fit(model, *callbacks, rows=20, batch_size=10, epochs=1):
    return model.fit(
        *data(rows),
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[*callbacks],
        verbose=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("bookkeeping", {"steps_per_execution": 2}),
        ("ghost", {"physical_batch_size": 4, "jit_compile": True}),
        ("vectorized", {"run_eagerly": True}),
    ],
    ids=str,
)
def test_nothing_clipped_is_no_bias(engine, options):
    """The same masks in both passes, or there would be a difference."""
    model = private(1e15, dropout=0.5, engine=engine, **options)
    found = logged(fit(model, BiasLogger(every=1), epochs=2))
    np.testing.assert_allclose(
        [found[name] for name in NAMES[:5]], [0, 1, 0, 1, 0], atol=1e-6
    )
    assert 0 < found["norm_q10"] <= found["norm_q50"] <= found["norm_q90"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "public_data"),
    [("bookkeeping", None), ("vectorized", data(3))],
    ids=["private", "public"],
)
def test_training_is_what_it_is_without(engine, public_data):
    weights = []
    for callbacks in ([], [BiasLogger(every=2, public_data=public_data)]):
        model = private(dropout=0.5, noise_multiplier=1.0, engine=engine)
        fit(model, *callbacks, epochs=3)
        weights.append(model.get_weights())
        assert len(model.ledger.segments) == 1
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


class Anneal(layers.Layer):
    """Counts its calls in training, and changes with them."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs * (1 + 0.1 * self.calls)


@pytest.mark.slow
def test_other_state_of_layers_is_put_back():
    counts = []
    for callbacks in ([], [BiasLogger(every=1)]):
        model = keras.Sequential([keras.Input((4,)), Anneal(), layers.Dense(1)])
        wrapped = tfdp.DPModel(model, sampling="shuffle")
        wrapped.compile(
            tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1e15, noise_multiplier=0.0), "mse"
        )
        history = fit(wrapped, *callbacks, epochs=2)
        counts.append(float(model.layers[0].calls))
    assert counts[0] == counts[1] > 0
    assert logged(history)["bias_magnitude"] == 0


@pytest.mark.slow
def test_steps_that_are_not_logged_cost_nothing(monkeypatch):
    """Values stay until the next ones; the first step of every `fit` is logged."""
    model, calls, seen = private(run_eagerly=True), [], []
    clip = BatchClipper._on_one
    monkeypatch.setattr(
        BatchClipper, "_on_one", lambda *args: (calls.append(1), clip(*args))[1]
    )

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["nonprivate_bias_magnitude"])

    logger = BiasLogger(every=4)
    for _ in range(2):
        fit(model, logger, Notes(), batch_size=2)
    assert len(calls) == 2 * (10 + 3)
    assert len(set(seen)) == 6
    for first in (0, 10):
        of_fit = seen[first : first + 10]
        assert of_fit[0] == of_fit[3] != of_fit[4] == of_fit[7] != of_fit[8]


@pytest.mark.slow
def test_no_slope_at_all():
    model = private()
    x = np.zeros((20, 4), "float32")
    history = model.fit(
        x,
        model.predict(x, verbose=0),
        batch_size=20,
        callbacks=[BiasLogger()],
        verbose=0,
    )
    found = list(logged(history).values())
    assert found == pytest.approx([0, 1, 0, 1, 0, 0, 0, 0], abs=1e-15)


@pytest.mark.slow
def test_rows_that_are_not_finite_are_in_no_mean():
    model, (x, y) = private(), data()
    x[0], x[1] = np.nan, np.inf
    history = model.fit(x, y, batch_size=20, callbacks=[BiasLogger()], verbose=0)
    found = logged(history)
    assert found["norm_q50"] < math.inf
    assert all(math.isfinite(found[name]) for name in NAMES)


@pytest.mark.slow
def test_groups_of_examples_are_the_units():
    found = logged(fit(private(num_microbatches=1), BiasLogger(), batch_size=20))
    # One unit: clipped or not, and what is left has its direction.
    assert found["clipped_fraction"] == 1
    assert found["clip_cosine"] == pytest.approx(1, abs=1e-6)
    assert found["norm_q10"] == found["norm_q90"]
    assert found["bias_magnitude"] == pytest.approx(found["norm_q50"] - 0.5, rel=1e-5)


@pytest.mark.slow
def test_empty_batches_are_not_logged():
    model = tfdp.DPModel(private().model)
    model.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=0.5, noise_multiplier=1.0), "mse"
    )
    x, y = data(200)
    batches = tfdp.data.PoissonDataset(x, y, expected_batch_size=1, seed=1)
    history = model.fit(batches, callbacks=[BiasLogger(every=1)], verbose=0)
    assert all(math.isfinite(value) for value in logged(history).values())


class TestPublicData:
    @pytest.mark.slow
    def test_is_that_of_the_public_rows(self):
        """The same rows as public ones and as the private batch."""
        options = {"physical_batch_size": 4}
        expected = logged(fit(private(**options), BiasLogger(), batch_size=20))
        history = fit(
            private(**options), BiasLogger(public_data=data(20)), rows=4, batch_size=2
        )
        names = {each for each in history.history if each.startswith(("pu", "nonp"))}
        assert names == {f"public_{name}" for name in NAMES}
        found = logged(history, "public_")
        for name in NAMES:
            assert found[name] == pytest.approx(expected[name], rel=1e-5)

    @pytest.mark.parametrize(
        "bad",
        [
            [1, 2],
            (),
            ([1.0], [2.0]),
            (np.ones(3),),
            (np.ones((0, 4)), np.ones((0, 1))),
            "data",
        ],
    )
    def test_bad_data_are_refused(self, bad):
        with pytest.raises(ValueError, match=r"`public_data` must .*Received"):
            BiasLogger(public_data=bad)


@pytest.mark.slow
def test_loggers_see_all_of_it(tmp_path):
    fit(
        private(),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        BiasLogger(),
        epochs=2,
    )
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for name in NAMES:
        assert all(math.isfinite(float(row[f"nonprivate_{name}"])) for row in rows)
    events = b"".join(path.read_bytes() for path in tmp_path.glob("board/**/events*"))
    assert b"nonprivate_bias_magnitude" in events


@pytest.mark.parametrize("bad", [0, -1, 1.5, math.nan])
def test_bad_steps_are_refused(bad):
    with pytest.raises(ValueError, match=r"`every` must .* Received: every="):
        BiasLogger(every=bad)
