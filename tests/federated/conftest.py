"""The noise that a budget needs is computed once: it takes a quarter of a second."""

import functools

import pytest

from tfdp.federated import local_budget

_calibrate = functools.cache(local_budget.calibrate_local_noise_multiplier)


@pytest.fixture(autouse=True)
def calibrated_once(monkeypatch):
    monkeypatch.setattr(local_budget, "calibrate_local_noise_multiplier", _calibrate)
