"""Frames, and cells that are taken step by step: one problem of each, in quick tests.

All others are in `tests/engines/test_bookkeeping.py`.
"""

import pytest

from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS
from tfdp.engines import BookkeepingEngine


@pytest.mark.parametrize("name", ["conv_lstm_masked", "rnn_own_cells"])
def test_clipped_as_single_rows(name):
    problem = PROBLEMS[name]
    check(problem, runner(problem, [BookkeepingEngine()], "eager"), OUTLIER)
