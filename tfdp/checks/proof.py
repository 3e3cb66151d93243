"""Finds out what an engine must know of a model for rows to be proven to stay apart."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tfdp import _seeds, engines
from tfdp._types import Nest, Tensor
from tfdp.checks.following import problems_of_pass, with_known_losses
from tfdp.checks.tracing import Trace
from tfdp.engines.traced import TracedPass
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.added import AddedLossError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.rules.own_gradients import OwnGradientsError
from tfdp.rules.unrolling import NotUnrolledError


def proven_engine(
    engine: engines.Engine,
    objective: Objective,
    data: Nest,
    sizes: Sequence[int | None],
    passes: list[TracedPass] | None,
) -> engines.Engine:
    """Return an engine for which rows are proven not to meet in what it reads.

    It knows where they lie, if that is not on the first axis alone.

    Args:
        engine: What is tried first.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, of which shapes and dtypes are read.
        sizes: How many rows to prove it for, each None for any number.
        passes: See `tfdp.checks.engine.choose`; for as many rows as the last size.

    Returns:
        `engine`, or one that knows more.

    Raises:
        UnsupportedLayerError: If that is not proven.
    """
    traced: list[TracedPass] = []
    problems = []
    traces = [Trace(objective.model) for _ in sizes]
    # The pass for as many rows as layers see is kept.
    rows_that_run = sizes[-1]
    try:
        for trace, rows in zip(traces, sizes, strict=True):
            whole = traced if passes is not None and rows == rows_that_run else None
            problems += problems_of_pass(
                engine, objective, data, rows, whole, trace=trace
            )
        failure = UnsupportedLayerError(str(problems[0])) if problems else None
    except UnsupportedLayerError as error:
        failure = error
    if failure is None:
        if passes is not None:
            passes += traced
        return engine
    if isinstance(failure, (NotUnrolledError, OwnGradientsError)):
        # Who asked for loops step by step goes on without; gradients are taken anyway.
        raise failure
    other = None
    if isinstance(engine, engines.BookkeepingEngine):
        # Uphill, gradients are joined with all else before they are looked at.
        is_of_gradients = all(each.is_of_gradients for each in problems)
        has_loop = any(trace.has_loop for trace in traces)
        if has_loop and engine.unrolls_loops is None:
            step_by_step = dataclasses.replace(engine, unrolls_loops=True)
            try:
                return proven_engine(step_by_step, objective, data, sizes, passes)
            except NotUnrolledError:
                engine = dataclasses.replace(engine, unrolls_loops=False)
        other = _that_knows_more(
            engine,
            objective,
            data,
            looks_for_places=is_of_gradients or objective.ascent is not None,
            has_split=any(trace.has_split for trace in traces),
        )
    if other is None:
        raise failure
    with (
        _after(failure)
        if _no_longer_splits(engine, other)
        else contextlib.nullcontext()
    ):
        return proven_engine(other, objective, data, sizes, passes)


def _no_longer_splits(engine: engines.Engine, other: engines.Engine) -> bool:
    """Tell whether the other engine asks for losses of each row alone, and this not."""
    splits = [getattr(each, "splits_losses", False) for each in (engine, other)]
    return splits == [True, False]


@contextlib.contextmanager
def _after(failure: UnsupportedLayerError) -> Iterator[None]:
    """Put before an error inside what failed where a loss was asked for all rows.

    Args:
        failure: What has.

    Raises:
        AddedLossError: As it is, for those who know it by its type.
        NotUnrolledError: Likewise.
        UnsupportedLayerError: Both, of another one.
    """
    try:
        yield
    except (AddedLossError, NotUnrolledError):
        raise
    except UnsupportedLayerError as error:
        raise UnsupportedLayerError(f"{failure} Of each row alone: {error}") from error


def _that_knows_more(
    engine: engines.BookkeepingEngine,
    objective: Objective,
    data: Nest,
    *,
    looks_for_places: bool,
    has_split: bool,
) -> engines.BookkeepingEngine | None:
    """Return what to try where nothing was proven for an engine; None if that was all."""
    other = _with_places(engine, objective, data) if looks_for_places else None
    if other is None and has_split:
        # Of each row alone a loss needs no proof.
        other = dataclasses.replace(engine, splits_losses=False)
    if other is None and engine.follows_leaves:
        # With the rules of leaves, and all that was known without.
        other = dataclasses.replace(
            engine,
            places=(),
            splits_losses=True,
            follows_leaves=False,
            unrolls_loops=None,
        )
    return other


def _with_places(
    engine: engines.BookkeepingEngine, objective: Objective, data: Nest
) -> engines.BookkeepingEngine | None:
    """Return an engine that knows more of where rows lie in calls and uses.

    Returns:
        None if there is nothing more to know, or it need not.
    """
    if isinstance(engine, engines.ApartEngine):
        return None
    trace = Trace(objective.model)
    # Uphill they lie where they lie here.
    here = dataclasses.replace(objective, ascent=None)
    traced = with_known_losses(here, trace)

    def run(x: Nest, y: Nest, sample_weight: Nest, is_padding: Tensor) -> Nest:
        batch = Batch(x, y, sample_weight, is_padding)
        with _seeds.secret_seeds(objective.model):
            try:
                return engine.recorded(traced, batch, 1).losses
            # What could not be recorded then may be with what is noted.
            except UnsupportedLayerError:
                return is_padding

    known = dict(engine.places)
    # Variables of a call whose rule gives it up are followed next time.
    places = known | trace.places(run, Batch(*data).signature())
    if places == known:
        return None
    return dataclasses.replace(engine, places=tuple(places.items()))
