"""The site's pages: each block of code runs alone, and every public name is there."""

import inspect
import re

import pytest

import tfdp
from tests.pages import ROOT, blocks, run_alone

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "line", "block"),
    [
        pytest.param(page, *found, id=f"{page.relative_to(DOCS)}:{found[0]}")
        for page in PAGES
        for found in blocks(page, "python")
    ],
)
def test_every_block_runs_alone(page, line, block, tmp_path):
    if "import keras_hub" in block:
        pytest.importorskip("keras_hub")
    error = run_alone(page, line, block, tmp_path)
    assert error is None, error


# Shared by a layer and its rule.
NOT_PUBLIC = {"tfdp.layers.centred"}


def names_in(module):
    """Return the names of a module's users: its exports, or all that it defines."""
    source = inspect.getsource(module)
    # `import a as a` exports a name; where there is none, all is for users.
    exports = re.findall(r"(?:import|^ +) ?(\w+) as \1\b", source, re.M)
    return exports or re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source, re.M)


def public_names():
    """Yield what users may write, with its name."""
    for name in names_in(tfdp):
        value = getattr(tfdp, name)
        if inspect.ismodule(value):
            for inner in names_in(value):
                if not inspect.ismodule(getattr(value, inner)):
                    yield getattr(value, inner), f"tfdp.{name}.{inner}"
        else:
            yield value, f"tfdp.{name}"


def test_every_public_name_has_its_place():
    text = "\n".join(
        page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md")
    )
    shown = set(re.findall(r"auto\w+:: (\S+)", text))
    places = {}
    for value, name in public_names():
        if name not in NOT_PUBLIC:
            places.setdefault(id(value), []).append(name)
    missing = [names for names in places.values() if not shown.intersection(names)]
    assert not missing
