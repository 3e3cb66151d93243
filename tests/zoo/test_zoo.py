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
# All of whose parts other models have, or tests of their rules.
ONE_MORE = {
    "autoencoder",
    "bag_of_instances",
    "bidirectional_lstm",
    "cait",
    "captions",
    "cct",
    "cepstrum",
    "cnn_3d",
    "conv_lstm",
    "conv_mixer",
    "crossed_features",
    "decision_forest",
    "deep_and_cross",
    "entity_recognition",
    "gated_residual",
    "hierarchical_attention",
    "last_word",
    "lstm_of_time",
    "miniature_gpt",
    "mlp_mixer",
    "molecules",
    "nested_transformer",
    "perceiver",
    "point_transformer",
    "pointnet",
    "seq2seq_transformer",
    "spatial_gating",
    "swin",
    "tab_transformer",
    "text_cnn",
    "traffic",
    "transformer_of_time",
    "unet",
    "vit_patch_encoder",
}


def marks_of(name):
    if TRAINED[name].is_quick:
        return []
    return [pytest.mark.exhaustive if name in ONE_MORE else pytest.mark.slow]


CASES = [
    pytest.param(entry, id=name, marks=marks_of(name))
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
