"""Where the values of variables come from: which trainings made them, read live."""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import keras
import numpy as np

from tfdp.accounting.runs import Run, Runs, union


class Counter(Protocol):
    """Counts a training."""

    @property
    def runs(self) -> dict[str, Run]:
        """What it has counted up to now, and what it has loaded."""
        ...

    @property
    def steps(self) -> int:
        """How many steps those are."""
        ...


class History:
    """What the values of a variable, or those that a training makes, come from.

    A training reads all the weights of its model, so what it makes depends on all that
    made those, also where it leaves them as they are. Histories refer to each other
    instead of holding what was counted: an answer is never behind.

    Args:
        counter: Of the training; None for that of a variable.

    Attributes:
        counter: As given.
        sources: Histories that this one depends on.
        bound_by: Of a variable, the histories of trainings whose budget has to cover
            all steps that change it.
    """

    def __init__(self, counter: Counter | None = None) -> None:
        """Begin without sources."""
        self.counter = counter
        # Dicts in place of sets: the order of ledgers is that of the calls.
        self.sources: dict[History, None] = {}
        self.bound_by: dict[History, None] = {}

    def depend_on(self, *others: "History") -> None:
        """Add sources."""
        self.sources.update(dict.fromkeys(others))

    def counters(self) -> list[Counter]:
        """Return the counters of all trainings that this history depends on."""
        reached: dict[History, None] = {self: None}
        to_see = [self]
        while to_see:
            for source in to_see.pop().sources:
                if source not in reached:
                    reached[source] = None
                    to_see.append(source)
        return [each.counter for each in reached if each.counter is not None]

    def runs(self) -> dict[str, Run]:
        """Return what all those trainings have run up to now."""
        return union(*(counter.runs for counter in self.counters()))


# The variables that have a history, by `id`: Keras's variables have no hash. The history
# itself is an attribute of the variable, so that it goes when the variable goes.
_variables: dict[int, "weakref.ref[Any]"] = {}
_HISTORY = "_tfdp_history"


def history_of(variable: Any) -> History:
    """Return the history of a Keras variable, always the same one.

    Args:
        variable: May be new.

    Returns:
        Its history; without sources if nothing is known to have changed it.
    """
    history: History | None = getattr(variable, _HISTORY, None)
    if history is None:
        history = History()
        setattr(variable, _HISTORY, history)
        key = id(variable)

        def forget(reference: Any) -> None:
            if _variables.get(key) is reference:
                del _variables[key]

        _variables[key] = weakref.ref(variable, forget)
    return history


def was_trained(variable: Any) -> bool:
    """Tell whether private steps have made the values of a variable."""
    return any(counter.steps for counter in history_of(variable).counters())


def note_steps(variables: Iterable[Any], training: History) -> None:
    """Let variables depend on a training that changes them, and the other way round."""
    for variable in variables:
        history = history_of(variable)
        history.depend_on(training)
        training.depend_on(history)


def note_reads(changed: Iterable[Any], read: Iterable[Any]) -> None:
    """Let variables that a gradient is for depend on all that it is computed from."""
    together = History()
    together.depend_on(*map(history_of, read))
    for variable in changed:
        history_of(variable).depend_on(together)


def note_copy(original: Any, copy: Any) -> None:
    """Let a copy of a variable depend on all that the original depends on."""
    history_of(copy).depend_on(*history_of(original).sources)


# What made values that variables once had, by a digest of the values: a copy may be
# made at the end of a training and wrapped when the original is gone. Trainings with
# the same seeds make the same values.
_known_values: dict[bytes, list[dict[str, Run]]] = {}


def remember_values(training: History) -> None:
    """Recognise later copies of the values that a training has given to variables."""
    runs = training.runs()
    for variable in _living():
        if training in history_of(variable).sources:
            makers = _known_values.setdefault(_digest(_value(variable)), [])
            makers[:] = [each for each in makers if set(each) != set(runs)] + [runs]


def runs_of_copies(variables: Iterable[Any], known: Runs) -> dict[str, Run]:
    """Find out which variables hold values that were copied from trained ones.

    Initial values that many variables share, zeros and ones, tell nothing.

    Args:
        variables: Keras variables.
        known: Runs that explain what is in them.

    Returns:
        The runs that made the values, none of those in `known`.
    """
    runs_of: dict[Counter, dict[str, Run]] = {}
    living = []
    for variable in _living():
        counters = history_of(variable).counters()
        for counter in counters:
            if counter not in runs_of:
                runs_of[counter] = counter.runs
        runs = union(*(runs_of[counter] for counter in counters))
        if not set(runs) <= set(known):
            living.append((variable, runs))
    remembered = {
        name for makers in _known_values.values() for each in makers for name in each
    }
    if not living and remembered <= set(known):
        return {}
    found: list[dict[str, Run]] = []
    for variable in variables:
        value = _value(variable)
        if not np.any(value) or np.all(value == 1):
            continue
        makers = _known_values.get(_digest(value), [])
        if any(set(each) <= set(known) for each in makers):
            continue
        found += makers[:1]
        found += [
            runs
            for other, runs in living
            if other is not variable
            and tuple(other.shape) == tuple(variable.shape)
            and np.array_equal(_value(other), value)
        ]
    return {name: run for name, run in union(*found).items() if name not in known}


def _living() -> list[Any]:
    """Return the variables that trainings have changed."""
    return [
        variable
        for reference in list(_variables.values())
        if (variable := reference()) is not None and history_of(variable).sources
    ]


def _value(variable: Any) -> np.ndarray:
    value: np.ndarray = keras.ops.convert_to_numpy(variable.value)
    return value


def _digest(value: np.ndarray) -> bytes:
    shape = f"{value.dtype} {value.shape}".encode()
    return hashlib.blake2b(shape + value.tobytes(), digest_size=16).digest()
