"""TensorFlow Privacy's optimizer names, with its order of arguments.

Part of `tfdp.optimizers`, as far as users are concerned.
"""

from typing import Any

import keras

from tfdp.optimizers.families import DPSGD, DPAdagrad, DPAdam, Family


class _Plain(Family):
    """Has the arguments of TensorFlow Privacy's `DPKeras*` optimizers."""

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        *args: object,
        **kwargs: Any,
    ) -> None:
        """Make the inner optimizer, and wrap it.

        Args:
            l2_norm_clip: See `DPOptimizer`.
            noise_multiplier: See `DPOptimizer`.
            num_microbatches: See `DPOptimizer`; None clips each example.
            gradient_accumulation_steps: Must be 1.
            *args: Positional arguments of the Keras optimizer.
            **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.

        Raises:
            ValueError: If gradients were to be accumulated, or a number is out of its
                range.
        """
        # None is what the configuration of a Keras optimizer says.
        if gradient_accumulation_steps not in {None, 1}:
            raise ValueError(
                "`gradient_accumulation_steps` is not needed: large batches run in "
                "passes of a bounded size, with one noise. Received: "
                f"gradient_accumulation_steps={gradient_accumulation_steps}. Use "
                "`tfdp.DPModel(model, physical_batch_size=...)`."
            )
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


class _Vectorized(Family):
    """Has the arguments of TensorFlow Privacy's `VectorizedDPKeras*` optimizers."""

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        unconnected_gradients_to_zero: bool = False,
        *args: object,
        **kwargs: Any,
    ) -> None:
        """Make the inner optimizer, and wrap it.

        Args:
            l2_norm_clip: See `DPOptimizer`.
            noise_multiplier: See `DPOptimizer`.
            num_microbatches: See `DPOptimizer`; None clips each example.
            unconnected_gradients_to_zero: Has no effect: every trainable variable
                gets noise.
            *args: Positional arguments of the Keras optimizer.
            **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
        """
        del unconnected_gradients_to_zero
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


# Saved files know these classes by "tfdp>" and their names.


@keras.saving.register_keras_serializable("tfdp")
class DPKerasSGDOptimizer(_Plain, DPSGD):
    """`DPSGD` for code written for TensorFlow Privacy.

    Example:
        >>> optimizer = tfdp.optimizers.DPKerasSGDOptimizer(1.0, 1.1, learning_rate=0.1)
        >>> float(optimizer.noise_multiplier)
        1.1
    """


@keras.saving.register_keras_serializable("tfdp")
class DPKerasAdamOptimizer(_Plain, DPAdam):
    """`DPAdam` for code written for TensorFlow Privacy."""


@keras.saving.register_keras_serializable("tfdp")
class DPKerasAdagradOptimizer(_Plain, DPAdagrad):
    """`DPAdagrad` for code written for TensorFlow Privacy."""


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasSGDOptimizer(_Vectorized, DPSGD):
    """`DPSGD` for code written for TensorFlow Privacy."""


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasAdamOptimizer(_Vectorized, DPAdam):
    """`DPAdam` for code written for TensorFlow Privacy."""


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasAdagradOptimizer(_Vectorized, DPAdagrad):
    """`DPAdagrad` for code written for TensorFlow Privacy."""
