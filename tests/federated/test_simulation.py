"""Rounds of virtual clients equal clients taken one by one."""

import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.reference import per_example_gradients
from tfdp.accounting.local import TrustedQueries
from tfdp.callbacks import AdaptiveMedianClip, AdaptiveQuantileClip, ClipNormScheduler
from tfdp.federated import Simulation, VirtualClients, client_update
from tfdp.optimizers import DPSGD

CLIENTS = VirtualClients(200, clients_per_round=8, examples_per_client=5, seed=2)
CLIP = 0.5
NOISELESS = pytest.mark.filterwarnings("ignore:Training without noise")
SEEDED = pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")
ROOT = Path(__file__).parents[2]


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
        "optimizer": keras.optimizers.SGD(0.1),
        "l2_norm_clip": CLIP,
        "noise_multiplier": 0.0,
    } | options
    return Simulation(model, loss, x, y, **options)


def norm_of(gradients):
    return math.sqrt(sum((gradient**2).sum() for gradient in gradients))


def one_round(model, x, y, clients, number, clip, learning_rate=0.1):
    """What the clients of a round do to the model, one by one; returns their norms."""
    replies, norms = [], []
    for client in clients.of_round(number):
        rows = clients.rows(np.array([client]), len(x))
        gradients = per_example_gradients(model, squares, x[rows], y[rows])
        means = [gradient.mean(0) for gradient in gradients]
        norms.append(norm_of(means))
        replies.append([mean * min(1.0, clip / norms[-1]) for mean in means])
    for place, variable in enumerate(model.trainable_variables):
        mean = np.mean([reply[place] for reply in replies], axis=0)
        variable.assign(variable.numpy() - learning_rate * mean)
    return np.array(norms)


def assert_same_weights(model, reference, rtol=1e-7, atol=1e-10):
    for found, expected in zip(
        model.get_weights(), reference.get_weights(), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def twin(model, build=dense_model):
    other = build()
    other.set_weights(model.get_weights())
    return other


# -------------------------------------------------------------------- what a round is


@NOISELESS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "vectorized"},
        pytest.param({"engine": "ghost"}, marks=pytest.mark.slow),
        {"engine": "bookkeeping", "physical_batch_size": 10},
        pytest.param(
            {"engine": "vectorized", "physical_batch_size": 15}, marks=pytest.mark.slow
        ),
        {"noise": "per_client"},
        {"jit_compile": True},
        pytest.param(
            {"jit_compile": True, "physical_batch_size": 20}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_equals_clients_one_by_one(rng, options):
    x, y = examples(rng)
    model = dense_model()
    reference = twin(model)
    simulation = simulated(model, x, y, **options)
    for number in range(3):
        simulation.run(number + 1, verbose=0)
        norms = one_round(reference, x, y, CLIENTS, number, CLIP)
        assert (norms > CLIP).any()
        np.testing.assert_allclose(simulation.nonprivate_norms, norms, rtol=1e-6)
        assert_same_weights(model, reference)


@NOISELESS
def test_eagerly(rng):
    x, y = examples(rng)
    model = dense_model()
    reference = twin(model)
    tf.config.run_functions_eagerly(True)
    try:
        simulated(model, x, y).run(1, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    one_round(reference, x, y, CLIENTS, 0, CLIP)
    assert_same_weights(model, reference)


@NOISELESS
def test_is_the_average_of_what_clients_send(rng):
    """Uniform: a client that is clipped counts as much as one that is not."""
    x, y = examples(rng)
    model = dense_model()
    weights = model.get_weights()
    updates = []
    for client in CLIENTS.of_round(0):
        rows = CLIENTS.rows(np.array([client]), len(x))
        updates.append(
            client_update(
                model,
                squares,
                x[rows],
                y[rows],
                l2_norm_clip=CLIP,
                noise_multiplier=1e-12,
            )
        )
    simulated(model, x, y, optimizer=keras.optimizers.SGD(1.0)).run(1, verbose=0)
    for place, (before, after) in enumerate(
        zip(weights, model.get_weights(), strict=True)
    ):
        mean = np.mean([update[place] for update in updates], axis=0)
        np.testing.assert_allclose(before - after, mean, rtol=1e-6, atol=1e-9)


@NOISELESS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_client_whose_gradient_is_not_finite_counts_as_zero(rng, bad):
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    x[0] = bad
    model = dense_model()
    simulation = simulated(model, x, y)
    simulation.run(2, verbose=0)
    assert not np.isfinite(simulation.nonprivate_norms).all()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@NOISELESS
@pytest.mark.parametrize(
    "optimizer",
    [keras.optimizers.Adam(0.01), "adagrad", keras.optimizers.SGD(0.1, 0.9)],
)
def test_any_optimizer_of_the_server(rng, optimizer):
    x, y = examples(rng)
    model = dense_model()
    before = model.get_weights()
    simulation = simulated(model, x, y, optimizer=optimizer)
    simulation.run(3, verbose=0)
    assert int(simulation.optimizer.iterations) == 3
    assert not np.array_equal(before[0], model.get_weights()[0])


@NOISELESS
def test_weight_regularizers_are_the_server_s(rng):
    """Their gradient is not clipped."""
    x, y = examples(rng)
    model = dense_model(kernel_regularizer=keras.regularizers.L2(50.0))
    reference = twin(model)
    kernel = model.layers[-1].kernel.numpy()
    simulated(model, x, y).run(1, verbose=0)
    one_round(reference, x, y, CLIENTS, 0, CLIP)
    np.testing.assert_allclose(
        model.layers[-1].kernel.numpy(),
        reference.layers[-1].kernel.numpy() - 0.1 * 100 * kernel,
        rtol=1e-6,
    )


# -------------------------------------------------------------------------------- noise


def rounds_of_noise(noise, clip=0.3, noise_multiplier=2.0, rounds=2, clients=40):
    """What rounds in which all gradients are zero do to the weights."""
    model = blank_model(20_000)
    simulation = Simulation(
        model,
        total,
        np.zeros((10, 1), "float32"),
        np.zeros((10, 1), "float32"),
        clients=VirtualClients(1000, clients, 5),
        optimizer=keras.optimizers.SGD(1.0),
        l2_norm_clip=clip,
        noise_multiplier=noise_multiplier,
        noise=noise,
    )
    steps, before = [], model.get_weights()[0]
    for number in range(rounds):
        simulation.run(number + 1, verbose=0)
        steps.append(model.get_weights()[0] - before)
        before = model.get_weights()[0]
    return [step.ravel() for step in steps]


@pytest.mark.parametrize("noise", ["aggregate", "per_client"])
def test_every_client_s_noise_is_in_the_average(noise):
    first, second = rounds_of_noise(noise)
    for step in (first, second):
        # 20,000 draws: the standard error is half a percent.
        assert step.std() == pytest.approx(0.3 * 2.0 / math.sqrt(40), rel=0.02)
        assert abs(step.mean()) < 4 * 0.3 * 2.0 / math.sqrt(40 * 20_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(20_000)


@pytest.mark.statistical
def test_both_ways_to_draw_the_noise_agree():
    """Quantiles of both, within five standard errors."""
    quantiles = [0.02, 0.16, 0.5, 0.84, 0.98]
    found = [
        np.quantile(np.concatenate(rounds_of_noise(noise)), quantiles)
        for noise in ("aggregate", "per_client")
    ]
    scale = 0.3 * 2.0 / math.sqrt(40)
    np.testing.assert_allclose(found[0], found[1], atol=5 * 2.1 * scale / 200)


def test_a_client_s_own_noise_is_the_clip_times_its_multiplier():
    (step,) = rounds_of_noise("per_client", rounds=1, clients=1)
    assert step.std() == pytest.approx(0.6, rel=0.02)


def test_noise_follows_the_schedule():
    model = blank_model(20_000)
    simulation = Simulation(
        model,
        total,
        np.zeros((10, 1), "float32"),
        np.zeros((10, 1), "float32"),
        clients=VirtualClients(1000, 4, 5),
        optimizer=keras.optimizers.SGD(1.0),
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        clip_policy=ClipNormScheduler(lambda number: [1.0, 0.1][number]),
    )
    before = model.get_weights()[0]
    for clip in (1.0, 0.1):
        simulation.run(simulation.rounds + 1, verbose=0)
        after = model.get_weights()[0]
        assert (after - before).std() == pytest.approx(clip, rel=0.02)
        before = after


@pytest.mark.slow
@SEEDED
def test_a_seed_makes_the_noise_reproducible():
    def weights():
        model = blank_model(50)
        simulated(
            model,
            np.zeros((10, 1), "float32"),
            np.zeros((10, 1), "float32"),
            loss=total,
            noise_multiplier=1.0,
            noise_seed=3,
        ).run(2, verbose=0)
        return model.get_weights()[0]

    np.testing.assert_array_equal(weights(), weights())


@pytest.mark.slow
def test_seeds_of_others_do_not_decide_the_noise():
    steps = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        steps.append(rounds_of_noise("aggregate", rounds=1)[0])
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


@pytest.mark.slow
def test_polynomial_decay_and_switch():
    decay = keras.optimizers.schedules.PolynomialDecay(0.05, 20, 0.0, power=2.0)
    found = clips(with_norms([1.0], ClipNormScheduler(decay)), 20)
    expected = 0.05 * (1 - np.arange(20) / 20) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    switch = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.05, 0.01])
    found = clips(with_norms([1.0], ClipNormScheduler(switch)), 6)
    np.testing.assert_allclose(found, [0.05] * 4 + [0.01] * 2)


@pytest.mark.parametrize("quantile", [0.1, 0.5])
def test_quantile_rises_by_a_known_factor_while_all_are_clipped(quantile):
    policy = AdaptiveQuantileClip(quantile, count_noise_multiplier=1e-9)
    found = clips(with_norms([50.0], policy, clip=0.01), 10)
    expected = 0.01 * np.exp(0.2 * quantile * np.arange(10))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_quantile_falls_where_nobody_is_clipped():
    policy = AdaptiveQuantileClip(0.5, count_noise_multiplier=1e-9)
    found = clips(with_norms([1e-3], policy), 4)
    np.testing.assert_allclose(found, np.exp(-0.1 * np.arange(4)), rtol=1e-9)


def test_quantile_finds_the_quantile():
    policy = AdaptiveQuantileClip(0.3)
    norms = np.linspace(1, 5, 100)
    clients = VirtualClients(1_000_000, 1000, 1)
    found = clips(with_norms(norms, policy, clip=0.2, clients=clients), 120)
    np.testing.assert_allclose(found[-20:], np.quantile(norms, 0.3), rtol=0.1)


@pytest.mark.statistical
def test_the_count_s_noise_has_standard_deviation_5():
    """Half of the norms do not exceed C, so that nothing is cut off."""
    norms = np.array([0.0] * 50 + [1e9] * 50)
    clients = VirtualClients(10**6, 1000, 1)
    policy = AdaptiveQuantileClip(0.5)
    simulation = with_norms(norms, policy, clients=clients)
    shares, noise = [], []
    for _ in range(200):
        before = simulation._next_clip
        simulation.run(simulation.rounds + 1, verbose=0)
        share = 0.5 - math.log(simulation._next_clip / before) / 0.2
        true = np.mean(simulation.nonprivate_norms <= before)
        noise.append(1000 * (share - true))
        shares.append(true)
    assert 0.4 < np.mean(shares) < 0.6
    assert np.std(noise) == pytest.approx(5.0, rel=0.2)


EDGES = [0, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3]


@pytest.mark.parametrize("clip", [0.01, 0.05])
def test_median_jumps_to_the_last_bin_at_its_first_release_and_stays(clip):
    policy = AdaptiveMedianClip(EDGES, histogram_noise_multiplier=6.304, every=3)
    found = clips(with_norms([5.0], policy, clip=clip), 8)
    np.testing.assert_allclose(found, [clip] * 3 + [0.09375] * 5)


def test_median_takes_the_middle_of_its_bin():
    policy = AdaptiveMedianClip(EDGES, histogram_noise_multiplier=1e-9, every=1)
    norms = [0.001] * 20 + [0.02] * 50 + [3.0] * 30
    clients = VirtualClients(100_000, 1000, 1)
    found = clips(with_norms(norms, policy, clients=clients), 3)
    np.testing.assert_allclose(found[1:], [(2**-6 + 2**-5) / 2] * 2)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_adaptive_policies_in_any_mode(jit_compile):
    policy = AdaptiveQuantileClip(0.5, count_noise_multiplier=1e-9)
    found = clips(with_norms([50.0], policy, jit_compile=jit_compile), 3)
    np.testing.assert_allclose(found, np.exp(0.1 * np.arange(3)), rtol=1e-9)


# --------------------------------------------------------------- participations, accounts


def test_nobody_takes_part_more_often_than_allowed():
    data = np.zeros((10, 1), "float32")
    options = {"loss": total, "noise_multiplier": 1.404227}
    simulation = simulated(blank_model(), data, data, **options)
    assert CLIENTS.rounds_per_pass == 25
    with pytest.raises(ValueError, match=r"rounds=26.*Use `run\(25\)`"):
        simulation.run(26, verbose=0)
    assert simulation.rounds == 0
    simulation.run(25, verbose=0)
    assert simulation.local_epsilon(1e-7) == pytest.approx(8.0, abs=1e-3)
    twice = simulated(blank_model(), data, data, max_participations=2, **options)
    twice.run(26, verbose=0)
    assert twice.local_epsilon(1e-7) == pytest.approx(12.0, abs=0.05)
    assert "(12.009, 1e-07)-locally" in twice.privacy_statement(1e-7)


def test_nothing_ran_costs_nothing():
    data = np.zeros((10, 1), "float32")
    simulation = simulated(
        blank_model(), data, data, loss=total, noise_multiplier=1.404227
    )
    assert simulation.local_epsilon(1e-7) == 0


@pytest.mark.parametrize(
    ("policy", "rounds", "figure"),
    [
        (AdaptiveQuantileClip(0.5), 3, "(0.447, 1e-07)"),
        (
            AdaptiveMedianClip(EDGES, histogram_noise_multiplier=10, every=2),
            3,
            "(0.447",
        ),
        (
            AdaptiveMedianClip(EDGES, histogram_noise_multiplier=10, every=2),
            1,
            "(0.000",
        ),
    ],
)
def test_statement_says_that_a_run_is_not_purely_local(policy, rounds, figure):
    simulation = with_norms([1.0], policy)
    simulation.run(rounds, verbose=0)
    text = " ".join(simulation.privacy_statement(1e-7).split())
    assert "not purely local" in text
    assert figure in text


def test_statement_counts_every_query_of_a_client():
    """Three passes: three Gaussians of multiplier 10."""
    clients = VirtualClients(4, 4, 1)
    policy = AdaptiveQuantileClip(0.5)
    simulation = with_norms([1.0], policy, clients=clients, max_participations=3)
    simulation.run(3, verbose=0)
    text = " ".join(simulation.privacy_statement(1e-7).split())
    expected = TrustedQueries("", 10.0, 2.0, 3).epsilon(1e-7, "add_or_remove_one")
    assert expected > 0.75
    assert f"the answers are ({expected:.3f}, 1e-07)" in text


def test_settings_cannot_be_changed_behind_the_account():
    policy = AdaptiveQuantileClip(0.5)
    simulation = with_norms([1.0], policy)
    for name in ("noise_multiplier", "clients", "l2_norm_clip", "rounds"):
        with pytest.raises(AttributeError):
            setattr(simulation, name, 100)
    policy.query_noise = 1000.0
    simulation.run(1, verbose=0)
    assert "(0.447, 1e-07)" in " ".join(simulation.privacy_statement(1e-7).split())


def test_an_interrupted_round_counts_and_its_noise_is_not_used_again(monkeypatch):
    simulation = with_norms([1.0], None)
    whole = simulation._round

    def interrupted(*arguments):
        seen.append(arguments)
        whole(*arguments)
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr(simulation, "_round", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            simulation.run(5, verbose=0)
    assert simulation.rounds == 2
    assert [int(number) for *_, number in seen] == [0, 1]


def test_statement_of_a_scheduled_run_is_purely_local():
    simulation = with_norms([1.0], ClipNormScheduler(lambda number: 0.1))
    simulation.run(1, verbose=0)
    assert "not purely local" not in simulation.privacy_statement(1e-7)


@pytest.mark.filterwarnings("error")
def test_no_noise_is_warned_of_and_never_private():
    data = np.zeros((10, 1), "float32")
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        simulation = simulated(blank_model(), data, data, loss=total)
    simulation.run(1, verbose=0)
    assert simulation.local_epsilon(1e-7) == math.inf
    assert "not differentially private" in simulation.privacy_statement(1e-7)


# ------------------------------------------------------------- histories, folders, kills


@pytest.mark.slow
@NOISELESS
def test_history(rng, tmp_path):
    x, y = examples(rng)
    model = dense_model()
    simulation = simulated(model, x, y, metrics=["mae"])
    history = simulation.run(
        5,
        validation_data=(x[1:], y[1:]),
        evaluate_every=2,
        directory=tmp_path,
        verbose=0,
    )
    assert history["round"] == [2, 4, 5]
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
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["2", "4", "5"]
    assert float(rows[1]["val_loss"]) == history["val_loss"][1]


@pytest.mark.slow
@NOISELESS
def test_validation_data_may_come_later(rng, tmp_path):
    x, y = examples(rng)
    simulation = simulated(dense_model(), x, y)
    simulation.run(1, directory=tmp_path, verbose=0)
    simulation.run(2, validation_data=(x, y), directory=tmp_path, verbose=0)
    history = simulation.run(3, directory=tmp_path, verbose=0)
    assert history["round"] == [1, 2, 3]
    np.testing.assert_array_equal(np.isnan(history["val_loss"]), [True, False, True])


def in_folder(rng_seed, folder, rounds, policy=None, **options):
    """A seeded simulation, run in a folder."""
    rng = np.random.default_rng(rng_seed)
    x, y = examples(rng)
    keras.utils.set_random_seed(1)
    model = dense_model("float32")
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


@SEEDED
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(None, marks=pytest.mark.slow, id="fixed"),
        pytest.param(AdaptiveQuantileClip(0.5), id="quantile"),
    ],
)
def test_goes_on_from_its_folder_as_if_it_had_never_stopped(tmp_path, policy):
    whole = in_folder(0, tmp_path / "whole", 6, policy)
    in_folder(0, tmp_path / "parts", 4, policy)
    rest = in_folder(0, tmp_path / "parts", 6, policy)
    assert rest.rounds == 6
    assert rest.history == whole.history
    assert_same_weights(rest.model, whole.model, rtol=0, atol=0)
    # What is complete is not run again.
    again = in_folder(0, tmp_path / "parts", 6, policy)
    assert again.history == whole.history
    np.testing.assert_array_equal(again.nonprivate_norms, whole.nonprivate_norms)


@SEEDED
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"l2_norm_clip": 0.7}, "l2_norm_clip"),
        ({"clients": VirtualClients(300, 8, 5)}, "clients"),
        ({"policy": AdaptiveQuantileClip(0.5)}, "clip_policy"),
        ({"policy": ClipNormScheduler(lambda number: CLIP / 2)}, "l2_norm_clip"),
        ({"loss": "mae"}, "loss"),
        ({"rng_seed": 1}, "data"),
    ],
)
def test_the_folder_of_another_simulation_is_refused(tmp_path, options, name):
    in_folder(0, tmp_path, 2)
    options = {"rng_seed": 0} | options
    with pytest.raises(ValueError, match=f"other values of .*{name}"):
        in_folder(folder=tmp_path, rounds=4, **options)


@pytest.mark.slow
@SEEDED
def test_a_folder_is_not_overwritten_by_a_simulation_that_ran_elsewhere(tmp_path):
    in_folder(0, tmp_path / "one", 2)
    other = in_folder(0, tmp_path / "other", 2)
    with pytest.raises(ValueError, match="not run in it"):
        other.run(4, directory=tmp_path / "one", verbose=0)


@SEEDED
def test_a_restored_run_is_held_to_its_participations(tmp_path):
    clients = VirtualClients(8, 8, 5)
    in_folder(0, tmp_path, 3, clients=clients, max_participations=3)
    with pytest.raises(ValueError, match="rounds=3"):
        in_folder(0, tmp_path, 1, clients=clients)


@SEEDED
def test_goes_on_with_half_precision_weights(tmp_path):
    weights = []
    for rounds in (1, 1):
        model = keras.Sequential([keras.Input((1,)), layers.Dense(2, dtype="bfloat16")])
        data = np.ones((10, 1), "float32")
        simulated(
            model, data, data, loss=total, noise_multiplier=1.0, noise_seed=3
        ).run(rounds, directory=tmp_path, verbose=0)
        weights.append(np.asarray(model.get_weights()[0], "float32"))
    np.testing.assert_array_equal(*weights)


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


KILLED = """
import sys, keras, numpy as np
from keras import layers
from tfdp.federated import Simulation, VirtualClients
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
data = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
simulation = Simulation(
    model, "mse", data[:, :2], data[:, 2:], clients=VirtualClients(10**6, 10, 5),
    optimizer="sgd", l2_norm_clip=0.1, noise_multiplier=1.0, noise_seed=1,
)
simulation.run(int(sys.argv[2]), evaluate_every=5, directory=sys.argv[1], verbose=0)
print(simulation.rounds, *(w.tobytes().hex() for w in model.get_weights()))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def start(folder, rounds):
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), str(rounds)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    killed = start(tmp_path / "killed", 50_000)
    state = tmp_path / "killed" / "history.csv"
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with state.open() as file:
        reached = int(list(csv.DictReader(file))[-1]["round"])
    rounds = reached + 20
    found, _ = start(tmp_path / "killed", rounds).communicate(timeout=300)
    expected, _ = start(tmp_path / "whole", rounds).communicate(timeout=300)
    assert found.split()[0] == str(rounds)
    assert found == expected


# ------------------------------------------------------------------------- bad arguments


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
        ({"physical_batch_size": 0}, ValueError, "physical_batch_size"),
    ],
)
def test_bad_arguments_are_refused_before_anything_trains(rng, options, error, message):
    x, y = examples(rng)
    model = dense_model()
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
