"""Layers that multiply by a matrix whose numbers have a posterior."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor
from tfdp.variational import correlation
from tfdp.variational.base import Normal, VariationalLayer


class VariationalProduct(VariationalLayer):
    """A product of what the layer sees with a kernel, a bias, an activation; abstract.

    Args:
        activation: Name of a Keras activation, or a function.
        use_bias: Whether there is a bias, with a posterior too.
        kernel_initializer: Of the kernel's means.
        bias_initializer: Of the bias's means.
        rank: See `VariationalDense`.
        **kwargs: Of `VariationalLayer`.
    """

    def __init__(
        self,
        *,
        activation: Callable[[Tensor], Tensor] | str | None = None,
        use_bias: bool = True,
        kernel_initializer: keras.initializers.Initializer | str = "glorot_uniform",
        bias_initializer: keras.initializers.Initializer | str = "zeros",
        rank: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.rank = rank if rank == 0 else _validate.positive_int("rank", rank)
        if self.rank and self.draws not in {"shared", "per_example"}:
            raise ValueError(
                "`draws` must be of whole weights for those that vary together. Received: "
                f"draws={self.draws!r}, rank={rank}. Use `draws='shared'` or "
                "`draws='per_example'`."
            )

    def _add_product(self, shape: tuple[int | None, ...]) -> None:
        """Add a kernel, and a bias as long as its last axis."""
        self._add("kernel", shape, self.kernel_initializer)
        self.bias_mean = self.bias_rho = None
        if self.use_bias:
            self._add("bias", shape[-1:], self.bias_initializer)
        if self.rank:
            rows = math.prod(self.kernel_mean.shape[:-1]) + self.use_bias
            self.factors = self.add_weight(
                (rows, shape[-1], self.rank),
                # At zero nothing says which way to go.
                initializer=keras.initializers.RandomNormal(stddev=0.1),
                regularizer=self._divergences["factors"],
                name="factors",
            )

    def seen(self, inputs: Tensor) -> Tensor:
        """Return what is multiplied at each position, shape ``(R, ..., d)``."""
        return inputs

    @property
    def kernel_scale(self) -> Tensor:
        """Standard deviations of the kernel's weights, of its shape."""
        return self.posteriors["kernel"].scale

    @property
    def bias_scale(self) -> Tensor | None:
        """Standard deviations of the bias, of its shape; None without one."""
        return self.posteriors["bias"].scale if self.use_bias else None

    def covariance(self) -> tuple[Tensor, Tensor]:
        """Return the covariance of the layer's weights, ``diag(diagonal) + U U^T``.

        Returns:
            The diagonal of shape ``(n, p)``, and U of shape ``(n, p, rank)``: p outputs,
            and n numbers for each, those of the kernel and then that of the bias.
        """
        scales = {name: of.scale[None] for name, of in self.posteriors.items()}
        together = ops.cast(self.together(scales)[0], self.wide_dtype)
        if not self.rank:
            return ops.square(together), ops.zeros((*together.shape, 0), together.dtype)
        return correlation.covariance(together, self.factors)

    def together(self, by_name: dict[str, Tensor]) -> Tensor:
        """Join what is of kernel and bias, V of each, to shape ``(V, n, p)``."""
        kernels = by_name["kernel"]
        size = (ops.shape(kernels)[0], -1, self.kernel_mean.shape[-1])
        parts = [ops.reshape(kernels, size)]
        if self.use_bias:
            parts.append(by_name["bias"][:, None])
        return ops.concatenate(parts, axis=1)

    def noise_of(self, normal: Normal, number: int | Tensor) -> dict[str, Tensor]:
        """Make what weights are made of; those that vary together have z in common.

        Args:
            normal: See `VariationalLayer`.
            number: Likewise.

        Returns:
            Likewise; and with a `rank`, `"common"` of shape ``(V, rank)``.
        """
        found = super().noise_of(normal, number)
        if not self.rank:
            return found
        z = normal((number, self.rank))
        noise = correlation.correlated(self.together(found), z, self.factors)
        kernels = noise[:, :-1] if self.use_bias else noise
        found["kernel"] = ops.reshape(kernels, (number, *self.kernel_mean.shape))
        if self.use_bias:
            found["bias"] = noise[:, -1]
        return found | {"common": z}

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Apply weights: drawn ones in training, otherwise their means."""
        rows = self.seen(inputs)
        if not training:
            return self.at_inference(rows)
        if self.draws == "local":
            return self.finished(self.local(*self.moments(rows)))
        return self.finished(self.multiplied(rows, self.noise(rows), self.signs(rows)))

    def at_inference(self, inputs: Tensor) -> Tensor:
        """Apply the means of the weights to what `seen` returns."""
        return self.finished(self.mean(inputs))

    def finished(self, outputs: Tensor) -> Tensor:
        """Apply the activation, in the dtype of the layer's outputs."""
        return self.activation(ops.cast(outputs, self.compute_dtype))

    def signs(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Draw the signs of `"flipout"` for inputs and for outputs, those of each row.

        Args:
            inputs: From `seen`, shape ``(R, ..., d)``.

        Returns:
            Numbers 1 and -1, of shapes ``(R, 1, ..., d)`` and ``(R, 1, ..., p)``; None
            if there are no such signs.
        """
        if self.draws != "flipout":
            return None
        d, p = inputs.shape[-1], self.kernel_mean.shape[-1]
        signs = self._signs((
            ops.shape(inputs)[0],
            *[1] * (len(inputs.shape) - 2),
            d + p,
        ))
        return signs[..., :d], signs[..., d:]

    def multiplied(
        self,
        inputs: Tensor,
        noise: dict[str, Tensor],
        signs: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Multiply inputs by drawn weights.

        Args:
            inputs: From `seen`, shape ``(R, ..., d)``.
            noise: From `noise`, V draws; row r takes number ``r % V``.
            signs: From `signs`: a row's weights deviate from their means by the numbers
                that were drawn times the sign of their input and of their output.

        Returns:
            Shape ``(R, ..., p)``, before the activation.
        """
        posteriors = self.posteriors
        if signs is None:
            drawn = {name: of.drawn(noise[name]) for name, of in posteriors.items()}
            return ops.cast(_products(inputs, drawn), self.compute_dtype)
        # The input of a bias is 1, with no sign.
        deviations = {
            name: of.deviations(noise[name]) for name, of in posteriors.items()
        }
        of_inputs, of_outputs = signs
        rows = ops.cast(inputs, of_inputs.dtype) * of_inputs
        outputs = self.mean(inputs) + of_outputs * _products(rows, deviations)
        return ops.cast(outputs, self.compute_dtype)

    def mean(self, inputs: Tensor) -> Tensor:
        """Return the mean of the outputs under the posterior; see `moments`."""
        dtype = self.wide_dtype
        kernel = ops.cast(self.kernel_mean, dtype)
        kernel = ops.reshape(kernel, (-1, self.kernel_mean.shape[-1]))
        outputs = ops.matmul(ops.cast(inputs, dtype), kernel)
        if self.use_bias:
            outputs += ops.cast(self.bias_mean, dtype)
        return outputs

    def moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs under the posterior.

        Args:
            inputs: From `seen`, shape ``(R, ..., d)``.

        Returns:
            Two tensors of shape ``(R, ..., p)``, before the activation, in at least
            float32.
        """
        rows = ops.cast(inputs, self.wide_dtype)
        diagonal, factors = self.covariance()
        d = rows.shape[-1]
        variance = ops.matmul(ops.square(rows), diagonal[:d])
        if self.use_bias:
            variance += diagonal[d]
        if self.rank:
            together = ops.tensordot(rows, factors[:d], 1)
            if self.use_bias:
                together += factors[d]
            variance += ops.sum(ops.square(together), axis=-1)
        return self.mean(inputs), variance

    def local(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Draw outputs, given their moments, each by itself."""
        return mean + root_of(variance) * self._normal(ops.shape(mean))

    def get_config(self) -> Config:
        """Return the arguments."""
        return {
            **super().get_config(),
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "rank": self.rank,
        }


def _products(inputs: Tensor, drawn: dict[str, Tensor]) -> Tensor:
    """Multiply row r, of shape ``(..., d)``, by draw ``r % V`` of kernel and bias."""
    kernels = drawn["kernel"]
    number, p = ops.shape(kernels)[0], kernels.shape[-1]
    d = math.prod(kernels.shape[1:-1])
    kernels = ops.reshape(kernels, (number, d, p))
    between = ops.shape(inputs)[1:-1]
    positions = math.prod(between) if between else 1
    rows = ops.cast(inputs, kernels.dtype)
    rows = ops.reshape(rows, (-1, number, positions, d))
    # One product for each draw: TensorFlow's product of matrices that are broadcast
    # was seen to write beside its memory.
    rows = ops.reshape(ops.transpose(rows, (1, 0, 2, 3)), (number, -1, d))
    outputs = ops.matmul(rows, kernels)
    if "bias" in drawn:
        outputs += drawn["bias"][:, None]
    outputs = ops.reshape(outputs, (number, -1, positions, p))
    outputs = ops.transpose(outputs, (1, 0, 2, 3))
    return ops.reshape(outputs, (ops.shape(inputs)[0], *between, p))


def root_of(variance: Tensor) -> Tensor:
    """Return standard deviations, with a finite gradient where one is zero."""
    return ops.sqrt(ops.maximum(variance, 1e-30))
