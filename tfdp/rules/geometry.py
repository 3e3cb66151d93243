"""How the kernels of convolutions slide over their inputs."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp._types import Tensor


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a kernel slides over its inputs, channels last.

    Attributes:
        strides: Steps along each spatial axis.
        dilations: Distances between the kernel's numbers along each.
        padding: ``"SAME"`` or ``"VALID"``.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str

    def groups(self, inputs: Sequence[int], kernel: Sequence[int]) -> int:
        """Count the groups of channels that do not meet."""
        return int(inputs[-1] // kernel[-2])

    def pads(
        self, inputs: Sequence[int], kernel: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the zeros before and after each axis of (spatial, C) inputs."""
        if self.padding == "VALID":
            return [(0, 0)] * len(self.strides)
        pads = []
        for size, extent, stride, dilation in zip(
            inputs, kernel, self.strides, self.dilations, strict=False
        ):
            outputs = -(-size // stride)
            total = max((outputs - 1) * stride + (extent - 1) * dilation + 1 - size, 0)
            pads.append((total // 2, total - total // 2))
        return pads

    def with_flat_axis(self) -> "Geometry":
        """Describe the same convolution with an axis of one position in front."""
        # One position has any stride: TensorFlow's depthwise operations take equal ones.
        return Geometry(2 * self.strides, (1, *self.dilations), self.padding)

    def padded(self, inputs: Tensor, kernel_shape: Sequence[int]) -> Tensor:
        """Write out the padding of ``(U, K, *spatial, C)``."""
        pads = self.pads(inputs.shape[2:].as_list(), kernel_shape)
        if not any(map(any, pads)):
            return inputs
        return tf.pad(inputs, [(0, 0), (0, 0), *pads, (0, 0)])

    def windows(
        self, positions: Sequence[int], kernel_shape: Sequence[int]
    ) -> Iterator[tuple[slice, ...]]:
        """Yield, for each place in the kernel, what it sees of the padded inputs."""
        for place in itertools.product(*map(range, kernel_shape[:-2])):
            window = tuple(
                slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
                for at, size, stride, dilation in zip(
                    place, positions, self.strides, self.dilations, strict=True
                )
            )
            yield window

    def sees_inputs(
        self,
        window: Sequence[slice],
        inputs: Sequence[int],
        kernel_shape: Sequence[int],
    ) -> bool:
        """Tell whether anything but padding lies in what a place in the kernel sees."""
        pads = self.pads(inputs, kernel_shape)
        return all(
            part.start < before + size and part.stop > before
            for part, size, (before, _) in zip(window, inputs, pads, strict=True)
        )
