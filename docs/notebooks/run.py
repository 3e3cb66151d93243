"""Runs the notebooks from top to bottom and keeps their outputs, nothing else.

python docs/notebooks/run.py                # All of them.
python docs/notebooks/run.py quick_start
"""

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def run(path: Path, *, timeout: int = 600) -> nbformat.NotebookNode:
    """Run a notebook in a fresh kernel, in a folder of its own."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=timeout, kernel_name="python3").execute()
    return notebook


def strip(notebook: nbformat.NotebookNode) -> None:
    """Take away what is another one in every run, but for the outputs."""
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            # What TensorFlow logs has times in it.
            cell.outputs = [
                each for each in cell.outputs if each.get("name") != "stderr"
            ]
            for output in cell.outputs:
                output.pop("execution_count", None)
                if "metadata" in output:
                    output.metadata = {}


def main(names: list[str]) -> None:
    """Run, strip and write."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        began = time.monotonic()
        notebook = run(path)
        strip(notebook)
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
        print(f"{path.name}: {time.monotonic() - began:.0f} s, {size:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
