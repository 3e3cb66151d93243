"""What counts the steps of one model, and keeps them within budgets."""

import contextlib
import dataclasses
import json
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdp._types import Tensor, Variable
from tfdp.accounting import Segment
from tfdp.accounting.calibration import with_noise
from tfdp.data.training_data import TrainingData
from tfdp.errors import PrivacyBudgetError
from tfdp.optimizers import DPOptimizer
from tfdp.runs.budgets import (
    enforce_budget,
    enforce_budget_of_step,
    enforce_budgets_of_loops,
    has_room_for,
    lift_if_free,
    room_in_graph,
    set_budget,
)
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.histories import (
    note_makers,
    note_plain_steps,
    noted_plain_steps,
    remember_values,
    was_trained,
)
from tfdp.runs.recorder import LedgerRecorder, Reservation, write_down
from tfdp.training.noise_plan import NoisePlan
from tfdp.training.step import Session


def steps_of_plain_keras(model: keras.Model) -> int:
    """Count the steps of a wrapped model's own optimizers, which have no privacy.

    Args:
        model: The wrapped model, which has no optimizer when it is wrapped.

    Returns:
        Steps since then that are known; those of an optimizer that a `compile` of the
        wrapped model has replaced are lost.
    """
    return noted_plain_steps(model.weights) + _steps_of_own_optimizer(model)


def _steps_of_own_optimizer(model: keras.Model) -> int:
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations.numpy())


def keep_plain_steps(model: keras.Model) -> None:
    """Note the steps of a wrapped model's own optimizer before that optimizer goes."""
    steps = steps_of_plain_keras(model)
    if steps:
        note_plain_steps(model.weights, steps)


class ModelLedger:
    """Keeps the ledger of a model: what trained it, here and where its weights are from.

    Args:
        private: The private model, whose attribute `model` has the weights.

    Attributes:
        recorder: Counts the steps that `fit` and `train_on_batch` take.
        optimizer: The one that takes them, since `bind`.
    """

    optimizer: DPOptimizer | None = None

    def __init__(self, private: keras.Model) -> None:
        """Begin an empty ledger."""
        self._model = private.model
        # Recorders outlive private models, whose budgets end with them.
        reference = weakref.ref(private)

        def weights() -> list[Variable] | None:
            private = reference()
            if private is None:
                return None
            return list(private.model.weights) if private.model.built else []

        self.recorder = LedgerRecorder(weights)
        # Of a ledger that was loaded, which weights have been trained.
        self._loaded_as_trained, self._loaded_plain_steps = b"", 0

    def bind(self, optimizer: DPOptimizer) -> None:
        """Let custom loops with this optimizer count in the model's ledger.

        Args:
            optimizer: Of the model.

        Raises:
            ValueError: If it belongs to another model.
        """
        if optimizer.recorder is not self.recorder:
            if optimizer.recorder.is_of_a_model:
                raise ValueError(
                    "`optimizer` belongs to another private model, whose ledger "
                    f"counts its steps. Received: optimizer={optimizer.name!r}. Make "
                    "one for each model: "
                    f"`{type(optimizer).__name__}.from_config(optimizer.get_config())`."
                )
            # What it has run before, also what it has loaded, stays in the ledger.
            self.recorder.history.depend_on(optimizer.recorder.history)
            optimizer.recorder = self.recorder
        optimizer.skip_used_noise()
        self.recorder.note_seeds(noise=optimizer.noise_is_seeded, sampling=False)
        self.optimizer, self._noise_plan = optimizer, NoisePlan(optimizer)

    # Steps.

    @contextlib.contextmanager
    def counting(
        self,
        session: Session,
        data: TrainingData,
        epochs: int,
        steps: int | None,
        releases: Mapping[Any, Segment],
    ) -> Iterator[None]:
        """Count the steps of a call of `fit` in a segment of its own.

        Args:
            session: What the steps are made for.
            data: What they train on.
            epochs: How many are to run.
            steps: How many steps that is, if the data tell.
            releases: What is to be released beside the steps, by callback.
        """
        recorder, optimizer = self.recorder, session.optimizer
        try:
            self._noise_plan = NoisePlan(optimizer, session, steps)
            recorder.begin(
                session.scheme,
                steps_per_release=data.batches_per_pass,
                planned_releases=data.planned_releases(epochs),
                noise_multipliers=self._noise_plan.planned
                / session.scheme.sensitivity_in_clips,
            )
            self.take_over_copies()
            recorder.begin_steps(session.objective.variables, self._weights())
            optimizer.skip_used_noise()
            optimizer.check_dials()
            recorder.to_come = dict(releases)
            self._reserve()
            self._keep_room_for_releases()
            self.limit()
            self._log_releases()
            drawn = data.drawn
            is_seeded = drawn is not None and drawn.seeded
            recorder.note_seeds(noise=optimizer.noise_is_seeded, sampling=is_seeded)
            if drawn is not None and is_seeded:
                # A seed must not give the draws again that an earlier epoch had.
                drawn.advance_to(max(drawn.epoch, recorder.all_sampled_epochs + 1))
            yield
        finally:
            recorder.journals = ()
            # Callbacks set the noise of a step only while `fit` runs.
            self._noise_plan = NoisePlan(optimizer)
            # Steps that follow have other batches, of which nothing is known.
            recorder.begin(UNDECLARED.in_units(session.scheme.examples_per_unit))
            recorder.to_come, recorder.reserved = {}, ()
            self._give_back()
            self.limit_again()
            recorder.end_steps()
            remember_values(self._weights())

    def _reserve(self) -> None:
        """Take a part of the budget of a project, if there is one."""
        recorder, budget = self.recorder, self.recorder.budget
        if budget is None or budget.project is None:
            return
        planned = self._planned_steps()
        releases = budget.project.reserve_steps(
            recorder.run,
            recorder.all_runs(),
            planned,
            beside=tuple(recorder.to_come.values()),
            label=str(self._model.name),
        )
        part = Reservation(
            recorder.run,
            recorder.beginnings,
            releases,
            min((each.noise_multiplier for each in planned), default=0.0),
        )
        set_budget(recorder, dataclasses.replace(budget, reservation=part))
        recorder.plan(recorder.counter.planned_releases)

    def _give_back(self) -> None:
        """Count in the project what has run, in place of what was reserved."""
        recorder, budget = self.recorder, self.recorder.budget
        if budget is not None and budget.project is not None and budget.reservation:
            budget.project.finish(recorder.run, recorder.all_runs())
            set_budget(recorder, dataclasses.replace(budget, reservation=None))

    def noise_to_come(self) -> np.ndarray:
        """Return what the noise of the coming steps counts as, over the sensitivity.

        Returns:
            One number for each step; see `NoisePlan.to_come`.
        """
        scheme = self.recorder.counter.scheme
        return self._noise_plan.to_come() / scheme.sensitivity_in_clips

    def planned(self) -> tuple[Segment, ...]:
        """Return all that the training which has begun will have run, if nothing ends it.

        Returns:
            The segments, without those of trainings before.

        Raises:
            ValueError: If nobody knows how many steps there are to be.
        """
        return (*self._planned_steps(), *self.recorder.to_come.values())

    def _planned_steps(self) -> tuple[Segment, ...]:
        counter = self.recorder.counter
        if counter.planned_releases is None:
            raise ValueError(
                "What a training costs must be known before it begins. Received: data "
                "that do not tell how many steps an epoch has. Use "
                "`fit(..., steps_per_epoch=...)`."
            )
        noise = counter.recorded(self.noise_to_come())
        if counter.steps_per_release > 1:
            # A pass counts with the least noise of its steps, wherever they end.
            noise = noise.min(keepdims=True)
        releases = counter.planned_releases
        return tuple(with_noise(Segment(counter.scheme, 1, 1.0), noise, releases))

    def limit(self, steps: int = 1) -> None:
        """Allow only the steps that the budget set by a `PrivacyBudget` has room for.

        Args:
            steps: How many are about to be taken at once.

        Raises:
            PrivacyBudgetError: If there is no room for a single one.
        """
        # Before each step and after it: what nobody asks for is not worked out.
        if lift_if_free(self.recorder):
            return
        enforce_budget(
            self.recorder,
            self.noise_to_come(),
            self._noise_plan.name(self.recorder.steps),
            steps=steps,
        )

    def limit_again(self) -> None:
        """Limit the steps to come after something has changed, none of them now.

        Traced loops that change the model's weights get a limit as well, which those
        that XLA compiles cannot ask for.
        """
        enforce_budgets_of_loops(self.recorder)
        with contextlib.suppress(PrivacyBudgetError):
            self.limit()

    # Releases beside the steps.

    def release(self, callback: Hashable) -> bool:
        """Count what a callback is about to release, before anybody sees it.

        Args:
            callback: Whose releases `counting` got.

        Returns:
            Whether it may: not if none of its releases are left, or budgets have no
            room. Then nothing is counted.
        """
        recorder = self.recorder
        left = recorder.to_come.get(callback)
        if left is None or not left.count:
            return False
        release = left.with_count(1)
        has_room = has_room_for(recorder, release)
        if has_room:
            recorder.count_release(release)
            for journal in recorder.journals:
                journal.begin()
        recorder.to_come[callback] = left.with_count(left.count - 1)
        self._keep_room_for_releases()
        self.limit_again()
        return has_room

    def _keep_room_for_releases(self) -> None:
        """Let budgets keep room for the next release of each callback.

        Not for all of them: the budget may end the training long before. Nor where
        there is no room for a step beside it.
        """
        recorder = self.recorder
        recorder.reserved = tuple(
            each.with_count(1) for each in recorder.to_come.values() if each.count
        )
        try:
            self.limit()
        except PrivacyBudgetError:
            recorder.reserved = ()

    def _log_releases(self) -> None:
        """Log by how much what is to be released raises epsilon."""
        recorder, counter = self.recorder, self.recorder.counter
        releases = tuple(each for each in recorder.to_come.values() if each.count)
        sizes = [each.scheme.number_of_examples or 1 for each in releases]
        if not releases or counter.planned_releases is None:
            return
        noise = float(self.noise_to_come().min())
        steps = Segment(counter.scheme, counter.planned_releases, noise)
        without = recorder.ledger.add(steps)
        budget = recorder.budget
        delta = min(0.1 / max(sizes), 0.1) if budget is None else budget.delta
        before, after = (
            each.epsilon(delta, "RDP") for each in (without, without.add(*releases))
        )
        if math.isfinite(before):
            logging.info(
                "%s: with all steps that are planned, epsilon rises from %.4g to %.4g "
                "at delta=%.2g (RDP).",
                "; ".join(each.words() for each in releases),
                before,
                after,
                delta,
            )

    def begin_single_step(
        self, session: Session, noise_multiplier: float | None = None
    ) -> None:
        """Note that a step which `fit` does not take changes the weights.

        Args:
            session: What the step is made for.
            noise_multiplier: That it counts with, over the sensitivity; by default what
                callbacks set.
        """
        self._pass_on_loaded()
        recorder, trained = session.recorder, session.objective.variables
        session.optimizer.begin_single_step(recorder, trained, self._weights())
        if noise_multiplier is None:
            noise_multiplier = float(self.noise_to_come()[0])
        # Also what a budget refuses then: too much, not too little.
        write_down(recorder, trained, noise_multiplier)

    def has_room(self, session: Session, noise_multiplier: Tensor) -> Tensor:
        """Tell whether budgets have room for a step of a loop of one's own.

        Such loops have to ask themselves: nobody limits them beforehand.

        Args:
            session: What the step is made for.
            noise_multiplier: What its noise counts as, over the sensitivity.

        Returns:
            A scalar bool tensor.

        Raises:
            PrivacyBudgetError: If there is none, and the step runs eagerly.
        """
        recorder = session.recorder
        with tf.init_scope():
            own = session.mechanism.counted(session.optimizer.noise_multiplier.value)
            own = float(own) / recorder.counter.scheme.sensitivity_in_clips
            self.begin_single_step(session, own)
            # A recorder that was never limited would have room for every step. Without
            # room the graph takes no step, as it does not where room ends later.
            with contextlib.suppress(PrivacyBudgetError):
                enforce_budget_of_step(recorder, own)
        if tf.executing_eagerly():
            enforce_budget_of_step(recorder, float(noise_multiplier))
        return room_in_graph(recorder, noise_multiplier)

    # Where weights come from.

    def _weights(self) -> list[Variable]:
        return self.recorder.weights() or []

    def take_over_copies(self) -> None:
        """Let the ledger have what made values that were copied into the weights."""
        self._pass_on_loaded()
        self.recorder.take_over_copies(self._weights())

    def _pass_on_loaded(self) -> None:
        """Let weights depend on what was loaded into them, as soon as there are any."""
        weights = self._weights()
        if len(self._loaded_as_trained) == len(weights):
            pairs = zip(weights, self._loaded_as_trained, strict=True)
            note_makers((each for each, was in pairs if was), self.recorder.loaded)
            self._loaded_as_trained = b""
        if weights and self._loaded_plain_steps:
            # Among them may be those that the model's own optimizer still counts.
            counted = _steps_of_own_optimizer(self._model)
            note_plain_steps(weights, self._loaded_plain_steps - counted)
            self._loaded_plain_steps = 0

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        self.take_over_copies()
        weights = self._weights()
        remember_values(weights)
        trained = [was_trained(weight) for weight in weights]
        plain_steps = steps_of_plain_keras(self._model)
        found = {"trained": trained, "plain_steps": plain_steps}
        return json.dumps({**json.loads(self.recorder.state()), **found})

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing counted here is lost.

        Args:
            state: What `state` returned.
        """
        self.recorder.restore(state)
        found = json.loads(state)
        self._loaded_plain_steps = int(found.get("plain_steps", 0))
        self.note_trained(bytes(found.get("trained", [])))

    def note_trained(self, flags: bytes) -> None:
        """Remember which weights the loaded ledger is about.

        Args:
            flags: For each weight, in order, whether it was trained.
        """
        self._loaded_as_trained = flags
        self._pass_on_loaded()
