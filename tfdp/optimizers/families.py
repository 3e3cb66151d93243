"""Keras's common optimizers, private, in one call."""

from typing import ClassVar, Self

import keras

from tfdp._types import Config
from tfdp.mechanisms import Mechanism
from tfdp.optimizers.dp_optimizer import DPOptimizer


class Family(DPOptimizer):
    """A `DPOptimizer` that makes its inner optimizer from its own arguments."""

    inner_class: ClassVar[type[keras.optimizers.Optimizer]]

    def __init__(
        self,
        *args: object,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        expected_batch_size: float | None = None,
        noise_seed: int | None = None,
        mechanism: Mechanism | None = None,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(
            self.inner_class(*args, **kwargs),
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            expected_batch_size=expected_batch_size,
            noise_seed=noise_seed,
            mechanism=mechanism,
            name=name,
        )

    def get_config(self) -> Config:
        """Return the inner optimizer's arguments and the private ones."""
        return {**self.inner_optimizer.get_config(), **self._private_config()}

    @classmethod
    def from_config(cls, config: Config, custom_objects: Config | None = None) -> Self:
        """Rebuild an optimizer from `get_config`."""
        if isinstance(config.get("learning_rate"), dict):
            config["learning_rate"] = keras.saving.deserialize_keras_object(
                config["learning_rate"], custom_objects=custom_objects
            )
        return cls(**config)


@keras.saving.register_keras_serializable("tfdp")
class DPSGD(Family):
    """`keras.optimizers.SGD` as a `DPOptimizer`: takes the arguments of both.

    Example:
        >>> optimizer = tfdp.optimizers.DPSGD(
        ...     learning_rate=0.15, momentum=0.9, l2_norm_clip=1.0, noise_multiplier=1.1
        ... )
    """

    inner_class = keras.optimizers.SGD


@keras.saving.register_keras_serializable("tfdp")
class DPAdam(Family):
    """`keras.optimizers.Adam` as a `DPOptimizer`: takes the arguments of both."""

    inner_class = keras.optimizers.Adam


@keras.saving.register_keras_serializable("tfdp")
class DPAdamW(Family):
    """`keras.optimizers.AdamW` as a `DPOptimizer`: takes the arguments of both."""

    inner_class = keras.optimizers.AdamW


@keras.saving.register_keras_serializable("tfdp")
class DPAdagrad(Family):
    """`keras.optimizers.Adagrad` as a `DPOptimizer`: takes the arguments of both."""

    inner_class = keras.optimizers.Adagrad


@keras.saving.register_keras_serializable("tfdp")
class DPNadam(Family):
    """`keras.optimizers.Nadam` as a `DPOptimizer`: takes the arguments of both."""

    inner_class = keras.optimizers.Nadam


@keras.saving.register_keras_serializable("tfdp")
class DPRMSprop(Family):
    """`keras.optimizers.RMSprop` as a `DPOptimizer`: takes the arguments of both."""

    inner_class = keras.optimizers.RMSprop
