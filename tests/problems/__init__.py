"""Problems as data: small models with their examples and losses, by name.

A problem draws its examples one by one, so a longer batch starts with the shorter
one. Weights and examples are the same numbers under every dtype (all are exact in
float32), so a float32 engine can be compared with a float64 reference.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.problems import (
    added,
    attention,
    convolutional,
    dense,
    embedding,
    normalization,
    outputs,
    recurrent,
    variables,
)
from tests.problems.batches import blank_row as blank_row
from tests.problems.batches import drop as drop
from tests.problems.batches import nan_row as nan_row
from tests.problems.batches import scale_outlier as scale_outlier
from tests.problems.batches import size as size
from tests.problems.batches import take as take
from tests.problems.building import floats as floats
from tests.problems.building import logits as logits
from tests.problems.building import sequential as sequential
from tests.problems.problem import TAGS as TAGS
from tests.problems.problem import Batch as Batch
from tests.problems.problem import Problem as Problem
from tests.problems.problem import precision as precision
from tests.problems.problem import register as register

_FAMILIES = (
    dense,
    convolutional,
    normalization,
    embedding,
    recurrent,
    attention,
    variables,
    outputs,
    added,
)
# The simplest of each kind come first.
PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in sorted(
        (problem for family in _FAMILIES for problem in family.PROBLEMS),
        key=lambda problem: len(problem.tags),
    )
}


def cases(
    having: Iterable[str] = (),
    lacking: Iterable[str] = (),
    *,
    is_slow: bool = False,
    is_few: bool = False,
) -> list[Any]:
    """Pytest parameters: the problems with all of one set of tags, none of another.

    Args:
        having: Tags that a problem must have.
        lacking: Tags that it must not have.
        is_slow: Whether only problems with a tag that none before them has are for
            the quick tests.
        is_few: Whether the others are left out altogether.
    """
    found, seen = [], set()
    for problem in PROBLEMS.values():
        if problem.tags.issuperset(having) and problem.tags.isdisjoint(lacking):
            is_new = not found or not seen.issuperset(problem.tags)
            seen |= problem.tags
            marks = [pytest.mark.slow] if is_slow and not is_new else []
            if is_new or not is_few:
                found.append(pytest.param(problem, id=problem.name, marks=marks))
    return found
