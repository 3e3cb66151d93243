"""The site's pages: each block of code runs alone, and every public name is there."""

import pytest

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
    error = run_alone(page, line, block, tmp_path)
    assert error is None, error
