"""Canaries in the clipped sums of a training, and what they find out."""

import dataclasses
import secrets
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Logs, Tensor
from tfdp._validate import positive_int, probability
from tfdp.accounting.text import filled
from tfdp.audit.lower_bound import epsilon_lower_bound, right_guesses
from tfdp.sampling import Scheme
from tfdp.training.callback import StepCallback


@dataclasses.dataclass(frozen=True)
class CanaryReport:
    """What the canaries of a training prove of its epsilon. Keep it where the rows are.

    Attributes:
        nonprivate_epsilon_lower_bound: An epsilon that the training exceeds. Where
            it is above `epsilon`, the training is less private than its ledger says.
        confidence: Of the bound.
        epsilon: Of the ledger; infinite without noise.
        delta: Of both.
        canaries: How many there were; each in the training or not by a coin.
        guesses: At how many of them the audit guessed.
        nonprivate_right: How many guesses were right.
        steps: Of the canaries.
    """

    nonprivate_epsilon_lower_bound: float
    confidence: float
    epsilon: float
    delta: float
    canaries: int
    guesses: int
    nonprivate_right: int
    steps: int

    @property
    def nonprivate_passed(self) -> bool:
        """Whether the bound does not contradict the ledger."""
        return self.nonprivate_epsilon_lower_bound <= self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values; an infinite epsilon is None."""
        fields = dataclasses.asdict(self)
        if not np.isfinite(self.epsilon):
            fields["epsilon"] = None
        passed = self.nonprivate_passed
        return {"audit": "gradient canaries", **fields, "nonprivate_passed": passed}

    def __str__(self) -> str:
        """Say it in words."""
        verdict = (
            "which does not contradict the ledger"
            if self.nonprivate_passed
            else "MORE than its ledger says: something that ran is not what was counted"
        )
        return filled(
            f"Audit by {self.canaries} gradient canaries in {self.steps} "
            f"step{'s' * (self.steps != 1)}: "
            f"{self.nonprivate_right} of {self.guesses} guesses were right, so with "
            f"confidence {self.confidence:g} epsilon is above "
            f"{self.nonprivate_epsilon_lower_bound:.3f} at delta {self.delta:g}, "
            f"{verdict} ({self.epsilon:.3f}); by the trade-off of Gaussian mechanisms. "
            "The bound was computed from private rows, and is private: not to be "
            "published. The canaries have moved the weights: an audited model is not one "
            "to publish."
        )


class GradientCanaries(StepCallback):
    """Puts canaries into the clipped sums of a training, to measure how it hides them.

    A canary is a gradient of norm C along one weight of its own, up or down. A fair coin
    decides whether it takes part at all [1]_. If it does, it is in a step as a row is,
    by a coin that falls as often as the scheme draws one, and gets no noise but the
    step's. The scores of the canaries come from the released sums alone: how likely
    each would be with the canary in it, over how likely without. What follows for epsilon
    says `epsilon_lower_bound`: an epsilon above the ledger's means that clipping, noise
    or steps were not what was counted. How rows are drawn is not tried out: canaries
    have draws of their own.

    The rows' guarantee stays what it is, for what is added knows no row. But canaries
    push the weights that they stand on, by up to C in every step, and one weight each:
    audit a training of its own, and do not publish that model.

    What this proves is private, too: it comes from sums over the rows. If their noise
    is as it was counted, the ledger covers it, as it does the weights; but that is what
    is tried out here.

    Args:
        canaries: How many, at least 2 and at most the number of trained weights. A
            thousand prove about half of epsilon, see `epsilon_lower_bound`.

    Raises:
        TypeError: If the number is none.
        ValueError: If it is out of its range; when `fit` begins, if the model is too
            small for it or another one than before, there is a `tf.distribute` strategy,
            or passes are what counts: canaries take part in single steps.

    Example:
        >>> model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(4)])
        >>> private = tfdp.DPModel(model)
        >>> optimizer = tfdp.optimizers.DPSGD(
        ...     0.1, l2_norm_clip=1.0, noise_multiplier=1.0
        ... )
        >>> private.compile(optimizer, loss="mse")
        >>> audit = tfdp.audit.GradientCanaries(100)
        >>> x, y = np.zeros((60, 50)), np.zeros((60, 4))
        >>> history = private.fit(x, y, batch_size=30, callbacks=[audit], verbose=0)
        >>> audit.epsilon_lower_bound(delta=1e-3) < private.epsilon(delta=1e-3)
        True

    References:
        .. [1] Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run",
           NeurIPS 2023, section 6. https://arxiv.org/abs/2305.08846
    """

    def __init__(self, canaries: int = 1000) -> None:
        super().__init__()
        self.canaries = positive_int("canaries", canaries)
        if self.canaries < 2:
            raise ValueError(
                f"`canaries` must be at least 2. Received: canaries={canaries}. Use "
                "`GradientCanaries(1000)`."
            )
        # From the operating system: no global seed may know what is guessed at.
        self._coins = np.random.default_rng(secrets.randbits(128))
        self.inserted = self._coins.integers(0, 2, self.canaries) == 1
        self._signs = self._coins.choice([-1.0, 1.0], self.canaries)
        # Which weights they stand on: none yet.
        self._places = np.empty(0, np.int64)
        self._sizes: list[int] = []
        with tf.init_scope(), _keras.unmirrored_variables():
            key = np.frombuffer(secrets.token_bytes(16), np.int64)
            self._key = tf.Variable(key, trainable=False)
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._scores = tf.Variable(
                tf.zeros(self.canaries, tf.float64), trainable=False
            )

    def set_model(self, model: keras.Model) -> None:
        """Find weights to stand on, the first time."""
        super().set_model(model)
        if _keras.strategy_of_model(model) is not None:
            raise ValueError(
                "`GradientCanaries` are on one device. Received: a model made in the scope "
                "of a `tf.distribute` strategy. Make the model outside of it."
            )
        sizes = [int(np.prod(each.shape)) for each in model.trainable_variables]
        if not len(self._places):
            if sum(sizes) < self.canaries:
                raise ValueError(
                    "`canaries` must be at most the number of trained weights. Received: "
                    f"canaries={self.canaries}, {sum(sizes)} weights. Use "
                    f"`GradientCanaries({sum(sizes)})`."
                )
            self._places = self._coins.choice(sum(sizes), self.canaries, replace=False)
            self._sizes = sizes
        if sizes != self._sizes:
            raise ValueError(
                "`GradientCanaries` stay in one model. Received: another one than "
                "before. Use `GradientCanaries(1000)` anew."
            )

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse passes before one is counted."""
        _chance(self.model.recorder.counter.scheme)

    def added_to_sum(self, l2_norm_clip: Tensor) -> list[Tensor]:
        """Add the canaries of the step; in the training graph."""
        chance = _chance(self.model.recorder.counter.scheme)
        # Two words of the key: the first tells steps apart.
        seed = self._key + tf.stack([self._steps, tf.zeros_like(self._steps)])
        coins = tf.random.stateless_uniform([self.canaries], seed, dtype=tf.float64)
        takes_part = tf.constant(self.inserted) & (coins < chance)
        lengths = tf.where(takes_part, tf.constant(self._signs), 0.0)
        lengths = tf.cast(lengths, l2_norm_clip.dtype) * l2_norm_clip
        flat = tf.scatter_nd(self._places[:, None], lengths, [sum(self._sizes)])
        variables = self.model.trainable_variables
        parts = tf.split(flat, self._sizes)
        return [
            tf.reshape(part, variable.shape)
            for part, variable in zip(parts, variables, strict=True)
        ]

    def after_release(self, released: list[Tensor], l2_norm_clip: Tensor) -> None:
        """Add to the scores what the released sums say; in the training graph."""
        scheme = self.model.recorder.counter.scheme
        optimizer = self.model.optimizer
        units = optimizer.expected_units(scheme.examples_per_unit)
        flat = tf.concat([tf.reshape(each, [-1]) for each in released], 0)
        seen = tf.cast(tf.gather(flat, self._places), tf.float64) * units
        seen *= tf.constant(self._signs) / tf.cast(l2_norm_clip, tf.float64)
        noise = optimizer.noise_multiplier.value
        self._scores.assign_add(_log_likelihoods(seen, _chance(scheme), noise))
        self._steps.assign_add(1)

    @property
    def scores(self) -> np.ndarray:
        """How much each canary looks as if it took part, float64, ``(canaries,)``."""
        return np.asarray(self._scores.numpy())

    def epsilon_lower_bound(self, delta: float, confidence: float = 0.95) -> float:
        """Compute an epsilon that the training exceeds, at the Gaussian curve.

        Args:
            delta: Of the epsilon, between 0 and 1.
            confidence: Of the bound, between 0 and 1.

        Returns:
            The bound, at least 0; see `tfdp.audit.epsilon_lower_bound`.

        Raises:
            TypeError: If a number is none.
            ValueError: If a number is out of its range.
        """
        return epsilon_lower_bound(self.scores, self.inserted, delta, confidence)

    def report(self, delta: float, confidence: float = 0.95) -> CanaryReport:
        """Return the bound beside what the ledger says.

        Args:
            delta: See `epsilon_lower_bound`.
            confidence: Likewise.

        Returns:
            A report that prints, and has `to_dict`.

        Raises:
            RuntimeError: If no training has had the canaries.
            TypeError: If a number is none.
            ValueError: If a number is out of its range.
        """
        delta = probability("delta", delta)
        if not len(self._places):
            raise RuntimeError(
                "`report` needs a training. Received: canaries that were in none. Use "
                "`private.fit(..., callbacks=[canaries])` before."
            )
        right, guesses, canaries = right_guesses(self.scores, self.inserted)
        return CanaryReport(
            self.epsilon_lower_bound(delta, confidence),
            confidence,
            self.model.epsilon(delta),
            delta,
            canaries,
            guesses,
            right,
            int(self._steps.numpy()),
        )


def _chance(scheme: Scheme) -> float:
    """Return how likely a row is in a step, for draws that no other step knows of."""
    if scheme.counts_passes or not scheme.adds_up:
        raise ValueError(
            "`GradientCanaries` take part in single steps, by a coin for each. Received: "
            f"{scheme}, which counts passes. Use `DPModel(model, sampling='poisson')`."
        )
    return scheme.sampling_probability


def _log_likelihoods(seen: Tensor, chance: float, noise_multiplier: Tensor) -> Tensor:
    """Return what is known of canaries from a step, by its claimed noise.

    Args:
        seen: Of the released sum along each canary, in clip norms.
        chance: That a canary takes part in the step.
        noise_multiplier: A scalar; at 0 the score is what was seen.
    """
    square = tf.square(tf.maximum(noise_multiplier, 1e-3))
    ratio = (seen - 0.5) / square
    if chance < 1:
        odds = np.log(chance) - np.log1p(-chance)
        ratio = tf.math.softplus(ratio + odds) - np.log1p(np.exp(odds))
    return tf.where(noise_multiplier > 0, ratio, seen)
