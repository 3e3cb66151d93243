"""The picture of the engines' times."""

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "plot_costs.py"
PAGE = """# Costs

| model | ordinary | book-keeping | ghost (Gram) | vectorized |
|---|---|---|---|---|
| MLP, 256 | 17.1 ms, 702 MiB | 1.48, 1.09 | 1.73, 1.09 | 17.8, 3.8 |
| Embedding, 256 | 9.4 ms, 750 MiB | 4.68, 1.16 | 4.86, 1.16 | not run |

| other | table |
|---|---|
| 1 | 2 |
"""


def test_the_table_is_read(tool):
    mlp, embedding = tool.read(PAGE).items()
    assert mlp == (
        "MLP, 256\nordinary step: 17.1 ms",
        {
            "ordinary": 1.0,
            "book-keeping": 1.48,
            "ghost (Gram)": 1.73,
            "vectorized": 17.8,
        },
    )
    assert math.isnan(embedding[1]["vectorized"])


def test_the_page_of_costs_has_one(tool):
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    assert len(tool.read(page)) == 6


def test_a_picture_is_drawn(run, tmp_path):
    page, picture = tmp_path / "costs.md", tmp_path / "new" / "engines.png"
    page.write_text(PAGE)
    assert run(page, f"--output={picture}") == f"Plot: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Received: none"),
        (["{folder}/missing.md"], "No such file"),
        (["{folder}/empty.md"], "Received: no ordinary, book-keeping"),
    ],
)
def test_wrong_pages_end_in_a_sentence(run, tmp_path, arguments, message):
    (tmp_path / "empty.md").write_text("nothing")
    with pytest.raises(SystemExit, match=message) as stop:
        run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert stop.value.code.startswith("plot_costs: ")
