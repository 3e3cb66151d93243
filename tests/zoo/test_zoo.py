"""Every model of the zoo trains, clipped as a loop over single rows would."""

import inspect

import numpy as np
import pytest

import tfdp
from tests.zoo import ZOO
from tests.zoo.entry import engine_of
from tests.zoo.single_rows import check_single_rows, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TRAINED = {name: entry for name, entry in ZOO.items() if entry.engine != "refused"}
CASES = [
    pytest.param(entry, id=name, marks=[] if entry.is_quick else pytest.mark.slow)
    for name, entry in TRAINED.items()
]


@pytest.mark.parametrize("entry", CASES)
def test_clipped_as_single_rows(entry):
    check_single_rows(entry)


DRAWING = {
    name: entry
    for name, entry in TRAINED.items()
    if "chance" in inspect.signature(entry.build).parameters
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", DRAWING.values(), ids=DRAWING)
def test_engine_with_chance(entry):
    """What a model draws does not change which engine clips it."""
    private = trained(entry, entry.build(1.0), entry.batch(), 1.0)
    assert engine_of(private) == entry.engine
    assert all(np.isfinite(v).all() for v in private.model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO.keys() - TRAINED.keys()))
def test_refused(name):
    """With a reason, before anything is trained."""
    model = ZOO[name].build(1.0)
    before = model.get_weights()
    with pytest.raises((
        tfdp.errors.UnsupportedLayerError,
        tfdp.errors.UnsupportedLossError,
    )):
        trained(ZOO[name], model, ZOO[name].batch(), 1.0)
    for weight, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, start)
