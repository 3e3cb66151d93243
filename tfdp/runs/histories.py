"""Where the values of variables come from: which trainings made them, read live."""

import dataclasses
import itertools
import weakref
import zlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdp._types import Variable
from tfdp.accounting.runs import Run, Runs, union


class Counter(Protocol):
    """Counts trainings."""

    @property
    def runs(self) -> dict[str, Run]:
        """What it has counted up to now, and what it has loaded."""
        ...

    @property
    def steps(self) -> int:
        """How many steps those are."""
        ...


@dataclasses.dataclass(eq=False)
class Snapshot:
    """Trainings up to some moment, which went into values that were copied then.

    Args:
        runs: By name.
    """

    runs: dict[str, Run]

    @property
    def steps(self) -> int:
        """How many steps they had taken."""
        return sum(run.steps for run in self.runs.values())


_numbers = itertools.count()


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
        number: Histories of a process are numbered in their order.
        plain_steps: Steps without privacy that have changed the values, by optimizers that
            are gone.
    """

    def __init__(self, counter: Counter | None = None) -> None:
        """Begin without sources."""
        self.counter = counter
        self.number = next(_numbers)
        self.plain_steps = 0
        # A dict in place of a set: the order of a ledger is that of the calls.
        self.sources: dict[History, None] = {}

    def depend_on(self, *others: "History") -> None:
        """Add sources."""
        self.sources.update(dict.fromkeys(others))


def counters_of(histories: Iterable[History]) -> list[Counter]:
    """Return the counters of all trainings that some histories depend on, in order."""
    reached = dict.fromkeys(histories)
    to_see = list(reached)
    while to_see:
        for source in to_see.pop().sources:
            if source not in reached:
                reached[source] = None
                to_see.append(source)
    in_order = sorted(reached, key=lambda history: history.number)
    return [each.counter for each in in_order if each.counter is not None]


def runs_of(histories: Iterable[History]) -> dict[str, Run]:
    """Return what all trainings that some histories depend on have run up to now."""
    return union(*(counter.runs for counter in counters_of(histories)))


# The variables that have a history, by `id`: Keras's variables have no hash. The history
# itself is an attribute of the variable, so that it goes when the variable goes.
_variables: "weakref.WeakValueDictionary[int, Variable]" = weakref.WeakValueDictionary()
_HISTORY = "_tfdp_history"


def history_of(variable: Variable) -> History:
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
        _variables[id(variable)] = variable
    return history


def note_plain_steps(variables: Iterable[Variable], steps: int) -> None:
    """Remember steps without privacy when the optimizer that took them goes.

    Args:
        variables: Keras variables, which it has trained.
        steps: How many there were in all.
    """
    for variable in variables:
        history = history_of(variable)
        history.plain_steps = max(history.plain_steps, steps)


def noted_plain_steps(variables: Iterable[Variable]) -> int:
    """Return the most that `note_plain_steps` was told of any of them."""
    return max((history_of(variable).plain_steps for variable in variables), default=0)


def was_trained(variable: Variable) -> bool:
    """Tell whether private steps have made the values of a variable."""
    return any(counter.steps for counter in counters_of([history_of(variable)]))


def note_steps(variables: Iterable[Variable], training: History, run: str) -> None:
    """Let variables depend on a training that changes them, and the other way round.

    Args:
        variables: Keras variables.
        training: Its history.
        run: Its name.
    """
    _names.add(run)
    for variable in variables:
        history = history_of(variable)
        # Not once a training has made the values: they must be recognised elsewhere.
        if not any(source.counter for source in history.sources):
            _note_start(variable)
        history.depend_on(training)
        training.depend_on(history)


# For each model all of its weights together, which the gradients of some depend on.
_of_models: "weakref.WeakKeyDictionary[keras.Model, History]" = (
    weakref.WeakKeyDictionary()
)


def note_reads(model: keras.Model) -> None:
    """Let what trains in a model depend on all of its weights, which gradients read."""
    together = _of_models.setdefault(model, History())
    together.depend_on(*map(history_of, model.weights))
    for variable in model.trainable_variables:
        history_of(variable).depend_on(together)


def note_makers(variables: Iterable[Variable | None], runs: Runs) -> None:
    """Let variables depend on runs that made the values which were copied into them.

    Args:
        variables: Keras variables; None in place of those that are gone.
        runs: By name, as they were when the values were copied.
    """
    if runs:
        copied = History(Snapshot(dict(runs)))
        for variable in variables:
            if variable is not None:
                history_of(variable).depend_on(copied)


def note_copy(original: Variable, copy: Variable) -> None:
    """Let a copy of a variable depend on all that the original depends on by now."""
    note_makers([copy], runs_of([history_of(original)]))


# What made values that variables once had, by a digest of the values: a copy may be
# made at the end of an epoch and wrapped when the original is gone. Trainings with
# the same seeds make the same values. The oldest are forgotten first.
_known_values: dict[Hashable, list[dict[str, Run]]] = {}
_MOST_VALUES = 100_000

# Names of all trainings of which something is known here.
_names: set[str] = set()

# Values that variables began with: others may begin with them, too.
_starts: dict[Hashable, None] = {}


def _note_start(variable: Variable) -> None:
    _starts[_digest(_value(variable))] = None
    _forget_oldest(_starts)


def _forget_oldest(values: dict[Hashable, Any]) -> None:
    while len(values) > _MOST_VALUES:
        del values[next(iter(values))]


def remember_values(variables: Iterable[Variable]) -> None:
    """Recognise later copies of the values that trainings have given to variables."""
    runs_of_sources: dict[frozenset[History], dict[str, Run]] = {}
    for variable in variables:
        history = history_of(variable)
        sources = frozenset(history.sources)
        if sources not in runs_of_sources:
            runs_of_sources[sources] = runs_of([history])
        runs = runs_of_sources[sources]
        if runs:
            _names.update(runs)
            makers = _known_values.setdefault(_digest(_value(variable)), [])
            makers[:] = [each for each in makers if each.keys() != runs.keys()]
            makers.append(runs)
    _forget_oldest(_known_values)


def recognise_copies(variables: Iterable[Variable]) -> bool:
    """Let variables whose values were copied from trained ones depend on the same.

    Values that tell nothing are those that variables began with, zeros and ones.

    Args:
        variables: Keras variables.

    Returns:
        Whether there were any.
    """
    trained = _Trained()
    found = False
    for variable in variables:
        known = trained.runs_of(variable)
        value = _value(variable)
        digest = _digest(value)
        makers = _known_values.get(digest, [])
        is_explained = any(_cover(known, each) for each in makers)
        if is_explained or digest in _starts or not np.any(value) or np.all(value == 1):
            continue
        runs = union(*makers[:1], *trained.equal_to(variable, value))
        if not _cover(known, runs):
            note_makers([variable], runs)
            found = True
    return found


def _cover(known: Runs, runs: Runs) -> bool:
    """Tell whether all that has run is known, as far as it had come."""
    return all(
        name in known and known[name].extent >= run.extent for name, run in runs.items()
    )


def rename_runs(names: Mapping[str, Runs]) -> None:
    """Let values come from other runs than they did.

    Args:
        names: What counts in place of a run, by the name of that run.
    """
    for makers in _known_values.values():
        makers[:] = [
            union(*(names.get(name, {name: run}) for name, run in runs.items()))
            for runs in makers
        ]


def know(runs: Runs) -> None:
    """Note that there were trainings from which values could come."""
    _names.update(runs)


def is_only_run(run: str) -> bool:
    """Tell whether there was no other training here, from which values could come."""
    return _names <= {run}


def glimpse(variables: list[Variable]) -> list[float]:
    """Look at a number of each variable, which is another when its values were set."""
    filled = [each for each in variables if all(each.shape)]
    return [float(tf.reshape(each.value, [-1])[0]) for each in filled]


class _Trained:
    """The trained variables that are alive, and what made each of them."""

    def __init__(self) -> None:
        self._runs: dict[Counter, dict[str, Run]] = {}
        self._variables = [
            variable
            for variable in list(_variables.values())
            if history_of(variable).sources
        ]

    def runs_of(self, variable: Variable) -> dict[str, Run]:
        """Return what made the values of a variable, each training asked once."""
        counters = counters_of([history_of(variable)])
        for counter in counters:
            if counter not in self._runs:
                self._runs[counter] = counter.runs
        return union(*(self._runs[counter] for counter in counters))

    def equal_to(self, variable: Variable, value: np.ndarray) -> list[dict[str, Run]]:
        """Return what made other variables that have the same value."""
        return [
            self.runs_of(other)
            for other in self._variables
            if other is not variable
            and tuple(other.shape) == tuple(variable.shape)
            and np.array_equal(_value(other), value)
        ]


def _value(variable: Variable) -> np.ndarray:
    """Look at a value, without a copy of it: on a CPU it is the variable's own memory."""
    return np.asarray(tf.convert_to_tensor(variable.value))


def _digest(value: np.ndarray) -> tuple[str, int, int]:
    """Tell values from others, at the speed of memory: nobody here is an adversary."""
    octets = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = octets[: octets.size - octets.size % 8].view(np.uint64)
    # The sum wraps around. Neither of the two alone has bits enough for many values.
    total = int(np.add.reduce(words, dtype=np.uint64))
    return f"{value.dtype} {value.shape}", zlib.crc32(octets.data), total
