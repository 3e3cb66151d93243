"""The estimate for many replicas."""

import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "scaling.py"


@pytest.mark.slow
def test_the_table(run):
    text = run(
        "--replicas=1", "--replicas=64", "--examples_per_replica=2", "--times_faster=10"
    )
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    alone, many = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert alone[:4] == ["1", "2", "0.0", "0.0"]
    assert many[:3] == ["64", "128", "51.8"]
    assert alone[-1] == "1"
    assert 1 < float(many[-1]) <= 64


def test_a_batch_larger_than_the_data_is_refused(run):
    with pytest.raises(SystemExit, match="number_of_examples=100"):
        run("--number_of_examples=100")
