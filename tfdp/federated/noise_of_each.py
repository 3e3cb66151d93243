"""Noise of contributors who trust nobody: each adds its own."""

import tensorflow as tf

from tfdp._types import Config, Tensor
from tfdp.clipping import ClippedSum, at_least_float32
from tfdp.mechanisms.mechanism import Mechanism, add_noise


class GaussianOfEach(Mechanism):
    """Gaussian noise that each contributor adds, because nobody trusts who adds up.

    The same distribution as one draw of ``sqrt(contributors)`` times the noise.

    Args:
        contributors: How many there are.
        noise_seed: See `Mechanism`.
    """

    def __init__(self, contributors: int, noise_seed: int | None = None) -> None:
        super().__init__(noise_seed)
        self.contributors = contributors

    def get_config(self) -> Config:
        """Return the arguments that rebuild it."""
        return {"contributors": self.contributors, **super().get_config()}

    def stream(self, step: Tensor) -> Tensor:
        """Return the stream of the first one; those of the others follow it."""
        return super().stream(step * self.contributors)

    def noised(
        self,
        clipped_sum: ClippedSum,
        *,
        noise_multiplier: Tensor,
        stream: Tensor,
        begins: Tensor | bool = True,
    ) -> list[Tensor]:
        """Add one noise after the other, in the memory of one."""
        del begins

        def add_one(number: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            of_one = stream + tf.stack([number, tf.zeros_like(number)])
            noised = add_noise(
                clipped_sum._replace(gradients=sums),
                noise_multiplier=noise_multiplier,
                stream=of_one,
            )
            return number + 1, noised

        sums: list[Tensor] = list(map(at_least_float32, clipped_sum.gradients))
        _, sums = tf.while_loop(
            lambda number, _: number < self.contributors,
            add_one,
            (tf.constant(0, tf.int64), sums),
        )
        return sums
