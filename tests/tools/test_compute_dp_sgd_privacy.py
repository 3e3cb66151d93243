import os
import pathlib
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


@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
def test_the_noise_for_an_epsilon(run, accountant):
    noise = accounting.calibrate_noise_multiplier(
        0.2, n=60_000, batch_size=256, epochs=60, delta=1e-5, accountant=accountant
    )
    output = run(*MNIST, "--target_epsilon=0.2", f"--accountant_type={accountant}")
    assert output.startswith(f"Noise multiplier: {noise}\n")
    assert f"epsilon = 0.2 at delta = 1e-05 by {accountant} accounting" in output


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
assert tool.accounting.Ledger().epsilon(1e-5) == 0
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{ROOT}"},
        check=True,
    )
