"""Federated learning under local privacy, simulated in one process."""

import copy
import functools
import json
import math
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree, _validate
from tfdp._types import Config, Loss, Nest, Variable
from tfdp.accounting.local import (
    RELATIONS,
    TrustedQueries,
    local_epsilon,
    local_privacy_statement,
)
from tfdp.accounting.text import filled
from tfdp.callbacks.adaptive import AdaptiveClip
from tfdp.callbacks.schedulers import ClipNormScheduler
from tfdp.clipping import ClippedSum
from tfdp.engines import Engine
from tfdp.federated.client import checked_local_noise
from tfdp.federated.clients import Clients
from tfdp.federated.noise_of_each import GaussianOfEach
from tfdp.federated.run_folder import (
    State,
    forget_rounds,
    interrupted_rounds,
    note_round,
    read_state,
    write_state,
)
from tfdp.federated.server import apply_mean, checked_optimizer
from tfdp.federated.user_clients import UserClients
from tfdp.federated.virtual_clients import VirtualClients
from tfdp.losses.batch import number_of_rows
from tfdp.mechanisms.mechanism import Gaussian, noise_of_query
from tfdp.optimizers.arguments import checked_clip
from tfdp.training.loops import clipped_gradients

_SIMULATED = (
    "This was a simulation: one process had the examples of all clients, and added the "
    "noise for them. The figures are those that real clients would have had; against "
    "whoever ran it there is no bound."
)


class Simulation:
    """Trains a model as virtual clients and their server would, all in one process.

    In a round each of some clients takes the gradient of the mean loss of its own
    examples at the server's weights, clips it to C and adds Gaussian noise of standard
    deviation ``noise_multiplier * C``; the server's optimizer applies the average, in
    which all clients have the same weight (federated LDP-SGD [1]_). All clients of a
    round go through the model together, and memory does not depend on how many clients
    there are.

    Attributes:
        history: What `run` returns.
        nonprivate_norms: Norms of the clients' gradients before clipping, in the last
            round, shape ``(clients_per_round,)``; no noise protects them.

    Guarantees:
        A client's reply is what `tfdp.federated.client_update` returns, in
        distribution. It takes part in `clients.participations(rounds)` rounds at most,
        and never in more than `max_participations`, but for rounds that were interrupted
        and run again. Weight regularizers are the server's: their gradient is added to
        the average.

    Args:
        model: A Keras model. It is trained in place, and stays the user's own.
        loss: See `tfdp.clipped_gradients`.
        x: Inputs of all examples that clients draw from, arrays with leading axis N.
        y: Targets likewise.
        clients: Who takes part when, and with which examples: `VirtualClients`, or
            `UserClients` where rows are of users.
        optimizer: Of the server, any Keras optimizer or the name of one.
        l2_norm_clip: The clip norm C, where `clip_policy` sets no other.
        noise_multiplier: Standard deviation of a client's noise over C:
            `calibrate_local_noise_multiplier`. With 0 nothing is private.
        clip_policy: None to keep C, or a `tfdp.callbacks.ClipNormScheduler`, whose
            schedule maps the number of a round, 0 at first, to C; or
            `AdaptiveQuantileClip` or `AdaptiveMedianClip` of `tfdp.callbacks`, which
            ask about the norms after every round, or after every `every` rounds. They
            need a trusted aggregator, and `privacy_statement` says so.
        max_participations: In how many rounds a client takes part at most.
        neighboring_relation: See `calibrate_local_noise_multiplier`.
        noise: `"aggregate"` draws the sum of all clients' noise at once, which only a
            simulation can; `"per_client"` draws it client by client.
        metrics: Keras metrics, or their names, for the validation data.
        engine: See `tfdp.DPModel`.
        physical_batch_size: The most examples to run at a time, those of whole
            clients; None for all of a round.
        jit_compile: Whether to compile the gradients with XLA.
        noise_seed: For tests only: makes the noise reproducible, and warns.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of its range, or `x` has no rows.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> noise_multiplier = tfdp.federated.calibrate_local_noise_multiplier(
        ...     8.0, delta=1e-7
        ... )
        >>> simulation = tfdp.federated.Simulation(
        ...     model,
        ...     "mse",
        ...     np.ones((100, 2), "float32"),
        ...     np.ones((100, 1), "float32"),
        ...     clients=tfdp.federated.VirtualClients(10_000, 100, 5),
        ...     optimizer=keras.optimizers.SGD(1.0),
        ...     l2_norm_clip=0.05,
        ...     noise_multiplier=noise_multiplier,
        ... )
        >>> history = simulation.run(10, verbose=0)
        >>> history["round"], history["l2_norm_clip"]
        ([10], [0.05])

    References:
        .. [1] Erlingsson et al., "Encode, Shuffle, Analyze Privacy Revisited:
           Formalizations and Empirical Evaluation", 2020.
           https://arxiv.org/abs/2001.03618
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Loss,
        x: Nest,
        y: Nest,
        *,
        clients: Clients,
        optimizer: keras.optimizers.Optimizer | str,
        l2_norm_clip: float,
        noise_multiplier: float,
        clip_policy: ClipNormScheduler | AdaptiveClip | None = None,
        max_participations: int = 1,
        neighboring_relation: str = "replace_one",
        noise: str = "aggregate",
        metrics: Sequence[keras.metrics.Metric | str] = (),
        engine: Engine | str = "auto",
        physical_batch_size: int | None = None,
        jit_compile: bool = False,
        noise_seed: int | None = None,
    ) -> None:
        self.model = model
        _validate.instance("clients", clients, VirtualClients, UserClients)
        self._clients = clients
        self.optimizer = checked_optimizer(optimizer)
        if clip_policy is not None:
            policies = ClipNormScheduler, AdaptiveClip
            _validate.instance("clip_policy", clip_policy, *policies)
        # A copy: whoever changes theirs later does not change what is accounted.
        self._clip_policy = copy.copy(clip_policy)
        self._l2_norm_clip = checked_clip(l2_norm_clip)
        self._noise_multiplier = checked_local_noise(noise_multiplier)
        self._max_participations = _validate.positive_int(
            "max_participations", max_participations
        )
        self._neighboring_relation = _validate.one_of(
            "neighboring_relation", neighboring_relation, RELATIONS
        )
        noises = ("aggregate", "per_client")
        self._each_draws = _validate.one_of("noise", noise, noises) == "per_client"
        self._mechanism = (
            GaussianOfEach(self._clients.clients_per_round, noise_seed)
            if self._each_draws
            else Gaussian(noise_seed)
        )

        self._data = _tree.map_tensors(tf.convert_to_tensor, (x, y))
        self._rows = int(number_of_rows(self._data))
        lengths = {int(tensor.shape[0]) for tensor in _tree.tensors(self._data)}
        if lengths != {self._rows} or not self._rows:
            raise ValueError(
                "`x` and `y` must have rows for clients to draw from, as many of each. "
                f"Received: arrays of {', '.join(map(str, sorted(lengths)))} rows. Use "
                "`x[:n], y[:n]`."
            )
        if not model.built:
            model(_tree.map_tensors(lambda tensor: tensor[:1], self._data[0]))
        self.optimizer.build(model.trainable_variables)

        # Refuses clients who do not have these rows.
        self._clients.rows_of_round(0, self._rows)

        def clipped(
            x: Nest, y: Nest, is_padding: tf.Tensor | None, clip: tf.Tensor
        ) -> ClippedSum:
            return clipped_gradients(
                model,
                loss,
                x,
                y,
                l2_norm_clip=clip,
                engine=engine,
                physical_batch_size=physical_batch_size,
                is_padding=is_padding,
                # A client's examples lie together: its gradient is their mean.
                examples_per_user=self._clients.examples_per_client,
            )

        self._clipped = tf.function(clipped, autograph=False, jit_compile=jit_compile)
        self._round = tf.function(self._run_round, autograph=False)
        self._evaluator = _Evaluator(model)
        self._evaluator.compile(loss=loss, metrics=list(metrics))

        self._loss_name = _name_of(loss)
        self._folders: set[Path] = set()
        self._clips: list[float] = []
        # How often a round was begun, not finished, and then run again.
        self._interrupted = 0
        self._next_clip = self._l2_norm_clip
        self.history: dict[str, list[float]] = {}
        self.nonprivate_norms = np.zeros(0)

    @property
    def clients(self) -> Clients:
        """Who takes part when, and with which examples."""
        return self._clients

    @property
    def l2_norm_clip(self) -> float:
        """C of the next round, where no schedule sets it."""
        return self._next_clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a client's noise over C."""
        return self._noise_multiplier

    @property
    def rounds(self) -> int:
        """How many rounds were begun."""
        return len(self._clips)

    def run(
        self,
        rounds: int,
        *,
        validation_data: tuple[Nest, Nest] | None = None,
        evaluate_every: int = 100,
        directory: str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> dict[str, list[float]]:
        """Run rounds until there have been so many, earlier calls included.

        After every `evaluate_every` rounds, and after the last, the history gets an
        entry: ``round``, ``l2_norm_clip`` of that round, ``val_loss`` and metrics of the
        validation data, and of the round's clients ``nonprivate_mean_norm`` and
        ``nonprivate_clipped_share``, which no noise protects.

        Args:
            rounds: How many rounds there are to be in all.
            validation_data: Inputs and targets.
            evaluate_every: Rounds from one entry of the history to the next.
            directory: Folder for `history.csv`, written with every entry, and for the
                state, written after every round. A simulation that begins with the
                state of an equal one in its folder goes on from there. The round that
                was interrupted is run again, and its clients count once more, beyond
                `max_participations` if need be: `local_epsilon` has it.
            verbose: 0 for silence, 1 for a line of progress now and then.

        Returns:
            The history, of all rounds.

        Raises:
            TypeError: If an argument has another type.
            ValueError: If a client would take part more than `max_participations`
                times, a value of the schedule is out of range, or the folder holds
                the state of a simulation with other settings.
        """
        rounds = _validate.positive_int("rounds", rounds)
        every = _validate.positive_int("evaluate_every", evaluate_every)
        self._check_participations(rounds)
        validation_data = _checked_pair(validation_data)
        folder = None if directory is None else Path(directory).resolve()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if folder not in self._folders:
                self._begin_in(folder)
            self._folders.add(folder)
        scheduled = self._scheduled(rounds)
        # Where the output is no terminal every update is a line.
        bar = keras.utils.Progbar(
            rounds, verbose=verbose, interval=0.5 if sys.stdout.isatty() else 10
        )
        while self.rounds < rounds:
            if scheduled is not None:
                self._next_clip = float(scheduled[self.rounds])
            if folder is not None:
                note_round(folder, self.rounds)
            self._one_more_round()
            if self.rounds % every == 0:
                self._note(validation_data)
            if folder is not None:
                self._save(folder)
            shown = self._shown()
            bar.stateful_metrics.update(name for name, _ in shown)
            bar.update(self.rounds, shown)
        if self.rounds not in self.history.get("round", []):
            self._note(validation_data)
            if folder is not None:
                self._save(folder)
        return self.history

    def local_epsilon(self, delta: float) -> float:
        """Compute what the replies have cost a client: see `local_epsilon`.

        Args:
            delta: Probability with which the bound may fail, between 0 and 1.

        Returns:
            An upper bound for the client that took part most often. What adaptive
            clip norms cost is not in it: `privacy_statement` tells.
        """
        return local_epsilon(
            self._noise_multiplier,
            delta,
            participations=self._participations,
            neighboring_relation=self._neighboring_relation,
        )

    def privacy_statement(self, delta: float) -> str:
        """Say in words what real clients would have had, and what is not covered.

        Args:
            delta: Probability with which the bound may fail, between 0 and 1.

        Returns:
            The text; see `tfdp.accounting.local_privacy_statement`. It ends by saying
            that this was a simulation.
        """
        policy, queries = self._clip_policy, None
        if isinstance(policy, AdaptiveClip):
            queries = TrustedQueries(
                type(policy).__name__,
                policy.query.noise_multiplier,
                policy.replaced_over_left_out,
                per_client=min(
                    self._participations,
                    self._interrupted + self.rounds // policy.query.every,
                ),
            )
        text = local_privacy_statement(
            self._noise_multiplier,
            delta,
            participations=self._participations,
            neighboring_relation=self._neighboring_relation,
            queries=queries,
            unit=self._clients.unit,
        )
        return f"{text}\n{filled(_SIMULATED)}\n"

    @property
    def _participations(self) -> int:
        """How often a client has taken part at most."""
        return self._clients.participations(self.rounds) + self._interrupted

    def _check_participations(self, rounds: int) -> None:
        needed = self._clients.participations(rounds)
        if needed > self._max_participations:
            most = self._max_participations * self._clients.rounds_per_pass
            raise ValueError(
                "A client must not take part more often than `max_participations`: it "
                f"would cost more. Received: rounds={rounds}, for which clients take "
                f"part {needed} times, max_participations={self._max_participations}. "
                f"Use `run({most})`, more clients, or `max_participations={needed}` "
                "with noise calibrated for it."
            )

    def _scheduled(self, rounds: int) -> np.ndarray | None:
        """Return C of the first rounds, None if it follows the norms."""
        if isinstance(self._clip_policy, ClipNormScheduler):
            return self._clip_policy.values(rounds)
        return (
            np.full(rounds, self._l2_norm_clip) if self._clip_policy is None else None
        )

    def _one_more_round(self) -> None:
        number, clip = self.rounds, self._next_clip
        rows = self._clients.rows_of_round(number, self._rows)
        # Counted first: a round that is interrupted has used up clients, and the noise
        # that goes by its number.
        self._clips.append(clip)
        norms, next_clip = self._round(
            tf.constant(rows),
            tf.constant(clip, tf.float64),
            tf.constant(number, tf.int64),
        )
        self._next_clip = float(next_clip)
        self.nonprivate_norms = np.asarray(norms)

    def _run_round(
        self, rows: tf.Tensor, clip: tf.Tensor, number: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Run a round in the graph; return norms before clipping and the next C."""
        is_padding = rows < 0 if self._clients.have_padding else None
        places = tf.maximum(rows, 0)
        x, y = _tree.map_tensors(lambda tensor: tf.gather(tensor, places), self._data)
        clipped_sum = self._clipped(x, y, is_padding, clip)
        contributors = self._clients.clients_per_round
        mean = [noised / contributors for noised in self._noised(clipped_sum, number)]
        apply_mean(self.optimizer, mean, self.model.trainable_variables)
        policy = self._clip_policy
        if not isinstance(policy, AdaptiveClip):
            return clipped_sum.norms, clip

        def next_clip() -> tf.Tensor:
            query = policy.query
            stream = self._mechanism.stream(number)
            noise = noise_of_query(query.shape, stream=stream)
            return policy.next_clip(
                clip,
                query.answer(clipped_sum.norms, clip, noise),
                expected_units=tf.constant(contributors, tf.float64),
            )

        asks = policy.query.asks_at(number + 1)
        return clipped_sum.norms, tf.cond(asks, next_clip, lambda: clip)

    def _noised(self, clipped_sum: ClippedSum, number: tf.Tensor) -> list[tf.Tensor]:
        noise_multiplier = tf.constant(self._noise_multiplier, tf.float64)
        if not self._each_draws:
            # Variances of independent noises add up.
            noise_multiplier *= self._clients.clients_per_round**0.5
        return self._mechanism.noised(
            clipped_sum,
            noise_multiplier=noise_multiplier,
            stream=self._mechanism.stream(number),
        )

    def _note(self, validation_data: tuple[Nest, Nest] | None) -> None:
        """Add an entry to the history."""
        clip = self._clips[-1]
        entry = {"round": self.rounds, "l2_norm_clip": clip}
        if validation_data is not None:
            values = self._evaluator.evaluate(
                *validation_data, batch_size=1000, verbose=0, return_dict=True
            )
            entry |= {f"val_{name}": float(value) for name, value in values.items()}
        entry |= {
            "nonprivate_mean_norm": float(np.mean(self.nonprivate_norms)),
            "nonprivate_clipped_share": float(np.mean(self.nonprivate_norms > clip)),
        }
        entries = len(self.history.get("round", []))
        for name in self.history | entry:
            column = self.history.setdefault(name, [math.nan] * entries)
            column.append(entry.get(name, math.nan))

    def _shown(self) -> list[tuple[str, float]]:
        """Return what the line of progress shows."""
        latest = [
            (name, values[-1])
            for name, values in self.history.items()
            if name.startswith("val_")
        ]
        return [("l2_norm_clip", self._clips[-1]), *latest]

    def _settings(self) -> Config:
        """Return what two runs that are the same have in common, as JSON has it."""
        policy = self._clip_policy
        # Keras numbers the names.
        optimizer = self.optimizer.get_config() | {
            "name": type(self.optimizer).__name__
        }
        settings: Config = {
            "clients": self._clients.settings(),
            "noise_multiplier": self._noise_multiplier,
            "optimizer": optimizer,
            "clip_policy": type(policy).__name__,
            "loss": self._loss_name,
            "data": self._data_checksums,
            "layers": [
                type(layer).__name__ for layer in _keras.flatten_layers(self.model)
            ],
            "weights": [list(variable.shape) for variable in self._variables()],
        }
        if isinstance(policy, AdaptiveClip):
            settings["clip_policy"] = [type(policy).__name__, *policy.settings()]
            settings["l2_norm_clip"] = self._l2_norm_clip
        as_json: Config = json.loads(json.dumps(settings, default=str))
        return as_json

    @functools.cached_property
    def _data_checksums(self) -> list[int]:
        return [zlib.crc32(tensor.numpy()) for tensor in _tree.tensors(self._data)]

    def _variables(self) -> list[Variable]:
        """List all that a round changes, the states of random layers included."""
        return [*self.model.variables, *self.optimizer.variables]

    def _save(self, folder: Path) -> None:
        state = State(
            settings=self._settings(),
            clips=self._clips,
            interrupted=self._interrupted,
            next_clip=self._next_clip,
            history=self.history,
            nonprivate_norms=self.nonprivate_norms,
            values=[keras.ops.convert_to_numpy(v) for v in self._variables()],
        )
        write_state(folder, state)

    def _begin_in(self, folder: Path) -> None:
        """Go on from the state in a folder, or write one."""
        state = read_state(folder)
        if state is None:
            forget_rounds(folder)
            self._save(folder)
            return
        self._restore(folder, state)
        interrupted = interrupted_rounds(folder, self.rounds)
        if interrupted[self.rounds]:
            logging.warning(
                "Round %d was interrupted and is run again: its clients count as "
                "having taken part once more.",
                self.rounds,
            )
        self._interrupted = state.interrupted + interrupted.total()
        self._check_participations(self.rounds)

    def _restore(self, folder: Path, state: State) -> None:
        if self.rounds:
            raise ValueError(
                "A folder holds one simulation, and this one was not run in it. "
                f"Received: directory='{folder}', after {self.rounds} rounds. Use a "
                "folder without a state."
            )
        here = self._settings()
        other = [name for name in here if here[name] != state.settings.get(name)]
        scheduled = self._scheduled(len(state.clips))
        if scheduled is not None and not np.array_equal(scheduled, state.clips):
            other.append("l2_norm_clip")
        if other:
            raise ValueError(
                "A folder holds the state of one simulation. Received: directory="
                f"'{folder}', whose state has other values of {', '.join(other)}. Use "
                "another folder, or delete this one."
            )
        for variable, value in zip(self._variables(), state.values, strict=True):
            variable.assign(value)
        self._clips, self._next_clip = state.clips, state.next_clip
        self.history, self.nonprivate_norms = state.history, state.nonprivate_norms


class _Evaluator(keras.Model):
    """Evaluates a model, and leaves what it was compiled with alone."""

    def __init__(self, model: keras.Model) -> None:
        # Keras would name it after the class, which no TensorFlow scope may be.
        super().__init__(name="evaluator")
        self.model = model

    def call(self, x: Nest) -> Nest:
        """Run the model."""
        return self.model(x, training=False)


def _checked_pair(validation_data: object) -> tuple[Nest, Nest] | None:
    """Return inputs and targets, or raise."""
    if validation_data is None:
        return None
    if not isinstance(validation_data, (tuple, list)) or len(validation_data) != 2:
        raise TypeError(
            "`validation_data` must be inputs and targets. Received: validation_data "
            f"of type {type(validation_data).__name__}. Use `validation_data=(x, y)`."
        )
    x, y = validation_data
    rows = [len(array) for array in _tree.tensors((x, y))]
    if len(set(rows)) > 1 or not rows[0]:
        raise ValueError(
            "`validation_data` must have rows, and targets for each. Received: "
            f"arrays of {', '.join(map(str, rows))} rows."
        )
    return x, y


def _name_of(loss: Loss) -> str:
    """Return what a loss is called, in every process alike."""
    if isinstance(loss, str):
        return loss
    return str(getattr(loss, "name", getattr(loss, "__name__", type(loss).__name__)))
