"""Compares what steps did with what they may do."""

import dataclasses
import math

import numpy as np
import tensorflow as tf
from scipy import spatial, stats

from tfdp import _keras
from tfdp._types import Array
from tfdp.audit.steps import Run, Steps
from tfdp.clipping import ClippedSum
from tfdp.losses.batch import Batch, number_of_rows

# Rounding may move a sum, or what comes of another row, by so much of it.
_ROUNDING = 1e-4

# An honest training's noise is found wrong with this probability.
_CHANCE = 1e-6

# Numbers of noise from which the spread of one variable's is judged, at least.
_ENOUGH = 30

# Noise that agrees in so many numbers is the same; so many pieces are compared, at most.
_ALIKE = 8
_MOST_COMPARED = 1000


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs and must not, or is not what it must be.

    Attributes:
        what: `"sensitivity"`, `"rows"`, `"state"`, `"noise"`, `"divisor"` or
            `"control flow"`.
        where: The layer, the variable, or the part of a step.
        nonprivate_detail: What was seen.
    """

    what: str
    where: str
    nonprivate_detail: str

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.what}: {self.where}: {self.nonprivate_detail}"


class Comparison:
    """Collects what is wrong with steps.

    Args:
        steps: They are taken as they are needed.

    Attributes:
        findings: What is wrong.
        largest_change: That one row made to a clipped sum, up to now.
    """

    def __init__(self, steps: Steps) -> None:
        """Find nothing yet."""
        self._steps = steps
        self.findings: list[Finding] = []
        self.largest_change = 0.0
        self._paths = [each.path for each in steps.session.objective.variables]

    # What a row may not do.

    def compare(self, one: Run, other: Run) -> bool:
        """Compare two steps of which the other has one row, the last one, emptied.

        Returns:
            Whether the row changed what comes of others.
        """
        self._compare_states(one, other)
        changes = [a - b for a, b in zip(one.sums, other.sums, strict=True)]
        of_each = [float(np.linalg.norm(each)) for each in changes]
        change = float(np.linalg.norm(of_each))
        change = change if np.isfinite(change) else math.inf
        total = float(np.linalg.norm([np.linalg.norm(each) for each in other.sums]))
        allowed = other.l2_sensitivity * (1 + _ROUNDING) + total * _ROUNDING / 10
        if not change <= max(allowed, self.largest_change):
            path = self._paths[int(np.argmax(of_each))]
            self._find(
                "sensitivity",
                f"the clipped sum, most in variable `{path}`",
                f"one row moves it by {change:.6g}, and {other.l2_sensitivity:.6g} is "
                "allowed",
            )
        self.largest_change = max(self.largest_change, change)
        units = min(len(one.norms), len(other.norms), len(one.norms) - 1)
        return not np.allclose(
            one.norms[:units],
            other.norms[:units],
            rtol=_ROUNDING,
            atol=_ROUNDING * other.clip,
            equal_nan=True,
        )

    def _compare_states(self, one: Run, other: Run) -> None:
        for variable, a, b in zip(
            self._steps.states, one.states, other.states, strict=True
        ):
            if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                self._find(
                    "state",
                    f"variable `{variable.path}`",
                    "it is another one after the step without the row",
                )

    def compare_sums(self, smaller: Run, emptied: Run) -> None:
        """Compare a batch without a row to one that has it emptied."""
        clipper = self._steps.session.clipper
        if _keras.draws_numbers(clipper.model) or clipper.augmentation is not None:
            return  # Shapes decide what is drawn.
        a, b = _flat(smaller.sums), _flat(emptied.sums)
        scale = np.linalg.norm(b) + emptied.clip
        if not np.linalg.norm(a - b) <= 10 * _ROUNDING * scale:
            self._find(
                "rows",
                "the clipped sum",
                "without the row it is another one than with the row emptied",
            )

    def look_at_layers(self, one: Batch, other: Batch, *, norms_differ: bool) -> None:
        """Find what lets the last row change what comes of others.

        Args:
            one: A batch.
            other: The same one without its last example, or user.
            norms_differ: Whether the gradients of others were seen to differ.
        """
        marks = np.asarray(other.is_padding) != np.asarray(one.is_padding)
        rows = int(np.argmax(marks)) if marks.any() else int(number_of_rows(other))
        calls, calls_without = (self._steps.calls(each) for each in (one, other))
        shapes, shapes_without = (
            [(path, [leaf.shape for leaf in leaves]) for path, leaves in each]
            for each in (calls, calls_without)
        )
        if shapes != shapes_without:
            pairs = zip(shapes, shapes_without, strict=False)
            at = next(
                (a[0] for a, b in pairs if a != b),
                self._steps.session.clipper.model.name,
            )
            self._find(
                "control flow",
                f"layer `{at}`",
                "with the row other layers run, or with other shapes",
            )
            return
        for (path, leaves), (_, without) in zip(calls, calls_without, strict=True):
            both = zip(leaves, without, strict=True)
            if any(_others_differ(a, b, rows, len(marks)) for a, b in both):
                self._find(
                    "rows",
                    f"layer `{path}`",
                    "one row changes what it returns for others",
                )
                return
        if norms_differ:
            self._find(
                "rows",
                "the loss",
                "one row changes the gradients of the loss of others",
            )

    # What comes after the sum.

    def look_at_divisor(self, run: Run, words: str) -> float:
        """Find out what a noised sum was divided by.

        Args:
            run: A step with the noise of the number 0.
            words: Say what its batch was.

        Returns:
            The divisor; the one claimed where noise and sum do not tell.
        """
        mechanism = self._steps.session.mechanism
        if mechanism.correlates_steps:
            return self._steps.divisor
        self._steps.begin()
        clip = tf.constant(run.clip, tf.float64)
        pairs = zip(run.sums, self._steps.seen.sums, strict=True)
        sums = [tf.cast(each, held.dtype) for each, held in pairs]
        noised = mechanism.noised(
            ClippedSum(sums, tf.constant(run.norms), tf.cast(clip, sums[0].dtype), 1),
            noise_multiplier=tf.constant(self._steps.noise_multiplier, tf.float64),
            stream=mechanism.stream(mechanism.number),
        )
        total, released = _flat([each.numpy() for each in noised]), _flat(run.released)
        square = released @ released
        divisor = float(total @ released / square) if square else self._steps.divisor
        rest = np.linalg.norm(total - divisor * released)
        if not rest <= 1e-2 * np.linalg.norm(total):
            return self._steps.divisor
        if not abs(divisor / self._steps.divisor - 1) <= 1e-3:
            self._find(
                "divisor",
                "what the noised sum is divided by",
                f"it is {divisor:.6g} {words}, and {self._steps.divisor:.6g} is the public one",
            )
            return divisor
        return self._steps.divisor

    def compare_noise(self, one: Run, other: Run, divisor: float) -> None:
        """Compare the noise of two steps of one number, by the divisor of both."""
        a, b = _flat(one.noise(divisor)), _flat(other.noise(divisor))
        scale = np.linalg.norm(b) + np.linalg.norm(_flat(one.sums))
        if not np.linalg.norm(a - b) <= 1e-3 * scale:
            self._find("noise", "the noise of a step", "it is another without the row")

    def look_at_noise(self, noises: list[list[Array]], stddev: float) -> float:
        """Compare the spread of noise with what it must be.

        Args:
            noises: Of several steps, an array for each variable.
            stddev: What it must be.

        Returns:
            What it is, over all variables.
        """
        of_variables = [
            np.concatenate([np.ravel(each) for each in step])
            for step in zip(*noises, strict=True)
        ]
        everything = np.concatenate(of_variables)
        found = float(np.sqrt(np.mean(everything**2)))
        if self._steps.session.mechanism.correlates_steps:
            return found
        if stddev and _comes_again(noises, stddev):
            self._find(
                "noise", "the noise of a step", "another step or variable has the same"
            )
        wrong = [
            (f"variable `{path}`", numbers)
            for path, numbers in zip(self._paths, of_variables, strict=True)
            if len(numbers) >= _ENOUGH and _is_wrong(numbers, stddev, len(self._paths))
        ]
        if not wrong and _is_wrong(everything, stddev, 1):
            wrong = [("all variables together", everything)]
        for where, numbers in wrong:
            self._find(
                "noise",
                where,
                f"its standard deviation is {np.sqrt(np.mean(numbers**2)):.6g}, and must "
                f"be {stddev:.6g}",
            )
        return found

    def _find(self, what: str, where: str, detail: str) -> None:
        """Keep the first finding at each place, and the worst one of the sum."""
        if what == "sensitivity":
            self.findings = [each for each in self.findings if each.what != what]
        if not any((each.what, each.where) == (what, where) for each in self.findings):
            self.findings.append(Finding(what, where, detail))


def _flat(arrays: list[Array]) -> Array:
    return np.concatenate([np.ravel(each).astype(np.float64) for each in arrays])


def _is_wrong(numbers: Array, stddev: float, tests: int) -> bool:
    """Tell whether Gaussian noise would hardly have such a spread."""
    if stddev == 0:
        return bool(np.abs(numbers).max(initial=0.0) > 1e-3)
    square = float(np.sum((numbers / stddev) ** 2))
    law = stats.chi2(len(numbers))
    return not 2 * min(law.cdf(square), law.sf(square)) >= _CHANCE / tests


def _comes_again(noises: list[list[Array]], stddev: float) -> bool:
    """Tell whether two steps, or variables of one, have the same noise to begin with."""
    begins = [
        np.ravel(each)[:_ALIKE]
        for step in noises
        for each in step
        if np.size(each) >= _ALIKE and np.abs(each).max() > 1e-2 * stddev
    ][:_MOST_COMPARED]
    if len(begins) < 2:
        return False
    nearest = spatial.distance.pdist(np.stack(begins), "chebyshev").min()
    return bool(nearest < 1e-2 * stddev)


def _others_differ(one: Array, other: Array, rows: int, all_rows: int) -> bool:
    """Tell whether arrays of all rows differ in the first ones."""
    if not one.ndim or one.dtype.kind not in "fc" or len(one) % all_rows:
        return False
    # Positions of a row may lie along the same axis, one behind the other.
    end = rows * len(one) // all_rows
    one, other = (
        each[:end].reshape(end, each[0].size).astype(np.result_type(each, np.float64))
        for each in (one, other)
    )
    # What counts as rounding goes by the row: a far one does not hide changes of others.
    sizes = np.max(np.abs(other), 1, where=np.isfinite(other), initial=0.0)
    return not all(
        np.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * size, equal_nan=True)
        for a, b, size in zip(one, other, sizes, strict=True)
    )
