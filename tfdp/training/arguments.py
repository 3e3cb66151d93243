"""Checks what `DPModel` and its methods are given."""

import functools

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras
from tfdp._types import Loss, Nest
from tfdp._validate import one_of
from tfdp.ascent.losses import check_plain
from tfdp.data.balls_in_bins import BallsInBins
from tfdp.data.declared import DeclaredDataset
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.errors import NotPrivateError
from tfdp.losses.objective import check_takes_logits
from tfdp.optimizers import DPOptimizer
from tfdp.sampling import Scheme, samplings

# What a `train_step` becomes.
_WITHOUT_TRAIN_STEP = """\
    class OfModel(keras.Model):  # `__init__` and `call` stay as they are.
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            return keras.ops.mean(keras.ops.square(y - y_pred))
"""

# And the most frequent one.
_WITHOUT_TRAIN_STEP_OF_VAE = """\
    class OfModel(keras.Model):  # `__init__` stays as it is.
        def call(self, x, training=None):
            mean, log_variance, code = self.encoder(x)
            image = self.decoder(code)
            return {"mean": mean, "log_variance": log_variance, "image": image}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            mean, log_variance = y_pred["mean"], y_pred["log_variance"]
            kl = keras.ops.square(mean) + keras.ops.exp(log_variance) - log_variance - 1
            away = keras.losses.binary_crossentropy(x, y_pred["image"])
            away = keras.ops.sum(away, axis=(1, 2))
            return keras.ops.mean(away + 0.5 * keras.ops.sum(kl, axis=1))
"""


def check_wrapped(model: object) -> None:
    """Refuse to wrap what is no ordinary Keras model.

    Args:
        model: To be trained.

    Raises:
        TypeError: If it is no Keras model, or private already.
        ValueError: If it overrides what `DPModel` replaces.
    """
    is_private = isinstance(model, _keras.ReplicatedModel)
    if not isinstance(model, keras.Model) or is_private:
        raise TypeError(
            "`model` must be a Keras model that is not private yet. Received: model "
            f"of type {type(model).__name__}. Use "
            "`tfdp.DPModel(keras.Sequential([...]))`."
        )
    overridden = [
        name
        for name in ("train_step", "test_step", "compute_metrics")
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if overridden:
        names = ", ".join(f"`{name}`" for name in overridden)
        kind = type(model).__name__
        advice = (
            f"Leave {names} out of `{kind}`, and use `compile(metrics=[...])` for what is "
            "to be logged: `evaluate` computes the loss and these."
        )
        if "train_step" in overridden:
            is_vae = hasattr(model, "encoder") and hasattr(model, "decoder")
            code = _WITHOUT_TRAIN_STEP_OF_VAE if is_vae else _WITHOUT_TRAIN_STEP
            whose = " of a variational autoencoder" if is_vae else ""
            advice = (
                "Use `compile(metrics=...)` for what is to be logged, return from `call` "
                "all that the loss is made of, and compute it in `compute_loss`, of which "
                "each example has what it would have alone. Of a GAN wrap what sees data, "
                "`tfdp.DPModel(discriminator)`, and train the generator in a callback. In "
                f"place of the `train_step`{whose}:\n\n"
                f"{code.replace('OfModel', kind)}\n"
                "    tfdp.DPModel(model).compile(optimizer)"
            )
        raise ValueError(
            f"Model `{model.name}` overrides {names}, which DPModel replaces. Received: "
            f"model of type {kind}. {advice}"
        )


def check_optimizer(optimizer: object) -> None:
    """Refuse an optimizer that would add no noise.

    Args:
        optimizer: Of `compile`, or assigned after it.

    Raises:
        NotPrivateError: If it is no `DPOptimizer`.
    """
    if not isinstance(optimizer, DPOptimizer):
        raise NotPrivateError(
            "`optimizer` would train without privacy. Received: optimizer="
            f"{optimizer!r}. Use `private.compile(tfdp.optimizers.DPOptimizer("
            "optimizer, l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)`."
        )


def check_trainable(model: keras.Model) -> None:
    """Refuse to train what cannot be.

    Args:
        model: The private one.

    Raises:
        NotPrivateError: If it was not compiled.
        ValueError: If it has nothing to train.
    """
    if not model.compiled:
        raise NotPrivateError(
            f"Model `{model.name}` was not compiled. Received: no optimizer. Use "
            "`private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, "
            "noise_multiplier=1.1), loss=...)`."
        )
    if model.built and not model.trainable_variables:
        raise ValueError(
            f"Model `{model.name}` has nothing to train. Received: no trainable "
            "variables. Set `model.trainable = True` and compile again."
        )


def check_loss(model: keras.Model, loss: Loss, *, has_own_loss: bool) -> None:
    """Refuse losses that cannot train a model.

    Args:
        model: Predicts what the loss compares.
        loss: Of `compile`, without what takes gradients uphill.
        has_own_loss: Whether the model computes one itself.

    Raises:
        ValueError: If there is none, or it takes logits for probabilities.
    """
    check_plain(loss)
    if loss is None and not has_own_loss and not _may_add_losses(model):
        raise ValueError(
            "`loss` is missing. Received: loss=None. Use "
            "`private.compile(optimizer, loss='mse')`."
        )
    check_takes_logits(model, loss)


def _may_add_losses(model: keras.Model) -> bool:
    """Tell whether layers have code of their own, or regularize what they return."""
    return any(
        layer.activity_regularizer is not None
        or not type(layer).__module__.startswith("keras.")
        for layer in _keras.flatten_layers(model)
    )


# How names of logs begin that say nothing of the private rows.
HARMLESS = ("val_", "public_", "epsilon", "l2_norm_clip", "noise_multiplier")
_NOT_OF_EXACT_METRICS = (*HARMLESS, "private_")


def check_names_of_logs(model: keras.Model, *metrics: Nest) -> None:
    """Refuse names of exact metrics that look like those of public or released ones.

    Args:
        model: The wrapped model, whose outputs and layers give names to logs, too.
        *metrics: Of `compile`.

    Raises:
        ValueError: If there are such.
    """
    outputs = getattr(model, "output_names", None) or []
    own = [each.name for each in _keras.metrics_of(model)]
    given = [
        str(getattr(each, "name", None) or getattr(each, "__name__", each))
        for each in keras.tree.flatten(metrics)
    ]
    for name in (*given, *own, *(outputs if len(outputs) > 1 else [])):
        if name.startswith(_NOT_OF_EXACT_METRICS):
            begins = ", ".join(f"`{each}`" for each in _NOT_OF_EXACT_METRICS)
            raise ValueError(
                "The name of an exact metric, or of an output, must not begin as names of "
                f"what is public or released do ({begins}): callbacks may decide by these. "
                f"Received: name={name!r}. Use another one, "
                f"`keras.metrics.Mean(name='exact_{name}')`."
            )


def check_inputs(x: Nest) -> None:
    """Refuse to train without inputs: a ValueError for None."""
    if x is None:
        raise ValueError(
            "`x` is missing. Received: x=None. Use `private.fit(x, y, batch_size=256)`."
        )


def check_validation_data(validation_data: Nest) -> None:
    """Refuse, before a step is spent, what `evaluate` refuses after an epoch.

    Args:
        validation_data: What `fit` got.

    Raises:
        ValueError: If its batches have padding, or come in a form that Keras does not
            know.
    """
    if isinstance(validation_data, (BallsInBins, DeclaredDataset)):
        raise ValueError(
            "`validation_data` must be what Keras takes: nothing of it is counted. "
            f"Received: validation_data={type(validation_data).__name__}(...). Use "
            "`validation_data=data.dataset`."
        )
    if isinstance(validation_data, DrawnDataset) and validation_data.is_padded:
        raise ValueError(
            "Batches with padding cannot be evaluated: only private training knows what "
            "is padding. Received: validation_data="
            f"{type(validation_data).__name__}(...) with `max_batch_size` or "
            "`user_ids`. Use the arrays themselves, `validation_data=(x, y)`."
        )


def check_targets(y: Nest, *, needs_them: bool) -> None:
    """Refuse data without targets, which most losses need.

    Args:
        y: Of some rows, or None.
        needs_them: Whether the loss is one of `compile`.

    Raises:
        ValueError: If they are missing.
    """
    if y is None and needs_them:
        raise ValueError(
            "`y` is missing: the loss compares what the model predicts with it. "
            "Received: y=None. Use `private.fit(x, y, ...)`, or a dataset of "
            "`(x, y)`; a model that learns without targets is compiled without `loss`, "
            "and adds its losses or overrides `compute_loss`."
        )


def check_no_class_weight(class_weight: dict[int, float] | None) -> None:
    """Refuse weights of classes for batches with padding, which Keras cannot weigh.

    Args:
        class_weight: As in `keras.Model.fit`.

    Raises:
        ValueError: If there are some.
    """
    if class_weight is not None:
        raise ValueError(
            "`class_weight` cannot weigh batches with padding. Received: class_weight="
            f"{class_weight!r}. Use `sample_weight=weight_of_class[y]`."
        )


def check_unit(unit: str, sampling: str) -> None:
    """Refuse units that cannot be drawn so.

    Args:
        unit: Of `DPModel`.
        sampling: Likewise.

    Raises:
        ValueError: If it is no unit, or one that the sampling does not draw.
    """
    one_of("unit", unit, ("example", "user"))
    if unit == "user" and sampling != "poisson":
        draws_users = getattr(samplings()[sampling], "unit", None) == "user"
        raise ValueError(
            "Users are drawn by Poisson sampling. Received: unit='user', sampling="
            f"{sampling!r}. Leave `sampling` out"
            f"{_declaring_users(sampling) if draws_users else ''}."
        )


def check_protects(unit: str, scheme: Scheme) -> None:
    """Refuse batches whose units are not those that a model is to protect.

    Args:
        unit: Of `DPModel`.
        scheme: How the batches are drawn.

    Raises:
        ValueError: If they are other ones.
    """
    if unit == scheme.unit:
        return
    if unit == "user":
        raise ValueError(
            "`DPModel(unit='user')` protects users, and needs batches of users. "
            f"Received: batches of examples ({type(scheme).__name__}). Use "
            "`private.fit(x, y, user_ids=ids, batch_size=64, examples_per_user=8)`, or "
            "`tfdp.data.PoissonDataset(x, y, user_ids=ids, ...)`."
        )
    raise ValueError(
        "Batches of users need a model that protects users. Received: unit="
        f"{unit!r}, batches of users ({type(scheme).__name__}). Use "
        "`tfdp.DPModel(model, unit='user')`"
        f"{_declaring_users(scheme.sampling) if scheme.sampling else ''}."
    )


def _declaring_users(sampling: str) -> str:
    """Say how a scheme of the user's own that draws users is named."""
    return (
        " and use `private.fit(tfdp.data.declare(dataset, number_of_examples=..., "
        f"expected_batch_size=..., sampling={sampling!r}))`"
    )


def check_class_weight(
    class_weight: dict[int, float] | None,
    sample_weight: Nest,
    y: Nest,
    model: keras.Model,
) -> None:
    """Refuse weights of classes where Keras would not know which to weigh.

    Args:
        class_weight: As in `keras.Model.fit`.
        sample_weight: Likewise.
        y: Likewise.
        model: Whose outputs tell how many targets there are, if `y` does not.

    Raises:
        ValueError: If there are weights of rows as well, or several targets.
    """
    if class_weight is None:
        return
    # Data that bring their own targets do not show them here.
    targets = getattr(model, "outputs", None) if y is None else keras.tree.flatten(y)
    outputs = len(targets or [None])
    if outputs > 1 or sample_weight is not None:
        given = "`sample_weight`" if outputs == 1 else f"{outputs} targets"
        raise ValueError(
            "`class_weight` weighs the classes of one target, in the place of "
            f"`sample_weight`. Received: class_weight={class_weight!r} with {given}. "
            "Use `sample_weight=weight_of_class[y]`, for several targets a list of "
            "such arrays, times weights of your own."
        )


@functools.cache
def note_slow_cpu() -> None:
    """Say once, in the log, that TensorFlow leaves a library of this CPU's off."""
    if _keras.onednn_is_off() and not tf.config.list_physical_devices("GPU"):
        logging.warning(
            "TensorFlow leaves oneDNN off on this CPU, with which convolutions were seen "
            "to take half of the time. Set the environment variable "
            "`TF_ENABLE_ONEDNN_OPTS=1` before TensorFlow is imported."
        )
