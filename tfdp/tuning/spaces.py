"""Where the settings of tries come from: public, and drawn uniformly."""

import abc
import itertools
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]
Grid: TypeAlias = Mapping[str, Sequence[Any]]
Sampler: TypeAlias = Callable[[random.Random], Settings]

_random = secrets.SystemRandom()


class Space(abc.ABC):
    """The settings that a try may have."""

    @abc.abstractmethod
    def draw(self) -> Settings:
        """Draw settings, by the operating system's randomness."""

    @abc.abstractmethod
    def to_plan(self, drawn: Sequence[Settings]) -> list[Settings]:
        """Return the settings whose cost is looked at before anything is trained.

        Args:
            drawn: Those of all tries.
        """

    @property
    @abc.abstractmethod
    def has_one_plan(self) -> bool:
        """Whether all settings must cost the same, because not all can be looked at."""


class _GridSpace(Space):
    """All combinations of listed values."""

    def __init__(self, grid: Grid) -> None:
        given: Mapping[Any, Any] = grid
        for name, values in given.items():
            is_list = isinstance(values, Sequence) and not isinstance(values, str)
            if not (isinstance(name, str) and is_list and values):
                raise ValueError(
                    "`space` must have a list of values for each name. Received: "
                    f"{name!r}: {values!r}. Use `{{'learning_rate': [0.1, 0.3]}}`."
                )
        self._all = [
            dict(zip(grid, values, strict=True))
            for values in itertools.product(*grid.values())
        ]

    def draw(self) -> Settings:
        return dict(_random.choice(self._all))

    def to_plan(self, drawn: Sequence[Settings]) -> list[Settings]:
        del drawn
        return [dict(each) for each in self._all]

    @property
    def has_one_plan(self) -> bool:
        return False


class _SampledSpace(Space):
    """What a function draws."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draw(self) -> Settings:
        settings = self._sampler(_random)
        if not isinstance(settings, dict):
            raise TypeError(
                "`space` must return a dictionary of settings. Received: "
                f"{settings!r}. Use `lambda random: "
                "{'learning_rate': 10 ** random.uniform(-2, 0)}`."
            )
        return dict(settings)

    def to_plan(self, drawn: Sequence[Settings]) -> list[Settings]:
        return [self.draw(), *map(dict, drawn)]

    @property
    def has_one_plan(self) -> bool:
        return True


def space_of(space: Grid | Sampler) -> Space:
    """Return what draws settings.

    Args:
        space: A dictionary of lists, or a function that draws.

    Raises:
        TypeError: If it is something else.
        ValueError: If a list is empty or none.
    """
    if isinstance(space, Mapping):
        return _GridSpace(space)
    if callable(space):
        return _SampledSpace(space)
    raise TypeError(
        "`space` must be a dictionary of lists, or a function of a `random.Random`. "
        f"Received: space={space!r}. Use `space={{'learning_rate': [0.1, 0.3]}}`."
    )
