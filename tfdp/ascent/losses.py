"""Losses that ask for the gradient a step away, uphill: BAM and SAT."""

from collections.abc import Callable
from typing import NamedTuple, Self, TypeAlias

import keras
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._types import Config, Loss, Nest, Tensor, Variable
from tfdp.errors import NotPrivateError

_Schedule = keras.optimizers.schedules.LearningRateSchedule
Radius: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule


class Ascent(NamedTuple):
    """A step uphill from the weights, for each unit its own.

    Attributes:
        read_radius: Reads the length of the step, a scalar tensor, anew in the graph that
            asks.
        mix: Weight of the gradient found there, beside the one found here.
        is_exact: Whether the step is infinitely small, and its effect scaled up.
    """

    read_radius: Callable[[], Tensor]
    mix: float
    is_exact: bool


class AscentLoss(keras.losses.Loss):
    """A Keras loss, and how far `DPModel` goes uphill for its gradient.

    Under `evaluate` it is just that loss. A model that is not private cannot train with
    it: its gradient raises `NotPrivateError`.

    Attributes:
        loss: As in `keras.Model.compile`.
        radius: A number, or a schedule of the optimizer's `iterations`, of which
            negative values and NaN count as 0.
    """

    def __init__(self, loss: Loss, radius: Radius) -> None:
        check_plain(loss)
        for leaf in keras.tree.flatten(loss):
            if isinstance(leaf, str):
                keras.losses.get(leaf)  # Raises if there is none.
        if not isinstance(radius, _Schedule):
            radius = _validate.non_negative("radius", radius)
        super().__init__(name=getattr(loss, "name", None))
        self.loss = loss
        self.radius = radius

    @property
    def is_exact(self) -> bool:
        """Whether gradients are differentiated: then layers see how many rows there are."""
        return False

    def __call__(
        self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> Tensor:
        """Compute the plain loss, where nothing is trained privately."""
        if self.loss is None or isinstance(self.loss, (dict, list, tuple)):
            raise ValueError(
                f"`{type(self).__name__}` around several losses, or none, is for "
                f"`tfdp.DPModel`. Received: loss={self.loss!r}. Use "
                "`model.compile(optimizer, loss.loss)` for a plain model."
            )
        loss = _keras.resolve_loss(self.loss, y_true, y_pred)
        return self._without_gradient(loss(y_true, y_pred, sample_weight))

    def _without_gradient(self, value: Tensor) -> Tensor:
        """Return the loss with a gradient that raises: it would be that of `loss`."""
        name = type(self).__name__

        @tf.custom_gradient
        def identity(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            def gradient(_: Tensor) -> Tensor:
                raise NotPrivateError(
                    f"`{name}` changes the gradient of each example, which a plain "
                    "model does not have: it would train with the plain loss. "
                    f"Received: the gradient of {self!r}. Use `private = "
                    f"tfdp.DPModel(model); private.compile(optimizer, "
                    f"tfdp.losses.{name}(...))`, or `model.compile(optimizer, "
                    "loss.loss)` for the plain loss."
                )

            return tf.identity(value), gradient

        without: Tensor = identity(tf.convert_to_tensor(value))
        return without

    def __repr__(self) -> str:
        """Return what the loss was made by."""
        config = {**self.get_config(), "loss": self.loss, "radius": self.radius}
        arguments = ", ".join(f"{name}={value!r}" for name, value in config.items())
        return f"{type(self).__name__}({arguments})"

    def has_ascent(self) -> bool:
        """Tell whether there is any step at all."""
        return isinstance(self.radius, _Schedule) or self.radius > 0

    def radius_at(self, iteration: Variable | Tensor | None) -> Tensor:
        """Return the length of a step.

        Args:
            iteration: The optimizer's `iterations`, a scalar; None if there are none.

        Returns:
            A float64 scalar tensor.

        Raises:
            ValueError: If a schedule has no iterations to go by.
        """
        radius = self.radius
        if isinstance(radius, _Schedule):
            if iteration is None:
                raise ValueError(
                    "A schedule of the radius needs the steps of an optimizer. "
                    f"Received: radius={radius!r}. Use `{type(self).__name__}(loss, "
                    "radius=0.02)`, another one in each step, or `tfdp.DPModel`."
                )
            radius = tf.cast(radius(iteration), tf.float64)
            # Downhill is not asked for, and NaN would end in steps of noise alone.
            return tf.where(radius > 0, radius, tf.zeros_like(radius))
        return tf.constant(radius, tf.float64)

    def get_config(self) -> Config:
        """Return the arguments that rebuild the loss."""
        return {
            "loss": keras.saving.serialize_keras_object(self.loss),
            "radius": keras.saving.serialize_keras_object(self.radius),
        }

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Rebuild a loss from `get_config`."""
        made = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("loss", "radius")
        }
        return cls(**{**config, **made})


def check_plain(loss: Loss) -> None:
    """Refuse a loss that has one of these inside.

    Args:
        loss: As in `keras.Model.compile`.

    Raises:
        ValueError: If it has.
    """
    for leaf in keras.tree.flatten(loss):
        if isinstance(leaf, AscentLoss):
            name = type(leaf).__name__
            raise ValueError(
                f"`{name}` must be around all losses of the model, alone. Received: "
                f"loss={loss!r}. Use `loss=tfdp.losses.{name}([...], radius=...)`."
            )


@keras.saving.register_keras_serializable("tfdp")
class BAM(AscentLoss):
    """Bias-aware minimisation: penalises the norm of each example's gradient too.

    What clipping cuts off is the bias of private training, and small gradients are
    not cut. The objective of example i becomes ``L_i + lambda ||grad L_i||`` [1]_.
    With w the weights and ``v_i = grad L_i(w) / ||grad L_i(w)||`` (0 where the
    gradient is 0), `DPModel` clips, in place of ``grad L_i(w)``,

    * ``(1 - mix) grad L_i(w) + mix grad L_i(w + radius v_i)`` with `ascent="sam"`
      (with ``mix=1`` equation 14 of the paper), or
    * ``grad L_i(w) + lambda H_i v_i``, the gradient of that objective, with
      `ascent="exact"`; H_i is the Hessian of L_i and ``lambda = mix * radius``.

    A unit of several examples, a microbatch or the views of an augmented example, has
    their mean loss for L_i. The loss and metrics of training are those at w. Under
    `evaluate` it is just `loss`.

    Guarantees:
        All of it happens before clipping and looks at one unit only: clipping, noise
        and epsilon are those of DP-SGD. With ``radius=0`` the weights are too, bit
        for bit.

    Args:
        loss: As in `keras.Model.compile`: name, object, function, or a list or dict
            of them.
        radius: How far to go uphill, at least 0, in units of the weights; or a
            `keras.optimizers.schedules` object of the optimizer's `iterations`.
        mix: Weight of the gradient found there, from 0 to 1.
        ascent: `"sam"` or `"exact"`. Without XLA, `"exact"` is faster where the size of
            the batches is static, as after `Dataset.batch(n, drop_remainder=True)`.

    Raises:
        TypeError: If a number is no number.
        ValueError: If a number is out of its range, `ascent` is unknown, or `loss` is
            such a loss already.

    Example:
        >>> loss = tfdp.losses.BAM("sparse_categorical_crossentropy", radius=0.02)

    References:
        .. [1] Knolle et al., "Bias-Aware Minimisation: Understanding and Mitigating
           Estimator Bias in Private SGD", 2023, equation 14.
           https://arxiv.org/abs/2308.12018
    """

    def __init__(
        self,
        loss: Loss,
        radius: Radius = 0.02,
        mix: float = 1.0,
        ascent: str = "sam",
    ) -> None:
        super().__init__(loss, radius)
        self.mix = _validate.non_negative("mix", mix)
        if self.mix > 1:
            raise ValueError(
                f"`mix` must lie between 0 and 1. Received: mix={mix!r}. Use `mix=1.0`."
            )
        self.ascent = _validate.one_of("ascent", ascent, ("sam", "exact"))

    @property
    def is_exact(self) -> bool:
        """Whether gradients are differentiated."""
        return self.ascent == "exact"

    def has_ascent(self) -> bool:
        """Tell whether there is any step at all."""
        return super().has_ascent() and self.mix > 0

    def ascent_at(self, iterations: Variable | None) -> Ascent | None:
        """Return the step uphill of each unit.

        Args:
            iterations: The optimizer's, which each step reads; see `radius_at`.

        Returns:
            The step; None if there is none.

        Raises:
            ValueError: See `radius_at`.
        """
        if not self.has_ascent():
            return None
        self.radius_at(iterations)  # Raises now, and not in the graph of a step.
        return Ascent(lambda: self.radius_at(iterations), self.mix, self.is_exact)

    def get_config(self) -> Config:
        """Return the arguments that rebuild the loss."""
        return {**super().get_config(), "mix": self.mix, "ascent": self.ascent}


@keras.saving.register_keras_serializable("tfdp")
class SAT(AscentLoss):
    """DP-SAT: sharpness-aware training along the gradient that was released last.

    With g the noised mean gradient of the step before, `DPModel` takes the gradients
    of a step at ``w + radius g / ||g||``, and moves w by them [1]_. The very first step
    has no g yet, and is an ordinary one. The loss and metrics of training are those at
    the moved weights: compare by `evaluate`, where it is just `loss`.

    Guarantees:
        g was released already, so epsilon is that of DP-SGD. With ``radius=0`` the
        weights are too, bit for bit.

    Args:
        loss: As in `keras.Model.compile`: name, object, function, or a list or dict
            of them.
        radius: How far to go uphill, at least 0, in units of the weights; or a
            `keras.optimizers.schedules` object of the optimizer's `iterations`.

    Raises:
        TypeError: If `radius` is no number.
        ValueError: If `radius` is out of its range or `loss` is such a loss already.

    Example:
        >>> loss = tfdp.losses.SAT("sparse_categorical_crossentropy", radius=0.03)

    References:
        .. [1] Park et al., "Differentially Private Sharpness-Aware Training", ICML
           2023. https://arxiv.org/abs/2306.05651
    """

    def __init__(self, loss: Loss, radius: Radius = 0.03) -> None:
        super().__init__(loss, radius)
