"""Means of bounded values, released with noise: of metrics."""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tfdp.sampling import Poisson, fresh_key

_Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A value of each example that is brought inside a public range.

    Args:
        name: What is released is called so.
        lower: Lower end of the range, finite.
        upper: Upper end, finite, above the lower one.
        nan_is_upper: Whether what is no number counts as the upper end; else as the
            lower one. It is the end that is worse.
    """

    name: str
    lower: float
    upper: float
    nan_is_upper: bool = False

    @property
    def middle(self) -> float:
        """The middle of the range, from which values are counted."""
        return self.lower / 2 + self.upper / 2

    @property
    def half_width(self) -> float:
        """How far a value is from the middle, at most."""
        return self.upper / 2 - self.lower / 2


@dataclasses.dataclass(frozen=True)
class NoisedMean:
    """Means over the units of a Poisson draw, with Gaussian noise.

    With k values v of each unit, m the middles and h the half widths of their ranges,
    D the expected number of units in a draw, a public constant, and u the units drawn,

        m + h * (sum_u (clip(v_u) - m) / h + Normal(0, noise_multiplier^2 k I)) / D.

    Guarantees:
        A unit that goes, or is replaced by an empty one, moves the vector of sums over
        half widths by sqrt(k) in l2 norm at most, whatever its values are.

    Args:
        values: What is averaged, one release for all of them.
        scheme: Draws the units.
        noise_multiplier: Standard deviation of the noise of each of these sums over
            sqrt(k), positive.
    """

    values: tuple[Bounded, ...]
    scheme: Poisson
    noise_multiplier: float

    @property
    def l2_sensitivity(self) -> float:
        """How far a unit moves the vector of sums over half widths, at most."""
        return math.sqrt(len(self.values))

    @property
    def _noise(self) -> _Floats:
        """Standard deviations of the noise of the sums."""
        return self.noise_multiplier * self.l2_sensitivity * self._half_widths

    @property
    def _half_widths(self) -> _Floats:
        return np.array([each.half_width for each in self.values])

    @property
    def _middles(self) -> _Floats:
        return np.array([each.middle for each in self.values])

    def draw(self) -> NDArray[np.int64]:
        """Draw units by coins that nobody knows: their numbers, ascending."""
        return self.scheme.draw(fresh_key(), 0, 0)

    def of_units(self, rows: _Floats, units: NDArray[np.int64], number: int) -> _Floats:
        """Return what each unit adds to the sums.

        Args:
            rows: Values of the units' rows, shape ``(n, k)``; NaN and infinities too.
            units: The unit of each row, in [0, number), shape ``(n,)``; each unit has
                a row.
            number: How many units there are; may be 0.

        Returns:
            The mean over the rows of each unit, from the middle of the range, shape
            ``(number, k)``, none of them farther from zero than half of the range.
        """
        lower, upper = (
            np.array([getattr(each, end) for each in self.values])
            for end in ("lower", "upper")
        )
        worse = np.where([each.nan_is_upper for each in self.values], upper, lower)
        rows = np.where(np.isnan(rows), worse, np.clip(rows, lower, upper))
        rows = rows - self._middles
        sums = np.zeros((number, len(self.values)))
        np.add.at(sums, units, rows)
        counts = np.bincount(units, minlength=number)
        means: _Floats = sums / np.maximum(counts, 1)[:, None]
        # Again: means are rounded.
        return np.clip(means, -self._half_widths, self._half_widths)

    def noised(self, total: _Floats) -> dict[str, float]:
        """Return the means, with fresh noise.

        Args:
            total: Sum of `of_units` over all units that were drawn, shape ``(k,)``.

        Returns:
            They, by name. Noise may move them out of their ranges.
        """
        random = np.random.Generator(np.random.Philox(key=fresh_key()))
        noised = total + self._noise * random.standard_normal(len(self.values))
        means = self._middles + noised / self.scheme.examples_per_release
        return dict(zip((v.name for v in self.values), means.tolist(), strict=True))

    def standard_errors(self) -> dict[str, float]:
        """Return how far the means are from those over all units, by name.

        From public numbers alone: the noise, and the coins if each value were at an
        end of its range, as those of an accuracy are. It is no matter of units that are
        not in the data.
        """
        drawn = self.scheme.examples_per_release
        noise = (self._noise / drawn).tolist()
        of_coins = math.sqrt((1 - self.scheme.sampling_probability) / drawn)
        return {
            each.name: math.hypot(stddev, of_coins * each.half_width)
            for each, stddev in zip(self.values, noise, strict=True)
        }
