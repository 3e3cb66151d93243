"""The server's part: whom it asks, and what it makes of the replies."""

import random
import time
from collections import Counter
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from tfdp import _validate
from tfdp.callbacks.schedulers import ClipNormScheduler
from tfdp.federated.flower.arrays import CLIP_KEY, set_weights, values_for
from tfdp.federated.server import apply_mean, checked_optimizer
from tfdp.optimizers.arguments import checked_clip


class LDPFedSGD(Strategy):
    """Flower strategy: the server's optimizer applies the mean of noised gradients.

    Federated LDP-SGD [1]_. In each round it asks as many clients as `clients_per_round`
    for their gradients, clipped to C and noised by themselves (`local_dp_mod`), and
    averages them uniformly, whatever weights they claim. Clients evaluate nothing:
    their results would have no noise. Use `evaluate_fn` of `start` with public data;
    the model has the weights of the round then.

    Guarantees:
        In a pass over the clients none is asked twice, and none is ever asked more
        often than `max_participations`; who comes next is drawn at random. Where
        fewer can be asked than a round needs, `start` waits for clients to connect. A
        reply counts only if it has the names and shapes of the model's weights and
        nothing but finite numbers. All others, and errors, are left out and logged; a
        round without any reply that counts changes nothing. Weight regularizers of the
        model are the server's: their gradient is added to the mean.

        None of this is needed for the privacy of clients, and what a client sends,
        if it is finite, is believed: there is no robust average.

    Args:
        model: A Keras model, built. It is trained in place.
        optimizer: Of the server, any Keras optimizer or the name of one.
        l2_norm_clip: The clip norm C, where `clip_policy` sets no other.
        clip_policy: None to keep C, or a `tfdp.callbacks.ClipNormScheduler`, whose
            schedule maps the number of an update, 0 at first, to C.
        clients_per_round: How many clients are asked in a round.
        max_participations: How often a client is asked at most.

    Raises:
        TypeError: If an argument has another type; adaptive policies are refused.
        ValueError: If a number is out of its range, or the model has no trainable
            variables.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> strategy = LDPFedSGD(
        ...     model, optimizer="sgd", l2_norm_clip=0.05, clients_per_round=100
        ... )
        >>> list(strategy.initial_arrays())
        ['0', '1']

    References:
        .. [1] Erlingsson et al., "Encode, Shuffle, Analyze Privacy Revisited:
           Formalizations and Empirical Evaluation", 2020.
           https://arxiv.org/abs/2001.03618
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: keras.optimizers.Optimizer | str,
        l2_norm_clip: float,
        clip_policy: ClipNormScheduler | None = None,
        clients_per_round: int,
        max_participations: int = 1,
    ) -> None:
        if not model.trainable_variables:
            raise ValueError(
                "`model` must be built, and have trainable variables. Received: model="
                f"`{model.name}` without any. Let it begin with `keras.Input(shape)`."
            )
        if clip_policy is not None and not isinstance(clip_policy, ClipNormScheduler):
            raise TypeError(
                "`clip_policy` must be a `ClipNormScheduler`: adaptive policies ask "
                "for exact norms, which clients do not send. Received: clip_policy of "
                f"type {type(clip_policy).__name__}. Use "
                "`tfdp.callbacks.ClipNormScheduler(schedule)`."
            )
        self.model = model
        self.optimizer = checked_optimizer(optimizer)
        self.l2_norm_clip = checked_clip(l2_norm_clip)
        self.clip_policy = clip_policy
        self.clients_per_round = _validate.positive_int(
            "clients_per_round", clients_per_round
        )
        self.max_participations = _validate.positive_int(
            "max_participations", max_participations
        )
        self._asked: Counter[int] = Counter()
        self.optimizer.build(model.trainable_variables)

    def initial_arrays(self) -> ArrayRecord:
        """Return the model's trainable weights, named by their places.

        All others, of frozen layers say, clients must have already.

        Returns:
            What `start` needs.
        """
        return ArrayRecord([
            keras.ops.convert_to_numpy(v) for v in self.model.trainable_variables
        ])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask clients for their gradients.

        Args:
            server_round: Number of the round, 1 at first.
            arrays: The weights.
            config: Sent too, with the number of the round and C in it.
            grid: Where the clients are.

        Returns:
            A message for each of them.
        """
        set_weights(self.model, arrays)
        clip = self.l2_norm_clip
        if self.clip_policy is not None:
            update = int(self.optimizer.iterations)
            clip = self.clip_policy.checked(float(self.clip_policy.schedule(update)))
        config = ConfigRecord({**config, "server-round": server_round, CLIP_KEY: clip})
        content = RecordDict({"arrays": arrays, "config": config})
        clients = self._next_clients(grid)
        self._asked.update(clients)
        return [
            Message(content, dst_node_id=client, message_type=MessageType.TRAIN)
            for client in clients
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, None]:
        """Apply the mean of the gradients that came back.

        Args:
            server_round: Number of the round.
            replies: The clients' answers, errors included.

        Returns:
            The weights after the update, None if there was none; and None.
        """
        updates = [*filter(None, map(self._checked_update, replies))]
        if not updates:
            logging.warning("Round %d: no reply counts; no update.", server_round)
            return None, None
        # Divided first, because a sum could overflow.
        mean = [
            tf.constant(sum(part.astype(np.float64) / len(updates) for part in parts))
            for parts in zip(*updates, strict=True)
        ]
        apply_mean(self.optimizer, mean, self.model.trainable_variables)
        return self.initial_arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask nobody: results of clients would have no noise."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Do nothing."""

    def summary(self) -> None:
        """Log the settings."""
        logging.info(
            "LDPFedSGD: %d clients per round, each asked %d times at most.",
            self.clients_per_round,
            self.max_participations,
        )

    def _next_clients(self, grid: Grid) -> list[int]:
        """Draw who is asked, least asked first; wait until there are enough."""
        waiting_with = None
        while True:
            connected = list(grid.get_node_ids())
            left = [n for n in connected if self._asked[n] < self.max_participations]
            if len(left) >= self.clients_per_round:
                random.shuffle(left)
                return sorted(left, key=self._asked.__getitem__)[
                    : self.clients_per_round
                ]
            if len(left) != waiting_with:
                logging.warning(
                    "Waiting for clients: of %d connected, %d can be asked, where a "
                    "round needs %d; the others were asked max_participations=%d times.",
                    len(connected),
                    len(left),
                    self.clients_per_round,
                    self.max_participations,
                )
                waiting_with = len(left)
            time.sleep(1)

    def _checked_update(self, reply: Message) -> list[np.ndarray] | None:
        """Return the arrays of a reply, None if it does not count."""
        client = reply.metadata.src_node_id
        if reply.has_error():
            logging.warning("Client %d sent an error: %s", client, reply.error.reason)
            return None
        try:
            [arrays] = reply.content.array_records.values()
            values = values_for(self.model, arrays)
            if not all(np.all(np.isfinite(value)) for value in values):
                raise ValueError("Not all numbers are finite.")
        except Exception as error:  # noqa: BLE001 (a client may send anything)
            logging.warning("The reply of client %d does not count: %s", client, error)
            return None
        return values
