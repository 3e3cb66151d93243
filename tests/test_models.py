"""Models: what they are made of, and that private training takes them in one pass."""

import re

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tfdp.models import bert, resnet9, wide_resnet

MODELS = {
    "resnet9": lambda: resnet9((16, 16, 3), 4, width=4),
    "wide_resnet": lambda: wide_resnet((8, 8, 3), 4, depth=10, width=1),
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def kinds(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def test_resnet9_has_eight_convolutions():
    model = resnet9((32, 32, 3), 10, width=16)
    assert [layer.filters for layer in kinds(model, tfdp.layers.WSConv2D)] == [
        *(16, 32, 32, 32),
        *(64, 128, 128, 128),
    ]
    assert {layer.groups for layer in kinds(model, layers.GroupNormalization)} == {16}
    assert model.output_shape == (None, 10)


def test_wide_resnet_has_the_depth_that_it_says():
    model = wide_resnet((32, 32, 3), 10)
    convolutions = kinds(model, tfdp.layers.WSConv2D)
    # The three that project are not counted.
    assert len([each for each in convolutions if each.kernel_size == (3, 3)]) == 13
    assert len(convolutions) == 16
    assert {each.filters for each in convolutions} == {16, 64, 128, 256}
    assert {layer.groups for layer in kinds(model, layers.GroupNormalization)} == {16}


@pytest.mark.slow
@models
def test_every_layer_has_a_rule(make):
    table = tfdp.DPModel(make(), engine="bookkeeping").explain()
    assert "ws_conv" in table
    assert "group_normalization" in table
    assert "generic" not in table


@pytest.mark.slow
def test_trains_with_bam_and_an_average_of_the_weights(caplog):
    model = MODELS["resnet9"]()
    private = tfdp.DPModel(model, engine="bookkeeping")
    optimizer = tfdp.optimizers.DPOptimizer(
        keras.optimizers.Nadam(1e-3, use_ema=True, ema_momentum=0.9),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    private.compile(optimizer, tfdp.losses.BAM(loss, radius=0.02), run_eagerly=True)
    x = np.random.default_rng(0).random((8, *model.input_shape[1:]), "float32")
    before = model.get_weights()
    private.fit(x, np.arange(8) % 4, batch_size=8, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.any(old != new)
    assert not [record for record in caplog.records if record.name == "absl"]


@pytest.mark.slow
@models
def test_an_example_is_alone_in_its_batch(make):
    model = make()
    x = np.random.default_rng(0).random((3, *model.input_shape[1:]), "float32")
    together = model.predict(x, verbose=0)
    alone = [model.predict(row[None], verbose=0)[0] for row in x]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "arguments", "problem"),
    [
        (resnet9, {"input_shape": (4, 32, 3)}, "at least 8 pixels"),
        (resnet9, {"input_shape": (32, 32)}, "Use `input_shape=(32, 32, 3)`"),
        (resnet9, {"num_classes": 0}, "`num_classes` must be a whole number"),
        (resnet9, {"width": -1}, "`width` must be a whole number"),
        (wide_resnet, {"depth": 15}, "Use `depth=16`"),
        (wide_resnet, {"depth": 4}, "Use `depth=16`"),
    ],
)
def test_wrong_arguments_are_explained(make, arguments, problem):
    arguments = {"input_shape": (32, 32, 3), "num_classes": 10, **arguments}
    with pytest.raises(ValueError, match=re.escape(problem)):
        make(**arguments)


# ---------------------------------------------------------------- text


def small_bert():
    return bert(20, 6, width=8, heads=2, blocks=2)


def low_rank(encoder):
    for layer in encoder.layers:
        layer.trainable = False
        if isinstance(layer, layers.MultiHeadAttention):
            layer.trainable = True
            layer.query_dense.enable_lora(2)
            layer.value_dense.enable_lora(2)
            # Half of an adapter is zeros at first.
            for dense in (layer.query_dense, layer.value_dense):
                dense.lora_kernel_b.assign(keras.ops.ones_like(dense.lora_kernel_b))


def classifier(prepare):
    encoder = small_bert()
    prepare(encoder)
    x = layers.GlobalAveragePooling1D()(encoder.output)
    return keras.Model(encoder.input, layers.Dense(2)(x))


@pytest.mark.slow
def test_bert_has_the_size_of_bert():
    encoder = bert(30_522, 512)
    # Of the 109 million of the published one, less pooler and segments.
    assert encoder.count_params() == 108_890_880
    block = [layer for layer in encoder.layers if layer.name.startswith("block_11_")]
    assert sum(layer.count_params() for layer in block) == 7_087_872


def test_bert_does_not_see_padding():
    encoder = small_bert()
    pooled = layers.GlobalAveragePooling1D()(encoder.output)
    model = keras.Model(encoder.input, pooled)
    ids = np.array([[3, 4, 5, 0, 0, 0]])
    wanted = np.mean(encoder(ids)[:, :3], axis=1)
    np.testing.assert_allclose(model(ids), wanted, atol=1e-5)
    padding = np.zeros((20, 8), "float32")
    padding[0] = 1
    encoder.get_layer("tokens").embeddings.assign_add(padding)
    np.testing.assert_allclose(model(ids), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [lambda _: None, low_rank])
def test_bert_is_clipped_by_rules_as_by_its_gradients(prepare, rng):
    model = classifier(prepare)
    table = tfdp.DPModel(model, engine="bookkeeping").explain()
    assert "generic" not in table
    x = rng.integers(1, 20, (5, 6)) * (np.arange(6) < rng.integers(2, 7, (5, 1)))
    y = rng.integers(0, 2, 5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = [
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=0.1, engine=engine)
        for engine in ("bookkeeping", "vectorized")
    ]
    np.testing.assert_allclose(found[0].norms, found[1].norms, rtol=1e-4)
    assert np.min(found[0].norms) > 0.1
    for one, other in zip(found[0].gradients, found[1].gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 4}, "`heads` must divide `width`.*heads=2"),
        ({"blocks": 0}, "`blocks` must be"),
        ({"heads": -1}, "`heads` must be"),
        ({"width": float("nan")}, "`width` must be"),
    ],
)
def test_bert_refuses_what_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        bert(20, 6, **{"width": 8, "heads": 2, "blocks": 2, **options})
