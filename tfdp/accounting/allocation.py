"""Privacy loss of a random allocation: one of several releases has the example.

With b releases of noise multiplier z, and P the outputs with the example, Q those
without, the ratio of their densities is a mean of b independent lognormal numbers under
Q [1]_::

    S = (X_1 + ... + X_b) / b,   X_i = exp(g_i / z - 1 / (2 z^2)),   g_i normal,

and all hockey-stick divergences are expectations of convex functions of it: that of
removing an example is E_Q[(S - e^epsilon)_+], that of adding one E_Q[(1 - e^epsilon
S)_+]. So they only grow where the mass of an X_i is spread onto the two ends of its cell
of a grid, keeping its mean. The error falls with the square of the width, which is what
makes a grid of equal cells, and so the fast Fourier transform, good enough.

References:
    .. [1] Feldman and Shenfeld, "Efficient Privacy Loss Accounting for Subsampling
       and Random Allocation", 2026. https://arxiv.org/abs/2602.17284
"""

import dataclasses
import math

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from numpy.typing import NDArray
from scipy import special

_Array = NDArray[np.float64]

# Probability of what is left out at either end and counts as an unbounded loss.
_TAIL = 1e-13
# Of single numbers that are so large when an example is added; they count as smaller.
_LARGE = 1e-3
# Masses below it are moved to an unbounded loss, and losses of the least probable
# outputs, that make up as much, are raised to the least of the others.
_NO_MASS = 1e-22
_FAR_MASS = 1e-15
# Arithmetic is slow with less.
_NOTHING = 1e-250

# The first grid for numbers when an example is removed has all but a few of them; each
# further one goes so many times as far, in cells of this part of where it begins.
_REACH_OF_FIRST = 1.0
_RATIO_OF_ENDS = 1000
_RELATIVE_WIDTH = 0.01

_FEWEST_CELLS, _MOST_CELLS = 2**17, 2**21
# How much the spreading may add to the variance of a number, and to that of the loss
# where numbers are small, before cells are halved.
_MOST_SPREAD = 0.005
_MOST_SPREAD_OF_LOSS = 1e-3
_UNIT_ROUNDOFF = 2.0**-52


def loss_of_allocation(
    batches: int, noise_multiplier: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss of releases one of which has the example.

    Guarantees:
        Both directions are upper bounds: their hockey-stick divergences are at least
        the true ones, so those of any composition are. Rounding of the transform counts
        as an unbounded loss.

    Args:
        batches: Number of releases, at least 2.
        noise_multiplier: Of each, from 0.1 on.
        interval: Grid of the losses, onto which they are spread in the same way.

    Returns:
        A distribution that dp_accounting composes with others.
    """
    return privacy_loss_distribution.PrivacyLossDistribution(
        _loss_of_removing(batches, noise_multiplier).on_grid(interval),
        _loss_of_adding(batches, noise_multiplier).on_grid(interval),
    )


@dataclasses.dataclass(frozen=True)
class _Loss:
    """Losses with their probabilities; what is missing to 1 is an unbounded loss."""

    losses: _Array
    masses: _Array
    unbounded: float

    def on_grid(self, interval: float) -> pld_pmf.PLDPmf:
        """Spread the losses onto multiples of an interval.

        Each mass goes to both ends of its cell so that it stays the same under the
        other of the two measures, too, whose density is less by the factor
        ``exp(-loss)``.

        Args:
            interval: Of the grid.

        Returns:
            The distribution in dp_accounting's form.
        """
        cells = np.floor(self.losses / interval)
        beyond = self.losses - cells * interval
        low = np.expm1(np.maximum(interval - beyond, 0)) / np.expm1(interval)
        # The two weights of exp(-loss) are convex in it, and sum to it.
        low = np.clip(low, 0, 1)
        first = int(cells.min())
        places = cells.astype(np.int64) - first
        number = int(places.max()) + 2
        masses = np.bincount(places, self.masses * low, number)
        masses += np.bincount(places + 1, self.masses * (1 - low), number)
        return pld_pmf.DensePLDPmf(interval, first, masses, self.unbounded, True)


def _loss_of_removing(batches: int, noise_multiplier: float) -> _Loss:
    """Return log S under P, where one of the numbers is drawn by its size.

    Its numbers go far: no grid is fine enough for the common ones and long enough for
    the rarest. So a fine one has the case in which none is beyond its end, the next one
    that in which one is, but not beyond its own end, and so on. Cells, which the cases
    do not cut, keep the mean in each. Numbers above the last grid, and sums above a
    grid, count as an unbounded loss.
    """
    z = noise_multiplier
    least = _number(special.ndtri(_TAIL / batches), z)
    parts, unbounded, end_before = [], 0.0, None
    widest = _widest(batches, z)
    ends = _ends(z)
    for end in ends:
        deviation = min(_deviation(z), end)
        # Beyond the last end another number is hardly as large; before, it may be.
        width = (1.05 if end == ends[-1] else 3.0) * (end - least)
        width += batches * (1 - least) + 12 * math.sqrt(batches) * deviation
        numbers = _Numbers.spread(least, end, width, z, widest)
        masses, moved = _drawn_sums(numbers, batches)
        if end_before is not None:
            seen, moved_of_seen = _drawn_sums(numbers.up_to(end_before), batches)
            masses, moved = masses - seen, moved + moved_of_seen
        unbounded += moved + numbers.mass_of_sums_beyond(batches, deviation)
        parts.append((np.log(numbers.sums(batches) / batches), masses))
        end_before = float(numbers.values[-1])
        widest = _RELATIVE_WIDTH * end_before
    drawn, others = numbers.drawn_by_size().masses.sum(), numbers.masses.sum()
    unbounded += 1 - float(drawn * others ** (batches - 1))
    losses, masses = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(losses, kind="stable")
    return _loss(losses[order], masses[order], unbounded)


def _ends(z: float) -> list[float]:
    """Return how far the grids for single numbers go."""
    reach = -special.ndtri(_TAIL)
    far = (reach - _REACH_OF_FIRST) / z  # From one end to the other, as logarithms.
    steps = math.ceil(far / math.log(_RATIO_OF_ENDS)) if far > math.log(10) else 0
    nearest = reach if steps == 0 else _REACH_OF_FIRST
    first = math.log(_number(nearest + 1 / z, z))
    return [math.exp(first + far * step / max(steps, 1)) for step in range(steps + 1)]


def _drawn_sums(numbers: "_Numbers", batches: int) -> tuple[_Array, float]:
    """Return the masses of sums under P, and how much of it rounding may have moved."""
    others, drawn = numbers.transform(), numbers.drawn_by_size().transform()
    masses = np.fft.irfft(others ** (batches - 1) * drawn, numbers.cells)
    return masses, _roundoff(others, drawn, batches, masses)


def _loss_of_adding(batches: int, noise_multiplier: float) -> _Loss:
    """Return -log S under Q.

    Numbers above the grid count as its end. Sums above it begin again at its start:
    both only raises the loss.
    """
    z = noise_multiplier
    least = _number(special.ndtri(_TAIL / batches), z)
    most = _number(-special.ndtri(_LARGE / batches), z)
    # All of them are around their median where the loss is large.
    widest = _number(0.0, z) * _widest(batches, z)
    while True:
        deviation = min(_deviation(z), most)
        width = batches * (1 - least) + 4 * most + 8 * math.sqrt(batches) * deviation
        # With a cell more for each than a number takes.
        room = 1 + 2 * batches / _FEWEST_CELLS
        width = min(width, room * batches * (most - least))
        numbers = _Numbers.spread(least, most, width, z, widest)
        # All numbers at the lowest point would be a loss far above the true one.
        if most < 2 or numbers.masses[0] ** batches < _FAR_MASS:
            break
        most /= 2
    numbers.masses[-1] += special.ndtr(-_normal(numbers.values[-1], z))
    others = numbers.transform()
    masses = np.fft.irfft(others**batches, numbers.cells)
    unbounded = _roundoff(others, others, batches, masses)
    unbounded += 1 - float(numbers.masses.sum()) ** batches
    losses = -np.log(numbers.sums(batches) / batches)
    return _loss(losses[::-1], masses[::-1], unbounded)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The distribution of an X_i under Q on a grid.

    Attributes:
        values: Of the grid, as far as a single number goes.
        masses: Their probabilities; what was below or above is missing.
        cells: Of the grid for sums.
        of_cells: What each cell has given to its upper end.
    """

    values: _Array
    masses: _Array
    cells: int
    of_cells: _Array

    @classmethod
    def spread(
        cls, least: float, most: float, width: float, z: float, widest: float
    ) -> "_Numbers":
        """Spread the mass of every cell onto its ends, keeping the mean.

        Args:
            least: Where the grid begins.
            most: What single numbers reach.
            width: How far beyond `least` sums reach, each counted from there.
            z: The noise multiplier.
            widest: Width that cells may have, if the number of cells allows it.

        Returns:
            The numbers.
        """
        cells = _FEWEST_CELLS
        while cells < _MOST_CELLS and width / (cells - 1) > widest:
            cells *= 2
        step = width / (cells - 1)
        number = min(int((most - least) / step) + 2, cells)
        values: _Array = least + step * np.arange(number, dtype=np.float64)
        normal = _normal(values, z)
        masses, means = _normal_masses(normal), _normal_masses(normal - 1 / z)
        upper = np.clip((means - values[:-1] * masses) / step, 0, masses)
        upper[upper < _NOTHING] = 0.0
        spread: _Array = np.zeros(number)
        spread[1:] += upper
        spread[:-1] += masses - upper
        spread[spread < _NOTHING] = 0.0
        return cls(values, spread, cells, upper)

    @property
    def step(self) -> float:
        """Width of a cell."""
        return float(self.values[1] - self.values[0])

    def up_to(self, end: float) -> "_Numbers":
        """Return what is in the cells that end before."""
        number = int((end - self.values[0]) / self.step) + 1
        masses = self.masses[:number].copy()
        # The last one has a part of the next cell's mass, too.
        masses[-1] = self.of_cells[number - 2] if number > 1 else 0.0
        return dataclasses.replace(self, values=self.values[:number], masses=masses)

    def drawn_by_size(self) -> "_Numbers":
        """Return the distribution under which large numbers are more likely."""
        return dataclasses.replace(self, masses=self.masses * self.values)

    def transform(self) -> NDArray[np.complex128]:
        """Return the Fourier transform over the grid for sums."""
        return np.fft.rfft(self.masses, self.cells)

    def sums(self, batches: int) -> _Array:
        """Return the values of sums on the grid."""
        least: float = batches * self.values[0]
        sums: _Array = least + self.step * np.arange(self.cells, dtype=np.float64)
        return sums

    def mass_of_sums_beyond(self, batches: int, deviation: float) -> float:
        """Return a bound, by Chernoff, on the mass under P of sums above the grid."""
        reach = self.values - self.values[0]
        width = self.step * self.cells
        most = max(128 / width, 20 / (deviation * math.sqrt(batches)))
        most = min(most, 600 / reach[-1])
        bounds = [0.0]
        for rate in np.geomspace(min(4 / width, most), most, 8):
            raised = self.masses * np.exp(rate * reach)
            of_drawn = math.log(float((raised * self.values).sum()))
            of_others = math.log(float(raised.sum()))
            bounds.append(of_drawn + (batches - 1) * of_others - rate * width)
        return math.exp(min(bounds))


def _loss(losses: _Array, masses: _Array, unbounded: float) -> _Loss:
    """Return losses, which are in ascending order, without those of hardly any mass."""
    kept = masses > _NO_MASS
    unbounded += float(masses[~kept & (masses > 0)].sum())
    losses, masses = losses[kept], masses[kept]
    first = int(np.searchsorted(np.cumsum(masses), _FAR_MASS))
    losses = np.maximum(losses, losses[min(first, len(losses) - 1)])
    return _Loss(losses, masses, max(0.0, unbounded))


def _roundoff(
    others: NDArray[np.complex128],
    drawn: NDArray[np.complex128],
    batches: int,
    masses: _Array,
) -> float:
    """Return how much mass rounding may have moved.

    Each entry of a transform has an error of the unit roundoff times the logarithm of
    their number.
    """
    cells = len(masses)
    slope = batches * np.abs(others) ** (batches - 2) * np.abs(drawn)
    # Parseval's theorem; a real transform has half of the entries.
    moved = math.sqrt(2 * float((slope**2).sum()))
    moved += math.sqrt(cells * float((masses**2).sum()))
    return _UNIT_ROUNDOFF * math.log2(cells) * moved


def _widest(batches: int, z: float) -> float:
    """Return a width of cells that adds little to the variance of numbers and losses.

    Spreading the mass of a cell adds up to a quarter of its squared width, a sixth if
    it is even, to the variance of a number; the loss is that of a sum around its mean.
    """
    of_number = math.sqrt(6 * _MOST_SPREAD) * _deviation(z)
    of_loss = math.sqrt(6 * _MOST_SPREAD_OF_LOSS * batches)
    return min(of_number, 0.4 * of_loss)


def _number(normal: float, z: float) -> float:
    """Return an X for its normal g."""
    return math.exp(normal / z - 1 / (2 * z**2))


def _normal(values: _Array, z: float) -> _Array:
    """Return the g of an X."""
    return z * np.log(values) + 1 / (2 * z)


def _deviation(z: float) -> float:
    """Return the standard deviation of an X."""
    return math.sqrt(math.expm1(1 / z**2))


def _normal_masses(edges: _Array) -> _Array:
    """Return the normal distribution's mass between edges, exact in both tails."""
    below, above = np.diff(special.ndtr(edges)), -np.diff(special.ndtr(-edges))
    masses: _Array = np.where(edges[1:] > 0, above, below)
    return masses
