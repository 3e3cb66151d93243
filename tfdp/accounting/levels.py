"""A few noise multipliers that stand for many, on the safe side."""

from typing import Any

import numpy as np

# Accountants take up to half a second for each noise multiplier of a segment.
_MOST_LEVELS = 32


def noise_levels(noise_multipliers: np.ndarray) -> np.ndarray:
    """Choose the noise multipliers to account with, where many are planned.

    Args:
        noise_multipliers: Positive numbers, shape ``(steps,)``.

    Returns:
        Some of them in rising order, the least one among them: all different ones,
        or, of more than 32, the least one in each of 32 bins of equal ratio.

    Example:
        >>> noise_levels(np.array([2.0, 1.0, 2.0]))
        array([1., 2.])
    """
    values = np.unique(noise_multipliers)
    if len(values) <= _MOST_LEVELS:
        return values
    places = np.log(values / values[0]) / np.log(values[-1] / values[0])
    bins = np.minimum(places * _MOST_LEVELS, _MOST_LEVELS - 1).astype(int)
    return values[np.unique(bins, return_index=True)[1]]


def lowered(noise_multipliers: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Replace each number by the greatest level that does not exceed it, if any.

    Args:
        noise_multipliers: Numbers, shape ``(steps,)``.
        levels: What `noise_levels` returned.

    Returns:
        The levels, shape ``(steps,)``.

    Example:
        >>> lowered(np.array([1.5, 2.0]), np.array([1.0, 2.0]))
        array([1., 2.])
    """
    places = np.searchsorted(levels, noise_multipliers, side="right")
    return np.where(places > 0, levels[places - 1], noise_multipliers)


def folded(noise_multiplier: Any, query_noise_multiplier: Any) -> Any:
    """Return the noise multiplier of two releases of one draw taken together.

    Both are Gaussian, so one vector of both, each part measured by its own noise,
    has the squared sensitivity ``1 / z**2 + 1 / z_query**2``.

    Args:
        noise_multiplier: Noise over sensitivity of one release, a number, array or
            tensor.
        query_noise_multiplier: That of the other.

    Returns:
        The noise multiplier to account with, like the arguments.

    Example:
        >>> round(folded(1.0, 10.0), 4)
        0.995
    """
    return (noise_multiplier**-2.0 + query_noise_multiplier**-2.0) ** -0.5
