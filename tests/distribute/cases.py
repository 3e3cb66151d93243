"""Trainings whose result must not depend on how many replicas take part."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp import callbacks, losses

ROWS = 40
BATCH = 4
STEPS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, its draws and its noise with known seeds.

    Batches have 4 rows on average: shares are uneven, and often empty.
    """

    noise_multiplier: float = 0.0
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)
    loss: Callable[[Any], Any] = lambda loss: loss
    callbacks: Callable[[], list[Any]] = list
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_microbatches: int | None = None
    data: str = "poisson"
    steps: int = STEPS
    has_own_loss: bool = False
    reads_elsewhere: bool = False


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Return ``(x, y)`` with an outlier; clipping is active."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype("float32")
    x[3] *= 100
    return x, rng.integers(0, 3, ROWS)


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class OwnLoss(keras.Sequential):
    """A model with a loss that Keras would divide by the number of replicas."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        del x, sample_weight
        return crossentropy()(y, y_pred)


class Reads(keras.layers.Layer):
    """Multiplies by the kernel of another layer, which book-keeping follows there."""

    def __init__(self, other: keras.layers.Dense) -> None:
        super().__init__()
        self.other = other

    def call(self, x):
        return x + (x @ keras.ops.transpose(self.other.kernel)) @ self.other.kernel


def public_rows() -> tuple[np.ndarray, np.ndarray]:
    x, y = rows()
    return x[:7], y[:7]


CASES = {
    "eager": Case(
        noise_multiplier=0.6,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        compile={"run_eagerly": True},
        steps=4,
    ),
    "noised": Case(noise_multiplier=0.6, optimizer=lambda: keras.optimizers.SGD(0.1)),
    "passes": Case(
        noise_multiplier=0.6,
        optimizer=lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9),
        model={"engine": "ghost", "physical_batch_size": 2},
        callbacks=lambda: [
            callbacks.PrivacyBudget(1e-3, target_epsilon=30.0),
            callbacks.ClipNormScheduler(
                keras.optimizers.schedules.PolynomialDecay(1.0, STEPS, 0.1)
            ),
        ],
    ),
    "vectorized": Case(
        model={"engine": "vectorized", "physical_batch_size": 3},
    ),
    "jit": Case(compile={"jit_compile": True}),
    "sat": Case(
        loss=lambda loss: losses.SAT(loss, radius=0.05),
        callbacks=lambda: [callbacks.BiasLogger(every=3)],
    ),
    "bounded": Case(data="bounded"),
    "users": Case(
        data="users",
        noise_multiplier=0.6,
        model={"unit": "user", "physical_batch_size": 6},
        callbacks=lambda: [
            callbacks.AdaptiveQuantileClip(target_quantile=0.5),
            callbacks.BiasLogger(every=3),
        ],
    ),
    "quantile": Case(
        noise_multiplier=0.6,
        callbacks=lambda: [callbacks.AdaptiveQuantileClip(target_quantile=0.5)],
    ),
    "median": Case(
        noise_multiplier=0.6,
        loss=lambda loss: losses.BAM(loss, radius=0.05),
        callbacks=lambda: [
            callbacks.AdaptiveMedianClip(
                [0, 0.1, 0.2, 0.4, 1.0], histogram_noise_multiplier=1.0, every=3
            ),
            callbacks.BiasLogger(every=3, public_data=public_rows()),
        ],
    ),
    "released": Case(
        noise_multiplier=0.6,
        has_own_loss=True,
        callbacks=lambda: [
            callbacks.PrivateEvaluation(
                ["accuracy", "loss"],
                # So little that values can be compared.
                noise_multiplier=1e-8,
                ranges={"loss": (0.0, 50.0)},
                physical_batch_size=16,
            ),
            callbacks.PrivateEarlyStopping("private_loss", patience=5),
        ],
    ),
    "declared": Case(data="declared", has_own_loss=True, num_microbatches=2),
    "elsewhere": Case(
        reads_elsewhere=True, noise_multiplier=0.6, model={"engine": "bookkeeping"}
    ),
}


def fit(case: Case, strategy: tf.distribute.Strategy | None = None) -> tuple[Any, Any]:
    """Train as the case says.

    Args:
        case: One of `CASES`.
        strategy: None for one device.

    Returns:
        The private model and the history of its logs.
    """
    x, y = rows()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        keras.utils.set_random_seed(0)
        first = keras.layers.Dense(16, activation="relu")
        model = (OwnLoss if case.has_own_loss else keras.Sequential)([
            keras.Input((8,)),
            first,
            *([Reads(first)] if case.reads_elsewhere else []),
            keras.layers.Dense(3),
        ])
        optimizer = tfdp.optimizers.DPOptimizer(
            case.optimizer(),
            l2_norm_clip=0.5,
            noise_multiplier=case.noise_multiplier,
            num_microbatches=case.num_microbatches,
            noise_seed=3,
        )
    private = tfdp.DPModel(model, **case.model)
    loss = None if case.has_own_loss else case.loss(crossentropy())
    private.compile(optimizer, loss, metrics=["accuracy"], **case.compile)
    if case.data != "declared":
        data = tfdp.data.PoissonDataset(
            x,
            y,
            expected_batch_size=BATCH,
            max_batch_size=24 if case.data == "bounded" else None,
            user_ids=np.arange(ROWS) % 17 if case.data == "users" else None,
            examples_per_user=3 if case.data == "users" else None,
            seed=5,
            steps_per_epoch=case.steps // 2,
        )
    else:
        data = tfdp.data.declare(
            # The second pass in the order of the first: how often TensorFlow has begun
            # to read it before is no matter then.
            tf.data.Dataset
            .from_tensor_slices((x, y))
            .shuffle(ROWS, seed=1, reshuffle_each_iteration=False)
            .batch(BATCH),
            number_of_examples=ROWS,
            expected_batch_size=BATCH,
            sampling="shuffle",
        )
    history = private.fit(data, epochs=2, verbose=0, callbacks=case.callbacks())
    return private, history.history


def weights_of(private: Any) -> np.ndarray:
    """Return all weights of the wrapped model as one vector."""
    return np.concatenate([each.ravel() for each in private.model.get_weights()])


def one_device_scope() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0"]).scope()


def network() -> keras.Sequential:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def optimizer() -> tfdp.optimizers.DPSGD:
    return tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
