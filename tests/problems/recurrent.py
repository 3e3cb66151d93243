"""Loops over time."""

import functools

import keras
from keras import layers, ops

from tests.problems.building import (
    floats,
    floats_of,
    logits,
    padded,
    padded_labelled,
    sequential,
    with_ids,
)
from tests.problems.problem import problem, register


def with_states(make_layer, states):
    """A recurrent layer that starts where inputs say, and returns where it ends."""
    sequence = keras.Input((4, 2))
    initial = [keras.Input((3,)) for _ in range(states)]
    layer = make_layer(return_sequences=True, return_state=True)
    outputs, *ends = layer(sequence, initial_state=initial)
    pooled = layers.GlobalAveragePooling1D()(outputs)
    return keras.Model([sequence, *initial], layers.concatenate([pooled, *ends]))


@register
class Leaf(layers.Layer):
    """A recurrent cell of one's own, with two matrices."""

    state_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.recurrent_kernel = self.add_weight(shape=(3, 3), name="recurrent_kernel")

    def call(self, x, states):
        h = ops.matmul(states[0], self.recurrent_kernel)
        h = ops.tanh(ops.matmul(x, self.kernel) + h)
        return h, [h]


@register
class OfLayers(layers.Layer):
    """A recurrent cell of one's own, made of layers."""

    state_size = 3

    def build(self, shape):
        self.new, self.kept = layers.Dense(3), layers.Dense(3, use_bias=False)
        self.new.build(shape)
        self.kept.build((None, 3))

    def call(self, x, states):
        h = ops.tanh(self.new(x) + self.kept(states[0]))
        return h, [h]


def conv_lstm_masked():
    """Frames of which some do not count, forwards and backwards."""
    ids = keras.Input((4,), dtype="int32")
    frames = layers.Reshape((4, 3, 2))(layers.Embedding(6, 6)(ids))
    is_there = ops.not_equal(ids, 0)
    x = layers.ConvLSTM1D(2, 2, return_sequences=True)(frames, mask=is_there)
    x = layers.ConvLSTM1D(2, 2, go_backwards=True)(x, mask=is_there)
    return keras.Model(ids, x)


def time_distributed_shared():
    """One matrix at every time step, and once outside of time."""
    sequence, vector = keras.Input((3, 2)), keras.Input((2,))
    shared = layers.Dense(2, activation="tanh")
    steps = layers.TimeDistributed(shared)(sequence)
    return keras.Model(
        [sequence, vector], steps * layers.RepeatVector(3)(shared(vector))
    )


PROBLEMS = (
    problem(
        "embedding_lstm",
        lambda: with_ids(layers.LSTM(3), layers.Dense(2), mask_zero=True),
        padded_labelled(2),
        logits,
        tags="embedding mask rnn",
    ),
    problem(
        "lstm_bidirectional",
        lambda: sequential(
            (4, 2), layers.Bidirectional(layers.LSTM(2)), layers.Dense(2)
        ),
        floats((4, 2), 2),
        "mse",
        tags="rnn",
    ),
    problem(
        "lstm_backwards_masked",
        lambda: with_ids(
            layers.LSTM(3, go_backwards=True, return_sequences=True),
            layers.LSTM(2, use_bias=False),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "lstm_unrolled",
        lambda: sequential(
            (3, 2),
            layers.LSTM(3, unroll=True, return_sequences=True),
            layers.GRU(2, unroll=True),
        ),
        floats((3, 2), 2),
        "mse",
        tags="rnn",
    ),
    problem(
        "lstm_unrolled_masked",
        lambda: sequential(
            (4,),
            layers.Embedding(6, 3, mask_zero=True),
            layers.LSTM(3, unroll=True),
            dtype="int32",
        ),
        lambda rng: (padded(rng, length=4), rng.normal(size=3)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "lstm_states",
        lambda: with_states(functools.partial(layers.LSTM, 3), 2),
        floats_of((4, 2), 3, 3, targets=9),
        "mse",
        tags="rnn structure",
    ),
    problem(
        "lstm_dropout",
        lambda: sequential(
            (4, 3), layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5, seed=3)
        ),
        floats((4, 3), 3),
        "mse",
        tags="random rnn",
    ),
    problem(
        "gru_stacked",
        lambda: sequential(
            (4, 2),
            layers.GRU(3, return_sequences=True),
            layers.GRU(2, go_backwards=True),
        ),
        floats((4, 2), 2),
        "mse",
        tags="rnn",
    ),
    problem(
        "gru_reset_before",
        lambda: sequential((4, 2), layers.GRU(3, reset_after=False), layers.Dense(1)),
        floats((4, 2), 1),
        "mse",
        tags="rnn",
    ),
    problem(
        "gru_reset_before_masked",
        lambda: with_ids(
            layers.GRU(3, reset_after=False, return_sequences=True),
            layers.GRU(2, go_backwards=True),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "gru_no_bias",
        lambda: sequential(
            (3, 2),
            layers.GRU(3, use_bias=False, return_sequences=True),
            layers.GRU(2, use_bias=False, reset_after=False),
        ),
        floats((3, 2), 2),
        "mse",
        tags="rnn",
    ),
    problem(
        "gru_states",
        lambda: with_states(functools.partial(layers.GRU, 3), 1),
        floats_of((4, 2), 3, targets=6),
        "mse",
        tags="rnn structure",
    ),
    problem(
        "simple_rnn",
        lambda: sequential((4, 2), layers.SimpleRNN(3), layers.Dense(1)),
        floats((4, 2), 1),
        "mse",
        tags="rnn",
    ),
    problem(
        "simple_rnn_masked",
        lambda: with_ids(
            layers.SimpleRNN(3, activation="elu", return_sequences=True),
            layers.SimpleRNN(2, use_bias=False, go_backwards=True),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "bidirectional_masked",
        lambda: with_ids(
            layers.Bidirectional(layers.LSTM(2, return_sequences=True), "mul"),
            layers.Bidirectional(layers.GRU(3), "sum"),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=3)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "bidirectional_modes",
        lambda: sequential(
            (3, 2),
            layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True), "ave"),
            layers.Bidirectional(
                layers.GRU(2, return_sequences=True),
                "concat",
                backward_layer=layers.LSTM(3, go_backwards=True, return_sequences=True),
            ),
        ),
        floats((3, 2), (3, 5)),
        "mse",
        tags="rnn",
    ),
    problem(
        "time_distributed",
        lambda: sequential(
            (3, 4, 4, 1),
            layers.TimeDistributed(layers.Conv2D(2, 2, activation="tanh")),
            layers.TimeDistributed(layers.Flatten()),
            layers.TimeDistributed(layers.Dense(2)),
        ),
        floats((3, 4, 4, 1), (3, 2)),
        "mse",
        tags="conv rnn",
    ),
    problem(
        "time_distributed_lstm",
        lambda: sequential(
            (2, 3, 2),
            layers.TimeDistributed(layers.LSTM(3)),
            layers.TimeDistributed(layers.Dense(2)),
        ),
        floats((2, 3, 2), (2, 2)),
        "mse",
        tags="rnn",
    ),
    problem(
        "time_distributed_shared",
        time_distributed_shared,
        floats_of((3, 2), 2, targets=(3, 2)),
        "mse",
        tags="rnn shared structure",
    ),
    problem(
        "rnn_of_cells",
        lambda: sequential(
            (4, 2),
            layers.Bidirectional(
                layers.RNN(layers.LSTMCell(2), return_sequences=True), "sum"
            ),
            layers.Bidirectional(layers.RNN(layers.GRUCell(3))),
        ),
        floats((4, 2), 6),
        "mse",
        tags="rnn",
    ),
    problem(
        "rnn_stacked_masked",
        lambda: sequential(
            (4,),
            layers.Embedding(6, 3, mask_zero=True),
            layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)], return_sequences=True),
            layers.RNN([
                layers.GRUCell(2, reset_after=False),
                layers.SimpleRNNCell(3, use_bias=False),
            ]),
            dtype="int32",
        ),
        lambda rng: (padded(rng, length=4), rng.normal(size=3)),
        "mse",
        tags="embedding mask rnn",
    ),
    problem(
        "rnn_own_cells",
        lambda: sequential(
            (3, 2),
            layers.RNN(Leaf(), return_sequences=True),
            layers.Bidirectional(layers.RNN(OfLayers(), return_sequences=True)),
            layers.RNN([OfLayers(), Leaf()], go_backwards=True),
        ),
        floats((3, 2), 3),
        "mse",
        tags="custom rnn",
    ),
    problem(
        "conv_lstm",
        lambda: sequential(
            (3, 5, 4, 2),
            layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True),
            layers.Bidirectional(layers.ConvLSTM2D(2, (3, 2), strides=2)),
            layers.GlobalAveragePooling2D(),
        ),
        floats((3, 5, 4, 2), 4),
        "mse",
        tags="conv rnn",
    ),
    problem(
        "conv_lstm_masked",
        conv_lstm_masked,
        lambda rng: (padded(rng, length=4), rng.normal(size=(1, 2))),
        "mse",
        tags="conv embedding mask rnn",
    ),
    problem(
        "conv_lstm_other_axes",
        lambda: sequential(
            (2, 3, 3, 3, 1),
            layers.ConvLSTM3D(2, 2, use_bias=False, return_sequences=True),
            layers.Reshape((2, 4, 4)),
            layers.ConvLSTM1D(2, 2, dilation_rate=2),
        ),
        floats((2, 3, 3, 3, 1), (2, 2)),
        "mse",
        tags="conv rnn",
    ),
)
