"""Steps of TensorFlow Privacy and of Keras 2.

An environment for it, with a Python up to 3.11:

    python3.11 -m venv tensorflow_privacy
    tensorflow_privacy/bin/pip install tensorflow==2.15.1 tensorflow-privacy==0.9.0

Row "vectorized" is its `DPModel`, row "fast_gradient_clipping" the same with a registry
of the layers that it has rules for. Each goes through the model's own `train_function`.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_models
import steps
import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    layer_normalization,
    multi_head_attention,
)
from tensorflow_privacy.privacy.keras_models import dp_keras_model


def stepper(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the step of a row."""
    model = keras_models.build(options.model)
    if row == "vectorized" and options.model == "lstm":
        raise steps.SkippedError("vectorized_map raises a TypeError in its loop")
    if row != "ordinary":
        rules = registry(model) if row == "fast_gradient_clipping" else None
        model = dp_keras_model.DPModel(
            steps.L2_NORM_CLIP,
            steps.NOISE_MULTIPLIER,
            use_xla=options.jit_compile,
            layer_registry=rules,
            inputs=model.inputs,
            outputs=model.outputs,
        )
    model.compile(
        keras.optimizers.SGD(steps.LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=options.jit_compile,
    )
    batch = steps.examples(options.model, options.batch_size)
    data = tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()
    iterator = iter(data)

    def step() -> None:
        if model.train_function is None:
            model.make_train_function()
        float(model.train_function(iterator)["loss"])
        model.trainable_variables[-1].numpy()

    return step


def registry(model: keras.Model) -> layer_registry.LayerRegistry:
    """Return the rules for a model's layers."""
    rules = layer_registry.make_default_layer_registry()
    rules.insert(
        keras.layers.LayerNormalization,
        layer_normalization.layer_normalization_computation,
    )
    rules.insert(
        keras.layers.MultiHeadAttention,
        multi_head_attention.multi_head_attention_layer_computation,
    )
    # It would run such a model without the registry, and say so nowhere.
    lacking = {
        type(layer).__name__
        for layer in model.layers
        if layer.trainable_variables and not rules.is_elem(layer)
    }
    if lacking:
        raise steps.SkippedError(f"no rule for {', '.join(sorted(lacking))}")
    return rules


if __name__ == "__main__":
    steps.main(
        stepper,
        f"TensorFlow Privacy {tensorflow_privacy.__version__}, Keras "
        f"{keras.__version__}, TensorFlow {tf.__version__}",
    )
