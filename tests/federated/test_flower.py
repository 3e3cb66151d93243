"""Flower: what leaves a client, what its ledger counts, and what the server does."""

import contextlib
import copy
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import tfdp
from tests.federated import flower_app
from tests.federated.flower_grid import LocalGrid, context
from tfdp.federated import flower

ROOT = Path(__file__).resolve().parents[2]
DELTA = 1e-7
# So little noise that results can be compared.
ALMOST_NONE = 1e-6
BFLOAT16 = tf.bfloat16.as_numpy_dtype


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.json"


def budget_at(path, epsilon=8.0, **options):
    return flower.LocalBudget(path, epsilon=epsilon, delta=DELTA, **options)


def clear_budget(path, **options):
    """A budget whose replies are not private."""
    budget = budget_at(path, **options)
    budget._noise_multiplier, budget._epsilon = ALMOST_NONE, math.inf
    return budget


# -------------------------------------------------------------------- what leaves


WEIGHTS = {"0": np.ones((2, 3), "float32"), "1": np.zeros(4, "float32")}


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def train_message(weights=WEIGHTS, clip=0.5, message_type="train", node_id=1):
    config = ConfigRecord({} if clip is None else {flower.CLIP_KEY: clip})
    content = RecordDict({"arrays": record(weights), "config": config})
    return Message(content, dst_node_id=node_id, message_type=message_type)


def replies(update):
    """An app that replies with an update, or whatever content."""

    def app(message, _):
        content = update
        if not isinstance(content, RecordDict):
            content = RecordDict({"arrays": record(content)})
        return Message(content, reply_to=message)

    return app


def answer(mod, message=None, app=None):
    return mod(message or train_message(), context(1), app or replies(WEIGHTS))


def arrays_in(reply):
    [arrays] = reply.content.array_records.values()
    return {name: flower.arrays.to_numpy(array) for name, array in arrays.items()}


@pytest.fixture
def mod(path):
    return flower.local_dp_mod(budget_at(path), max_l2_norm_clip=1.0)


@pytest.fixture
def clear(path):
    """A mod with almost no noise, for many replies."""
    budget = clear_budget(path, max_participations=100)
    return flower.local_dp_mod(budget, max_l2_norm_clip=1.0)


SIGMA = 1.404227
MANY = {
    "0": np.zeros((100, 200), "float32"),
    "1": np.zeros(20_000),
    "2": np.zeros((20_000, 1), "float16"),
    "3": np.zeros((20_000, 1), BFLOAT16),
}


def updates_of(value):
    return {name: np.full(a.shape, value, a.dtype) for name, a in MANY.items()}


@pytest.mark.statistical
@pytest.mark.parametrize("value", [0.0, 3.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("asked", "used"), [(0.25, 0.25), (1, 1.0), (100.0, 1.0)])
def test_noise_has_the_standard_deviation_of_the_budget(value, asked, used, mod):
    reply = answer(mod, train_message(MANY, asked), replies(updates_of(value)))
    private = arrays_in(reply)
    assert [a.dtype for a in private.values()] == [a.dtype for a in MANY.values()]
    # Every coordinate has the same share of a clipped update, at most C of all.
    numbers = [a.astype("float64").ravel() for a in private.values()]
    for each in numbers:
        assert np.var(each) == pytest.approx((SIGMA * used) ** 2, rel=0.06)
        assert abs(np.mean(each)) < 5.5 * SIGMA * used / len(each) ** 0.5
    correlations = np.corrcoef(numbers) - np.eye(len(numbers))
    assert np.max(np.abs(correlations)) < 5.5 / 20_000**0.5


def test_two_replies_have_other_noise(path):
    budget = budget_at(path, max_participations=2)
    mod = flower.local_dp_mod(budget, max_l2_norm_clip=1.0)
    first, second = (arrays_in(answer(mod))["0"] for _ in range(2))
    assert not np.any(first == second)


@pytest.mark.parametrize(("asked", "used"), [(0.5, 0.5), (1, 1.0), (100.0, 1.0)])
def test_all_arrays_are_clipped_as_one_vector(asked, used, clear):
    weights = {"a": np.zeros(2, "float32"), "b": np.zeros(1)}
    message = train_message(weights, asked)
    message.content["more"] = record({"a": np.zeros((1, 1), "float16")})
    update = RecordDict({
        "more": record({"a": np.full((1, 1), 4.0, "float16")}),
        "arrays": record({"b": np.array([2.0]), "a": np.array([4.0, 0.0], "f4")}),
    })
    content = answer(clear, message, replies(update)).content
    # In the order of the server's message.
    assert list(content.array_records) == ["arrays", "more"]
    assert list(content["arrays"]) == ["a", "b"]
    private = [a.numpy() for r in content.array_records.values() for a in r.values()]
    joined = np.concatenate([a.ravel().astype("float64") for a in private])
    expected = np.array([4.0, 0.0, 2.0, 4.0]) / 6 * used
    np.testing.assert_allclose(joined, expected, atol=5e-4)


def test_an_update_inside_the_ball_stays(clear):
    update = {"0": np.full((2, 3), 0.01, "float32"), "1": np.full(4, -0.02, "float32")}
    private = arrays_in(answer(clear, app=replies(update)))
    for name, value in update.items():
        np.testing.assert_allclose(private[name], value, atol=2e-4)


def test_metrics_and_configs_stay(clear):
    content = RecordDict({
        "metrics": MetricRecord({"loss": 0.25, "num-examples": 17}),
        "arrays": record(WEIGHTS),
        "more": MetricRecord({"accuracy": 0.5}),
        "config": ConfigRecord({"name": "someone"}),
    })
    private = answer(clear, app=replies(content)).content
    assert dict(private.metric_records) == {"metrics": {"num-examples": 1}}
    assert list(private.array_records) == ["arrays"]
    assert not private.config_records


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 2], "int64"),
        np.array([True]),
        np.array(["someone"]),
        np.array([1 + 2j]),
        np.zeros(0, "int32"),
        np.array(7, "uint8"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_what_cannot_be_noised_is_zeros(array, alone, mod):
    update = {"n": array} if alone else {"n": array, "x": np.ones(2, "float32")}
    weights = {name: np.zeros_like(a) for name, a in update.items()}
    private = arrays_in(answer(mod, train_message(weights), replies(update)))
    assert private["n"].dtype == array.dtype
    np.testing.assert_array_equal(private["n"], np.zeros(array.shape, array.dtype))
    assert alone or np.all(private["x"] != 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", BFLOAT16])
def test_scalars_and_empty_arrays(dtype, mod):
    update = {
        "scalar": np.array(3.0, dtype),
        "empty": np.zeros((0, 4), dtype),
        "row": np.zeros((1, 3), dtype),
    }
    private = arrays_in(answer(mod, train_message(update), replies(update)))
    assert {k: (a.shape, a.dtype) for k, a in private.items()} == {
        k: (a.shape, a.dtype) for k, a in update.items()
    }
    assert private["scalar"] != 0
    assert np.all(np.isfinite(private["row"].astype("float64")))


def test_only_empty_arrays(mod):
    update = {"empty": np.zeros((0, 4), "float32")}
    assert arrays_in(answer(mod, train_message(update), replies(update)))[
        "empty"
    ].shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "bool", BFLOAT16])
def test_dtypes_are_the_servers(dtype, clear):
    update = {name: np.ones(a.shape).astype(dtype) for name, a in WEIGHTS.items()}
    private = arrays_in(answer(clear, app=replies(update)))
    for array in private.values():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, 0.5 / 10**0.5, atol=2e-3)


def test_numbers_too_large_for_the_servers_dtype_are_noise(mod):
    update = {name: np.full(a.shape, 1e300) for name, a in WEIGHTS.items()}
    assert np.all(np.isfinite(arrays_in(answer(mod, app=replies(update)))["0"]))


def test_replies_have_the_same_length_whatever_the_data(path):
    budget = budget_at(path, max_participations=10)
    mod = flower.local_dp_mod(budget, max_l2_norm_clip=1.0)
    weights = WEIGHTS | {"n": np.zeros(3, "int32")}
    lengths = set()
    for value in (0, 1, 1e30, math.nan):
        with np.errstate(invalid="ignore"):
            update = {
                name: np.asfortranarray(np.full(a.shape, value).astype(a.dtype))
                for name, a in weights.items()
            }
        reply = answer(mod, train_message(weights), replies(update))
        arrays = reply.content["arrays"]
        lengths.add((
            len(reply.content.deflate()),
            len(arrays.deflate()),
            len(reply.content["metrics"].deflate()),
            *(len(array.data) for array in arrays.values()),
        ))
    assert len(lengths) == 1


def test_what_the_app_does_to_the_message_changes_nothing(mod):
    def app(message, _):
        message.content["arrays"] = record({"other": np.zeros(7)})
        return replies({"other": np.zeros(7)})(message, _)

    assert answer(mod, app=app).error.reason == "The client failed."


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "clip",
    [None, 0.0, -1.0, math.nan, math.inf, -math.inf, "1.0", b"1", True, [1.0], 1e-30],
)
def test_a_message_without_a_usable_clip_costs_nothing(clip, path):
    budget, calls = budget_at(path), []
    mod = flower.local_dp_mod(budget, max_l2_norm_clip=1.0)
    reply = mod(train_message(clip=clip), context(1), calls.append)
    assert reply.error.reason == (
        "The message must have usable arrays and `l2-norm-clip`."
    )
    assert (budget.participations, calls) == (0, [])


def test_a_damaged_ledger_lets_nothing_out(path):
    budget = budget_at(path)
    path.write_text("{")
    reply = answer(flower.local_dp_mod(budget, max_l2_norm_clip=1.0))
    assert reply.error.reason == "The privacy budget allows no reply."
    assert path.read_text() == "{"


def test_two_clips_in_a_message_are_refused(mod, path):
    message = train_message()
    message.content["more"] = ConfigRecord({flower.CLIP_KEY: 0.1})
    assert answer(mod, message).has_error()
    assert budget_at(path).participations == 0


def test_arrays_that_are_none_are_refused(mod, path):
    message = train_message()
    message.content["arrays"]["0"] = Array("float32", (1,), "numpy.ndarray", b"junk")
    assert answer(mod, message).has_error()
    assert budget_at(path).participations == 0


@pytest.mark.parametrize(
    "message_type", ["evaluate", "query", "evaluate.train", "query.train"]
)
def test_other_messages_are_refused(message_type, path):
    budget, calls = budget_at(path), []
    mod = flower.local_dp_mod(budget, max_l2_norm_clip=1.0)
    message = train_message(message_type=message_type)
    reply = mod(message, context(1), calls.append)
    assert reply.error.reason == "Only train messages are answered."
    assert (budget.participations, calls) == (0, [])


def test_named_train_messages_are_answered(mod):
    assert answer(mod, train_message(message_type="train.personal")).has_content()


def fails(message, _):
    raise ValueError("row 17: someone")


def refuses(message, _):
    return Message(Error(code=17, reason="row 17: someone"), reply_to=message)


@pytest.mark.parametrize(
    "app",
    [
        fails,
        refuses,
        lambda *_: None,
        replies({}),
        replies({"0": WEIGHTS["0"]}),
        replies(WEIGHTS | {"someone": np.zeros(1)}),
        replies(WEIGHTS | {"1": np.zeros(5)}),
        replies(WEIGHTS | {"1": np.zeros((4, 1))}),
        replies(WEIGHTS | {"1": np.array(["a", "b", "c", "d"])}),
        replies(RecordDict({"someone": record(WEIGHTS)})),
        replies(RecordDict({"arrays": record(WEIGHTS), "x": record(WEIGHTS)})),
        replies(RecordDict()),
    ],
)
def test_nothing_of_an_app_that_fails_leaves(app, path):
    budget = budget_at(path)
    reply = answer(flower.local_dp_mod(budget, max_l2_norm_clip=1.0), app=app)
    assert not reply.has_content()
    assert reply.error == Error(code=6, reason="The client failed.")
    # A server cannot ask again to find out more.
    assert budget.participations == 1


@pytest.mark.parametrize(
    ("budget", "clip", "error"),
    [
        (8.0, 1.0, TypeError),
        (None, 0.0, ValueError),
        (None, math.nan, ValueError),
        (None, math.inf, ValueError),
        (None, "1", TypeError),
    ],
)
def test_arguments_of_the_mod(budget, clip, error, path):
    with pytest.raises(error, match=r"`\w+` must be .* Received: "):
        flower.local_dp_mod(budget or budget_at(path), max_l2_norm_clip=clip)


# -------------------------------------------------------------------- the loop


def linear(**options):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, **options)])


def client_app(path, x, y, epsilon=None, **options):
    """A client as it is in reality: an app and a ledger of its own."""
    budget = (
        clear_budget(path, **options)
        if epsilon is None
        else budget_at(path, epsilon, **options)
    )
    app = ClientApp(mods=[flower.local_dp_mod(budget, max_l2_norm_clip=1.0)])

    @app.train()
    def train(message, _):
        reply = flower.gradient_reply(message, linear(), "mse", x, y)
        reply.content["metrics"] = MetricRecord({"loss": 1.0, "num-examples": len(x)})
        return reply

    @app.evaluate()
    def evaluate(message, _):
        metrics = MetricRecord({"loss": 1.0, "num-examples": len(x)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def examples(client):
    rng = np.random.default_rng(client)
    n = 2 + client
    return rng.normal(size=(n, 3)), rng.normal(size=(n, 2))


def grid_of(tmp_path, clients=4, **options):
    return LocalGrid({
        7 + n: client_app(tmp_path / f"{n}.json", *examples(n), **options)
        for n in range(clients)
    })


def strategy_for(model, **options):
    defaults = {"optimizer": keras.optimizers.SGD(0.5), "l2_norm_clip": 0.5}
    return flower.LDPFedSGD(model, **defaults | {"clients_per_round": 4} | options)


def step(kernel, bias, clip, regularizer=0.0):
    """NumPy's answer: one round of all four clients, and SGD."""
    mean = [np.zeros_like(kernel), np.zeros_like(bias)]
    for client in range(4):
        x, y = examples(client)
        residual = x @ kernel + bias - y
        gradients = [2 * x.T @ residual / y.size, 2 * residual.sum(0) / y.size]
        norm = math.sqrt(sum(np.sum(g**2) for g in gradients))
        factor = min(1, clip / norm) / 4
        mean = [m + factor * g for m, g in zip(mean, gradients, strict=True)]
    return kernel - 0.5 * (mean[0] + 2 * regularizer * kernel), bias - 0.5 * mean[1]


def test_the_loop_is_clipped_gradients_averaged_and_sgd(tmp_path):
    model = linear()
    grid = grid_of(tmp_path, max_participations=3)
    strategy = strategy_for(model, l2_norm_clip=0.7, max_participations=3)
    expected = [v.numpy().astype("float64") for v in model.trainable_variables]
    seen = []
    result = strategy.start(
        grid,
        strategy.initial_arrays(),
        num_rounds=3,
        evaluate_fn=lambda number, arrays: seen.append(model.get_weights()),
    )
    for number in range(3):
        expected = step(*expected, clip=0.7)
        for value, wanted in zip(seen[number + 1], expected, strict=True):
            np.testing.assert_allclose(value, wanted, atol=2e-5)
    for value, wanted in zip(result.arrays.to_numpy_ndarrays(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)
    assert not result.train_metrics_clientapp
    assert not result.evaluate_metrics_clientapp
    sent = {message.metadata.message_type for message in grid.messages}
    assert sent == {"train"}


def test_the_clip_norm_follows_a_schedule(tmp_path):
    model = linear()
    grid = grid_of(tmp_path, max_participations=2)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.125])
    strategy = strategy_for(
        model,
        clip_policy=tfdp.callbacks.ClipNormScheduler(schedule),
        max_participations=2,
    )
    expected = [v.numpy().astype("float64") for v in model.trainable_variables]
    strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    expected = step(*step(*expected, clip=0.5), clip=0.125)
    for value, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)
    configs = [message.content["config"] for message in grid.messages[::4]]
    assert [c[flower.CLIP_KEY] for c in configs] == [0.5, 0.125]
    assert [c["server-round"] for c in configs] == [1, 2]


def test_weight_regularizers_are_the_servers(tmp_path):
    model = linear(kernel_regularizer=keras.regularizers.L2(0.1))
    strategy = strategy_for(model)
    start = [v.numpy().astype("float64") for v in model.trainable_variables]
    strategy.start(grid_of(tmp_path), strategy.initial_arrays(), num_rounds=1)
    expected = step(*start, clip=0.5, regularizer=0.1)
    for value, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)


def test_start_trains_from_the_arrays_it_is_given(tmp_path):
    model = linear()
    strategy = strategy_for(model)
    weights = [np.full((3, 2), 0.3, "float32"), np.full(2, -0.1, "float32")]
    strategy.start(grid_of(tmp_path), ArrayRecord(weights), num_rounds=1)
    for value, wanted in zip(model.get_weights(), step(*weights, 0.5), strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5)


def test_any_optimizer_applies_the_mean(tmp_path):
    model = linear()
    before = model.get_weights()
    strategy = strategy_for(model, optimizer="adam")
    strategy.start(grid_of(tmp_path), strategy.initial_arrays(), num_rounds=1)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(np.abs(value - old), 0.001, rtol=0.02)


def test_flowers_own_strategy_averages_uniformly(tmp_path):
    """Any strategy can be the server: it adds the clipped updates here."""
    grid = grid_of(tmp_path)
    model = linear()
    weights = ArrayRecord(model.get_weights())
    result = FedAvg(fraction_evaluate=0.0, min_train_nodes=4).start(
        *(grid, weights),
        num_rounds=1,
        train_config=ConfigRecord({flower.CLIP_KEY: 0.5}),
    )
    start = [v.astype("float64") for v in model.get_weights()]
    expected = step(*start, clip=0.5)
    for mean, old, new in zip(
        result.arrays.to_numpy_ndarrays(), start, expected, strict=True
    ):
        np.testing.assert_allclose(old - 0.5 * mean, new, atol=2e-5)
    assert result.train_metrics_clientapp[1] == {}


def test_a_server_cannot_ask_again(tmp_path):
    app = client_app(tmp_path / "0.json", *examples(0), epsilon=8.0)
    weights = {str(n): w for n, w in enumerate(linear().get_weights())}
    grid = LocalGrid({1: app})
    assert grid.answer(train_message(weights)).has_content()
    spent = "The privacy budget allows no reply."
    for clip in (0.5, 1e-3):
        assert grid.answer(train_message(weights, clip)).error.reason == spent
    # Under a new node id, and after the client was started anew.
    again = client_app(tmp_path / "0.json", *examples(0), epsilon=8.0)
    grid = LocalGrid({99: app, 100: again})
    for node_id in (99, 100):
        message = train_message(weights, node_id=node_id)
        message.content["config"]["epsilon"] = 1e9
        message.content["config"]["noise-multiplier"] = 0.0
        assert grid.answer(message).error.reason == spent
    strategy = strategy_for(linear(), clients_per_round=2)
    before = strategy.model.get_weights()
    strategy.start(grid, strategy.initial_arrays(), num_rounds=1)
    for value, old in zip(strategy.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_a_server_cannot_lower_the_noise(path):
    message = train_message(MANY, 1.0)
    for name in ("noise-multiplier", "noise_multiplier", "ldp-sigma", "epsilon"):
        message.content["config"][name] = 0.0
    mod = flower.local_dp_mod(budget_at(path), max_l2_norm_clip=1.0)
    private = arrays_in(answer(mod, message, replies(MANY)))
    assert np.std(private["0"]) == pytest.approx(SIGMA, rel=0.05)


def test_evaluation_is_refused(tmp_path):
    grid = grid_of(tmp_path, clients=1)
    reply = grid.answer(train_message(message_type="evaluate", node_id=7))
    assert reply.error.reason == "Only train messages are answered."


def test_the_state_of_a_client_stays_with_it(mod):
    state = context(1)
    state.state["seen"] = MetricRecord({"rows": 5})
    reply = mod(train_message(), state, replies(WEIGHTS))
    assert state.state["seen"] == {"rows": 5}
    assert "seen" not in reply.content


# -------------------------------------------------------------------- the server


def lying(update, num_examples=1):
    app = ClientApp()

    @app.train()
    def train(message, _):
        content = update
        if not isinstance(update, RecordDict):
            content = RecordDict({"arrays": record(update)})
        content = copy.deepcopy(content)
        content["metrics"] = MetricRecord({"num-examples": num_examples})
        return Message(content, reply_to=message)

    return app


def constant(value, dtype="float32"):
    return {"0": np.full((3, 2), value, dtype), "1": np.full(2, value, dtype)}


def moved(apps, **options):
    """Return how far one round moves each weight."""
    model = linear(kernel_initializer="zeros")
    strategy = strategy_for(model, **{"clients_per_round": len(apps)} | options)
    grid = LocalGrid(dict(enumerate(apps, start=1)))
    strategy.start(grid, strategy.initial_arrays(), num_rounds=1)
    return [-2 * value for value in model.get_weights()]


@pytest.mark.parametrize("claimed", [0, -3, 1e9, 10**6, math.nan])
def test_the_average_is_uniform_whatever_clients_claim(claimed):
    apps = [lying(constant(1.0)), lying(constant(4.0), claimed), lying(constant(1.0))]
    for mean in moved(apps):
        np.testing.assert_allclose(mean, 2.0, rtol=1e-6)


def broken(name, array):
    content = RecordDict({"arrays": record(constant(9.0))})
    content["arrays"][name] = array
    return content


@pytest.mark.parametrize(
    "update",
    [
        constant(math.nan),
        constant(math.inf),
        constant(1e300, "float64"),
        constant(1, "int32"),
        constant(1 + 1j, "complex64"),
        {"0": np.full((3, 2), "a"), "1": np.full(2, "b")},
        {"0": np.ones((3, 2), "float32")},
        constant(1.0) | {"2": np.ones(1, "float32")},
        constant(1.0) | {"1": np.ones((2, 1), "float32")},
        {"kernel": np.ones((3, 2), "float32"), "bias": np.ones(2, "float32")},
        {},
        RecordDict(),
        RecordDict({"a": record(constant(1.0)), "b": record(constant(1.0))}),
        broken("0", Array("float32", (3, 2), "numpy.ndarray", b"")),
        broken("0", Array("float32", (3, 2), "other", b"")),
        broken("0", Array("object", (3, 2), "numpy.ndarray", b"\x93NUMPY junk")),
    ],
)
def test_replies_that_do_not_fit_are_left_out(update):
    def fails(*_):
        raise RuntimeError

    for mean in moved([lying(update), lying(constant(2.0)), fails]):
        np.testing.assert_allclose(mean, 2.0, rtol=1e-6)


def test_large_finite_numbers_do_not_overflow_in_the_mean():
    for mean in moved([lying(constant(1e38)), lying(constant(-1e38))]):
        np.testing.assert_allclose(mean, 0.0, atol=1.0)


def test_a_round_without_replies_changes_nothing():
    model = linear()
    strategy = strategy_for(model, clients_per_round=2, max_participations=2)
    before = model.get_weights()
    grid = LocalGrid({1: fails, 2: lying(constant(math.nan))})
    strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert int(strategy.optimizer.iterations) == 0


def test_clients_take_part_by_permutation():
    orders = set()
    for seed in range(5):
        random.seed(seed)
        strategy = strategy_for(linear(), clients_per_round=3, max_participations=2)
        grid = LocalGrid({n: lying(constant(0.0)) for n in range(1, 7)})
        strategy.start(grid, strategy.initial_arrays(), num_rounds=4)
        asked = [message.metadata.dst_node_id for message in grid.messages]
        assert sorted(asked[:6]) == sorted(asked[6:]) == [1, 2, 3, 4, 5, 6]
        orders.add(tuple(asked))
    assert len(orders) > 1


def test_a_round_waits_for_clients_that_may_be_asked(monkeypatch):
    grid = LocalGrid({1: lying(constant(0.0)), 2: lying(constant(0.0))})
    connected = iter([{3: lying(constant(0.0))}, {}, {4: lying(constant(0.0))}])
    monkeypatch.setattr(time, "sleep", lambda _: grid.apps.update(next(connected)))
    strategy = strategy_for(linear(), clients_per_round=2)
    strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    asked = [message.metadata.dst_node_id for message in grid.messages]
    assert sorted(asked[:2]) == [1, 2]
    assert sorted(asked[2:]) == [3, 4]
    assert next(connected, None) is None


@pytest.mark.parametrize(
    "policy",
    [
        tfdp.callbacks.AdaptiveQuantileClip(0.5, count_noise_multiplier=10.0),
        lambda step: 1.0,
        0.5,
    ],
)
def test_only_schedules_of_the_clip_norm(policy):
    with pytest.raises(TypeError, match=r"`clip_policy` must be a `ClipNormScheduler`"):
        strategy_for(linear(), clip_policy=policy)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"l2_norm_clip": math.nan}, ValueError),
        ({"l2_norm_clip": 0.0}, ValueError),
        ({"clients_per_round": 0}, ValueError),
        ({"clients_per_round": math.nan}, ValueError),
        ({"max_participations": 0}, ValueError),
        ({"max_participations": "1"}, TypeError),
        ({"optimizer": 0.5}, TypeError),
        (
            {"optimizer": tfdp.optimizers.DPSGD(l2_norm_clip=1.0, noise_multiplier=1)},
            TypeError,
        ),
    ],
)
def test_arguments_of_the_strategy(options, error):
    [name] = options
    with pytest.raises(error, match=f"`{name}` must .* Received: {name}"):
        strategy_for(linear(), **options)


def test_the_model_must_be_built():
    with pytest.raises(ValueError, match=r"`model` must be built.*keras\.Input"):
        strategy_for(keras.Sequential([keras.layers.Dense(2)]))


# -------------------------------------------------------------------- the client


def test_weights_of_another_model_are_refused():
    model = linear()
    with pytest.raises(ValueError, match="Arrays must be those of the trainable"):
        flower.set_weights(model, ArrayRecord([np.zeros((3, 3)), np.zeros(3)]))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_arrive_as_they_are_sent(dtype):
    keras.config.set_floatx(dtype)
    model = linear(bias_initializer="normal")
    strategy = strategy_for(model)
    other = linear()
    flower.set_weights(other, strategy.initial_arrays())
    for here, there in zip(model.variables, other.variables, strict=True):
        assert here.dtype == there.dtype == dtype
        np.testing.assert_array_equal(here.numpy(), there.numpy())


def test_the_gradient_is_that_of_the_mean_loss_in_training_mode():
    model = keras.Sequential([
        keras.Input((), dtype="int32"),
        keras.layers.Embedding(5, 3, embeddings_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2, trainable=False),
        keras.layers.Dense(1),
    ])
    x, y = np.array([1, 2, 4, 1]), np.ones((4, 1), "float32")
    sample_weight = np.array([1.0, 2.0, 0.0, 1.0], "float32")
    weights = ArrayRecord([v.numpy() + 0.1 for v in model.trainable_variables])
    message = Message(
        RecordDict({"weights": weights}), dst_node_id=1, message_type="train"
    )
    reply = flower.gradient_reply(message, model, "mse", x, y, sample_weight)
    [found] = reply.content.array_records.values()
    assert list(reply.content) == ["weights"]
    # The moving averages of the normalization are the client's own.
    with tf.GradientTape() as tape:
        losses = tf.reduce_mean((model(x, training=True) - y) ** 2, 1)
        loss = tf.reduce_mean(losses * sample_weight)
    variables = [v.value for v in model.trainable_variables]
    for gradient, wanted in zip(
        found.to_numpy_ndarrays(), tape.gradient(loss, variables), strict=True
    ):
        dense = tf.convert_to_tensor(wanted)
        np.testing.assert_allclose(gradient, dense, atol=1e-6)


def test_models_are_built_by_the_data():
    model = keras.Sequential([keras.layers.Dense(1)])
    message = train_message({"0": np.ones((2, 1)), "1": np.ones(1)})
    reply = flower.gradient_reply(
        message, model, "mse", np.ones((3, 2)), np.ones((3, 1))
    )
    assert arrays_in(reply)["0"].ravel().tolist() == [4.0, 4.0]


# -------------------------------------------------------------------- as installed


def test_without_flower_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "tfdp.federated.flower")
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'tfdp[flower]'")):
        importlib.import_module("tfdp.federated.flower")


PROJECT = """
[project]
name = "privately"
version = "1.0.0"
description = "A server, and clients that do not trust it"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"
[tool.flwr.app.config]
clients = 2
found = "{found}"
"""
CONNECTION = """
[superlink]
default = "here"
[superlink.here]
address = "{address}"
insecure = true
"""


def free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def started(tmp_path):
    """A function that starts one of Flower's programs, which is killed in the end."""
    environment = os.environ | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    processes = []

    def started(name, *arguments):
        with (tmp_path / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [shutil.which(name, path=environment["PATH"]), *map(str, arguments)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
        return process

    yield started
    for process in reversed(processes):
        # The group: Flower's programs start others.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(condition, seconds, tmp_path):
    deadline = time.monotonic() + seconds
    while not condition():
        log = (tmp_path / "log.txt").read_text(errors="replace")
        assert time.monotonic() < deadline, log
        time.sleep(0.5)


def accepts(port):
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_clients_of_their_own_over_flowers_network(tmp_path, started):
    port, *node_ports = free_ports(3)
    app, found = tmp_path / "app", tmp_path / "found.json"
    app.mkdir()
    shutil.copy(flower_app.__file__, app)
    (app / "pyproject.toml").write_text(PROJECT.format(found=found))
    (tmp_path / "home").mkdir()
    address = f"127.0.0.1:{port}"
    (tmp_path / "home" / "config.toml").write_text(CONNECTION.format(address=address))

    offline = "--disable-runtime-dependency-installation"
    started("flower-superlink", "--insecure", "--port", port, offline)
    wait_for(lambda: accepts(port), 60, tmp_path)
    for client, node_port in enumerate(node_ports):
        budget = tmp_path / f"{client}.json"
        config = f'client={client} noise={ALMOST_NONE} budget="{budget}"'
        started(
            *("flower-supernode", "--insecure", "--superlink", address),
            *("--port", node_port, "--node-config", config),
        )
    run = started("flwr", "run", app, "here")
    wait_for(lambda: run.poll() is not None, 60, tmp_path)
    wait_for(found.exists, 300, tmp_path)

    result = json.loads(found.read_text())
    expected = [v.numpy() for v in flower_app.model().trainable_variables]
    for client in range(2):
        update = tfdp.clipped_gradients(
            *(flower_app.model(), "mse", *flower_app.examples(client)),
            l2_norm_clip=flower_app.CLIP,
            num_microbatches=1,
        )
        gradients = [gradient.numpy() / 2 for gradient in update.gradients]
        for place, gradient in enumerate(gradients):
            expected[place] = expected[place] - flower_app.LEARNING_RATE * gradient
    for weight, wanted in zip(result["weights"], expected, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-5)
    # Each has taken part in the round, and is asked to train and to evaluate again.
    assert sorted(reply["error"] for reply in result["again"]) == [
        *2 * ["Only train messages are answered."],
        *2 * ["The privacy budget allows no reply."],
    ]
    for client in range(2):
        ledger = json.loads((tmp_path / f"{client}.json").read_text())
        assert len(ledger["noise_multipliers"]) == 1
