"""Layers that multiply by a matrix, and PReLU."""

import numpy as np
from keras import layers

from tests.problems.building import (
    floats,
    labelled,
    logits,
    sequential,
    weighted,
)
from tests.problems.problem import problem


def einsum(shape, *equations, **options):
    """EinsumDense layers in a row, each ``(equation, output shape, bias axes)``."""
    model = sequential(shape)
    for equation, output_shape, bias_axes in equations:
        layer = layers.EinsumDense(equation, output_shape, bias_axes=bias_axes)
        model.add(layer)
    for layer in model.layers if options.get("lora") else ():
        layer.enable_lora(options["lora"])
    return model


PROBLEMS = (
    problem(
        "linear_regression",
        lambda: sequential((3,), layers.Dense(1)),
        floats(3, 1),
        "mse",
    ),
    problem(
        "mlp_softmax",
        lambda: sequential(
            (4,), layers.Dense(5, "tanh"), layers.Dense(3, activation="softmax")
        ),
        labelled(4, 3),
        "sparse_categorical_crossentropy",
    ),
    problem(
        "mlp_logits",
        lambda: sequential((4,), layers.Dense(5, "relu"), layers.Dense(3)),
        labelled(4, 3),
        logits,
    ),
    problem(
        "mlp_weighted",
        lambda: sequential((4,), layers.Dense(5, "relu"), layers.Dense(3)),
        weighted(labelled(4, 3)),
        logits,
    ),
    problem(
        "mlp_one_hot",
        lambda: sequential(
            (4,),
            layers.Dense(5, "silu", use_bias=False),
            layers.Dense(3, "softmax", use_bias=False),
        ),
        lambda rng: (rng.normal(size=4), np.eye(3)[rng.integers(3)]),
        "categorical_crossentropy",
    ),
    problem(
        "mlp_binary",
        lambda: sequential((4,), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")),
        lambda rng: (rng.normal(size=4), rng.integers(2, size=1)),
        "binary_crossentropy",
    ),
    problem(
        "dense_grid",
        lambda: sequential((2, 3, 4), layers.Dense(3, "tanh"), layers.Dense(2)),
        floats((2, 3, 4), (2, 3, 2)),
        "mse",
    ),
    problem(
        "prelu",
        lambda: sequential(
            (4,), layers.Dense(3), layers.PReLU("uniform"), layers.Dense(2)
        ),
        floats(4, 2),
        "mae",
    ),
    problem(
        "prelu_shared_axes",
        lambda: sequential(
            (3, 2, 4),
            layers.Dense(2),
            layers.PReLU("uniform", shared_axes=[1, 2]),
            layers.PReLU("uniform", shared_axes=[1]),
        ),
        floats((3, 2, 4), (3, 2, 2)),
        "mse",
    ),
    problem(
        "prelu_as_activation",
        lambda: sequential(
            (4,),
            layers.Dense(3, activation=layers.PReLU("uniform")),
            layers.Dense(2),
        ),
        floats(4, 2),
        "mse",
    ),
    problem(
        "einsum_dense",
        lambda: sequential(
            (4, 3),
            layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
            layers.Activation("tanh"),
            layers.EinsumDense("abde,def->abf", (None, 2), bias_axes="f"),
        ),
        floats((4, 3), (4, 2)),
        "mse",
    ),
    problem(
        "einsum_ellipsis_first",
        lambda: einsum(
            (2, 3, 4), ("...x,xy->...y", 3, "y"), ("...x,xy->...y", 2, None)
        ),
        floats((2, 3, 4), (2, 3, 2)),
        "mse",
    ),
    problem(
        "einsum_ellipsis_last",
        lambda: einsum((3, 2, 2), ("ab...,bc->ac...", 4, "c")),
        floats((3, 2, 2), (4, 2, 2)),
        "mse",
    ),
    problem(
        "einsum_reversed_kernel",
        lambda: einsum(
            (3, 2, 2),
            ("abcd,efcd->abef", (3, 2, 3), "ef"),
            ("abef,gef->abg", (3, 2), "g"),
        ),
        floats((3, 2, 2), (3, 2)),
        "mse",
    ),
    problem(
        "einsum_mixed_kernel",
        lambda: einsum(
            (3, 2), ("abc,dce->abde", (3, 2, 3), "e"), ("abde,bdf->abf", (3, 2), "bf")
        ),
        floats((3, 2), (3, 2)),
        "mse",
    ),
    problem(
        "einsum_bias_of_positions",
        lambda: einsum((3, 2), ("abc,cde->abde", (3, 2, 3), "bd")),
        floats((3, 2), (3, 2, 3)),
        "mse",
    ),
    # Keras adds a bias along the last axis, or the first of a row, that is as long.
    problem(
        "einsum_bias_along_another_axis",
        lambda: einsum(
            (2, 4),
            ("abc,bd->adc", (4, 4), "d"),
            ("adc,cef->adef", (4, 4, 3), "e"),
            ("adef,fg->adeg", (4, 4, 1), "eg"),
        ),
        floats((2, 4), (4, 4, 1)),
        "mse",
    ),
    problem(
        "einsum_lora",
        lambda: einsum(
            (3, 2),
            ("abc,cde->abde", (3, 2, 3), "de"),
            ("abde,def->abf", (3, 4), "f"),
            ("abf,gf->abg", (3, 2), None),
            lora=2,
        ),
        floats((3, 2), (3, 2)),
        "mse",
        tags="frozen lora",
    ),
)
