"""Federated learning under local privacy with Flower: `pip install 'tfdp[flower]'`.

What runs where each client's data are, in the client's own `ClientApp`::

    budget = flower.LocalBudget("/var/lib/app/budget.json", epsilon=8.0, delta=1e-7)
    app = ClientApp(mods=[flower.local_dp_mod(budget, max_l2_norm_clip=1.0)])


    @app.train()
    def train(message, context):
        x, y = examples_of_this_client()
        return flower.gradient_reply(message, build_model(), "mse", x, y)

And on the server, which is not trusted with anything::

    app = ServerApp()


    @app.main()
    def main(grid, context):
        strategy = flower.LDPFedSGD(
            build_model(),
            optimizer=keras.optimizers.SGD(1.0),
            l2_norm_clip=0.05,
            clients_per_round=1000,
        )
        strategy.start(grid, strategy.initial_arrays(), num_rounds=100)
        strategy.model.save("model.keras")

Flower's `flwr run` sends the code of the `ClientApp` to the clients. Whoever may start
a run could send another one, without this privacy: let clients run only code that they
have checked, and keep numbers of the budget out of `context.run_config`, which comes
from there too.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree, _validate
from tfdp._types import Loss, Nest
from tfdp.ascent.losses import AscentLoss, check_plain
from tfdp.callbacks.schedulers import ClipNormScheduler
from tfdp.federated.client import privatize
from tfdp.federated.local_budget import LocalBudget as LocalBudget
from tfdp.federated.server import apply_mean, checked_optimizer
from tfdp.losses.objective import Objective
from tfdp.optimizers.arguments import checked_clip

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as missing:
    raise ImportError(
        "`tfdp.federated.flower` needs Flower. Use `pip install 'tfdp[flower]'`."
    ) from missing

# What the server asks for, in a ConfigRecord of its message.
CLIP_KEY = "l2-norm-clip"

Mod: TypeAlias = Callable[
    [Message, Context, Callable[[Message, Context], Message]], Message
]


def local_dp_mod(budget: LocalBudget, *, max_l2_norm_clip: float) -> Mod:
    """Make a Flower mod that lets nothing but noised updates leave a client.

    Put it first: ``ClientApp(mods=[local_dp_mod(...), ...])``. What other mods and the
    app make of a train message, a gradient or any other update, is clipped as one
    vector and noised. The clip norm C is what the server's message asks for, in a
    `ConfigRecord` under ``"l2-norm-clip"``, at most `max_l2_norm_clip`.

    Guarantees:
        All replies of the client are (epsilon, delta)-locally private for the numbers
        of `budget`, whatever a server sends, apart from what is named below. A reply
        has the arrays that the server sent, with their names, shapes and dtypes, in
        their order; those of floating point hold the noised update (no more than
        noise, if a number of it is not finite) and all others zeros, because they
        cannot be noised. Beside them there is ``{"num-examples": 1}``, with which any
        strategy averages uniformly. Metrics and configs of the app stay with the
        client, and so does `context.state`. Messages other than train messages, whose
        replies would hold numbers without noise, get an error for a reply, and so do
        those that ask for no usable C. Errors have a fixed text; what happened is in
        the client's own log. Noise is drawn with a secret key of the operating system.

        The participation is counted before the app runs. Otherwise a server that finds
        weights with which it fails for some data only could ask as often as it likes.

        Not covered: how long a client takes, whether it answers at all, and that it
        failed. An app should not fail because of its data. What the `lifespan` of a
        `ClientApp` raises passes no mod, and Flower sends its text.

    Args:
        budget: The client's ledger.
        max_l2_norm_clip: Largest C that the client accepts. Noise grows with C, so
            this does not make replies any more private; it bounds them.

    Returns:
        The mod.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If `max_l2_norm_clip` is out of its range.

    Example:
        >>> import tempfile
        >>> from flwr.clientapp import ClientApp
        >>> folder = tempfile.TemporaryDirectory()
        >>> budget = LocalBudget(f"{folder.name}/budget.json", epsilon=8.0, delta=1e-7)
        >>> app = ClientApp(mods=[local_dp_mod(budget, max_l2_norm_clip=1.0)])
        >>> folder.cleanup()
    """
    _validate.instance("budget", budget, LocalBudget)
    ceiling = checked_clip(_validate.positive("max_l2_norm_clip", max_l2_norm_clip))

    def mod(
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return _refusal(message, "Only train messages are answered.")
        reason = f"The message must have usable arrays and `{CLIP_KEY}`."
        try:
            clip = checked_clip(min(_asked_clip(message.content), ceiling))
            if _METRICS in message.content:
                raise ValueError(f"`{_METRICS}` is the name of the reply's own record.")
            # Before the app runs, which may change the message.
            zeros = {
                key: np.zeros(array.shape, array.dtype)
                for key, array in _arrays(message.content)
            }
            reason = "The privacy budget allows no reply."
            budget.spend()
            reason = "The client failed."
            reply = call_next(message, context)
            if reply.has_error():
                raise RuntimeError(f"The app replied with {reply.error}.")
            content = _private_content(
                dict(_arrays(reply.content)),
                zeros,
                l2_norm_clip=clip,
                noise_multiplier=budget.noise_multiplier,
            )
            return Message(content, reply_to=message)
        except Exception as error:  # noqa: BLE001 (Flower would send what it says)
            logging.error("%s Nothing was sent.", reason, exc_info=error)
            return _refusal(message, reason)

    return mod


# Record of a reply that strategies take its weight from.
_METRICS = "metrics"

# Flower's code for a mod whose precondition failed.
_MOD_FAILED = 6

# Arrays by the names of their records and their own.
_Arrays: TypeAlias = dict[tuple[str, str], np.ndarray]


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(code=_MOD_FAILED, reason=reason), reply_to=message)


def _asked_clip(content: RecordDict) -> float:
    """Return the C that the server asks for, or raise."""
    asked = [
        record[CLIP_KEY]
        for record in content.config_records.values()
        if CLIP_KEY in record
    ]
    if len(asked) != 1:
        raise ValueError(f"A message must have one `{CLIP_KEY}`. Received: {asked}.")
    return _validate.positive(CLIP_KEY, asked[0])


def _arrays(content: RecordDict) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    for record_name, record in content.array_records.items():
        for name, array in record.items():
            yield (record_name, name), _to_numpy(array)


def _to_numpy(array: Array) -> np.ndarray:
    values: np.ndarray = array.numpy()
    if values.dtype.kind == "V":
        # NumPy's format has no name for bfloat16; Flower's has.
        values = values.view(tf.as_dtype(array.dtype).as_numpy_dtype)
    return values


def _private_content(
    update: _Arrays, zeros: _Arrays, *, l2_norm_clip: float, noise_multiplier: float
) -> RecordDict:
    """Clip and noise an update, in the form of what the server sent."""
    sent = {key: array.shape for key, array in zeros.items()}
    received = {key: array.shape for key, array in update.items()}
    if received != sent:
        # Names and shapes could say something about the data.
        raise ValueError(
            "A reply must have the arrays that the server sent, with their names and "
            f"shapes. Received: {received}, where the server sent {sent}."
        )
    private = dict(zeros)
    floating = [key for key, array in zeros.items() if _is_floating(array.dtype)]
    if floating:
        # Half precision overflows, before the noise and after it.
        with np.errstate(over="ignore", invalid="ignore"):
            noised = privatize(
                [
                    update[key].astype(
                        "float64" if zeros[key].itemsize >= 8 else "float32"
                    )
                    for key in floating
                ],
                l2_norm_clip=l2_norm_clip,
                noise_multiplier=noise_multiplier,
            )
            for key, array in zip(floating, noised, strict=True):
                private[key] = np.asarray(array).astype(zeros[key].dtype)
    records: dict[str, ArrayRecord] = {}
    for (record_name, name), values in private.items():
        records.setdefault(record_name, ArrayRecord())[name] = Array(values)
    return RecordDict({**records, _METRICS: MetricRecord({"num-examples": 1})})


def _is_floating(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.floating) or dtype == tf.bfloat16.as_numpy_dtype


def set_weights(model: keras.Model, arrays: ArrayRecord) -> None:
    """Give a model the weights that a server sent.

    Args:
        model: A Keras model, built.
        arrays: The trainable weights, as `LDPFedSGD.initial_arrays` names them: by
            their places in ``model.trainable_variables``.

    Raises:
        ValueError: If they are those of another model.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> set_weights(model, ArrayRecord([np.ones((2, 1)), np.zeros(1)]))
        >>> model.layers[0].kernel.numpy().ravel()
        array([1., 1.], dtype=float32)
    """
    for variable, value in zip(
        model.trainable_variables, _values_for(model, arrays), strict=True
    ):
        variable.assign(value)


def gradient_reply(
    message: Message,
    model: keras.Model,
    loss: Loss,
    x: Nest,
    y: Nest,
    sample_weight: Nest = None,
) -> Message:
    """Answer a train message with the gradient of the client's own examples.

    The gradient of their mean loss, in training mode, at the weights in the message.
    It is neither clipped nor noised: that is what `local_dp_mod` does. As in a
    `Simulation`, weight regularizers are left to the server.

    Args:
        message: From a server with `LDPFedSGD`.
        model: A Keras model of the same architecture. It gets the server's weights.
        loss: A Keras loss: name, object or function, or a list or dict of them.
        x: The client's inputs, leading axis N.
        y: Targets likewise.
        sample_weight: None, or weights of the examples' losses.

    Returns:
        The reply.

    Raises:
        ValueError: If the weights in the message are those of another model, or the
            loss is a `tfdp.losses.BAM` or `SAT`.

    Example:
        >>> from flwr.clientapp import ClientApp
        >>> app = ClientApp()
        >>> @app.train()
        ... def train(message, context):
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     x, y = np.ones((5, 2)), np.ones((5, 1))
        ...     return gradient_reply(message, model, "mse", x, y)
    """
    x, y, sample_weight = _tree.map_tensors(tf.convert_to_tensor, (x, y, sample_weight))
    if not model.built:
        model(x)
    [(record_name, arrays)] = message.content.array_records.items()
    set_weights(model, arrays)
    if isinstance(loss, AscentLoss):
        raise ValueError(
            "`gradient_reply` takes gradients at the server's weights, and not uphill "
            f"from them. Received: loss={loss!r}. Use `{loss.loss!r}`."
        )
    check_plain(loss)
    objective = Objective.of(model, loss)
    variables, penalties = objective.variables, objective.penalties()
    with tf.GradientTape() as tape, _keras.without_regularizers(variables):
        losses = objective.losses(x, y, objective.predict(x), sample_weight)
        # Of activities; those of weights are the server's.
        parts = [tf.reduce_mean(losses), *model.losses]
        parts += [penalty(variable.value) for variable, penalty in penalties]
        mean_loss = tf.add_n(parts)
    gradients = tape.gradient(
        mean_loss,
        [variable.value for variable in variables],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    values = [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients]
    return Message(RecordDict({record_name: ArrayRecord(values)}), reply_to=message)


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
            values = _values_for(self.model, arrays)
            if not all(np.all(np.isfinite(value)) for value in values):
                raise ValueError("Not all numbers are finite.")
        except Exception as error:  # noqa: BLE001 (a client may send anything)
            logging.warning("The reply of client %d does not count: %s", client, error)
            return None
        return values


def _values_for(model: keras.Model, arrays: ArrayRecord) -> list[np.ndarray]:
    """Return arrays for a model's trainable variables, in order, or raise."""
    values = {name: _to_numpy(array) for name, array in arrays.items()}
    variables = model.trainable_variables
    wanted = {str(n): tuple(variable.shape) for n, variable in enumerate(variables)}
    shapes = {name: value.shape for name, value in values.items()}
    if shapes != wanted or not all(_is_floating(v.dtype) for v in values.values()):
        raise ValueError(
            f"Arrays must be those of the trainable variables of model `{model.name}`. "
            f"Received: shapes {shapes}, where it has {wanted}. Use the same "
            "architecture on both sides."
        )
    # Too large a number becomes infinite, so that it can be found.
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            values[str(n)].astype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            for n, variable in enumerate(variables)
        ]
