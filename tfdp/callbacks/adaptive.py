"""Clip norms that follow the norms of the gradients, privately."""

import abc
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfdp import _validate
from tfdp._types import Tensor
from tfdp.accounting.levels import folded
from tfdp.optimizers import DPOptimizer
from tfdp.optimizers.arguments import LEAST_CLIP
from tfdp.training.callback import Query, Step, StepCallback


class AdaptiveClip(StepCallback, abc.ABC):
    """Learns the clip norm from noised queries about the norms of the units.

    Attributes:
        replaced_over_left_out: How much further a query moves when a unit is
            replaced by another than when it is left out.
        query: What it asks.
    """

    sets = "l2_norm_clip"
    replaced_over_left_out: ClassVar[float]
    query: Query

    @abc.abstractmethod
    def next_clip(
        self, clip: Tensor, answer: Tensor, *, expected_units: Tensor
    ) -> Tensor:
        """Say what C follows from the noised answer to the query.

        Args:
            clip: The C that clipped, a float64 scalar.
            answer: float64, of the query's shape.
            expected_units: The public number of units, a scalar.

        Returns:
            The next C, a float64 scalar.
        """

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """Log how the query raises epsilon, and what would not raise it."""
        noise_multiplier = float(optimizer.noise_multiplier.numpy())
        of_query = self.query.noise_multiplier
        if noise_multiplier == 0:
            return
        if noise_multiplier < of_query:
            needed = (noise_multiplier**-2 - of_query**-2) ** -0.5
            fix = f"noise_multiplier={needed:.6g} would cost what it costs without"
        else:
            fix = "no noise_multiplier would cost what it costs without"
        logging.info(
            "A step that %s learns from with noise_multiplier=%.6g counts as %.6g: %s.",
            type(self).__name__,
            noise_multiplier,
            folded(noise_multiplier, of_query),
            fix,
        )

    def during_step(self, step: Step) -> None:
        """Set the clip norm if the step asks, in the training graph."""
        clip = step.optimizer.l2_norm_clip
        answer = step.ask(self.query)
        following = self.next_clip(
            clip.value, answer, expected_units=step.expected_units
        )
        clip.assign(tf.where(step.asks(self.query), following, clip.value))

    def settings(self) -> list[float]:
        """Return the numbers that decide where C goes."""
        return [self.query.noise_multiplier, self.query.every]


class AdaptiveQuantileClip(AdaptiveClip):
    """Moves the clip norm towards a quantile of the gradients' norms.

    After every step it learns, with noise, the share b of units whose norm is at
    most C, and sets ``C <- C * exp(-learning_rate * (b - target_quantile))`` [1]_.
    With U the expected number of units, a public constant, and u those of the step,

        b = clip(1/2 + (sum_u (1[norm_u <= C] - 1/2) + Normal(0, s^2)) / U, 0, 1),
        s = count_noise_multiplier / 2,

    because a unit moves the sum by 1/2 at most. C begins as the optimizer's
    `l2_norm_clip`, and is saved with it. `fit` logs `l2_norm_clip`.

    Guarantees:
        The noise of a step is drawn with the C that clipped it. The count costs
        privacy, and the ledger counts it: a step has the noise multiplier
        ``(noise_multiplier**-2 + count_noise_multiplier**-2) ** -0.5``, which `fit`
        logs beside the one that would cost no more than without.

    Args:
        target_quantile: Share of the units that are not to be clipped, in (0, 1).
        learning_rate: How fast C moves, positive.
        count_noise_multiplier: Standard deviation of the noise of the sum over 1/2,
            positive.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If a number is out of its range.

    Example:
        >>> median = tfdp.callbacks.AdaptiveQuantileClip(target_quantile=0.5)

    References:
        .. [1] Andrew et al., "Differentially Private Learning with Adaptive
           Clipping", NeurIPS 2021, Algorithm 1. https://arxiv.org/abs/1905.03871
    """

    # A unit adds 1/2 or takes 1/2 away.
    replaced_over_left_out = 2.0

    def __init__(
        self,
        target_quantile: float,
        learning_rate: float = 0.2,
        count_noise_multiplier: float = 10.0,
    ) -> None:
        super().__init__()
        self.target_quantile = _validate.probability("target_quantile", target_quantile)
        self.learning_rate = _validate.positive("learning_rate", learning_rate)
        self.count_noise_multiplier = _validate.positive(
            "count_noise_multiplier", count_noise_multiplier
        )
        self.query = Query(
            lambda norm, clip: tf.where(norm <= clip, _float64(0.5), _float64(-0.5)),
            sensitivity=0.5,
            noise_multiplier=self.count_noise_multiplier,
        )

    def settings(self) -> list[float]:
        """Return the numbers that decide where C goes."""
        return [*super().settings(), self.target_quantile, self.learning_rate]

    def next_clip(
        self, clip: Tensor, answer: Tensor, *, expected_units: Tensor
    ) -> Tensor:
        """Move C by the noised share of the norms that do not exceed it."""
        units = tf.cast(expected_units, tf.float64)
        share = tf.clip_by_value(0.5 + answer / units, 0.0, 1.0)
        factor = tf.exp(-self.learning_rate * (share - self.target_quantile))
        return _usable(clip * factor)


class AdaptiveMedianClip(AdaptiveClip):
    """Sets the clip norm to the median of the gradients' norms, now and then.

    On every `every`-th step, the first one included, it counts how many norms fall
    into each bin, and adds noise to the counts. C becomes the midpoint of the bin in
    which the noised counts, added up from the least bin, pass half of their sum.
    Larger norms than the last edge count in the last bin, so C lies between the
    midpoints of the first and the last bin. `fit` logs `l2_norm_clip`.

    Guarantees:
        The noise of a step is drawn with the C that clipped it. The histogram costs
        privacy, and the ledger counts it: such a step has the noise multiplier
        ``(noise_multiplier**-2 + histogram_noise_multiplier**-2) ** -0.5``.

    Args:
        bin_edges: Rising numbers of at least 0, the edges of the bins, in units of a
            gradient's norm; two at least. They must not depend on private data.
        histogram_noise_multiplier: Standard deviation of the noise of each count,
            positive; a unit is in one bin. `tfdp.accounting.calibrate_gaussian`
            finds it for an epsilon and a delta of each histogram. Where a unit may be
            replaced by another, as in `tfdp.federated`, it leaves one count for
            another: the same privacy takes sqrt(2) times the noise.
        every: Steps from one histogram to the next, by the optimizer's
            `iterations`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of its range, or the edges do not rise.

    Example:
        >>> noise = tfdp.accounting.calibrate_gaussian(0.8, delta=1e-8)
        >>> median = tfdp.callbacks.AdaptiveMedianClip(
        ...     [0, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3],
        ...     histogram_noise_multiplier=noise,
        ... )
    """

    # A unit leaves one count for another.
    replaced_over_left_out = math.sqrt(2)

    def __init__(
        self,
        bin_edges: Sequence[float],
        *,
        histogram_noise_multiplier: float,
        every: int = 1000,
    ) -> None:
        super().__init__()
        self.bin_edges = _checked_edges(bin_edges)
        self.histogram_noise_multiplier = _validate.positive(
            "histogram_noise_multiplier", histogram_noise_multiplier
        )
        self.every = _validate.positive_int("every", every)
        bins = len(self.bin_edges) - 1
        edges = self.bin_edges[1:-1]

        def bin_of_unit(norm: Tensor, clip: Tensor) -> Tensor:
            del clip
            norm = tf.cast(norm, tf.float64)
            # What is no number is above all edges. (TensorFlow's graphs take
            # `~(norm < edges)` for `norm >= edges`.)
            is_above = (norm >= edges) | tf.math.is_nan(norm)
            return tf.one_hot(tf.math.count_nonzero(is_above), bins, dtype=tf.float64)

        self.query = Query(
            bin_of_unit,
            sensitivity=1.0,
            noise_multiplier=self.histogram_noise_multiplier,
            shape=(bins,),
            every=self.every,
        )

    def settings(self) -> list[float]:
        """Return the numbers that decide where C goes."""
        return [*super().settings(), *self.bin_edges.tolist()]

    def next_clip(
        self, clip: Tensor, answer: Tensor, *, expected_units: Tensor
    ) -> Tensor:
        """Return the midpoint of the bin with the median of the noised counts."""
        del clip, expected_units
        edges = self.bin_edges
        summed = tf.cumsum(answer)
        # The last bin passes half of the sum, unless noise made the sum negative.
        passes = tf.concat([summed[:-1] >= summed[-1] / 2, [True]], 0)
        midpoints = _float64((edges[:-1] + edges[1:]) / 2)
        return _usable(midpoints[tf.argmax(tf.cast(passes, tf.int32))])


def _float64(value: float | np.ndarray) -> Tensor:
    return tf.constant(value, tf.float64)


def _usable(clip: Tensor) -> Tensor:
    return tf.clip_by_value(clip, _float64(LEAST_CLIP), _float64(1 / LEAST_CLIP))


def _checked_edges(bin_edges: Sequence[float]) -> np.ndarray:
    edges = np.array([_validate.non_negative("bin_edges", edge) for edge in bin_edges])
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise ValueError(
            "`bin_edges` must be two or more numbers that rise. Received: bin_edges="
            f"{bin_edges!r}. Use `[0, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3]`."
        )
    return edges
