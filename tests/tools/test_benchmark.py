"""The benchmark, with few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "benchmark.py", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "xla",
    ["--nojit_compile", pytest.param("--jit_compile", marks=pytest.mark.slow)],
)
def test_prints_times_and_ratios(tmp_path, xla):
    plot = tmp_path / "times.png"
    process = start(
        "--models=cnn", "--steps=2", "--batch_size=8", xla, f"--plot={plot}"
    )
    assert process.returncode == 0, process.stderr
    rows = re.findall(
        r"^(\w+) +(fixed|Poisson) +([\d.]+) +([\d.]+) +([\d.]+)$", process.stdout, re.M
    )
    assert [row[:2] for row in rows] == [("cnn", "fixed"), ("cnn", "Poisson")]
    for *_, keras_time, tfdp_time, ratio in rows:
        assert float(keras_time) > 0
        assert float(tfdp_time) > 0
        assert float(ratio) > 0
    assert re.search(r"TensorFlow [\d.]+", process.stdout)
    assert re.search(r"\d+ cores", process.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_wrong_flag_is_explained():
    process = start("surplus")
    assert process.returncode
    assert "surplus" in process.stderr
    assert "Traceback" not in process.stderr
