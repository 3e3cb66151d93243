"""TensorFlow Privacy's optimizer names, with its order of arguments."""

from typing import Any

import keras

from tfdp.optimizers.families import DPSGD, DPAdagrad, DPAdam


def _refuse_accumulation(gradient_accumulation_steps: int | None) -> None:
    # None is what the configuration of a Keras optimizer says.
    if gradient_accumulation_steps not in {None, 1}:
        raise ValueError(
            "`gradient_accumulation_steps` is not needed: large batches run in "
            "passes of a fixed size, with one noise. Received: "
            f"gradient_accumulation_steps={gradient_accumulation_steps}. Use "
            "`tfdp.DPModel(model, physical_batch_size=...)`."
        )


@keras.saving.register_keras_serializable("tfdp")
class DPKerasSGDOptimizer(DPSGD):
    """`DPSGD` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        gradient_accumulation_steps: Must be 1.
        *args: Positional arguments of `keras.optimizers.SGD`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse_accumulation(gradient_accumulation_steps)
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfdp")
class DPKerasAdamOptimizer(DPAdam):
    """`DPAdam` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        gradient_accumulation_steps: Must be 1.
        *args: Positional arguments of `keras.optimizers.Adam`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse_accumulation(gradient_accumulation_steps)
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfdp")
class DPKerasAdagradOptimizer(DPAdagrad):
    """`DPAdagrad` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        gradient_accumulation_steps: Must be 1.
        *args: Positional arguments of `keras.optimizers.Adagrad`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse_accumulation(gradient_accumulation_steps)
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasSGDOptimizer(DPSGD):
    """`DPSGD` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        unconnected_gradients_to_zero: Has no effect: every trainable variable gets
            noise.
        *args: Positional arguments of `keras.optimizers.SGD`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        unconnected_gradients_to_zero: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del unconnected_gradients_to_zero
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasAdamOptimizer(DPAdam):
    """`DPAdam` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        unconnected_gradients_to_zero: Has no effect: every trainable variable gets
            noise.
        *args: Positional arguments of `keras.optimizers.Adam`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        unconnected_gradients_to_zero: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del unconnected_gradients_to_zero
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )


@keras.saving.register_keras_serializable("tfdp")
class VectorizedDPKerasAdagradOptimizer(DPAdagrad):
    """`DPAdagrad` for code written for TensorFlow Privacy.

    Args:
        l2_norm_clip: See `DPOptimizer`.
        noise_multiplier: See `DPOptimizer`.
        num_microbatches: See `DPOptimizer`; None clips each example.
        unconnected_gradients_to_zero: Has no effect: every trainable variable gets
            noise.
        *args: Positional arguments of `keras.optimizers.Adagrad`.
        **kwargs: Its keyword arguments, and the other ones of `DPOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        unconnected_gradients_to_zero: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del unconnected_gradients_to_zero
        super().__init__(
            *args,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            **kwargs,
        )
