"""The estimate for many replicas."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "scaling.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_table():
    process = run(
        "--replicas=1", "--replicas=64", "--examples_per_replica=2", "--times_faster=10"
    )
    assert process.returncode == 0, process.stderr
    rows = [line for line in process.stdout.splitlines() if re.match(r"\| \d", line)]
    alone, many = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert alone[:4] == ["1", "2", "0.0", "0.0"]
    assert many[:3] == ["64", "128", "51.8"]
    assert alone[-1] == "1"
    assert 1 < float(many[-1]) <= 64


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_refused():
    process = run("--number_of_examples=100")
    assert process.returncode == 1
    assert "number_of_examples=100" in process.stderr
    assert "Traceback" not in process.stderr
