"""Normalisations."""

from keras import layers

from tests.problems.building import floats, frozen, sequential
from tests.problems.problem import problem

PROBLEMS = (
    problem(
        "layer_norm",
        lambda: sequential(
            (3, 4),
            layers.Dense(4),
            layers.LayerNormalization(),
            layers.LayerNormalization(axis=[1, 2], center=False),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((3, 4), 2),
        "mse",
        tags="norm",
    ),
    problem(
        "layer_norm_axes",
        lambda: sequential(
            (3, 4),
            layers.Dense(4),
            layers.LayerNormalization(axis=[1]),
            layers.LayerNormalization(axis=1, scale=False),
            layers.LayerNormalization(axis=[1, 2]),
            layers.LayerNormalization(center=False, scale=False),
        ),
        floats((3, 4), (3, 4)),
        "mse",
        tags="norm",
    ),
    problem(
        "group_norm",
        lambda: sequential(
            (4, 4, 2),
            layers.Conv2D(4, 2),
            layers.GroupNormalization(2),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((4, 4, 2), 2),
        "mse",
        tags="conv norm",
    ),
    problem(
        "group_norm_axes",
        lambda: sequential(
            (4, 3),
            layers.Dense(4),
            layers.GroupNormalization(2, axis=1),
            layers.GroupNormalization(1, scale=False),
            layers.GroupNormalization(-1, center=False),
            layers.GroupNormalization(1, center=False, scale=False),
        ),
        floats((4, 3), (4, 4)),
        "mse",
        tags="norm",
    ),
    problem(
        "rms_norm",
        lambda: sequential(
            (3, 4), layers.Dense(4), layers.RMSNormalization(), layers.Dense(2)
        ),
        floats((3, 4), (3, 2)),
        "mse",
        tags="norm",
    ),
    problem(
        "rms_norm_axes",
        lambda: sequential(
            (3, 2, 4), layers.Dense(4), layers.RMSNormalization(axis=[-2, -1])
        ),
        floats((3, 2, 4), (3, 2, 4)),
        "mse",
        tags="norm",
    ),
    problem(
        "frozen_batch_norm",
        lambda: sequential(
            (4,),
            layers.Dense(4, "relu"),
            frozen(layers.BatchNormalization()),
            layers.Dense(2),
        ),
        floats(4, 2),
        "mse",
        tags="frozen norm",
    ),
)
