"""Each family is its Keras optimizer, on private gradients."""

import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp import optimizers
from tfdp.clipping import ClippedSum

PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1}
STEPS = 3


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.1, 0.01])


# Family, arguments: every one is an argument of Keras's optimizer.
CASES = {
    "sgd": ("DPSGD", {"learning_rate": 0.1}),
    "sgd_nesterov": (
        "DPSGD",
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "sgd_scheduled": ("DPSGD", {"learning_rate": schedule}),
    "sgd_decay": ("DPSGD", {"learning_rate": 0.1, "weight_decay": 0.05}),
    "adam": ("DPAdam", {"learning_rate": 0.1, "beta_1": 0.8}),
    "adam_amsgrad": ("DPAdam", {"learning_rate": 0.1, "amsgrad": True}),
    "adam_scheduled": ("DPAdam", {"learning_rate": schedule}),
    "adam_averaged": ("DPAdam", {"use_ema": True, "ema_overwrite_frequency": 2}),
    "adamw": ("DPAdamW", {"learning_rate": 0.1, "weight_decay": 0.1}),
    "adagrad": ("DPAdagrad", {"initial_accumulator_value": 0.2}),
    "nadam": ("DPNadam", {"learning_rate": 0.05}),
    "rmsprop": ("DPRMSprop", {"rho": 0.8, "momentum": 0.5, "centered": True}),
}

FAMILIES = sorted({family for family, _ in CASES.values()})


def arguments_of(case):
    return {k: v() if callable(v) else v for k, v in CASES[case][1].items()}


def keras_class(family):
    return getattr(keras.optimizers, family.removeprefix("DP"))


def trained(apply):
    """The weights after some steps with the same gradients."""
    rng = np.random.default_rng(0)
    weights = [
        keras.Variable(rng.normal(size=shape).astype("float32"))
        for shape in ([3, 2], [2])
    ]
    for _ in range(STEPS):
        apply(
            [
                tf.constant(rng.normal(size=weight.shape), tf.float32)
                for weight in weights
            ],
            weights,
        )
    return [weight.numpy() for weight in weights]


@pytest.mark.parametrize("case", CASES)
def test_without_noise_it_is_keras_s_optimizer_on_the_mean_gradient(case):
    family, _ = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = getattr(optimizers, family)(
            **arguments_of(case),
            l2_norm_clip=1.0,
            noise_multiplier=0.0,
            expected_batch_size=4,
        )
    plain = keras_class(family)(**arguments_of(case))

    def apply_private(gradients, weights):
        sums = [gradient * 4 for gradient in gradients]
        clipped_sum = ClippedSum(sums, tf.ones([1]), tf.constant(1.0), 1)
        private.apply_clipped_sum(clipped_sum, weights)

    for actual, expected in zip(
        trained(apply_private), trained(plain.apply), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_configuration_round_trip(case):
    family, _ = CASES[case]
    private = getattr(optimizers, family)(
        **arguments_of(case), **PRIVATE, num_microbatches=2, name="mine"
    )
    serialized = keras.saving.serialize_keras_object(private)
    again = keras.saving.deserialize_keras_object(serialized)
    assert type(again) is type(private)
    assert again.get_config() == private.get_config()
    assert again.name == "mine"
    plain = keras_class(family)(**arguments_of(case)).get_config()
    assert again.inner_optimizer.get_config() | {"name": plain["name"]} == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_private_arguments_reach_the_private_optimizer(family):
    private = getattr(optimizers, family)(
        l2_norm_clip=0.5,
        noise_multiplier=2.0,
        num_microbatches=3,
        expected_batch_size=9,
    )
    assert float(private.l2_norm_clip) == 0.5
    assert float(private.noise_multiplier) == 2.0
    assert private.num_microbatches == 3
    assert private.expected_batch_size == 9
    assert type(private.inner_optimizer) is keras_class(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_positional_argument_is_the_learning_rate(family):
    private = getattr(optimizers, family)(0.375, **PRIVATE)
    assert float(private.learning_rate) == 0.375


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("missing", PRIVATE)
def test_private_arguments_have_no_default(family, missing):
    arguments = {name: value for name, value in PRIVATE.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        getattr(optimizers, family)(0.1, **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_argument_of_keras_is_shadowed(family):
    own = inspect.signature(getattr(optimizers, family).__init__).parameters
    inner = inspect.signature(keras_class(family).__init__).parameters
    assert set(own) & set(inner) <= {"self", "name", "args", "kwargs"}
