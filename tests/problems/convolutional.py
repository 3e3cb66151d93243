"""Convolutions."""

import keras
from keras import layers

from tests.problems.building import (
    KERAS_VERSION,
    floats,
    floats_of,
    labelled,
    logits,
    sequential,
)
from tests.problems.problem import problem
from tfdp.layers import WSConv2D

CHANNELS_FIRST = {"data_format": "channels_first"}


def siamese():
    left, right = keras.Input((4, 4, 1)), keras.Input((4, 4, 1))
    encoder = sequential(
        (4, 4, 1), layers.Conv2D(2, 2, activation="tanh"), layers.Flatten()
    )
    return keras.Model([left, right], layers.Dense(1)(encoder(left) - encoder(right)))


def ws_conv_called_twice():
    inputs = keras.Input((5, 5, 3))
    conv = WSConv2D(3, 3, padding="same", activation="tanh")
    outputs = layers.GlobalAveragePooling2D()(conv(conv(inputs)))
    return keras.Model(inputs, outputs)


def conv_called_twice():
    """One kernel on its own outputs, and on inputs of another size."""
    image, small = keras.Input((4, 4, 2)), keras.Input((3, 2, 2))
    shared = layers.Conv2D(2, 2, padding="same", activation="tanh")
    pool = layers.GlobalAveragePooling2D()
    return keras.Model(
        [image, small], pool(shared(shared(image))) - pool(shared(small))
    )


def low_rank_conv():
    model = sequential(
        (5, 4, 2),
        layers.Conv2D(3, 2, strides=2, padding="same", activation="tanh"),
        layers.Conv2D(4, (1, 2), use_bias=False),
        layers.Flatten(),
    )
    for layer in model.layers[:2]:
        layer.enable_lora(2)
    return model


def low_rank_conv_in_groups():
    model = sequential(
        (5, 4, 2),
        layers.Conv2D(4, 2, padding="same", activation="tanh"),
        layers.Conv2D(6, (1, 2), groups=2),
        layers.Flatten(),
        layers.Dense(12),
    )
    model.layers[1].enable_lora(2)
    return model


PROBLEMS = (
    problem(
        "cnn",
        lambda: sequential(
            (6, 6, 2),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(3),
        ),
        labelled((6, 6, 2), 3),
        logits,
        tags="conv",
    ),
    problem(
        "conv2d_strided",
        lambda: sequential(
            (6, 7, 2),
            layers.Conv2D(3, (3, 2), strides=2, padding="same", activation="tanh"),
            layers.Conv2D(2, 2, strides=(1, 2), use_bias=False),
            layers.GlobalAveragePooling2D(),
        ),
        floats((6, 7, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "conv2d_dilated",
        lambda: sequential(
            (6, 6, 2),
            layers.Conv2D(3, 2, dilation_rate=(2, 3), activation="tanh"),
            layers.Conv2D(2, 3, dilation_rate=2, padding="same"),
        ),
        floats((6, 6, 2), (4, 3, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv2d_grouped",
        lambda: sequential(
            (5, 5, 2),
            layers.Conv2D(4, 2, activation="tanh"),
            layers.Conv2D(6, 2, strides=2, padding="same", groups=2),
            layers.GlobalMaxPooling2D(),
        ),
        floats((5, 5, 2), 6),
        "mse",
        tags="compiled conv",
    ),
    problem(
        "conv2d_even",
        lambda: sequential(
            (6, 5, 1),
            layers.Conv2D(2, (4, 2), strides=2, padding="same", activation="tanh"),
            layers.Conv2D(2, (2, 3), strides=(1, 2), padding="same"),
        ),
        floats((6, 5, 1), (3, 2, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv2d_pointwise",
        lambda: sequential(
            (5, 4, 3),
            layers.Conv2D(4, 1, strides=2, activation="tanh"),
            layers.Conv2D(2, 1),
        ),
        floats((5, 4, 3), (3, 2, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv_no_bias",
        lambda: sequential(
            (4, 4, 2),
            layers.Conv2D(3, 2, use_bias=False, activation="tanh"),
            layers.Reshape((9, 3)),
            layers.Conv1D(2, 3, use_bias=False, activation="tanh"),
            layers.Reshape((7, 1, 1, 2)),
            layers.Conv3D(2, (2, 1, 1), use_bias=False),
        ),
        floats((4, 4, 2), (6, 1, 1, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv1d",
        lambda: sequential(
            (8, 2),
            layers.Conv1D(3, 3, padding="causal", dilation_rate=2, activation="tanh"),
            layers.Conv1D(2, 2, strides=2),
        ),
        floats((8, 2), (4, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv1d_same",
        lambda: sequential(
            (7, 2),
            layers.Conv1D(3, 4, strides=3, padding="same", activation="tanh"),
            layers.Conv1D(2, 2, dilation_rate=2, padding="same"),
        ),
        floats((7, 2), (3, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv2d_each_channel",
        lambda: sequential(
            (5, 5, 2),
            layers.Conv2D(4, 2, groups=2, activation="tanh"),
            layers.Conv2D(4, 3, padding="same", groups=4, dilation_rate=2),
            layers.Conv2D(4, 2, strides=(2, 1), groups=4),
            layers.GlobalMaxPooling2D(),
        ),
        floats((5, 5, 2), 4),
        "mse",
        tags="compiled conv",
    ),
    problem(
        "conv1d_grouped",
        lambda: sequential(
            (5, 4),
            layers.Conv1D(6, 2, groups=2, activation="tanh"),
            layers.Conv1D(2, 1),
        ),
        floats((5, 4), (4, 2)),
        "mse",
        tags="compiled conv",
    ),
    problem(
        "conv3d",
        lambda: sequential(
            (3, 3, 4, 2),
            layers.Conv3D(2, 2, strides=(1, 1, 2), activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((3, 3, 4, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "conv3d_strided",
        lambda: sequential(
            (4, 3, 5, 1),
            layers.Conv3D(2, (2, 2, 3), strides=2, padding="same", activation="tanh"),
            layers.Conv3D(2, 1, strides=(1, 2, 2)),
        ),
        floats((4, 3, 5, 1), (2, 1, 2, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv3d_grouped",
        lambda: sequential(
            (3, 3, 3, 2),
            layers.Conv3D(4, 2, activation="tanh"),
            layers.Conv3D(2, (1, 2, 2), groups=2),
            layers.GlobalMaxPooling3D(),
        ),
        floats((3, 3, 3, 2), 2),
        "mse",
        tags="compiled conv",
    ),
    problem(
        "conv_transpose",
        lambda: sequential(
            (3, 2, 2),
            layers.Conv2DTranspose(3, (2, 3), strides=2, activation="tanh"),
            layers.Conv2DTranspose(2, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
        ),
        floats((3, 2, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "conv_transpose_padded",
        lambda: sequential(
            (3, 2, 2),
            layers.Conv2DTranspose(
                3, 3, strides=2, padding="same", output_padding=1, activation="tanh"
            ),
            layers.Conv2DTranspose(
                2, 2, strides=(2, 3), output_padding=(1, 2), use_bias=False
            ),
            layers.GlobalAveragePooling2D(),
        ),
        floats((3, 2, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "conv1d_transpose",
        lambda: sequential((4, 3), layers.Conv1DTranspose(2, 3, strides=2)),
        floats((4, 3), (9, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "conv3d_transpose",
        lambda: sequential(
            (2, 2, 1, 2),
            layers.Conv3DTranspose(2, 2, strides=(2, 1, 1), padding="same"),
        ),
        floats((2, 2, 1, 2), (4, 2, 1, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "depthwise_conv",
        lambda: sequential(
            (5, 5, 2),
            layers.DepthwiseConv2D(2, depth_multiplier=2, activation="tanh"),
            layers.DepthwiseConv2D(3, strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((5, 5, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "depthwise_conv_dilated",
        lambda: sequential(
            (6, 5, 2),
            layers.DepthwiseConv2D(2, dilation_rate=(2, 2), activation="tanh"),
            layers.DepthwiseConv2D(
                2, dilation_rate=(2, 1), padding="same", use_bias=False
            ),
        ),
        floats((6, 5, 2), (4, 3, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "depthwise_conv1d",
        lambda: sequential(
            (6, 3),
            layers.DepthwiseConv1D(2, depth_multiplier=2, activation="tanh"),
            layers.GlobalAveragePooling1D(),
        ),
        floats((6, 3), 6),
        "mse",
        tags="conv",
    ),
    problem(
        "separable_conv",
        lambda: sequential(
            (5, 5, 2),
            layers.SeparableConv2D(3, 2, depth_multiplier=2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((5, 5, 2), 2),
        "mse",
        tags="conv",
    ),
    problem(
        "separable_conv_strided",
        lambda: sequential(
            (6, 5, 2),
            layers.SeparableConv2D(
                3, 3, strides=2, padding="same", depth_multiplier=2, activation="tanh"
            ),
            layers.SeparableConv2D(2, 2, use_bias=False),
        ),
        floats((6, 5, 2), (2, 2, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "separable_conv1d",
        lambda: sequential(
            (6, 2),
            layers.SeparableConv1D(3, 3, padding="same", activation="tanh"),
            layers.GlobalMaxPooling1D(),
        ),
        floats((6, 2), 3),
        "mse",
        tags="conv",
    ),
    problem(
        "separable_conv1d_dilated",
        lambda: sequential(
            (6, 2), layers.SeparableConv1D(3, 2, padding="same", dilation_rate=2)
        ),
        floats((6, 2), (6, 3)),
        "mse",
        tags="conv",
    ),
    # Where it is as long as there are filters, Keras adds the bias along the last axis.
    problem(
        "channels_first",
        lambda: sequential(
            (2, 3, 2, 3),
            layers.Conv3D(2, 2, activation="tanh", **CHANNELS_FIRST),
            layers.Conv3D(2, (1, 2, 1), padding="same", **CHANNELS_FIRST),
            layers.Conv3D(3, 1, **CHANNELS_FIRST),
        ),
        floats((2, 3, 2, 3), (3, 2, 1, 2)),
        "mse",
        tags="conv",
    ),
    problem(
        "channels_first_grouped",
        lambda: sequential(
            (4, 6, 6),
            layers.Conv2D(4, 3, groups=2, activation="tanh", **CHANNELS_FIRST),
            WSConv2D(4, 1, groups=2, activation="tanh", **CHANNELS_FIRST),
            WSConv2D(6, (1, 2), groups=2, **CHANNELS_FIRST),
        ),
        floats((4, 6, 6), (6, 4, 3)),
        "mse",
        tags="compiled conv",
    ),
    problem(
        "ws_conv",
        lambda: sequential(
            (6, 6, 2),
            WSConv2D(4, 3, padding="same", activation="tanh"),
            layers.GroupNormalization(2),
            WSConv2D(6, (3, 2), strides=2, use_bias=False),
            layers.Activation("tanh"),
            WSConv2D(3, 1, padding="same"),
            layers.GlobalAveragePooling2D(),
        ),
        floats((6, 6, 2), 3),
        "mse",
        tags="conv",
    ),
    problem(
        "ws_conv_grouped",
        lambda: sequential(
            (6, 6, 4),
            # Short kernels are not divided by their length.
            WSConv2D(4, 3, groups=2, dilation_rate=2, epsilon=2.0),
            layers.GlobalMaxPooling2D(),
        ),
        floats((6, 6, 4), 4),
        "mse",
        tags="conv",
    ),
    problem(
        "ws_conv_called_twice",
        ws_conv_called_twice,
        floats((5, 5, 3), 3),
        "mse",
        tags="conv",
    ),
    problem(
        "conv_called_twice",
        conv_called_twice,
        floats_of((4, 4, 2), (3, 2, 2), targets=2),
        "mse",
        tags="conv shared structure",
    ),
    problem(
        "siamese",
        siamese,
        lambda rng: (
            [rng.normal(size=(4, 4, 1)), rng.normal(size=(4, 4, 1))],
            rng.normal(size=1),
        ),
        "mse",
        tags="conv shared structure",
    ),
    problem(
        "conv_lora",
        low_rank_conv,
        floats((5, 4, 2), 12),
        "mse",
        tags="conv frozen lora",
    ),
    problem(
        "conv_lora_in_groups",
        low_rank_conv_in_groups,
        floats((5, 4, 2), 12),
        "mse",
        tags="conv frozen lora",
    ),
)

# Older Keras cannot run these channels first on a CPU.
if KERAS_VERSION >= (3, 15):
    PROBLEMS += (
        problem(
            "depthwise_channels_first",
            lambda: sequential(
                (4, 6, 6),
                layers.DepthwiseConv2D(3, activation="tanh", **CHANNELS_FIRST),
                layers.SeparableConv2D(2, 3, activation="tanh", **CHANNELS_FIRST),
                layers.SeparableConv2D(3, 1, **CHANNELS_FIRST),
            ),
            floats((4, 6, 6), (3, 2, 2)),
            "mse",
            tags="conv",
        ),
    )
