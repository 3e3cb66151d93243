"""Steps that end after one of their stages."""

import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdp

ROOT = Path(__file__).parents[2]
ENGINES = (
    "ghost",
    *(
        pytest.param(engine, marks=pytest.mark.slow)
        for engine in ("vectorized", "fast_gradient_clipping", "bookkeeping")
    ),
)
STAGES = ("forward", "backward", "norms", "sums")


@pytest.fixture(scope="module")
def peer():
    """The script of the steps, loaded as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools" / "peers")
        yield importlib.import_module("tfdp_stage_steps")


@pytest.fixture(scope="module")
def problem(peer):
    """A model, and a batch in which some examples are clipped and some are not."""
    model = peer.tfdp_steps.build("mlp:8")
    x, y = peer.steps.examples("mlp", 6)
    x[2] *= 1e6
    x[3] *= 1e-3
    return model, tf.constant(x), tf.constant(y)


@pytest.fixture(scope="module")
def held_by(peer, problem):
    """Engine -> what its steps hold at the end of each stage."""

    @functools.cache
    def held(engine):
        model, *batch = problem
        whole = peer.whole_of(engine, model, 6)
        return {
            stage: [each.numpy() for each in peer.until(stage, whole, *batch)()]
            for stage in STAGES
        }

    return held


def has(held, expected):
    return any(
        each.shape == expected.shape and np.allclose(each, expected, 1e-5, 1e-8)
        for each in held
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_stages_end_with_what_the_engine_computes(peer, problem, held_by, engine):
    model, x, y = problem
    expected = tfdp.clipped_gradients(
        *(model, peer._LOSS, x, y),
        l2_norm_clip=peer.steps.L2_NORM_CLIP,
        engine=peer.tfdp_steps.OPTIONS[engine]["engine"],
    )
    assert np.sum(expected.norms > 1) > 1  # Clipped, the outlier among them.
    held = held_by(engine)
    outputs = model(x).numpy()
    assert all(has(held[stage], outputs) for stage in STAGES)
    norms = expected.norms.numpy()
    assert [has(held[stage], norms) for stage in STAGES] == [False, False, True, True]
    for each in expected.gradients:
        found = [has(held[stage], each.numpy()) for stage in STAGES]
        assert found == [False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_examples_are_held_where_they_are_summed(problem, held_by, engine):
    shapes = {each.shape for each in held_by(engine)["backward"]}
    kernels = [v.shape for v in problem[0].trainable_variables if len(v.shape) == 2]
    assert ({(6, *shape) for shape in kernels} <= shapes) == (engine == "vectorized")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ordinary", "ghost"])
def test_updates_move_the_weights(peer, problem, engine):
    _, *batch = problem
    model = peer.tfdp_steps.build("mlp:8")
    before = model.get_weights()
    peer.until("update", peer.whole_of(engine, model, 6), *batch)()
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.any(old != new)


def test_ordinary_steps_have_the_gradients_of_tensorflow(peer, problem):
    model, x, y = problem
    with tf.GradientTape() as tape:
        loss = peer._LOSS(y, model(x))
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    run = peer.until("backward", peer.whole_of("ordinary", model, 6), x, y)
    held = [each.numpy() for each in run()]
    assert all(has(held, each.numpy()) for each in expected)


def test_memory_of_a_gpu_is_what_tensorflow_holds_there(peer, monkeypatch):
    def found(device):
        assert device == "GPU:0"
        return {"current": 2**20, "peak": 3 * 2**20}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", found)
    measured = []
    monkeypatch.setattr(peer.steps, "main", lambda *args: measured.append(args[2]))
    monkeypatch.setattr(peer.tfdp_steps, "about", str)
    for gpus in ([], ["GPU"]):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _, of=gpus: of)
        peer.tfdp_steps.main(peer.stepper)
    of_host, of_gpu = measured
    assert of_host is None
    assert of_gpu() == (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert_whole", "gpt2:1", "wrn16_4"])
def test_models_for_accelerators_fit_their_examples(peer, model):
    network = peer.tfdp_steps.build(model)
    x, y = peer.steps.examples(model, 2)
    assert network.input_shape[1:] == x.shape[1:]
    assert network.output_shape[1:-1] == y.shape[1:]
    assert network.output_shape[-1] == peer.steps.problem_of(model).classes


@pytest.mark.slow
def test_the_positions_of_a_language_model_train(peer):
    network = peer.tfdp_steps.build("gpt2:1")
    assert (256, 768) in {each.shape for each in network.trainable_variables}


@pytest.mark.exhaustive
def test_peaks_grow_from_stage_to_stage():
    options = ("--stages", "--models=mlp", "--rows=vectorized", "--time_limit=300")
    process = subprocess.run(
        [sys.executable, ROOT / "tools" / "benchmark.py", *options, "--batch_size=64"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    found = re.findall(r"^mlp +64  (\w+)((?: +[\d-]+){5})$", process.stdout, re.M)
    table = {row: numbers.split() for row, numbers in found}
    assert list(table) == ["ordinary", "vectorized"]
    assert table["ordinary"][2:4] == ["-", "-"]
    peaks = [int(number) for number in table["vectorized"]]
    # The host's memory is in pages, arenas and graphs, too.
    assert all(later > 0.9 * former for former, later in itertools.pairwise(peaks))
    gradients_mib = 64 * 4 * (784 * 1024 + 1024 * 1024) / 2**20
    assert peaks[0] < gradients_mib < peaks[1]
