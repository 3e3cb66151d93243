"""Convolutions whose weights have a posterior: independent Gaussians."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor
from tfdp.rules.geometry import Geometry
from tfdp.rules.patches import patches
from tfdp.variational.product import VariationalProduct


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalConv2D(VariationalProduct):
    """A convolution with a Gaussian posterior over each weight of its kernel.

    All is as in `VariationalDense`: the kernel multiplies what it sees at each
    position. All positions of a row have the same weights, therefore outputs cannot be
    drawn in their place (`draws="local"`).

    Args:
        filters: Channels of the outputs.
        kernel_size: Height and width of the kernel, or one number for both.
        strides: Steps of the kernel along both axes, or one number for both.
        padding: `"valid"` or `"same"`.
        **kwargs: All other arguments of `VariationalDense`; `draws` is `"shared"` unless
            it is given.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or inputs are not of a known
            shape ``(N, height, width, channels)``.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((8, 8, 1)),
        ...     VariationalConv2D(4, 3, number_of_examples=100, activation="relu"),
        ... ])
        >>> model.layers[0].kernel_scale.shape, model.output_shape
        (TensorShape([3, 3, 1, 4]), (None, 6, 6, 4))
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.filters = _validate.positive_int("filters", filters)
        self.kernel_size = _two("kernel_size", kernel_size)
        self.strides = _two("strides", strides)
        self.padding = _validate.one_of("padding", padding, ("valid", "same"))

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add means and scales of the kernel, and of the bias."""
        if len(input_shape) != 4 or None in input_shape[1:]:
            raise ValueError(
                "Inputs must have a known shape (N, height, width, channels). Received: "
                f"inputs of shape {tuple(input_shape)} of layer `{self.name}`. Use "
                "`keras.Input((height, width, channels))`."
            )
        if 0 in self.compute_output_shape(input_shape)[1:3]:
            raise ValueError(
                "`kernel_size` must fit into the inputs. Received: kernel_size="
                f"{self.kernel_size}, and inputs of shape {tuple(input_shape)} of layer "
                f"`{self.name}`. Use `padding='same'`."
            )
        self._add_product((*self.kernel_size, input_shape[-1], self.filters))

    def seen(self, inputs: Tensor) -> Tensor:
        """Lay out what the kernel sees at each position."""
        geometry = Geometry(self.strides, (1, 1), self.padding.upper())
        inputs = ops.cast(inputs, self.compute_dtype)
        return patches(inputs, tuple(self.kernel_mean.shape), geometry)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Return the shape of the outputs."""
        sizes = []
        for size, extent, stride in zip(
            input_shape[1:3], self.kernel_size, self.strides, strict=True
        ):
            first = 1 if self.padding == "same" else extent
            positions = None if size is None else (size - first) // stride + 1
            sizes.append(positions and max(positions, 0))
        return (input_shape[0], *sizes, self.filters)

    def get_config(self) -> Config:
        """Return the arguments."""
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
        }


def _two(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Return a number for each of both axes."""
    both = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(both) != 2:
        raise ValueError(
            f"`{name}` must be one number or two. Received: {name}={value!r}. Use "
            f"`{name}=(3, 3)`."
        )
    first, second = (_validate.positive_int(name, each) for each in both)
    return first, second
