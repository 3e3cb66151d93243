"""Convolutions whose weights have a posterior: independent Gaussians."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor
from tfdp.rules.geometry import Geometry
from tfdp.rules.patches import patches
from tfdp.variational.product import VariationalProduct


class VariationalConvolution(VariationalProduct):
    """A convolution; abstract.

    Args:
        filters: Channels of the outputs.
        kernel_size: Of the kernel along each axis, or one number for all.
        strides: Steps of the kernel along each axis, or one number for all.
        padding: One of `paddings`.
        **kwargs: Of `VariationalProduct`.
    """

    # Names of the axes that the kernel slides along, and what inputs may be padded like.
    axes: ClassVar[tuple[str, ...]]
    paddings: ClassVar[tuple[str, ...]] = ("valid", "same")

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
        self.kernel_size = self._for_each_axis("kernel_size", kernel_size)
        self.strides = self._for_each_axis("strides", strides)
        self.padding = _validate.one_of("padding", padding, self.paddings)

    def _for_each_axis(self, name: str, value: int | Sequence[int]) -> tuple[int, ...]:
        number = len(self.axes)
        values = tuple(value) if isinstance(value, list | tuple) else (value,) * number
        if len(values) != number:
            example = 3 if number == 1 else (3,) * number
            raise ValueError(
                f"`{name}` must be one number{' or two' if number == 2 else ''}. Received: "
                f"{name}={value!r}. Use `{name}={example}`."
            )
        return tuple(_validate.positive_int(name, each) for each in values)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add means and scales of the kernel, and of the bias."""
        names = ", ".join(self.axes)
        if len(input_shape) != len(self.axes) + 2 or None in input_shape[1:]:
            raise ValueError(
                f"Inputs must have a known shape (N, {names}, channels). Received: "
                f"inputs of shape {tuple(input_shape)} of layer `{self.name}`. Use "
                f"`keras.Input(({names}, channels))`."
            )
        if 0 in self.compute_output_shape(input_shape)[1:-1]:
            raise ValueError(
                "`kernel_size` must fit into the inputs. Received: kernel_size="
                f"{self.kernel_size}, and inputs of shape {tuple(input_shape)} of layer "
                f"`{self.name}`. Use `padding='same'`."
            )
        self._add_product((*self.kernel_size, input_shape[-1], self.filters))

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Return the shape of the outputs."""
        sizes = []
        for size, extent, stride in zip(
            input_shape[1:-1], self.kernel_size, self.strides, strict=True
        ):
            first = extent if self.padding == "valid" else 1
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


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalConv1D(VariationalConvolution):
    """A convolution over steps of time, with a Gaussian posterior over its weights.

    All is as in `VariationalConv2D`, along one axis.

    Args:
        filters: Channels of the outputs.
        kernel_size: Length of the kernel.
        strides: Steps of the kernel.
        padding: `"valid"`, `"same"`, or `"causal"`: no output sees a later input.
        **kwargs: All other arguments of `VariationalDense`; `draws` is `"shared"` unless
            it is given.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or inputs are not of a known
            shape ``(N, steps, channels)``.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((12, 2)),
        ...     VariationalConv1D(4, 3, number_of_examples=100, padding="causal"),
        ... ])
        >>> model.layers[0].kernel_scale.shape, model.output_shape
        (TensorShape([3, 2, 4]), (None, 12, 4))
    """

    axes = ("steps",)
    paddings = (*VariationalConvolution.paddings, "causal")

    def seen(self, inputs: Tensor) -> Tensor:
        """Lay out what the kernel sees at each step."""
        inputs, padding = ops.cast(inputs, self.compute_dtype), self.padding
        if padding == "causal":
            before = self.kernel_size[0] - 1
            inputs, padding = ops.pad(inputs, [[0, 0], [before, 0], [0, 0]]), "valid"
        # Rows of images that are one pixel high.
        geometry = Geometry((1, *self.strides), (1, 1), padding.upper())
        kernel_shape = (1, *self.kernel_mean.shape)
        return patches(inputs[:, None], kernel_shape, geometry)[:, 0]


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalConv2D(VariationalConvolution):
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

    axes = ("height", "width")

    def seen(self, inputs: Tensor) -> Tensor:
        """Lay out what the kernel sees at each position."""
        geometry = Geometry(self.strides, (1, 1), self.padding.upper())
        inputs = ops.cast(inputs, self.compute_dtype)
        return patches(inputs, tuple(self.kernel_mean.shape), geometry)
