"""The benchmark, with few steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = r"((?: +[\d.]+){6})$"


def start(*arguments, script="benchmark.py"):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def small(*arguments):
    # XLA may take its time on a machine that does something else, too.
    options = ("--models=mlp", "--batch_size=4", "--steps=2", "--time_limit=300")
    return start(*options, *arguments)


def rows(process):
    assert process.returncode == 0, process.stdout + process.stderr
    found = re.findall(rf"^mlp +4  (\w+){NUMBERS}", process.stdout, re.M)
    return {
        row: [float(number) for number in numbers.split()] for row, numbers in found
    }


@pytest.mark.slow
def test_steps_of_clients_are_timed_and_weighed():
    rows = ["federated_aggregate:1000000000", "federated_per_client:10000"]
    process = start(
        *("--model=cnn", "--batch_size=5", "--steps=2", "--rows", *rows),
        script="peers/tfdp_steps.py",
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert list(found["milliseconds"]) == rows
    assert all(
        len(times) == 2 and min(times) > 0 for times in found["milliseconds"].values()
    )
    assert 0 < found["before_mib"] < found["peak_mib"]
    assert "TensorFlow" in found["about"]


@pytest.mark.slow
def test_prints_times_and_memory_and_ratios():
    process = small("--rows=bookkeeping", "--rows=bam_sam", "--poisson")
    table = rows(process)
    assert list(table) == ["ordinary", "bookkeeping", "bam_sam"]
    for numbers in table.values():
        assert all(number > 0 for number in numbers)
    assert table["ordinary"][1::2] == [1, 1, 1]
    assert re.search(r"TensorFlow [\d.]+", process.stdout)
    assert re.search(r"\d+ cores", process.stdout)


def test_texts_are_for_bert():
    process = start("--models=mlp", "--texts=texts.tsv")
    assert process.returncode
    assert "--texts are for bert" in process.stderr


@pytest.mark.exhaustive
def test_rows_alone_are_kept_and_not_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = small("--rows=bookkeeping", f"--alone={path}")
    table = rows(first)
    assert list(table) == ["ordinary", "bookkeeping"]
    kept = path.read_text()
    path.write_text(kept + '{"what": [')
    assert rows(small("--rows=bookkeeping", f"--alone={path}")) == table
    assert len(kept.splitlines()) == 2


@pytest.mark.parametrize(
    ("limit", "problem"),
    [("--memory_limit=0.01", "out of memory"), ("--time_limit=0.1", "too slow")],
)
def test_a_limit_is_a_result(limit, problem):
    process = small("--rows=ghost", limit)
    assert process.returncode == 0, process.stderr
    assert len(re.findall(rf"  {problem}$", process.stdout, re.M)) == 2


def test_a_failure_is_explained_and_is_no_result(tmp_path):
    python = tmp_path / "python"
    process = small("--rows=ghost", "--time_limit=0.1", f"--opacus_python={python}")
    assert process.returncode
    assert "not all rows" in process.stderr
    assert re.search(rf"opacus ordinary .*failed: .*{python}", process.stdout)


@pytest.mark.exhaustive
def test_memory_over_batch_sizes():
    process = start("--passes", "--batch_size=8")
    assert process.returncode == 0, process.stderr
    table = re.findall(r"^(\d+)((?: +\d+, \d+){3})$", process.stdout, re.M)
    assert [int(size) for size, _ in table] == [8]


@pytest.mark.slow
def test_growth_is_plotted(tmp_path):
    code = """
import pathlib, sys
from benchmarking.growth import plot
from benchmarking.processes import Result
found = Result({"ordinary": [1.0], "ghost": [2.0]}, 100.0)
failed = Result(problem="out of memory")
over = {8: {"ordinary": found, "ghost": found}, 9: {"ordinary": found, "ghost": failed}}
plot({"a": over, "b": over}, ["ordinary", "ghost"], pathlib.Path(sys.argv[1]))
"""
    plot = tmp_path / "plots" / "growth.png"
    subprocess.run(
        [sys.executable, "-c", code, plot],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        check=True,
    )
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_wrong_flag_is_explained():
    process = start("surplus")
    assert process.returncode
    assert "surplus" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.exhaustive
def test_time_over_depth(tmp_path):
    path = tmp_path / "bam.png"
    process = start("--bam", "--batch_size=4", "--depth=2", f"--bam_plot={path}")
    assert process.returncode == 0, process.stderr
    table = re.findall(r"^(\d+)((?: +[\d.]+ \+- [\d.]+){5})$", process.stdout, re.M)
    assert [int(depth) for depth, _ in table] == [2]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_prints_what_starting_takes():
    process = small("--startup", "--rows=bookkeeping")
    assert process.returncode == 0, process.stdout + process.stderr
    found = re.findall(r"^mlp +(\w+) +([\d.]+) +([\d.]+)$", process.stdout, re.M)
    assert [row for row, *_ in found] == ["ordinary", "bookkeeping"]
    assert all(float(seconds) > 0 for _, seconds, _ in found)


@pytest.mark.exhaustive
def test_prints_passes_over_files():
    process = small("--reading")
    assert process.returncode == 0, process.stdout + process.stderr
    found = re.findall(r"^cnn +4  (\w+) +([\d.]+) +([\d.]+)$", process.stdout, re.M)
    assert [row for row, *_ in found] == ["shuffled", "bins"]
    assert all(float(milliseconds) > 0 for _, milliseconds, _ in found)


@pytest.mark.exhaustive
def test_prints_epochs_of_fit_for_each_way_to_give_rows():
    process = small("--fit", "--seconds=1")
    assert process.returncode == 0, process.stdout + process.stderr
    found = re.findall(r"^mlp +4  (\w+) +([\d.]+) +([\d.]+)$", process.stdout, re.M)
    ways = [way for way, *_ in found]
    assert ways[:3] == ["ordinary", "ordinary_pipeline", "poisson"]
    assert {"bounded_poisson", "shuffled", "declared"} <= set(ways)
    assert float(found[0][2]) == 1
