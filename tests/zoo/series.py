"""What changes with time: measurements, traffic, sound."""

import keras
import numpy as np
import tensorflow as tf
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


class Coefficients(layers.Layer):
    """Takes the cosine transform of a spectrogram in mel, all of it in TensorFlow."""

    def call(self, x):
        power = tf.square(tf.abs(tf.signal.stft(x, 16, 8)))
        to_mel = tf.signal.linear_to_mel_weight_matrix(6, 9, 800, 20.0, 390.0)
        mel = tf.matmul(power, tf.cast(to_mel, power.dtype))
        return tf.signal.mfccs_from_log_mel_spectrograms(tf.math.log(mel + 1e-6))


def cepstrum(_):
    inputs = keras.Input((64,))
    x = layers.Conv1D(4, 3, activation="relu")(Coefficients()(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class Time2Vec(layers.Layer):
    """Makes a line and waves of a time."""

    def build(self, shape):
        self.line = self.add_weight(shape=(shape[-2], 1), name="line")
        self.waves = self.add_weight(shape=(shape[-1], 3), name="waves")
        self.phases = self.add_weight(shape=(shape[-2], 3), name="phases")

    def call(self, x):
        waves = ops.sin(ops.matmul(x, self.waves) + self.phases)
        return ops.concatenate([x * self.line, waves], -1)


def vectors_of_time(_):
    inputs = keras.Input((6, 1))
    x = layers.Flatten()(Time2Vec()(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(8, "relu")(x)))


class StateSpace(layers.Layer):
    """A linear system in a scan over time."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kept = self.add_weight(shape=(self.units,), name="kept")
        self.taken = self.add_weight(shape=(shape[-1], self.units), name="taken")
        self.shown = self.add_weight(shape=(self.units, shape[-1]), name="shown")

    def call(self, x):
        kept = ops.sigmoid(self.kept)

        def step(state, x):
            state = kept * state + ops.matmul(x, self.taken)
            return state, state

        start = ops.zeros((ops.shape(x)[0], self.units), x.dtype)
        _, states = ops.scan(step, start, ops.transpose(x, (1, 0, 2)))
        return ops.matmul(ops.transpose(states, (1, 0, 2)), self.shown)


def state_space(_):
    inputs = keras.Input((7, 3))
    x = layers.LayerNormalization()(inputs)
    x = inputs + StateSpace(4)(x)
    return keras.Model(inputs, layers.Dense(1)(x[:, -1]))


class SelectiveStateSpace(layers.Layer):
    """A linear system that its inputs decide about, in a scan over two arrays."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        width = shape[-1]
        self.decay = self.add_weight(shape=(width, self.units), name="decay")
        self.parameters = layers.Dense(2 * self.units, use_bias=False)
        self.step = layers.Dense(width, "softplus")
        self.parameters.build(shape)
        self.step.build(shape)

    def call(self, x):
        step = self.step(x)
        taken, shown = ops.split(self.parameters(x), 2, -1)
        kept = ops.exp(ops.einsum("btd,dn->btdn", step, -ops.exp(self.decay)))
        added = ops.einsum("btd,btn,btd->btdn", step, taken, x)

        def update(state, of_step):
            kept, added = of_step
            state = kept * state + added
            return state, state

        of_steps = ops.moveaxis(kept, 1, 0), ops.moveaxis(added, 1, 0)
        _, states = ops.scan(update, ops.zeros_like(added[:, 0]), of_steps)
        return ops.einsum("tbdn,btn->btd", states, shown)


def selective_state_space(_):
    inputs = keras.Input((7, 3))
    x = inputs + SelectiveStateSpace(4)(layers.RMSNormalization()(inputs))
    return keras.Model(inputs, layers.Dense(1)(x))


class MinimalCell(layers.Layer):
    """A cell as in Keras's guide, with a gate."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = units

    def build(self, shape):
        kernel = (shape[-1], 2 * self.units)
        self.kernel = self.add_weight(shape=kernel, name="kernel")
        self.recurrent = self.add_weight(
            shape=(self.units, 2 * self.units), name="recurrent"
        )

    def call(self, x, states):
        h = ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent)
        gate, candidate = ops.split(h, 2, -1)
        gate = ops.sigmoid(gate)
        h = gate * states[0] + (1 - gate) * ops.tanh(candidate)
        return h, [h]


def own_cell(_):
    inputs = keras.Input((6, 3))
    return keras.Model(inputs, layers.Dense(1)(layers.RNN(MinimalCell(4))(inputs)))


class Flow(layers.Layer):
    """Steps of Euler along a field that layers say."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.field = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(4)])

    def build(self, shape):
        self.field.build(shape)

    def call(self, x):
        return ops.fori_loop(0, 4, lambda _, x: x + 0.25 * self.field(x), x)


def neural_ode(_):
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(3)(Flow()(layers.Dense(4)(inputs))))


ENTRIES = [
    Entry("cepstrum", cepstrum, images(64), CLASSES, "bookkeeping", dtype="float32"),
    Entry("vectors_of_time", vectors_of_time, numbers(6, 1), "mse", "bookkeeping"),
    Entry("state_space", state_space, numbers(7, 3), "mse", "bookkeeping"),
    Entry(
        "selective_state_space",
        selective_state_space,
        numbers(7, 3, targets=(7, 1)),
        "mse",
        "bookkeeping",
    ),
    Entry("own_cell", own_cell, numbers(6, 3), "mse", "bookkeeping"),
    Entry("neural_ode", neural_ode, images(3), CLASSES, "bookkeeping"),
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
