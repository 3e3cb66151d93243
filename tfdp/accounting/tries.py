"""Laws of the secret number of tries of a private search."""

import abc
import dataclasses
import math
import secrets
from collections.abc import Iterator
from typing import Any, ClassVar

from tfdp import _validate

# What is less likely than this, beyond the mean, is not drawn.
_NEVER = 1e-18

_random = secrets.SystemRandom()


class Tries(abc.ABC):
    """How many times a private search trains: a number that is drawn, and stays secret.

    A fixed number would cost as much as all of the trainings together; a random one that
    nobody learns costs little more than two of them, however large its mean [1]_.

    Attributes:
        name: In files.
        mean: Of the number.
        shape: As dp_accounting has it: 1 for geometric, infinite for Poisson.

    References:
        .. [1] Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential
           Privacy", ICLR 2022. https://arxiv.org/abs/2110.03620
    """

    name: ClassVar[str]
    mean: float
    shape: float

    def __post_init__(self) -> None:
        """Check the mean."""
        mean = _validate.positive("mean", self.mean)
        if mean < 1:
            raise ValueError(
                "`mean` must be at least 1: of fewer tries nothing is proven. Received: "
                f"mean={self.mean!r}. Use `mean=1`, or train without a search."
            )
        object.__setattr__(self, "mean", mean)

    @abc.abstractmethod
    def law(self) -> Iterator[tuple[int, float]]:
        """Yield the numbers in rising order, each with its probability, without end."""

    def draw(self) -> int:
        """Draw a number, by the operating system's randomness.

        Returns:
            The number of tries. Its law is exact up to rounding, about 1e-15. It is a
            secret: who learns it, or anything that tells of it, has learned more than
            the search accounts for.
        """
        level = _random.random()
        number = 0
        for number, chance in self.law():
            level -= chance
            if level < 0 or (chance < _NEVER and number > self.mean):
                break
        return number

    def to_dict(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {"law": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @abc.abstractmethod
    def words(self) -> str:
        """Say which law it is."""


@dataclasses.dataclass(frozen=True)
class Geometric(Tries):
    """After each try another one follows with the same probability: 1, 2, 3, ...

    Args:
        mean: Of the number of tries, at least 1.

    Raises:
        TypeError: If `mean` is no number.
        ValueError: If it is below 1 or not finite.

    Example:
        >>> tries = Geometric(mean=10)
        >>> [round(chance, 3) for (_, chance), _ in zip(tries.law(), range(3))]
        [0.1, 0.09, 0.081]
    """

    name: ClassVar[str] = "geometric"
    shape = 1.0

    mean: float

    def law(self) -> Iterator[tuple[int, float]]:
        """Yield the numbers from 1 on, each with its probability."""
        return TruncatedNegativeBinomial(self.shape, self.mean).law()

    def words(self) -> str:
        """Say which law it is."""
        return f"geometric with mean {self.mean:g}"


@dataclasses.dataclass(frozen=True)
class Poisson(Tries):
    """Concentrated about its mean: seldom far more tries than one has time for.

    The number may be 0, with probability ``exp(-mean)``. Then nothing is trained and
    nothing leaves the search, which costs the same.

    Args:
        mean: Of the number of tries, at least 1.

    Raises:
        TypeError: If `mean` is no number.
        ValueError: If it is below 1 or not finite.

    Example:
        >>> tries = Poisson(mean=2)
        >>> [round(chance, 3) for (_, chance), _ in zip(tries.law(), range(3))]
        [0.135, 0.271, 0.271]
    """

    name: ClassVar[str] = "poisson"
    # The limit of shapes that grow.
    shape = math.inf

    mean: float

    def law(self) -> Iterator[tuple[int, float]]:
        """Yield the numbers from 0 on, each with its probability."""
        number, log_chance = 0, -self.mean
        while True:
            yield number, math.exp(log_chance)
            number += 1
            log_chance += math.log(self.mean / number)

    def words(self) -> str:
        """Say which law it is."""
        return f"Poisson with mean {self.mean:g}"


@dataclasses.dataclass(frozen=True)
class TruncatedNegativeBinomial(Tries):
    """A family of laws on 1, 2, 3, ...: the smaller its shape, the less a search costs.

    ``shape=1`` is `Geometric`; ``shape=0`` is the logarithmic law, of which most numbers
    are small and some very large.

    Args:
        shape: At least 0, and finite.
        mean: Of the number of tries, at least 1.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If one is out of its range or not finite.

    Example:
        >>> tries = TruncatedNegativeBinomial(shape=0.0, mean=10)
        >>> [round(chance, 3) for (_, chance), _ in zip(tries.law(), range(3))]
        [0.269, 0.131, 0.085]
    """

    name: ClassVar[str] = "truncated_negative_binomial"

    shape: float
    mean: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        shape = _validate.non_negative("shape", self.shape)
        object.__setattr__(self, "shape", shape)
        super().__post_init__()

    def law(self) -> Iterator[tuple[int, float]]:
        """Yield the numbers from 1 on, each with its probability.

        Definition 1 of Papernot and Steinke, with gamma their parameter.
        """
        shape, gamma = self.shape, self._gamma()
        if gamma >= 1:
            yield 1, 1.0
            return
        log_gamma, log_other = math.log(gamma), math.log1p(-gamma)
        # The logarithm of (gamma**-shape - 1) / shape, -log(gamma) where shape is 0.
        power = -shape * log_gamma
        log_scale = math.log(-log_gamma)
        if power > 0:
            log_scale = power + math.log(-math.expm1(-power)) - math.log(shape)
        number, log_chance = 1, log_other - log_scale
        while True:
            yield number, math.exp(log_chance)
            log_chance += log_other + math.log((number + shape) / (number + 1))
            number += 1

    def words(self) -> str:
        """Say which law it is."""
        law = "truncated negative binomial"
        return f"{law} with shape {self.shape:g} and mean {self.mean:g}"

    def _gamma(self) -> float:
        """Return the gamma of the law, at least as large as that of the mean."""
        if self.shape == 1 or self.mean == 1:
            return 1 / self.mean
        low, high = 0.0, 1.0
        while low < (middle := (low + high) / 2) < high:
            if self._mean_of(middle) > self.mean:
                low = middle
            else:
                high = middle
        return high

    def _mean_of(self, gamma: float) -> float:
        log_gamma = math.log(gamma)
        power = self.shape * log_gamma
        share = -log_gamma if power == 0 else -math.expm1(power) / self.shape
        return (1 / gamma - 1) / share


_LAWS: dict[str, type[Tries]] = {
    each.name: each for each in (Geometric, Poisson, TruncatedNegativeBinomial)
}


def tries_from_dict(fields: dict[str, Any]) -> Tries:
    """Return the law that `Tries.to_dict` described.

    Args:
        fields: As it returned them.

    Returns:
        A law equal to the one described.

    Raises:
        ValueError: If the law is unknown, or a field is missing, unknown or wrong.
    """
    arguments = dict(fields)
    name = arguments.pop("law", None)
    if name not in _LAWS:
        raise ValueError(
            f"The law of a search must be one of {', '.join(map(repr, _LAWS))}. "
            f"Received: law={name!r}."
        )
    try:
        return _LAWS[name](**arguments)
    except TypeError as error:
        raise ValueError(
            f"The law {name!r} cannot have these fields. Received: {arguments!r}. "
            f"{error}"
        ) from error
