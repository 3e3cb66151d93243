"""Steps of JAX-Privacy and of JAX, with the Keras models.

An environment for it:

    python -m venv jax_privacy
    jax_privacy/bin/pip install jax-privacy==2.0.0 keras

Each step is one compiled function of the weights. The rows are `clipped_grad` for the
whole batch at once, its default, and for one example after the other.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax_privacy
import keras
import keras_models
import optax
import steps
from jax_privacy import noise_addition

_MICROBATCH_SIZES = {"vmap": None, "one_by_one": 1}


def stepper(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the step of a row."""
    if row == "noise":
        return noise_alone()
    model = keras_models.build(options.model)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optax.sgd(steps.LEARNING_RATE)
    state = [variable.value for variable in model.non_trainable_variables]

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        y_pred, _ = model.stateless_call(weights, state, x, training=True)
        return cross_entropy(y, y_pred)

    if row == "ordinary":
        gradients = jax.value_and_grad(loss)
    else:
        clipped = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=steps.L2_NORM_CLIP,
            batch_argnums=(1, 2),
            normalize_by=options.batch_size,
            microbatch_size=_MICROBATCH_SIZES[row],
            return_values=True,
        )

        def gradients(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple:
            means, found = clipped(weights, x, y)
            return found.values.mean(), means

        noise = noise_addition.gaussian_privatizer(
            stddev=steps.NOISE_MULTIPLIER * clipped.sensitivity(), prng_key=0
        )
        optimizer = optax.chain(noise, optimizer)

    def step_of(weights: list, slots: tuple, x: jax.Array, y: jax.Array) -> tuple:
        value, means = gradients(weights, x, y)
        updates, slots = optimizer.update(means, slots, weights)
        return optax.apply_updates(weights, updates), slots, value

    compiled = jax.jit(step_of, donate_argnums=(0, 1))
    x, y = map(jax.numpy.asarray, steps.examples(options.model, options.batch_size))
    weights = [jax.numpy.copy(variable.value) for variable in model.trainable_variables]
    slots = optimizer.init(weights)

    def step() -> None:
        nonlocal weights, slots
        weights, slots, value = compiled(weights, slots, x, y)
        jax.block_until_ready((weights, value))

    return step


def noise_alone() -> steps.Step:
    """Return what adds noise to a million numbers, as one compiled function."""
    privatizer = noise_addition.gaussian_privatizer(
        stddev=steps.NOISE_MULTIPLIER, prng_key=0
    )
    numbers = jax.numpy.zeros(steps.NUMBERS_OF_NOISE)
    compiled = jax.jit(privatizer.update)
    state = privatizer.init(numbers)

    def step() -> None:
        nonlocal state
        noised, state = compiled(numbers, state)
        jax.block_until_ready(noised)

    return step


if __name__ == "__main__":
    steps.main(
        stepper,
        f"JAX-Privacy {jax_privacy.__version__}, JAX {jax.__version__}, "
        f"Keras {keras.__version__}",
    )
