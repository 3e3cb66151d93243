"""A search for settings that costs little more than a few trainings."""

import contextlib
import dataclasses
import gc
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras

from tfdp import _validate
from tfdp._keras import names_begin_again
from tfdp._types import Config, Logs, Nest
from tfdp.accounting import BestOf, Ledger, Project, Segment
from tfdp.accounting.accountant import is_known_to_rdp
from tfdp.accounting.projects import project_of
from tfdp.accounting.runs import Run, Runs, ledger_of, union
from tfdp.accounting.tries import Tries
from tfdp.distribute.workers import replicas_of
from tfdp.errors import NotPrivateError
from tfdp.model import DPModel
from tfdp.training.releases import ReleasingCallback, direction_of
from tfdp.tuning.arguments import arguments_of, check_arguments, check_data
from tfdp.tuning.progress import SearchProgress, check_rows
from tfdp.tuning.scores import check_is_released, check_score, value_of
from tfdp.tuning.spaces import Grid, Sampler, Settings, space_of


class PrivateSearch:
    """Trains with settings drawn at random, and lets only the best model out.

    How often it trains is drawn in secret, each time with settings that are drawn
    uniformly, with replacement, from a public space. What leaves is the model of the
    largest score. For that the whole search costs about as much as a few trainings,
    however many there are on average [1]_; `tfdp.accounting.BestOf` says what is
    proven. The cost stands on the model: in its
    ledger, its statements, files and exports, and what is trained later adds to it.

    Each try counts with all that its `fit` planned, and as if it had the dearest settings
    that could have been drawn: which were drawn is as secret as their number. So all
    settings of a grid are built once, up to where training would begin, and those of a
    sampler must all cost the same.

    Guarantees:
        The model that `fit` returns, its `settings` and its `score` are covered by
        ``search.ledger``, and nothing else is written or printed: losers, their logs and
        scores, and the number of tries stay inside. How long a search took tells of that
        number. A search that is cut short, by an error or Ctrl-C, counts as the
        composition of the tries that had begun, and so does one that is killed, if it
        has a `project`, where that is written down.

        Trusted is that `build` and the callbacks keep nothing, and that each
        model begins anew, without `keras.utils.set_random_seed`: whoever knows the seed
        sees in weights that are not trained how many were made before. Names in the
        graph of a SavedModel number what a process has traced: export from another
        process, which loads the saved model.

    Args:
        build: From the settings of a try, a dictionary, to a compiled `tfdp.DPModel`, made
            anew in every call.
        space: A dictionary of lists, all combinations of which are equally likely; or a
            function that draws settings from a secret `random.Random`. It must not depend
            on the private data.
        tries: The law of the number of tries: `Geometric`, `Poisson` (which may be 0;
            then nothing leaves) or `TruncatedNegativeBinomial`. Public.
        score: The metric that decides, by its last value: one that
            `tfdp.callbacks.PrivateEvaluation` releases, ``"private_accuracy"``, so that
            its cost is part of every try; or one of public rows, ``"val_accuracy"`` with
            `fit(public_data=...)`. NaN is worse than any number; of equal ones
            the first try wins.
        delta: Of the guarantee, in (0, 1): what `fit` says in the end, and what it refuses
            an infinite epsilon at.
        mode: ``"max"``, ``"min"``, or ``"auto"``, which goes by the name of the score.
        project: A `tfdp.accounting.Project`, or the path of its file, which must exist:
            the search counts in it, within its budget if it has one.
        verbose: 0 for silence; 1 for a line before and one after.

    Attributes:
        settings: Those of the model that left; None if none has.
        score: The value that it had.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the score is an exact metric of private rows, a number is out
            of its range, or there is no file of the project.

    Example:
        >>> def build(settings):
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     private = tfdp.DPModel(model)
        ...     optimizer = tfdp.optimizers.DPSGD(
        ...         settings["learning_rate"], l2_norm_clip=1.0, noise_multiplier=1.1
        ...     )
        ...     private.compile(optimizer, loss="mse")
        ...     return private
        >>> search = PrivateSearch(
        ...     build,
        ...     space={"learning_rate": [0.03, 0.1, 0.3]},
        ...     tries=tfdp.tuning.Geometric(mean=2),
        ...     score="val_loss",
        ...     delta=1e-3,
        ...     verbose=0,
        ... )
        >>> x, y = np.ones((100, 2)), np.ones((100, 1))
        >>> public = np.ones((9, 2)), np.ones((9, 1))
        >>> best = search.fit(x, y, batch_size=10, epochs=1, public_data=public)
        >>> round(best.epsilon(delta=1e-3), 2), best.ledger == search.ledger
        (2.66, True)

    References:
        .. [1] Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential
           Privacy", ICLR 2022. https://arxiv.org/abs/2110.03620
    """

    def __init__(
        self,
        build: Callable[[Settings], DPModel],
        *,
        space: Grid | Sampler,
        tries: Tries,
        score: str,
        delta: float,
        mode: str = "auto",
        project: Project | str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> None:
        if not callable(build):
            raise TypeError(
                "`build` must be a function of the settings that returns a compiled "
                f"`tfdp.DPModel`. Received: build={build!r}."
            )
        _validate.instance("tries", tries, Tries)
        self._build = build
        self._space = space_of(space)
        self._tries = tries
        check_score(score, has_public_rows=True)
        self._score, self._direction = score, direction_of(score, mode)
        self._delta = _validate.probability("delta", delta)
        self._project = None if project is None else project_of(project)
        self._verbose = verbose
        self.settings: Settings | None = None
        self.score: float | None = None
        # All searches up to now, with what their models came from.
        self._runs: dict[str, Run] = {}

    @property
    def ledger(self) -> Ledger:
        """What all calls of `fit` have cost, with what their models came from.

        Empty before the first. A search that was cut short is in it with all tries that
        had begun; one that runs comes into it when it ends.
        """
        return ledger_of(self._runs)

    def fit(
        self,
        x: Nest = None,
        y: Nest = None,
        *,
        public_data: Nest = None,
        **arguments: Any,
    ) -> DPModel | None:
        """Search, and return the best model.

        Searches before it count for the model, too: use another `PrivateSearch` for other
        data.

        Args:
            x: As in `tfdp.DPModel.fit`, for every try.
            y: Likewise.
            public_data: ``(x, y)`` or ``(x, y, sample_weight)`` that are public: nobody's
                privacy depends on them. They must not be rows of `x`. Tries are evaluated on them after every epoch,
                as on Keras's `validation_data`.
            **arguments: Likewise. Functions are called with the settings of a try:
                ``epochs=lambda settings: settings["epochs"]``. Callbacks remember what
                they have seen, so each try must get its own: ``callbacks=lambda settings:
                [...]``, and so must each dataset that tfdp draws from: ``x=lambda
                settings: tfdp.data.PoissonDataset(...)``.

        Returns:
            The model of the best try, trained; None if the number of tries was 0.

        Raises:
            NotPrivateError: If the models' noise is known or missing.
            PrivacyBudgetError: If the budget of the project has no room for the search.
            TypeError: If `build` returns no private model.
            ValueError: If the arguments contradict each other, a sampler's settings differ
                in what they cost, or a try runs more than its `fit` had planned.
        """
        check_score(self._score, has_public_rows=public_data is not None)
        check_arguments(arguments)
        arguments |= {"x": x, "y": y, "validation_data": public_data}
        self.settings = self.score = None
        # All of them at once: what they cost must be known before any of them is trained.
        drawn = [self._space.draw() for _ in range(self._tries.draw())]
        plans = self._plans(drawn, arguments)
        scheme = BestOf(self._tries, tuple(plan.segments for plan in plans))
        before = union(self._runs, *(plan.before for plan in plans))
        whole = Ledger((scheme.segment(),))
        self._check_cost(whole)
        self._say(
            "A private search: how many tries it has, and how far it is, is secret."
        )
        progress = SearchProgress(scheme, before, self._project)
        try:
            winner = self._best_of(drawn, arguments, progress)
            self._runs = progress.end(winner and winner.recorder)
        except BaseException:
            self._runs = progress.cut_short()
            raise
        self._say(
            f"The search is over: ({self.ledger.epsilon(self._delta):.3f}, "
            f"{self._delta:g})-differentially private, with all of its tries and with what "
            "came before it."
        )
        if winner is None:
            warnings.warn(
                "The number of tries was 0: nothing was trained, and nothing leaves the "
                f"search. Received: tries={self._tries!r}, which is 0 with probability "
                f"{math.exp(-self._tries.mean):.2g}. Search again, or use "
                "`tfdp.tuning.Geometric(mean)`, which is never 0.",
                stacklevel=2,
            )
        return winner

    # What it costs.

    def _plans(self, drawn: list[Settings], arguments: Config) -> list["_Plan"]:
        """Find out what tries are to run, and refuse what no law is known for."""
        plans: dict[_Plan, None] = {}
        for settings in self._space.to_plan(drawn):
            with _quiet():
                plans[self._plan(settings, arguments)] = None
            gc.collect()
        if self._space.has_one_plan and len(plans) > 1:
            raise ValueError(
                "Settings of a sampler must all cost the same, because not all of them can "
                "be looked at before. Received: settings with other steps or noise than "
                "others. Use a grid, `space={'batch_size': [128, 256]}`, for what "
                "changes the cost."
            )
        return list(plans)

    def _plan(self, settings: Settings, arguments: Config) -> "_Plan":
        """Find out what a try is to run: all of `fit` up to the first step."""
        private = self._built(settings)
        look = _Look()
        given = arguments_of(settings, arguments, look)
        check_data(settings, arguments, given)
        releasing = [c for c in given["callbacks"] if isinstance(c, ReleasingCallback)]
        check_rows(saw_others=any(each.sees_other_rows for each in releasing))
        with contextlib.suppress(_LookedAtError):
            private.fit(**given)
        recorder = private.recorder
        budget = recorder.budget
        if budget is not None and budget.project is not None:
            raise ValueError(
                "Tries must not count one by one in a project. Received: a "
                "`PrivacyBudget` with a project. Give it to the search: "
                "`PrivateSearch(..., project=...)`."
            )
        ledger = recorder.own_run().ledger
        if ledger.noise_seed_fixed or ledger.sampling_seed_fixed:
            raise NotPrivateError(
                "Tries must be independent, and a seed gives all of them the same noise "
                "or the same batches. Received: a `noise_seed`, or data with a `seed`. "
                "Leave it out."
            )
        check_is_released(self._score, look.segments)
        for segment in look.segments:
            if not is_known_to_rdp(segment):
                raise ValueError(
                    "A search is accounted by Rényi differential privacy, which "
                    "takes each pass of such batches for a release of all rows. "
                    f"Received: {segment.words()}. Use `DPModel(sampling='poisson')`."
                )
        runs = recorder.all_runs()
        runs.pop(recorder.run, None)
        return _Plan(look.segments, tuple(runs.items()))

    def _check_cost(self, whole: Ledger) -> None:
        if math.isinf(whole.epsilon(self._delta)):
            raise NotPrivateError(
                "The search would not be differentially private. Received: tries that run "
                f"{whole.segments[0].words()}. Use `noise_multiplier=1.0` or so."
            )

    # What it does.

    def _best_of(
        self, drawn: list[Settings], arguments: Config, progress: SearchProgress
    ) -> DPModel | None:
        """Train with all settings, one after the other; keep the best model only."""
        best, best_value = None, -math.inf
        for settings in drawn:
            with _quiet():
                private, value = self._try(settings, arguments, progress)
            if best is None or value > best_value:
                best, best_value = private, value
                self.settings, self.score = settings, self._direction * value
            del private
            gc.collect()
        return best

    def _try(
        self, settings: Settings, arguments: Config, progress: SearchProgress
    ) -> tuple[DPModel, float]:
        """Train once, and check that no more was run than was planned."""
        private = self._built(settings)
        history = private.fit(
            **arguments_of(settings, arguments, last=_Begin(progress))
        )
        progress.check_try(private.recorder)
        run = private.recorder.own_run()
        value = value_of(
            self._score,
            history.history,
            self._direction,
            is_complete=not run.ledger.cut_short,
        )
        # What the logs say of the private rows stays here.
        private.history = None
        private.reset_metrics()
        return private, value

    def _built(self, settings: Settings) -> DPModel:
        private: object = self._build(dict(settings))
        if not isinstance(private, DPModel) or not private.compiled:
            raise TypeError(
                "`build` must return a compiled `tfdp.DPModel`. Received: an object of "
                f"type {type(private).__name__}. Use `private.compile(...); return "
                "private`."
            )
        if replicas_of(private.model).processes > 1:
            raise ValueError(
                "Each process would draw its own number of tries. Received: a model that "
                "several processes train. Search in one process."
            )
        if private.recorder.own_run().steps:
            raise ValueError(
                "`build` must make a new model in every call. Received: one that was "
                "trained before. Make layers, model and optimizer inside of `build`."
            )
        return private

    def _say(self, text: str) -> None:
        if self._verbose:
            sys.stdout.write(f"{text}\n")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a try is to run, and the runs that its model comes from."""

    segments: tuple[Segment, ...]
    _before: tuple[tuple[str, Run], ...]

    @property
    def before(self) -> Runs:
        return dict(self._before)


class _LookedAtError(Exception):
    """A call of `fit` has told what it plans."""


class _Look(keras.callbacks.Callback):
    """Ends `fit` before its first step, and knows what it had planned."""

    segments: tuple[Segment, ...] = ()

    def on_train_begin(self, logs: Logs = None) -> NoReturn:
        """See the plan: all other callbacks have begun."""
        del logs
        self.segments = self.model.planned_segments()
        raise _LookedAtError


class _Begin(keras.callbacks.Callback):
    """Writes down that a try begins, before its first step."""

    def __init__(self, progress: SearchProgress) -> None:
        super().__init__()
        self._progress = progress

    def on_train_begin(self, logs: Logs = None) -> None:
        """Write down all that the try may run."""
        del logs
        self._progress.begin_try(self.model.planned_segments())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing be printed or named that would tell how many tries ran."""
    before = logging.root.manager.disable
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # noqa: PTH123
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
        names_begin_again(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
