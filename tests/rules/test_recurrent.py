"""Recurrent layers under dropout, whose gates may have masks of their own."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.engine_checks import clipped
from tests.masks import (
    check,
    check_clipping_under_masks,
    gradients_of_row,
    median,
    stacked,
    with_masks_drawn,
)
from tests.problems import precision, sequential
from tfdp.ascent.losses import Ascent
from tfdp.engines import BookkeepingEngine
from tfdp.losses.objective import Objective

BOTH = {"dropout": 0.4, "recurrent_dropout": 0.4, "seed": 1}
INPUTS = {"dropout": 0.4, "seed": 2}
STATES = {"recurrent_dropout": 0.4, "seed": 3}
# With a mask for each gate Keras's own layer fails where cuDNN is not ruled out.
GATES = {"implementation": 1, "use_cudnn": False}


def stack(*cells_or_layers):
    return lambda: sequential((4, 3), *(make() for make in cells_or_layers))


def of(layer, *args, **options):
    return functools.partial(layer, *args, **options)


def masked():
    return sequential(
        (4,),
        layers.Embedding(6, 3, mask_zero=True),
        layers.Bidirectional(layers.LSTM(3, return_sequences=True, **BOTH)),
        layers.Bidirectional(layers.GRU(2, reset_after=False, **BOTH), "sum"),
        dtype="int32",
    )


def called_twice():
    x = keras.Input((4, 3))
    layer = layers.LSTM(3, **BOTH)
    return keras.Model(x, layer(x) + layer(2 * x[:, 1:]))


MODELS = {
    "lstm": stack(of(layers.LSTM, 3, **BOTH)),
    "lstm_inputs": stack(of(layers.LSTM, 3, **INPUTS)),
    "lstm_inputs_of_gates": stack(of(layers.LSTM, 5, **INPUTS, **GATES)),
    "lstm_states_backwards": stack(
        of(layers.LSTM, 3, go_backwards=True, return_sequences=True, **STATES),
        of(layers.LSTM, 2, use_bias=False, **STATES),
    ),
    "gru": stack(of(layers.GRU, 3, **BOTH)),
    "gru_inputs_of_gates": stack(
        of(layers.GRU, 3, return_sequences=True, **INPUTS, **GATES),
        of(layers.GRU, 3, reset_after=False, **INPUTS, **GATES),
    ),
    "gru_reset_before": stack(
        of(layers.GRU, 3, reset_after=False, return_sequences=True, **BOTH),
        of(layers.GRU, 2, reset_after=False, use_bias=False, **INPUTS),
    ),
    "gru_states": stack(
        of(layers.GRU, 3, return_sequences=True, go_backwards=True, **STATES),
        of(layers.GRU, 2, use_bias=False, reset_after=False, **STATES),
    ),
    "simple_rnn": stack(
        of(layers.SimpleRNN, 3, return_sequences=True, **BOTH),
        of(layers.SimpleRNN, 2, go_backwards=True, **STATES),
    ),
    "unrolled": stack(
        of(layers.LSTM, 3, unroll=True, return_sequences=True, **BOTH),
        of(layers.GRU, 2, unroll=True, **BOTH),
    ),
    "cells": stack(
        lambda: layers.RNN(layers.LSTMCell(3, **BOTH), return_sequences=True),
        lambda: layers.RNN(layers.GRUCell(3, implementation=1, **INPUTS)),
    ),
    "stacked_cells": lambda: sequential(
        (2, 3),
        layers.RNN([
            layers.LSTMCell(2, **BOTH),
            layers.GRUCell(3, reset_after=False, **BOTH),
        ]),
    ),
    "masked_bidirectional": masked,
    "called_twice": called_twice,
}
QUICK = {"lstm"}
# What differs little from the others.
ONE_MORE = {"cells", "gru_inputs_of_gates", "lstm_inputs", "unrolled"}


def marks_of(name):
    if name in QUICK:
        return []
    return [pytest.mark.exhaustive if name in ONE_MORE else pytest.mark.slow]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name)) for name in MODELS]
)
def test_each_row_is_clipped_under_its_own_masks(name, rng):
    check_clipping_under_masks(MODELS[name], rng)


@pytest.mark.slow
def test_graphs_see_the_same_masks(rng):
    with precision("float64"):
        model, x, y, masks, again = with_masks_drawn(MODELS["gru_reset_before"], rng)
        rows = [gradients_of_row(model, masks, x, y, row) for row in range(len(y))]
        gradients = stacked(rows)
        clip = median(gradients)
        objective = Objective.of(model, "mse")
        again()

        @tf.function(autograph=False)
        def run(x, y):
            return clipped(BookkeepingEngine(), objective, x, y, clip)

        check(run(tf.constant(x), tf.constant(y)), gradients, clip, 1e-9)


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("lstm", False),
        pytest.param("lstm", True, marks=pytest.mark.exhaustive),
        pytest.param("gru_reset_before", False, marks=pytest.mark.exhaustive),
        pytest.param("gru_reset_before", True, marks=pytest.mark.exhaustive),
    ],
)
def test_uphill_the_masks_are_the_same(name, is_exact, rng):
    radius = 0.3
    with precision("float64"):
        model, x, y, masks, again = with_masks_drawn(MODELS[name], rng)
        variables = model.trainable_variables
        rows = []
        for row in range(len(y)):
            of_row = functools.partial(gradients_of_row, model, masks, x, y, row)
            with tf.GradientTape() as tape:
                here = of_row()
            norm = np.sqrt(sum(np.sum(np.square(g)) for g in here))
            v = [g / norm if norm else g for g in here]
            if is_exact:
                curved = tape.gradient(here, variables, output_gradients=v)
                there = [a + radius * b for a, b in zip(here, curved, strict=True)]
            else:
                for variable, step in zip(variables, v, strict=True):
                    variable.assign_add(radius * step)
                there = of_row()
                for variable, step in zip(variables, v, strict=True):
                    variable.assign_sub(radius * step)
            rows.append(there)
        gradients = stacked(rows)
        clip = median(gradients)
        step = Ascent(lambda: tf.constant(radius, tf.float64), 1.0, is_exact)
        objective = dataclasses.replace(Objective.of(model, "mse"), ascent=step)
        again()
        found = clipped(BookkeepingEngine(), objective, x, y, clip)
        check(found, gradients, clip, 1e-8)
