"""Networks for private training, of images and of text: no layer mixes examples."""

import math
from collections.abc import Sequence

import keras
from keras import layers

from tfdp import _validate
from tfdp.layers import WSConv2D

# Of group normalization, as in De et al.; fewer where there are fewer channels.
_GROUPS = 16


def resnet9(
    input_shape: Sequence[int], num_classes: int, *, width: int = 64
) -> keras.Model:
    """Build a ResNet-9 with standardised kernels and group normalization.

    Eight convolutions, among them two residual blocks of two each, and a dense layer.
    As in [1]_, kernels are standardised, and 16 groups of channels normalized, where
    networks for training without privacy have batch normalization.

    Args:
        input_shape: Height, width and channels; height and width at least 8.
        num_classes: Number of logits.
        width: Channels of the first convolution; the last have 8 times as many.

    Returns:
        A model that returns logits, of shape ``(batch, num_classes)``.

    Raises:
        TypeError: If what should be a whole number is none.
        ValueError: If a number is not positive or images are too small.

    Example:
        >>> model = tfdp.models.resnet9((32, 32, 3), 10)
        >>> model.count_params()
        6577610

    References:
        .. [1] De et al., "Unlocking High-Accuracy Differentially Private Image
           Classification through Scale", 2022. https://arxiv.org/abs/2204.13650
    """
    _check(input_shape, num_classes, width)
    inputs = keras.Input(input_shape)
    x = _conv_norm_relu(inputs, width)
    x = _conv_norm_relu(x, 2 * width, pools=True)
    x = layers.add([x, _conv_norm_relu(_conv_norm_relu(x, 2 * width), 2 * width)])
    x = _conv_norm_relu(x, 4 * width, pools=True)
    x = _conv_norm_relu(x, 8 * width, pools=True)
    x = layers.add([x, _conv_norm_relu(_conv_norm_relu(x, 8 * width), 8 * width)])
    x = layers.GlobalMaxPooling2D()(x)
    return keras.Model(inputs, _logits(x, num_classes), name="resnet9")


def wide_resnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    depth: int = 16,
    width: int = 4,
) -> keras.Model:
    """Build a wide residual network [1]_ as private training likes it [2]_.

    Kernels are standardised, 16 groups of channels are normalized, and each
    normalization follows the activation.

    Args:
        input_shape: Height, width and channels; height and width at least 8.
        num_classes: Number of logits.
        depth: Number of layers, 6 n + 4 for n blocks at each resolution.
        width: Times 16, 32 and 64 channels.

    Returns:
        A model that returns logits, of shape ``(batch, num_classes)``.

    Raises:
        TypeError: If what should be a whole number is none.
        ValueError: If a number is not positive, images are too small, or there is no
            such depth.

    Example:
        >>> model = tfdp.models.wide_resnet((32, 32, 3), 10)
        >>> model.name
        'wide_resnet_16_4'

    References:
        .. [1] Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016.
           https://arxiv.org/abs/1605.07146
        .. [2] De et al., "Unlocking High-Accuracy Differentially Private Image
           Classification through Scale", 2022. https://arxiv.org/abs/2204.13650
    """
    _check(input_shape, num_classes, width)
    if _validate.positive_int("depth", depth) < 10 or (depth - 4) % 6:
        raise ValueError(
            "`depth` must be 6 n + 4 for n blocks at each resolution. Received: "
            f"depth={depth!r}. Use `depth=16`."
        )
    inputs = keras.Input(input_shape)
    x = WSConv2D(16, 3, padding="same")(inputs)
    for channels, strides in ((16, 1), (32, 2), (64, 2)):
        for block in range((depth - 4) // 6):
            x = _block(x, channels * width, strides if block == 0 else 1, block == 0)
    x = layers.GlobalAveragePooling2D()(_relu_norm(x))
    return keras.Model(
        inputs, _logits(x, num_classes), name=f"wide_resnet_{depth}_{width}"
    )


def bert(
    vocabulary_size: int,
    length: int,
    *,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
) -> keras.Model:
    """Build a Transformer encoder of the shape of BERT [1]_, without dropout.

    Each text needs a token that is no padding: let it begin with one that means so.

    By default it has the size of BERT's base model. To train the last block only, or
    low-rank updates of the queries and values [2]_, on top of a frozen rest::

        for layer in encoder.layers:
            layer.trainable = layer.name.startswith("block_11_")

        for layer in encoder.layers:
            layer.trainable = False
            if isinstance(layer, keras.layers.MultiHeadAttention):
                layer.trainable = True
                layer.query_dense.enable_lora(4)
                layer.value_dense.enable_lora(4)

    Args:
        vocabulary_size: Number of token ids; 0 is padding, which is masked.
        length: Tokens of a text.
        width: Numbers that stand for a token.
        heads: Heads of each attention; they share the width.
        blocks: Number of blocks, each an attention and two dense layers.

    Returns:
        A model of token ids, shape ``(batch, length)``, that returns ``(batch, length,
        width)``, masked where there is padding. The names of the layers of a block
        begin with its number: ``"block_0_"``.

    Raises:
        TypeError: If what should be a whole number is none.
        ValueError: If a number is not positive, or `heads` does not divide `width`.

    Example:
        >>> encoder = tfdp.models.bert(1000, 16, width=32, heads=2, blocks=2)
        >>> encoder.output_shape
        (None, 16, 32)

    References:
        .. [1] Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for
           Language Understanding", NAACL 2019. https://arxiv.org/abs/1810.04805
        .. [2] Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR
           2022. https://arxiv.org/abs/2106.09685
    """
    for name, value in (
        ("vocabulary_size", vocabulary_size),
        ("length", length),
        ("width", width),
        ("heads", heads),
        ("blocks", blocks),
    ):
        _validate.positive_int(name, value)
    if width % heads:
        raise ValueError(
            "`heads` must divide `width`. Received: "
            f"heads={heads!r}, width={width!r}. Use `heads={math.gcd(heads, width)}`."
        )
    ids = keras.Input((length,), dtype="int32", name="token_ids")
    tokens = layers.Embedding(vocabulary_size, width, mask_zero=True, name="tokens")
    # Each text has positions of its own. Padding has 0, so that its mask is kept.
    is_token = keras.ops.cast(keras.ops.not_equal(ids, 0), "int32")
    numbers = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) * is_token
    positions = layers.Embedding(length + 1, width, mask_zero=True, name="positions")
    x = layers.Add(name="embeddings")([tokens(ids), positions(numbers)])
    x = layers.LayerNormalization(epsilon=1e-12, name="embeddings_norm")(x)
    for block in range(blocks):
        x = _attention_block(x, heads, f"block_{block}_")
    return keras.Model(ids, x, name="bert")


def _attention_block(x: keras.KerasTensor, heads: int, name: str) -> keras.KerasTensor:
    width = x.shape[-1]
    attend = layers.MultiHeadAttention(heads, width // heads, name=f"{name}attention")
    x = layers.Add(name=f"{name}add")([x, attend(x, x)])
    x = layers.LayerNormalization(epsilon=1e-12, name=f"{name}norm")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}up")(x)
    y = layers.Dense(width, name=f"{name}down")(y)
    x = layers.Add(name=f"{name}add_2")([x, y])
    return layers.LayerNormalization(epsilon=1e-12, name=f"{name}norm_2")(x)


def _block(
    x: keras.KerasTensor, channels: int, strides: int, projects: bool
) -> keras.KerasTensor:
    skip = x
    if projects:
        skip = WSConv2D(channels, 1, strides=strides, padding="same")(_relu_norm(x))
    x = WSConv2D(channels, 3, strides=strides, padding="same")(_relu_norm(x))
    x = WSConv2D(channels, 3, padding="same")(_relu_norm(x))
    return layers.add([x, skip])


def _relu_norm(x: keras.KerasTensor) -> keras.KerasTensor:
    return _normalized(layers.ReLU()(x))


def _conv_norm_relu(
    x: keras.KerasTensor, channels: int, *, pools: bool = False
) -> keras.KerasTensor:
    x = _normalized(WSConv2D(channels, 3, padding="same")(x))
    x = layers.ReLU()(x)
    return layers.MaxPooling2D(2)(x) if pools else x


def _normalized(x: keras.KerasTensor) -> keras.KerasTensor:
    channels = x.shape[-1]
    groups = next(n for n in range(_GROUPS, 0, -1) if channels % n == 0)
    return layers.GroupNormalization(groups)(x)


def _check(input_shape: Sequence[int], num_classes: int, width: int) -> None:
    _validate.positive_int("num_classes", num_classes)
    _validate.positive_int("width", width)
    sizes = [_validate.positive_int("input_shape", size) for size in input_shape]
    if len(sizes) != 3 or min(sizes[:2]) < 8:
        raise ValueError(
            "`input_shape` must be height and width, of at least 8 pixels, and "
            f"channels. Received: input_shape={input_shape!r}. Use "
            "`input_shape=(32, 32, 3)`."
        )


def _logits(x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
    # In half precision the loss would be too coarse.
    is_half = keras.config.dtype_policy().compute_dtype in {"float16", "bfloat16"}
    dtype = "float32" if is_half else None
    return layers.Dense(num_classes, dtype=dtype, name="logits")(x)
