import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags

from tfdp import accounting

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "compute_dp_sgd_privacy.py"
MNIST = ["--N=60000", "--batch_size=256", "--epochs=60", "--delta=1e-5"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--noused_microbatching"], {"used_microbatching": False}),
        (["--max_examples_per_user=2"], {"max_examples_per_user": 2}),
        (["--accountant_type=PLD"], {"accountant_type": "PLD"}),
    ],
)
def test_the_statement(run, arguments, options):
    expected = accounting.compute_dp_sgd_privacy_statement(
        60_000, 256, 60, 8.0, 1e-5, **options
    )
    assert run(*MNIST, "--noise_multiplier=8", *arguments) == expected + "\n"


def test_delta_and_epochs_may_be_left_and_fractional(run):
    expected = accounting.compute_dp_sgd_privacy_statement(1000, 10, 1.5, 2.0, 1e-6)
    arguments = ["--N=1000", "--batch_size=10", "--epochs=1.5"]
    assert run(*arguments, "--noise_multiplier=2") == expected + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
def test_the_noise_for_an_epsilon(run, accountant):
    noise = accounting.calibrate_noise_multiplier(
        0.2, n=60_000, batch_size=256, epochs=60, delta=1e-5, accountant=accountant
    )
    output = run(*MNIST, "--target_epsilon=0.2", f"--accountant_type={accountant}")
    assert output.startswith(f"Noise multiplier: {noise}\n")
    assert f"epsilon = 0.2 at delta = 1e-05 by {accountant} accounting" in output


SMALL = ["--N=500", "--batch_size=50", "--noise_multiplier=2", "--delta=1e-4"]


@pytest.mark.slow
def test_all_ways_of_drawing_stand_beside_each_other(run):
    planned = accounting.segments_by_sampling(
        n=500, batch_size=50, epochs=2, noise_multiplier=2.0
    )
    output = run(*SMALL, "--epochs=2", "--sampling=all")
    lines = re.findall(r"^ +([\d.]+)  (\d+ \w+) +(\w+) +(\w+): .+$", output, re.M)
    assert lines == [
        (
            f"{accounting.reported_epsilon([segment], 1e-4):.3f}",
            f"{segment.count} {segment.scheme.counts}",
            "yours" if name == "unknown" else "50",
            name,
        )
        for name, segment in planned.items()
    ]
    assert "{" not in output
    assert "Poisson-sampled batches:" not in output


@pytest.mark.slow
def test_cyclic_draws_from_as_many_parts_as_asked_for(run):
    planned = accounting.segments_by_sampling(
        n=500, batch_size=50, epochs=2, noise_multiplier=2.0, cyclic_parts=5
    )["cyclic_poisson"]
    assert planned.scheme.parts == 5
    sampling = ["--sampling=cyclic_poisson", "--cyclic_parts=5"]
    output = run(*SMALL, "--epochs=2", *sampling)
    assert f"{accounting.reported_epsilon([planned], 1e-4):.3f}  2 passes" in output
    assert "from 5 parts in turn, with chance 0.5" in output


@pytest.mark.slow
def test_some_ways_over_the_epochs(run, tmp_path):
    path = tmp_path / "new" / "plot.png"
    sampling = "--sampling=shuffle,poisson"
    output = run(*SMALL, "--epochs=2.5", sampling, f"--plot={path}")
    assert re.findall(r"(\w+): ", output) == ["shuffle", "poisson", "Plot"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_needs_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plots", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        run(*SMALL, "--epochs=1", "--sampling=unknown", f"--plot={tmp_path / 'p'}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling=coins"], "must be all, or some of poisson,"),
        (["--sampling="], "must be all, or some of poisson,"),
        (["--sampling=all,poisson"], "must be all, or some of poisson,"),
        (["--sampling=all", "--compare"], "Received: compare=True"),
        (["--sampling=all", "--accountant_type=PLD"], "accountant_type=PLD"),
        (["--sampling=all", "--used_microbatching"], "used_microbatching=True"),
        (["--sampling=all", "--batch_size=501"], "Use `batch_size=500`"),
        (["--sampling=all", "--delta=0"], "Received: delta=0"),
        (["--plot=plot.png"], "Use `--sampling=all` with it"),
        (["--cyclic_parts=3"], "Use `--sampling=all` with it"),
        (["--sampling=all", "--cyclic_parts=501"], "Received: parts=501"),
        (["--sampling=all", "--cyclic_parts=0"], "Received: parts=0"),
    ],
)
def test_a_comparison_of_something_else(run, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(*SMALL, "--epochs=1", *arguments)


def test_ways_of_drawing_take_a_noise_multiplier(run):
    with pytest.raises(SystemExit, match="Received: target_epsilon=1"):
        run(*MNIST, "--target_epsilon=1", "--sampling=all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--noise_multiplier=-1"], "Received: noise_multiplier=-1"),
        (["--noise_multiplier=nan"], "Received: noise_multiplier=nan"),
        (
            ["--noise_multiplier=1", "--batch_size=60001"],
            "`batch_size` must be at most",
        ),
        (["--noise_multiplier=1", "--delta=1"], "Received: delta=1"),
        (["--noise_multiplier=1", "more"], "Received: more"),
        (["--target_epsilon=0"], "Received: target_epsilon=0"),
        (["--target_epsilon=1", "--epochs=1.5"], "Received: epochs=1.5"),
        (["--target_epsilon=1", "--used_microbatching"], "used_microbatching=True"),
        (["--target_epsilon=1", "--compare"], "compare=True"),
        (
            ["--target_epsilon=1", "--max_examples_per_user=2"],
            "max_examples_per_user=2",
        ),
    ],
)
def test_wrong_values_end_in_a_sentence(run, arguments, message):
    with pytest.raises(SystemExit, match=message) as stop:
        run(*MNIST, *arguments)
    assert stop.value.code.startswith("compute_dp_sgd_privacy: ")


def test_the_comparison_needs_tensorflow_privacy(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    with pytest.raises(SystemExit, match=r"pip install 'tfdp\[tensorflow-privacy\]'"):
        run(*MNIST, "--noise_multiplier=8", "--compare")


def test_the_comparison_stands_below(run, monkeypatch):
    monkeypatch.setattr(
        accounting,
        "compare_with_tensorflow_privacy",
        lambda *training, **options: f"{training} {options}",
    )
    output = run(*MNIST, "--noise_multiplier=8", "--compare", "--noused_microbatching")
    assert output.endswith(
        "(60000, 256, 60.0, 8.0, 1e-05) "
        "{'used_microbatching': False, 'accountant_type': 'RDP'}\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--noise_multiplier=1", "--target_epsilon=1"],
        ["--noise_multiplier=much"],
        ["--noise_multiplier=1", "--accountant_type=GDP"],
    ],
)
def test_wrong_flags_are_refused(run, arguments):
    with pytest.raises(flags.Error):
        run(*MNIST, *arguments)


@pytest.mark.slow
def test_the_script_runs_from_a_shell():
    process = subprocess.run(
        [sys.executable, SCRIPT, *MNIST, "--noise_multiplier=8"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "Poisson-sampled batches:" in process.stdout


@pytest.mark.slow
def test_it_starts_without_tensorflow():
    code = """
import sys, compute_dp_sgd_privacy as tool
assert not {"keras", "tensorflow"} & set(sys.modules)
assert not {"matplotlib", "plots"} & set(sys.modules)
assert tool.accounting.Ledger().epsilon(1e-5) == 0
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{ROOT}"},
        check=True,
    )
