"""What runs where a client's data are: its gradient, and what may leave of it."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from tfdp import _keras, _tree, _validate
from tfdp._types import Loss, Nest
from tfdp.ascent.losses import AscentLoss, check_plain
from tfdp.federated.client import privatize
from tfdp.federated.flower.arrays import CLIP_KEY, is_floating, set_weights, to_numpy
from tfdp.federated.local_budget import LocalBudget
from tfdp.losses.objective import Objective
from tfdp.optimizers.arguments import checked_clip

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
            yield (record_name, name), to_numpy(array)


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
    floating = [key for key, array in zeros.items() if is_floating(array.dtype)]
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
