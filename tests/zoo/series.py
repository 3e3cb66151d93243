"""What changes with time: measurements, traffic, sound."""

import keras
import numpy as np
from keras import layers, ops

from tests.zoo.entry import CLASSES, Entry, images, numbers


def transformer(chance):
    inputs = keras.Input((10, 1))
    y = layers.MultiHeadAttention(2, 4, dropout=0.2 * chance)(inputs, inputs)
    x = layers.LayerNormalization()(layers.Dropout(0.2 * chance)(y)) + inputs
    y = layers.Conv1D(4, 1, activation="relu")(x)
    x = layers.LayerNormalization()(layers.Conv1D(1, 1)(y)) + x
    x = layers.GlobalAveragePooling1D(data_format="channels_first")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(6, "relu")(x)))


def lstm(_):
    inputs = keras.Input((8, 3))
    x = layers.LSTM(4)(layers.LSTM(5, return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Dense(1)(x))


def autoencoder(chance):
    return keras.Sequential([
        keras.Input((12, 1)),
        layers.Conv1D(4, 3, padding="same", strides=2, activation="relu"),
        layers.Dropout(0.2 * chance),
        layers.Conv1D(3, 3, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(4, 3, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(1, 3, padding="same", strides=2),
    ])


def dilated(_):
    inputs = keras.Input((12, 2))
    x = layers.Conv1D(4, 1)(inputs)
    for rate in (1, 2, 4):
        value = layers.Conv1D(4, 2, padding="causal", dilation_rate=rate)(x)
        gate = layers.Conv1D(4, 2, padding="causal", dilation_rate=rate)(x)
        x = x + ops.tanh(value) * ops.sigmoid(gate)
    return keras.Model(inputs, layers.Dense(1)(x[:, -1]))


class GraphConvolution(layers.Layer):
    """Adds up what the neighbours of a node have; axes: nodes, batch, time, features."""

    def __init__(self, sources, targets, nodes, units, **kwargs):
        super().__init__(**kwargs)
        self.sources, self.targets, self.nodes = sources, targets, nodes
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        neighbours = ops.take(x, self.targets, axis=0)
        mean = ops.segment_sum(neighbours, self.sources, num_segments=self.nodes)
        both = [ops.matmul(each, self.kernel) for each in (x, mean)]
        return ops.relu(ops.concatenate(both, axis=-1))


class GraphAndTime(layers.Layer):
    """A convolution over nodes, then a loop over time for each node of each row."""

    def __init__(self, sources, targets, nodes, **kwargs):
        super().__init__(**kwargs)
        self.nodes = nodes
        self.convolution = GraphConvolution(sources, targets, nodes, 3)
        self.lstm = layers.LSTM(4)
        self.dense = layers.Dense(2)

    def call(self, x):
        x = ops.transpose(x, (2, 0, 1, 3))
        x = self.convolution(x)
        shape = ops.shape(x)
        x = ops.reshape(x, (shape[0] * shape[1], shape[2], shape[3]))
        x = ops.reshape(self.dense(self.lstm(x)), (shape[0], shape[1], 2))
        return ops.transpose(x, (1, 2, 0))


def traffic(_):
    inputs = keras.Input((4, 3, 1))
    layer = GraphAndTime(np.array([0, 0, 1, 2]), np.array([1, 2, 0, 1]), 3)
    return keras.Model(inputs, layer(inputs))


class Spectrogram(layers.Layer):
    """How loud each frequency is, piece by piece."""

    def call(self, x):
        real, imaginary = ops.stft(x, 8, 4, 8)
        return ops.sqrt(ops.square(real) + ops.square(imaginary) + 1e-6)


def speech(_):
    inputs = keras.Input((32,))
    x = Spectrogram()(inputs)
    x = layers.Conv1D(4, 3, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def mel_spectrogram(_):
    inputs = keras.Input((64,))
    x = layers.MelSpectrogram(
        fft_length=16,
        sequence_stride=8,
        sampling_rate=800,
        num_mel_bins=4,
        max_freq=400,
    )(inputs)
    x = layers.Conv2D(3, 3, padding="same", activation="relu")(x[..., None])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(x)))


def learned_spectrogram(_):
    inputs = keras.Input((32, 1))
    x = layers.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8)(inputs)
    x = layers.GRU(4)(x)
    return keras.Model(inputs, layers.Dense(3)(x))


ENTRIES = [
    Entry("transformer_of_time", transformer, images(10, 1), CLASSES, "bookkeeping"),
    Entry("lstm_of_time", lstm, numbers(8, 3), "mse", "bookkeeping"),
    Entry(
        "autoencoder_of_time",
        autoencoder,
        images(12, 1, classes=None),
        "mse",
        "bookkeeping",
        True,
    ),
    Entry("dilated", dilated, numbers(12, 2), "mse", "bookkeeping"),
    Entry("traffic", traffic, numbers(4, 3, 1, targets=(2, 3)), "mse", "bookkeeping"),
    Entry("speech", speech, images(32), CLASSES, "bookkeeping"),
    Entry(
        "mel_spectrogram",
        mel_spectrogram,
        images(64),
        CLASSES,
        "apart",
        dtype="float32",
    ),
    Entry(
        "learned_spectrogram",
        learned_spectrogram,
        images(32, 1),
        CLASSES,
        "bookkeeping",
    ),
]
