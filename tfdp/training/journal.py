"""A record of steps on disk, for runs that are killed and go on from a backup."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from absl import logging

from tfdp._files import replaced
from tfdp._types import Logs
from tfdp.accounting import Ledger
from tfdp.accounting.runs import Run, runs_from_state, runs_to_dict
from tfdp.accounting.segments import Segment, segment_from_dict, segment_to_dict
from tfdp.runs.recorder import LedgerRecorder

_FILE = "tfdp_journal.jsonl"


class Journal(keras.callbacks.Callback):
    """Writes down steps before they run, beside the backups of `BackupAndRestore`.

    A backup knows nothing of the steps that came after it. The file begins, anew in every
    epoch and for every segment, with the state of the recorder; each line that follows says how many
    steps and releases may have run since then, and with how little noise.

    Guarantees:
        After a kill at any time, `restore` makes the ledger at least as large as
        what really ran, with single steps of callbacks. Not covered: steps since the last
        batch began that another model's `fit` takes in a callback, or a graph which a
        callback has traced.

    Args:
        recorder: Of the model that trains.
        directory: Where the backups are.
        to_come: Returns what the noise of the coming steps counts as, over the sensitivity.
    """

    def __init__(
        self,
        recorder: LedgerRecorder,
        directory: str,
        to_come: Callable[[], np.ndarray],
    ) -> None:
        super().__init__()
        self._to_come = to_come
        self._recorder = recorder
        # Whose steps the lines count, and what the header knows of others.
        self._counted: tuple[object, ...] | None = None
        self.path = Path(directory) / _FILE

    def restore(self) -> None:
        """Count in the recorder what a run that was killed may have taken."""
        if not self.path.exists():
            return
        # A last line without an end was not followed by a step.
        header, *lines = self.path.read_text().split("\n")[:-1]
        begun = json.loads(header)
        state, run = begun["state"], begun["run"]
        if run == self._recorder.run:
            # It was not killed: what it counts is what it has taken.
            return
        runs = runs_from_state(state)
        ledger, steps = Ledger(), 0
        if lines:
            steps, releases, noise_multiplier = json.loads(lines[-1])
            segment = dataclasses.replace(
                segment_from_dict(begun["segment"]).with_count(releases),
                noise_multiplier=noise_multiplier,
            )
            ledger = Ledger((segment,))
        # Apart from the run itself, which may not have taken them. Where there are none
        # this says that nothing more is to come of the run: projects ask for that.
        before = runs[run].steps if run in runs else 0
        runs[f"{run} after {before}"] = Run(ledger, steps)
        state.pop("ledger", None)
        self._recorder.restore(json.dumps({**state, "runs": runs_to_dict(runs)}))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Write down all that was run before the epoch."""
        self.begin()

    def begin(self, recorder: LedgerRecorder | None = None) -> None:
        """Begin the file anew, with all that was counted up to now.

        Args:
            recorder: Of the steps to come; by default that of the training.
        """
        own, recorder = self._recorder, recorder or self._recorder
        self._counted = self._known(recorder)
        counter = recorder.counter
        self._steps, self._releases = recorder.steps, counter.releases_begun
        # Less noise in the steps to come would also count for a pass that is open.
        self._open_passes = int(counter.is_inside_release)
        self._least_noise = float("inf")
        header = json.dumps({
            "run": own.run,
            "segment": segment_to_dict(Segment(counter.scheme, 0, 1.0)),
            "state": json.loads(own.state()),
        })
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self.path) as file:
            file.write(f"{header}\n")

    def on_train_end(self, logs: Logs = None) -> None:
        """Write down what has run, if the backup stays: it is no longer what may have."""
        if self.path.exists():
            self.begin()

    def _known(self, recorder: LedgerRecorder) -> tuple[object, ...]:
        others = {
            each.run: int(each.counter.steps.numpy())
            for each in self._recorder.recorders()
            if each is not recorder
        }
        return recorder, recorder.beginnings, others

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Write down the steps that are about to run."""
        self.write(self._recorder, self.model.steps_per_execution)

    def write(
        self,
        recorder: LedgerRecorder,
        steps: int,
        noise_multiplier: float | None = None,
    ) -> None:
        """Write down steps that are about to run; see `StepJournal`."""
        if self._counted != self._known(recorder):
            # Another segment has begun, or another recorder counts, or has counted.
            self.begin(recorder)
        counter = recorder.counter
        if noise_multiplier is None:
            noise_multiplier = float(self._to_come()[:steps].min())
        self._least_noise = min(self._least_noise, noise_multiplier)
        line = [
            recorder.steps - self._steps + steps,
            counter.releases_begun
            - self._releases
            + counter.releases_begun_by(steps)
            + self._open_passes,
            self._least_noise,
        ]
        with self.path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def restored_journals(
    callbacks: list[keras.callbacks.Callback],
    recorder: LedgerRecorder,
    to_come: Callable[[], np.ndarray],
) -> list[Journal]:
    """Return a journal for every `BackupAndRestore`, with its steps counted.

    Args:
        callbacks: Of `fit`.
        recorder: Of the model that trains.
        to_come: See `Journal`.

    Returns:
        Callbacks that must run after all others.
    """
    found = []
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        directory = str(callback.backup_dir)
        if "://" in directory:
            logging.warning(
                "tfdp keeps no journal in %s: after a kill, steps since the last "
                "backup are not in the ledger.",
                directory,
            )
            continue
        found.append(Journal(recorder, directory, to_come))
        found[-1].restore()
    return found
