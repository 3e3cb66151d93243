"""Checks what a private optimizer is made with."""

import warnings

import keras

from tfdp import _validate
from tfdp._types import Config
from tfdp.mechanisms import Gaussian, Mechanism

# Far below it noise is flushed to zero, far above its reciprocal it is infinite.
LEAST_CLIP = 1e-20

_CLIPS_TOO = (
    "it would clip the noised mean, not the gradient of an example",
    "`l2_norm_clip` alone",
)

# What an inner optimizer must not have: why, and what to use.
_REFUSED_OF_INNER = {
    "gradient_accumulation_steps": (
        "it would average gradients that are already noised",
        "`DPModel(model, physical_batch_size=...)`, which accumulates before the "
        "noise is drawn",
    ),
    "clipnorm": _CLIPS_TOO,
    "clipvalue": _CLIPS_TOO,
    "global_clipnorm": _CLIPS_TOO,
    "loss_scale_factor": (
        "the gradients that reach it are not scaled",
        "no loss scale: tfdp scales float16 losses itself, before clipping",
    ),
}


def checked_clip(value: float) -> float:
    """Return a clip norm that noise can be drawn for, or raise a ValueError."""
    value = _validate.positive("l2_norm_clip", value)
    if not LEAST_CLIP <= value <= 1 / LEAST_CLIP:
        raise ValueError(
            "`l2_norm_clip` must lie where float32 noise of its size is exact. "
            f"Received: l2_norm_clip={value!r}. Use a value from {LEAST_CLIP:g} to "
            f"{1 / LEAST_CLIP:g}."
        )
    return value


def checked_noise_multiplier(
    value: float, calibration: str = "tfdp.calibrate_noise_multiplier(...)"
) -> float:
    """Return a noise multiplier, with a warning if it is 0.

    Args:
        value: A number.
        calibration: What returns one for an epsilon.

    Raises:
        ValueError: If it is negative or not finite.
    """
    value = _validate.non_negative("noise_multiplier", value)
    if value == 0:
        warnings.warn(
            "Training without noise is not private: its epsilon is infinite. "
            "Received: noise_multiplier=0. Take a multiplier from "
            f"`{calibration}`.",
            stacklevel=3,
        )
    return value


def checked_inner(
    inner: object, *wrappers: type[keras.optimizers.Optimizer]
) -> keras.optimizers.Optimizer:
    """Return an optimizer that applies what it is given, every time.

    Args:
        inner: A Keras optimizer, or the name of one.
        *wrappers: Classes of optimizers that have an inner one themselves.

    Raises:
        TypeError: If it is none, or one of those.
        ValueError: If it clips, accumulates or scales gradients.
    """
    if isinstance(inner, str):
        inner = keras.optimizers.get(inner)
    is_wrapper = isinstance(inner, wrappers)
    if not isinstance(inner, keras.optimizers.Optimizer) or is_wrapper:
        raise TypeError(
            "`inner` must be a plain Keras optimizer. Received: inner of type "
            f"{type(inner).__name__}. Use `tfdp.optimizers.DPOptimizer("
            "keras.optimizers.SGD(0.1), ...)`; float16 losses are scaled by tfdp."
        )
    for argument, (reason, fix) in _REFUSED_OF_INNER.items():
        value = getattr(inner, argument, None)
        if value is not None:
            raise ValueError(
                f"`{argument}` of the inner optimizer is refused: {reason}. "
                f"Received: {argument}={value!r}. Use {fix}."
            )
    return inner


def checked_mechanism(
    mechanism: Mechanism | Config | None, seed: int | None
) -> Mechanism:
    """Return what draws the noise, also if it is given as a configuration.

    Args:
        mechanism: None for Gaussian noise, independent in every step.
        seed: Of that; None for a secret one.

    Raises:
        TypeError: If `mechanism` is none.
        ValueError: If a seed is given beside a mechanism.
    """
    if mechanism is None:
        return Gaussian(seed)
    if isinstance(mechanism, dict):
        mechanism = keras.saving.deserialize_keras_object(mechanism)
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "`mechanism` must be a `tfdp.mechanisms.Mechanism`. Received: mechanism of "
            f"type {type(mechanism).__name__}. Use `tfdp.mechanisms.Gaussian()`, or "
            "leave it out."
        )
    if seed is not None:
        raise ValueError(
            "`noise_seed` belongs to the mechanism, where one is given. Received: "
            f"noise_seed={seed!r}, mechanism={type(mechanism).__name__}. Use "
            f"`mechanism={type(mechanism).__name__}(noise_seed={seed!r})`."
        )
    return mechanism
