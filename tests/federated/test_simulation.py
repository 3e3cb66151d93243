"""Rounds of virtual clients equal clients taken one by one."""

import csv
import functools
import math
import shutil
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests import forks
from tests.reference import per_example_gradients
from tfdp.accounting.local import TrustedQueries
from tfdp.callbacks import AdaptiveMedianClip, AdaptiveQuantileClip, ClipNormScheduler
from tfdp.federated import Simulation, VirtualClients
from tfdp.optimizers import DPSGD

CLIENTS = VirtualClients(200, clients_per_round=6, examples_per_client=5, seed=4)
DELTA = 1e-5
CLIP, STEP = 4.5, 2**-6
NOISELESS = pytest.mark.filterwarnings("ignore:Training without noise")
SEEDED = pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")


def squares(y_true, y_pred):
    return ops.sum(ops.square(y_pred - y_true), axis=-1)


def total(y_true, y_pred):
    return ops.sum(y_pred, axis=-1)


def dense_model(dtype="float64", **options):
    return keras.Sequential([
        keras.Input((3,), dtype=dtype),
        layers.Dense(4, activation="tanh", dtype=dtype),
        layers.Dense(2, dtype=dtype, **options),
    ])


def blank_model(size=1):
    """A model whose gradients do not depend on its weights."""
    return keras.Sequential([
        keras.Input((1,)),
        layers.Dense(size, use_bias=False, kernel_initializer="zeros"),
    ])


def examples(rng, rows=30):
    """Rows of which one is an outlier that many clients have."""
    x = rng.normal(size=(rows, 3))
    x[0] *= 1e6
    return x, rng.normal(size=(rows, 2))


def simulated(model, x, y, *, loss=squares, **options):
    options = {
        "clients": CLIENTS,
        "optimizer": keras.optimizers.SGD(STEP),
        "l2_norm_clip": CLIP,
        "noise_multiplier": 0.0,
    } | options
    return Simulation(model, loss, x, y, **options)


def norm_of(gradients):
    return math.sqrt(sum((gradient**2).sum() for gradient in gradients))


@functools.cache
def one_by_one():
    """Data, a model's weights at first, and norms and weights after each round.

    A client whose gradient is not finite counts as zero.
    """
    x, y = examples(np.random.default_rng(0))
    x[1], x[2] = math.nan, math.inf
    keras.utils.set_random_seed(0)
    model = dense_model()
    weights, rounds = model.get_weights(), []
    for number in range(2):
        replies, norms = [], []
        for client in CLIENTS.of_round(number):
            rows = CLIENTS.rows(np.array([client]), len(x))
            gradients = per_example_gradients(model, squares, x[rows], y[rows])
            means = [gradient.mean(0) for gradient in gradients]
            norms.append(norm_of(means))
            factor = min(1.0, CLIP / norms[-1])
            is_finite = math.isfinite(norms[-1])
            replies.append([
                factor * mean if is_finite else np.zeros_like(mean) for mean in means
            ])
        assert np.nanmin(norms) < CLIP < np.nanmax(norms)
        assert np.isnan(norms).any()
        for place, variable in enumerate(model.trainable_variables):
            mean = np.mean([reply[place] for reply in replies], axis=0)
            variable.assign(variable.numpy() - STEP * mean)
        rounds.append((np.array(norms), model.get_weights()))
    return x, y, weights, rounds


def assert_same_weights(found, expected, rtol=1e-7, atol=1e-10):
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_allclose(here, there, rtol=rtol, atol=atol)


# -------------------------------------------------------------------- what a round is


@NOISELESS
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"engine": "bookkeeping", "physical_batch_size": 10, "noise": "per_client"},
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            {"engine": "vectorized", "physical_batch_size": 20, "jit_compile": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_equals_clients_one_by_one(options):
    """Uniform: a client that is clipped counts as much as one that is not."""
    x, y, weights, rounds = one_by_one()
    model = dense_model()
    model.set_weights(weights)
    simulation = simulated(model, x, y, **options)
    for number, (norms, expected) in enumerate(rounds):
        simulation.run(number + 1, verbose=0)
        np.testing.assert_allclose(simulation.nonprivate_norms, norms, rtol=1e-6)
        assert_same_weights(model.get_weights(), expected)


def test_eagerly_without_noise_and_with_weight_regularizers():
    """The gradient of regularizers is the server's, and not clipped."""
    x, y, weights, [(norms, expected), *_] = one_by_one()
    model = dense_model(kernel_regularizer=keras.regularizers.L2(50.0))
    model.set_weights(weights)
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        simulation = simulated(model, x, y)
    tf.config.run_functions_eagerly(True)
    try:
        simulation.run(1, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(simulation.nonprivate_norms, norms, rtol=1e-6)
    found, expected = model.get_weights(), list(expected)
    kernel = expected.pop(-2) - STEP * 100 * weights[-2]
    np.testing.assert_allclose(found.pop(-2), kernel, rtol=1e-6)
    assert_same_weights(found, expected)
    assert simulation.local_epsilon(1e-7) == math.inf
    assert "not differentially private" in simulation.privacy_statement(1e-7)


# -------------------------------------------------------------------------------- noise


def rounds_of_noise(noise):
    """What rounds in which all gradients are zero do to the weights, over C."""
    model, clips = blank_model(20_000), [0.3, 0.1]
    simulation = Simulation(
        model,
        total,
        np.zeros((10, 1), "float32"),
        np.zeros((10, 1), "float32"),
        clients=VirtualClients(1000, 40, 5),
        optimizer=keras.optimizers.SGD(1.0),
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        clip_policy=ClipNormScheduler(lambda number: clips[number]),
        noise=noise,
    )
    steps, before = [], model.get_weights()[0]
    for number, clip in enumerate(clips):
        simulation.run(number + 1, verbose=0)
        after = model.get_weights()[0]
        steps.append((after - before).ravel() / clip)
        before = after
    statement = " ".join(simulation.privacy_statement(1e-7).split())
    assert "not purely local" not in statement
    assert "a simulation: one process had the examples of all clients" in statement
    return steps


@pytest.mark.slow
@pytest.mark.statistical
def test_every_client_s_noise_is_in_the_average_however_it_is_drawn():
    """It follows the schedule of C."""
    quantiles, found = [0.02, 0.16, 0.5, 0.84, 0.98], []
    scale = 2.0 / math.sqrt(40)
    for noise in ("aggregate", "per_client"):
        first, second = rounds_of_noise(noise)
        for step in (first, second):
            # 20,000 draws: the standard error is half a percent.
            assert step.std() == pytest.approx(scale, rel=0.02)
            assert abs(step.mean()) < 4 * scale / math.sqrt(20_000)
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(20_000)
        found.append(np.quantile(np.concatenate([first, second]), quantiles))
    # Within five standard errors: of 40,000 draws, that of the outermost quantiles is
    # sqrt(0.02 * 0.98 / 40,000) over the density there, 0.048.
    error = math.sqrt(2 * 0.02 * 0.98 / 40_000) / 0.048 * scale
    np.testing.assert_allclose(found[0], found[1], atol=5 * error)


@pytest.mark.slow
def test_seeds_of_others_do_not_decide_the_noise():
    steps = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        steps.append(rounds_of_noise("aggregate")[0])
    assert (steps[0] != steps[1]).all()


# --------------------------------------------------------------------------- clip sizes


def with_norms(norms, policy, *, clip=1.0, clients=None, **options):
    """A simulation in which row i has a gradient of norm ``norms[i]``."""
    norms = np.asarray(norms, "float32")[:, None]
    return simulated(
        blank_model(),
        norms,
        np.zeros_like(norms),
        loss=total,
        clients=clients or VirtualClients(10_000, 100, 1),
        l2_norm_clip=clip,
        clip_policy=policy,
        noise_multiplier=1.0,
        **options,
    )


def clips(simulation, rounds):
    """C of each round."""
    return simulation.run(rounds, evaluate_every=1, verbose=0)["l2_norm_clip"]


EDGES = [0, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3]


@pytest.mark.slow
def test_median_takes_the_middle_of_its_bin_and_stays():
    policy = AdaptiveMedianClip(EDGES, histogram_noise_multiplier=10, every=3)
    clients = VirtualClients(10_000, 200, 1)
    simulation = with_norms([5.0], policy, clip=0.05, clients=clients)

    def statement():
        return " ".join(simulation.privacy_statement(1e-7).split())

    simulation.run(2, verbose=0)
    assert "not purely local" in statement()
    assert "(0.000, 1e-07)" in statement()
    # After the rounds 2 to 8.
    np.testing.assert_allclose(clips(simulation, 8), [0.05] * 2 + [0.09375] * 5)
    assert "(0.447, 1e-07)" in statement()


# --------------------------------------------------------------- participations, accounts


def test_nobody_takes_part_more_often_than_allowed():
    data = np.zeros((10, 1), "float32")
    simulation = simulated(
        blank_model(),
        data,
        data,
        loss=total,
        noise_multiplier=1.404227,
        clients=VirtualClients(17, 8, 5),
        max_participations=2,
    )
    assert simulation.clients.rounds_per_pass == 2
    with pytest.raises(ValueError, match=r"rounds=5.*Use `run\(4\)`"):
        simulation.run(5, verbose=0)
    assert simulation.rounds == 0
    assert simulation.local_epsilon(1e-7) == 0
    simulation.run(2, verbose=0)
    assert simulation.local_epsilon(1e-7) == pytest.approx(8.0, abs=1e-3)
    simulation.run(3, verbose=0)
    assert simulation.local_epsilon(1e-7) == pytest.approx(12.0, abs=0.05)
    assert "(12.009, 1e-07)-locally" in simulation.privacy_statement(1e-7)


@pytest.mark.slow
@pytest.mark.statistical
def test_a_quantile_s_queries_are_noised_and_counted():
    """Gaussians of multiplier 10, whatever is changed later."""
    # So many norms do not exceed C that nothing is cut off.
    norms = np.array([0.0] * 40 + [1e9] * 60)
    policy = AdaptiveQuantileClip(0.5)
    clients = VirtualClients(200, 200, 1)
    simulation = with_norms(norms, policy, clients=clients, max_participations=200)
    for name in ("noise_multiplier", "clients", "l2_norm_clip", "rounds"):
        with pytest.raises(AttributeError):
            setattr(simulation, name, 100)
    policy.query_noise = 1000.0
    noise = []
    for number in range(200):
        before = simulation.l2_norm_clip
        simulation.run(number + 1, verbose=0)
        share = 0.5 - math.log(simulation.l2_norm_clip / before) / 0.2
        true = np.mean(simulation.nonprivate_norms <= before)
        assert 0.2 < true < 0.45
        noise.append(200 * (share - true))
        if number in {0, 2}:
            text = " ".join(simulation.privacy_statement(1e-7).split())
            queries = TrustedQueries("", 10.0, 2.0, number + 1)
            expected = queries.epsilon(1e-7, "add_or_remove_one")
            assert "not purely local" in text
            assert f"the answers are ({expected:.3f}, 1e-07)" in text
    assert np.std(noise) == pytest.approx(5.0, rel=0.2)
    assert abs(np.mean(noise)) < 5 * 5.0 / math.sqrt(200)


def test_an_interrupted_round_counts_and_its_noise_is_not_used_again(monkeypatch):
    simulation = with_norms([1.0], None)

    def interrupted(*arguments):
        seen.append(arguments)
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr(simulation, "_round", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            simulation.run(5, verbose=0)
    assert simulation.rounds == 2
    assert [int(number) for *_, number in seen] == [0, 1]


# ------------------------------------------------------------- histories, folders, kills


@pytest.mark.slow
@NOISELESS
def test_history(rng, tmp_path):
    x, y = examples(rng)
    model = dense_model()
    simulation = simulated(model, x, y, metrics=["mae"])
    simulation.run(1, directory=tmp_path, verbose=0)
    history = simulation.run(
        5,
        validation_data=(x[1:], y[1:]),
        evaluate_every=2,
        directory=tmp_path,
        verbose=0,
    )
    assert history["round"] == [1, 2, 4, 5]
    losses = np.square(model.predict(x[1:], verbose=0) - y[1:]).sum(-1)
    assert history["val_loss"][-1] == pytest.approx(losses.mean(), rel=1e-5)
    assert set(history) == {
        "round",
        "l2_norm_clip",
        "val_loss",
        "val_mae",
        "nonprivate_mean_norm",
        "nonprivate_clipped_share",
    }
    history = simulation.run(6, directory=tmp_path, verbose=0)
    assert np.isnan(history["val_loss"]).tolist() == [True, *3 * [False], True]
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "4", "5", "6"]
    assert float(rows[2]["val_loss"]) == history["val_loss"][2]


def in_folder(rng_seed, folder, rounds, policy=None, **options):
    """A seeded simulation, run in a folder."""
    rng = np.random.default_rng(rng_seed)
    x, y = examples(rng)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype="bfloat16")])
    simulation = simulated(
        model,
        x.astype("float32"),
        y.astype("float32"),
        optimizer=keras.optimizers.Adam(0.01),
        clip_policy=policy,
        noise_seed=7,
        **({"noise_multiplier": 1.0} | options),
    )
    simulation.run(rounds, evaluate_every=2, directory=folder, verbose=0)
    return simulation


@pytest.mark.slow
@SEEDED
def test_goes_on_from_its_folder_as_if_it_had_never_stopped(tmp_path):
    """Also with weights in half precision, which NumPy's files do not know."""
    policy = AdaptiveQuantileClip(0.5)
    whole = in_folder(0, tmp_path / "whole", 4, policy)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    whole.run(6, evaluate_every=2, verbose=0)
    rest = in_folder(0, tmp_path / "part", 6, policy)
    # What is complete is not run again.
    again = in_folder(0, tmp_path / "part", 6, policy)
    for other in (rest, again):
        assert other.rounds == int(other.optimizer.iterations) == 6
        assert other.history == whole.history
        assert_same_weights(other.model.get_weights(), whole.model.get_weights(), 0, 0)
        np.testing.assert_array_equal(other.nonprivate_norms, whole.nonprivate_norms)


def killed_in_round(number, folder, rounds, **options):
    """A simulation that ends while a round runs."""
    run_round = Simulation._run_round

    def killed(self, rows, clip, of_round):
        tf.debugging.assert_none_equal(
            of_round, tf.constant(number, tf.int64), message="killed"
        )
        return run_round(self, rows, clip, of_round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_run_round", killed)
        with pytest.raises(tf.errors.InvalidArgumentError, match="killed"):
            in_folder(0, folder, rounds, **options)


@pytest.mark.slow
@SEEDED
def test_an_interrupted_round_is_run_again_and_counts_again(tmp_path):
    options = {"clients": VirtualClients(80, 8, 5), "max_participations": 1}
    whole = in_folder(0, tmp_path / "whole", 5, **options)
    assert whole.local_epsilon(DELTA) < math.inf
    folder = tmp_path / "killed"
    for _ in range(2):
        killed_in_round(3, folder, 5, **options)
    found = in_folder(0, folder, 5, **options)
    assert found.rounds == int(found.optimizer.iterations) == 5
    assert found.history == whole.history
    assert_same_weights(found.model.get_weights(), whole.model.get_weights(), 0, 0)
    # Once in the five rounds, and whoever was in the fourth twice more.
    assert found.local_epsilon(DELTA) == tfdp.federated.local_epsilon(
        1.0, DELTA, participations=3
    )
    again = in_folder(0, folder, 6, **options)
    assert again.local_epsilon(DELTA) == found.local_epsilon(DELTA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """That of a simulation in which each client has taken part twice."""
    folder = tmp_path_factory.mktemp("folder")
    clients = VirtualClients(8, 8, 5)
    with pytest.warns(UserWarning, match="reproducible"):
        in_folder(0, folder, 2, clients=clients, max_participations=2)
    return folder


@SEEDED
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 2.0}, "other values of .*noise_multiplier"),
        ({"l2_norm_clip": 0.7}, "other values of .*l2_norm_clip"),
        ({"clients": VirtualClients(9, 8, 5)}, "other values of .*clients"),
        ({"policy": AdaptiveQuantileClip(0.5)}, "other values of .*clip_policy"),
        (
            {"policy": ClipNormScheduler(lambda number: CLIP / 2)},
            "other values of .*l2_norm_clip",
        ),
        ({"loss": "mae"}, "other values of .*loss"),
        ({"rng_seed": 1}, "other values of .*data"),
        ({"max_participations": 1, "rounds": 1}, "rounds=2"),
    ],
)
def test_the_folder_of_another_simulation_is_refused(folder, options, message):
    options = {
        "rng_seed": 0,
        "rounds": 3,
        "clients": VirtualClients(8, 8, 5),
        "max_participations": 3,
    } | options
    with pytest.raises(ValueError, match=message):
        in_folder(folder=folder, **options)


@pytest.mark.slow
@SEEDED
def test_a_folder_is_not_overwritten_by_a_simulation_that_ran_elsewhere(
    tmp_path, folder
):
    other = in_folder(0, tmp_path, 2)
    with pytest.raises(ValueError, match="not run in it"):
        other.run(4, directory=folder, verbose=0)


@NOISELESS
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ((np.ones((2, 3)), np.ones((3, 2))), ValueError),
        ((np.ones((0, 3)), np.ones((0, 2))), ValueError),
        ((np.ones((2, 3)), np.ones((2, 2)), np.ones(2)), TypeError),
        (np.ones((2, 3)), TypeError),
    ],
)
def test_bad_validation_data_are_refused_before_the_first_round(rng, data, error):
    simulation = simulated(dense_model(), *examples(rng))
    with pytest.raises(error, match="`validation_data` must"):
        simulation.run(1, validation_data=data, verbose=0)
    assert simulation.rounds == 0


def run_in_folder(folder, rounds):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    data = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
    simulation = Simulation(
        *(model, "mse", data[:, :2], data[:, 2:]),
        clients=VirtualClients(10**6, 10, 5),
        optimizer="sgd",
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        noise_seed=1,
    )
    simulation.run(rounds, evaluate_every=5, directory=folder, verbose=0)
    return simulation


@pytest.mark.slow
@SEEDED
def test_a_killed_run_goes_on(tmp_path):
    """In another process; Flower is not loaded there."""
    code = (
        "import sys; from tests.federated.test_simulation import run_in_folder; "
        "assert 'flwr' not in sys.modules; run_in_folder(sys.argv[1], 50_000)"
    )
    state = tmp_path / "killed" / "history.csv"
    killed = forks.start(code, tmp_path / "killed", output=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not state.exists() and time.monotonic() < deadline:
            assert killed.is_alive()
            time.sleep(0.1)
    finally:
        killed.kill()
        killed.join()
    with state.open() as file:
        rounds = int(list(csv.DictReader(file))[-1]["round"]) + 20
    found = run_in_folder(tmp_path / "killed", rounds)
    expected = run_in_folder(tmp_path / "whole", rounds)
    assert found.history == expected.history
    assert found.rounds == rounds
    assert_same_weights(found.model.get_weights(), expected.model.get_weights(), 0, 0)


# ------------------------------------------------------------------------- bad arguments


untrained = functools.cache(dense_model)


@NOISELESS
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"l2_norm_clip": 0.0}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": math.nan}, ValueError, "l2_norm_clip"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier"),
        ({"max_participations": 0}, ValueError, "max_participations"),
        ({"neighboring_relation": "any"}, ValueError, "neighboring_relation"),
        ({"noise": "both"}, ValueError, "noise='both'"),
        ({"clients": 100}, TypeError, "VirtualClients"),
        ({"clip_policy": 0.1}, TypeError, "ClipNormScheduler"),
        (
            {"optimizer": DPSGD(0.1, l2_norm_clip=1, noise_multiplier=1)},
            TypeError,
            "SGD",
        ),
        ({"optimizer": 1.0}, TypeError, "optimizer"),
        ({"engine": "fast"}, ValueError, "engine"),
        ({"physical_batch_size": 12}, ValueError, "physical_batch_size=15"),
    ],
)
def test_bad_arguments_are_refused_before_anything_trains(rng, options, error, message):
    x, y = examples(rng)
    model = untrained()
    before = model.get_weights()
    with pytest.raises(error, match=message):
        simulated(model, x, y, **options).run(1, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@NOISELESS
def test_a_model_that_mixes_examples_is_refused(rng):
    x, y = examples(rng)
    model = keras.Sequential([
        keras.Input((3,)),
        layers.BatchNormalization(),
        layers.Dense(2),
    ])
    with pytest.raises(ValueError, match="BatchNormalization"):
        simulated(model, x.astype("float32"), y.astype("float32")).run(1, verbose=0)


@NOISELESS
@pytest.mark.parametrize(
    "arguments", [{"rounds": 0}, {"rounds": 1.5}, {"rounds": 1, "evaluate_every": 0}]
)
def test_bad_numbers_of_rounds(rng, arguments):
    with pytest.raises(ValueError, match="whole number"):
        simulated(dense_model(), *examples(rng)).run(**arguments)


@NOISELESS
@pytest.mark.parametrize(
    ("rows", "message"), [((0, 0), "0 rows"), ((9, 8), "8, 9 rows")]
)
def test_there_are_examples_and_as_many_targets(rows, message):
    x, y = (np.zeros((number, 3), "float32") for number in rows)
    with pytest.raises(ValueError, match=message):
        simulated(dense_model("float32"), x, y)


def test_a_bad_value_of_the_schedule_is_found_before_the_first_round():
    simulation = with_norms([1.0], ClipNormScheduler(lambda number: 2.0 - number))
    with pytest.raises(ValueError, match="step 2 of the schedule"):
        simulation.run(3, verbose=0)
    assert simulation.rounds == 0
