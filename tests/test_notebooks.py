"""The site's notebooks: each runs from top to bottom in a fresh kernel, in time."""

import os
import time
import warnings

import pytest

from tests.pages import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# A person waits no longer; seconds, on two cores.
_LIMIT = 120


def _read(path):
    nbformat = pytest.importorskip(
        "nbformat", reason="notebooks need the extra `docs`: pip install -e '.[docs]'"
    )
    return nbformat.read(path, as_version=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    reason = "notebooks run by nbclient, of the extra `docs`: pip install -e '.[docs]'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient = pytest.importorskip("nbclient", reason=reason)
        pytest.importorskip("ipykernel", reason=reason)
    searched = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, searched)))
    end = time.monotonic() + _LIMIT
    client = nbclient.NotebookClient(
        _read(path),
        kernel_name="python3",
        # What is left for a cell: past that, `CellTimeoutError`.
        timeout_func=lambda cell: max(1, int(end - time.monotonic())),
        resources={"metadata": {"path": str(tmp_path)}},
    )
    # An error in a cell raises `CellExecutionError`, with what it says.
    client.execute()
    assert time.monotonic() < end


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_its_outputs_and_nothing_else(path):
    notebook = _read(path)
    assert path.stat().st_size < 150_000
    assert notebook.cells[0].source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(
        "image/png" in output.get("data", {})
        for cell in code
        for output in cell.outputs
    )
    for cell in notebook.cells:
        # Times, numbers of executions and what TensorFlow logs change in every run.
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.execution_count is None
            kinds = {output.get("name", output.output_type) for output in cell.outputs}
            assert kinds <= {"stdout", "display_data", "execute_result"}
