"""What forms are made from."""

import keras
import pytest

import tfdp
from tfdp.accounting import Ledger, PoissonSteps
from tfdp.reports import facts_of


@pytest.fixture
def facts():
    """Return a function that gathers facts of a small model and of a given ledger."""

    def gather(*segments, answers=None, audits=(), plain_steps=0, delta=1e-5, **flags):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, name="last")], name="small"
        )
        return facts_of(
            model,
            tfdp.DPModel(model).recorder,
            Ledger(segments or (PoissonSteps(10, 8.0, 60_000, 256),), **flags),
            delta,
            plain_steps=plain_steps,
            answers=answers,
            audits=audits,
        )

    return gather
