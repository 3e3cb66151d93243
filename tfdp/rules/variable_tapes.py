"""Tapes that see which variables a pass uses, so that none escapes the rules."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.registry import own_variables


class VariableTapes:
    """Sees which trainable variables are used where, and what no rule answers for.

    Args:
        model: Whose variables they are.
        is_of_one_unit: See `Recording`.

    Attributes:
        running: The tapes that run now, that of the whole pass first.
        elsewhere: See `Recording`.
        foreign: Variables that no rule answers for in some use, and why, by their ids.
        refusals: Why the pass cannot be recorded.
    """

    def __init__(self, model: keras.Model, *, is_of_one_unit: bool) -> None:
        self.running: list[tf.GradientTape] = []
        self.elsewhere: dict[int, Variable] = {}
        self.foreign: dict[int, tuple[Variable, str]] = {}
        self.refusals: list[str] = []
        self._is_of_one_unit = is_of_one_unit
        # Inside of a layer's call `value` may be a cast copy: known by all its tensors.
        self._trainable = {
            id(known): variable
            for variable in model.trainable_variables
            for known in _keras.tensorflow_variables(variable)
        }
        self._out_of_reach: dict[int, str] = {}

    @contextlib.contextmanager
    def seeing(self) -> Iterator[tf.GradientTape]:
        """See what is used inside, which the tape outside then does not see."""
        with contextlib.ExitStack() as entered:
            if self.running:
                entered.enter_context(self.running[-1].stop_recording())
            tape = entered.enter_context(tf.GradientTape())
            self.running.append(tape)
            try:
                yield tape
            finally:
                self.running.pop()

    @contextlib.contextmanager
    def activations_seen(self, layer: keras.layers.Layer) -> Iterator[None]:
        """Let no activation use a variable unseen: rules do not know what it does."""
        owner = layer.cell if isinstance(layer, keras.layers.RNN) else layer
        seen = {
            name: functools.partial(self._activated, vars(owner)[name])
            for name in ("activation", "recurrent_activation")
            if vars(owner).get(name) is not None
        }
        with _keras.attributes_replaced(owner, **seen):
            yield

    def _activated(
        self, function: Callable[..., Nest], *args: Nest, **kwargs: Nest
    ) -> Nest:
        """Run an activation; refuse that it uses a variable, its layer's own, too."""
        with self.seeing() as used:
            outputs = function(*args, **kwargs)
        self.refuse_foreign(used, [])
        return outputs

    def of_model(self, used: tf.GradientTape) -> list[Variable]:
        """List the trainable variables that a tape has seen."""
        seen = [self._trainable.get(id(each)) for each in used.watched_variables()]
        return [variable for variable in seen if variable is not None]

    def check_is_read(
        self, path: str, layer: keras.layers.Layer, read: list[int]
    ) -> None:
        """Refuse a call that has other values in the place of its layer's variables.

        As `layer.stateless_call` has: what the rule says would be of the values.

        Args:
            path: Of the layer.
            layer: The layer.
            read: Ids of the variables that the call, and calls in it, have read.

        Raises:
            UnsupportedLayerError: If it has.
        """
        trained = {id(variable) for variable in self._trainable.values()}
        for variable in own_variables(layer):
            if id(variable) in trained and id(variable) not in read:
                raise UnsupportedLayerError(
                    "A layer must be called with its own variables. Received: "
                    f"`{path}` ({type(layer).__name__}), called with another "
                    f"`{variable.name}`."
                )

    def refuse_foreign(self, used: tf.GradientTape, own: list[Variable]) -> None:
        """Refuse that a rule uses what is not its layer's own.

        Without its rule the layer runs as it does in Keras, and this can be followed.

        Args:
            used: Has seen what the rule uses.
            own: The layer's variables.

        Raises:
            UnsupportedLayerError: If it does.
        """
        known = {id(variable) for variable in own}
        foreign = [v for v in self.of_model(used) if id(v) not in known]
        if self._is_of_one_unit:
            self.elsewhere |= {id(variable): variable for variable in foreign}
        elif foreign:
            raise UnsupportedLayerError(" ".join(map(used_elsewhere, foreign)))

    def note_foreign(
        self, used: tf.GradientTape, why: str | None = None, *, is_by_rule: bool = False
    ) -> None:
        """Note what is used where no rule answers for it.

        Args:
            used: Has seen it.
            why: Why the rule of its layer does not.
            is_by_rule: Whether another rule has called the layer.
        """
        foreign = self.of_model(used)
        if self._is_of_one_unit:
            self.elsewhere |= {id(variable): variable for variable in foreign}
            return
        # What a rule calls is not followed: the rule answers for it.
        if why is not None and (is_by_rule or not foreign):
            self.refusals.append(why)
        for variable in foreign:
            reason = why or used_elsewhere(variable)
            self.foreign.setdefault(id(variable), (variable, reason))

    def hide(self, path: str, variable: Variable) -> None:
        """Note that the tape does not see a variable; see `Call.hide`."""
        self._out_of_reach[id(variable)] = path

    def refuse_out_of_reach(self) -> None:
        """Refuse variables whose whole gradient is asked for, and would lack a part."""
        for number in self._out_of_reach.keys() & self.elsewhere.keys():
            self.refusals.append(
                "A variable of a loop over time must be used by its own layer alone. "
                f"Received: `{self.elsewhere[number].path}` of "
                f"`{self._out_of_reach[number]}`, used elsewhere."
            )


def used_elsewhere(variable: Variable) -> str:
    """Say that a variable is used where no rule answers for it."""
    return (
        "No rule answers for a variable that is used elsewhere than in a call of its own "
        f"layer. Received: `{variable.path}`, used elsewhere."
    )
