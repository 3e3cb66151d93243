"""Metrics and losses that keep data in variables of metrics alone, which no model has in it."""

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Variable
from tfdp.checks.changes import Changes, changes_inside, paths_by_handle
from tfdp.errors import UnsupportedLayerError

# In place of the name of a variable that is neither the model's nor the optimizer's.
_UNKNOWN = ""


@contextlib.contextmanager
def only_metrics_assigned(model: keras.Model) -> Iterator[None]:
    """Refuse that metrics which are computed inside keep data in anything but themselves.

    They see rows without noise. In a weight these would be released, in an optimizer's
    dial they would steer it, and what a layer or a loss reads would let rows meet those of
    later steps.

    In a graph every operation inside is looked at, and what it calls. Eagerly the values of
    the model's and the optimizer's variables are compared: other variables are not seen.

    Args:
        model: A compiled `tfdp.DPModel`.

    Raises:
        UnsupportedLayerError: Afterwards, if anything else was assigned. Eagerly it has
            its value from before again. Also if a metric has a variable of the model or
            the optimizer as an attribute, which Keras takes for the metric's.
    """
    with changes_inside(_variables(model)) as changes:
        yield
    own, known = _own(model), paths_by_handle(_variables(model))
    _refuse(
        changes,
        model,
        lambda handle: None if handle in own else known.get(handle, _UNKNOWN),
    )


@contextlib.contextmanager
def only_metrics_called(model: keras.Model, method: str) -> Iterator[None]:
    """As `only_metrics_assigned`, while Keras calls a method of all metrics eagerly."""
    _own(model)
    are_kerass = all(
        getattr(metric, method).__module__.startswith("keras.")
        for metric in _metrics(model)
    )
    is_known = are_kerass or not tf.executing_eagerly()
    with contextlib.nullcontext() if is_known else only_metrics_assigned(model):
        yield


@contextlib.contextmanager
def losses_keep_nothing(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Refuse that a loss which is computed for logs keeps data in a weight or a dial.

    What it counts in other variables of the model has its value from before again: the
    step counts it, and what it keeps there is proven to be of no row. So are its own
    variables, in training.

    Args:
        model: See `only_metrics_assigned`.
        training: Whether it is computed after a step. In evaluation it may assign no
            variables of its own either, which a step may read; eagerly they are not seen.

    Raises:
        UnsupportedLayerError: Afterwards, if a weight or a dial was assigned.
    """
    seeds = _keras.seed_states(model)
    drawn = set(map(id, seeds))
    states = [v for v in model.non_trainable_variables if id(v) not in drawn]
    others = {id(each) for each in (*states, *seeds)}
    of_seeds = {
        *paths_by_handle(seeds),
        *map(id, _keras.handles_of(_keras.global_seed_state())),
    }
    before = [tf.identity(state.value) for state in states]
    with changes_inside(_variables(model)) as changes:
        yield
    known = paths_by_handle(
        each for each in _variables(model) if id(each) not in others
    )
    may_change = _own(model) | paths_by_handle(states).keys()

    def name_of(handle: int) -> str | None:
        if handle in of_seeds:
            return _UNKNOWN
        if handle in known or training or handle in may_change:
            return known.get(handle)
        return _UNKNOWN

    _refuse(changes, model, name_of)
    for state, value in zip(states, before, strict=True):
        if changes.has(state):
            state.assign(value)


def _refuse(
    changes: Changes, model: keras.Model, name_of: Callable[[int], str | None]
) -> None:
    """Raise if something was assigned that may not be.

    Args:
        changes: What was assigned.
        model: For the message.
        name_of: Takes a handle; returns None where it may be assigned, else its name,
            or `_UNKNOWN`, which may be drawn with.

    Raises:
        UnsupportedLayerError: If it was.
    """
    for handle, words in changes.words.items():
        name = name_of(handle)
        if name is None or (name == _UNKNOWN and handle in changes.drawn):
            continue
        changes.undo()
        raise UnsupportedLayerError(
            f"Metrics and losses of model `{model.name}` must keep what they see of "
            "rows, without noise, in variables of metrics alone. Received: "
            f"{name or words}, assigned by one. Make variables with "
            "`self.add_variable(...)` in the `__init__` of a metric, and assign no "
            "others; keep in a loss nothing of what it is computed for; and draw random "
            "numbers as often as no data say."
        )


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """List all metrics, those that Keras has put into one for `compile` behind it."""
    metrics = [*model.metrics, *_keras.metrics_of(model.model)]
    return [
        *metrics,
        *(part for each in metrics for part in getattr(each, "metrics", ())),
    ]


def _own(model: keras.Model) -> set[int]:
    """Identify the handles that metrics may assign to.

    Args:
        model: See `only_metrics_assigned`.

    Returns:
        The `id` of each.

    Raises:
        UnsupportedLayerError: If a metric has a variable that is not its own.
    """
    _keras.note_metrics(model)
    others = paths_by_handle(_variables(model))
    for metric in reversed(_metrics(model)):
        for variable in metric.variables:
            if not others.keys().isdisjoint(paths_by_handle([variable])):
                raise UnsupportedLayerError(
                    "A metric must not have a variable of the model or the optimizer as an "
                    "attribute: Keras takes it for the metric's own, and sets it to zero. "
                    f"Received: metric `{metric.name}` with `{variable.path}`. Hold it in "
                    "a function, `self.value = lambda: optimizer.learning_rate`."
                )
    return set(map(id, _keras.metrics_handles(model)))


def _variables(model: keras.Model) -> list[Variable]:
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer else ())]
