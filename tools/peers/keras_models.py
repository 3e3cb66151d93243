"""The models, for Keras 2 and for Keras 3 with any backend."""

from typing import Any

import keras
from keras import layers


def build(name: str) -> keras.Model:
    """Build a model by its name, which may give its width or depth: `"mlp:512"`."""
    name, _, size = name.partition(":")
    return _BUILD[name](*([int(size)] if size else []))


def _mlp(width: int = 1024) -> keras.Model:
    """Wide dense layers."""
    return keras.Sequential([
        keras.Input((784,)),
        layers.Dense(width, activation="relu"),
        layers.Dense(width, activation="relu"),
        layers.Dense(10),
    ])


def _cnn() -> keras.Model:
    """The network of the MNIST example."""
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Conv2D(32, 4, strides=2, activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ])


def _resnet9() -> keras.Model:
    """Eight convolutions, two of them pairs with a shortcut, and a dense layer."""

    def block(x: Any, filters: int, *, pool: bool) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.GroupNormalization(min(32, filters // 4))(x)
        x = layers.Activation("relu")(x)
        return layers.MaxPooling2D()(x) if pool else x

    inputs = keras.Input((32, 32, 3))
    x = block(block(inputs, 32, pool=False), 64, pool=True)
    pair = block(block(x, 64, pool=False), 64, pool=False)
    x = layers.Add()([x, pair])
    x = block(block(x, 128, pool=True), 256, pool=True)
    pair = block(block(x, 256, pool=False), 256, pool=False)
    x = layers.GlobalMaxPooling2D()(layers.Add()([x, pair]))
    return keras.Model(inputs, layers.Dense(10)(x))


def _transformer() -> keras.Model:
    """Two blocks of width 128, four heads, normalized after each half."""
    inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(5000, 128)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        inner = layers.Dense(128)(layers.Dense(512, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _lstm() -> keras.Model:
    """A recurrent classifier of 64 time steps."""
    return keras.Sequential([
        keras.Input((64, 32)),
        layers.LSTM(128),
        layers.Dense(3),
    ])


def _embedding() -> keras.Model:
    """A large table, of which a batch reads a part."""
    return keras.Sequential([
        keras.Input((64,), dtype="int32"),
        layers.Embedding(100_000, 64),
        layers.GlobalAveragePooling1D(),
        layers.Dense(10),
    ])


def _synthetic() -> keras.Model:
    """Two dense layers, 16 million weights."""
    return keras.Sequential([
        keras.Input((5120,)),
        layers.Dense(2560, activation="relu"),
        layers.Dense(1280),
    ])


def _wide_sequence() -> keras.Model:
    """Two dense layers over few positions: gradients are larger than Gram matrices."""
    return _sequence(32, 512)


def _long_sequence() -> keras.Model:
    """Two dense layers over many positions: Gram matrices are larger than gradients."""
    return _sequence(512, 32)


def _sequence(positions: int, width: int) -> keras.Model:
    return keras.Sequential([
        keras.Input((positions, width)),
        layers.Dense(width, activation="relu"),
        layers.Dense(width),
        layers.GlobalAveragePooling1D(),
    ])


def _deep(depth: int = 8) -> keras.Model:
    """Narrow dense layers."""
    hidden = [layers.Dense(128, activation="relu") for _ in range(depth - 1)]
    return keras.Sequential([keras.Input((128,)), *hidden, layers.Dense(10)])


def _frozen() -> keras.Model:
    """A dense trunk of 25 million weights, which does not train, and a head."""
    trunk = [layers.Dense(2048, activation="relu", trainable=False) for _ in range(6)]
    return keras.Sequential([keras.Input((2048,)), *trunk, layers.Dense(10)])


def _gpt2(blocks: int = 12) -> keras.Model:
    """A causal language model as large as GPT-2 small; its last matrix is its own."""
    inputs = keras.Input((256,), dtype="int32")
    # Of the inputs: on numbers Keras would call the layer here and now.
    numbers = keras.ops.zeros_like(inputs) + keras.ops.arange(256)
    places = layers.Embedding(256, 768)(numbers)
    x = layers.Embedding(50_257, 768)(inputs) + places
    for _ in range(blocks):
        inner = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(12, 64)
        x += attention(inner, inner, use_causal_mask=True)
        inner = layers.LayerNormalization()(x)
        x += layers.Dense(768)(layers.Dense(3072, activation="gelu")(inner))
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(50_257, use_bias=False)(x))


def _mobilenet_v2() -> keras.Model:
    """Depthwise convolutions between pointwise ones, with batch normalization."""
    return _application(keras.applications.MobileNetV2)


def _resnet50() -> keras.Model:
    """Bottlenecks with shortcuts, 53 convolutions, with batch normalization."""
    return _application(keras.applications.ResNet50)


def _convnext_tiny() -> keras.Model:
    """Convolutions in as many groups as channels, between dense layers."""
    return _application(keras.applications.ConvNeXtTiny, include_preprocessing=False)


def _application(network: Any, **options: Any) -> keras.Model:
    return network(
        input_shape=(64, 64, 3),
        weights=None,
        classes=10,
        classifier_activation=None,
        **options,
    )


def _resnext() -> keras.Model:
    """Three blocks with convolutions of 128 channels in 32 groups."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, 3, padding="same")(inputs)
    for stride in (1, 2, 2):
        inner = layers.Conv2D(128, 1, activation="relu")(x)
        inner = layers.Conv2D(128, 3, stride, padding="same", groups=32)(inner)
        inner = layers.Activation("relu")(layers.GroupNormalization(8)(inner))
        shortcut = x if stride == 1 else layers.AveragePooling2D(stride)(x)
        x = layers.Add()([layers.Conv2D(64, 1)(inner), shortcut])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


_BUILD = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet9": _resnet9,
    "transformer": _transformer,
    "lstm": _lstm,
    "embedding": _embedding,
    "synthetic": _synthetic,
    "wide_sequence": _wide_sequence,
    "long_sequence": _long_sequence,
    "frozen": _frozen,
    "deep": _deep,
    "gpt2": _gpt2,
    "mobilenet_v2": _mobilenet_v2,
    "resnet50": _resnet50,
    "resnext": _resnext,
    "convnext_tiny": _convnext_tiny,
}
