"""Steps that are taken again and again from the same place, and what they did."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._types import Array, Nest, Tensor, Variable
from tfdp.losses.batch import Batch
from tfdp.training.callback import NonprivateStep, StepCallback
from tfdp.training.step import Session, private_step


@dataclasses.dataclass(frozen=True)
class Run:
    """What one step did; lists have a float64 array for each variable.

    Attributes:
        sums: The clipped sums.
        released: What was released of them.
        norms: Of the units' gradients.
        clip: The C that clipped.
        l2_sensitivity: That the sum claims.
        states: Values of what a pass may change, after the step.
    """

    sums: list[Array]
    released: list[Array]
    norms: Array
    clip: float
    l2_sensitivity: float
    states: list[Array]

    def noise(self, divisor: float) -> list[Array]:
        """Return what was added to the sums, if they were divided by that."""
        pairs = zip(self.released, self.sums, strict=True)
        return [released * divisor - total for released, total in pairs]


class Seen(StepCallback):
    """Keeps what a step has clipped and released."""

    def build(self, variables: list[Variable]) -> None:
        """Make room for the gradients of variables."""
        dtypes = [
            tf.float64 if each.dtype == "float64" else tf.float32 for each in variables
        ]
        with tf.init_scope():
            self.sums, self.released = (
                [
                    tf.Variable(tf.zeros(each.shape, dtype), trainable=False)
                    for each, dtype in zip(variables, dtypes, strict=True)
                ]
                for _ in range(2)
            )
            nothing = tf.zeros([0], tf.float64)
            self.norms = tf.Variable(nothing, shape=[None], trainable=False)
            self.clips = tf.Variable(tf.zeros([2], tf.float64), trainable=False)

    def nonprivate_step(self, step: NonprivateStep) -> None:
        """Keep the clipped sum; in the training graph."""
        clipped_sum = step.clipped_sum
        for held, value in zip(self.sums, clipped_sum.gradients, strict=True):
            held.assign(tf.cast(value, held.dtype))
        self.norms.assign(tf.cast(clipped_sum.norms, tf.float64))
        clips = [clipped_sum.l2_norm_clip, clipped_sum.l2_sensitivity]
        self.clips.assign(tf.cast(tf.stack(clips), tf.float64))

    def after_release(self, released: list[Tensor], l2_norm_clip: Tensor) -> None:
        """Keep what was released; in the training graph."""
        for held, value in zip(self.released, released, strict=True):
            held.assign(tf.cast(value, held.dtype))


class Steps:
    """Takes private steps, each from where the first one began.

    Args:
        session: What the steps are made for.
        seen: A callback of it.
        begin: Makes everything what it was before the first step.
        eagerly: Whether the steps run without a graph.

    Attributes:
        session: See above.
        seen: Likewise.
        begin: Likewise.
        states: The variables that a pass may change.
        divisor: The public one of the noised sums.
        noise_multiplier: Of the noise.
    """

    def __init__(
        self,
        session: Session,
        seen: Seen,
        begin: Callable[[], None],
        *,
        eagerly: bool,
    ) -> None:
        """Take no step yet."""
        self.session, self.seen, self.begin = session, seen, begin
        seen.build(session.objective.variables)
        self.states: list[Variable] = session.clipper.states()
        self._first_number = int(session.mechanism.number)
        optimizer, units = session.optimizer, session.clipper.examples_per_unit
        self.divisor = float(optimizer.expected_units(units))
        self.noise_multiplier = float(optimizer.noise_multiplier.numpy())
        self._step: Callable[[Batch], None] = self._take_step
        if not eagerly:
            self._step = tf.function(
                self._take_step, autograph=False, reduce_retracing=True
            )

    def _take_step(self, batch: Batch) -> None:
        private_step(
            self.session,
            batch,
            has_room=lambda _: tf.constant(value=True),
            on_outputs=lambda *_: None,
        )

    def run(self, batch: Batch, number: int = 0) -> Run:
        """Take a step from where the first one began.

        Args:
            batch: Of the step.
            number: Steps of the same one have the same noise.

        Returns:
            What it did.
        """
        self.begin()
        self.session.mechanism.skip_to(self._first_number + number)
        self._step(batch)
        seen = self.seen
        clip, l2_sensitivity = seen.clips.numpy().tolist()
        return Run(
            [each.numpy().astype(np.float64) for each in seen.sums],
            [each.numpy().astype(np.float64) for each in seen.released],
            seen.norms.numpy(),
            clip,
            l2_sensitivity,
            [each.numpy() for each in self.states],
        )

    def calls(self, batch: Batch) -> list[tuple[str, list[Array]]]:
        """Run the model eagerly, and return what its layers return, in that order."""
        model = self.session.clipper.model
        self.begin()
        found: list[tuple[str, list[Array]]] = []

        def tapped(path: str, call: Callable[..., Nest]) -> Callable[..., Nest]:
            @functools.wraps(call)  # Keras reads which arguments it takes.
            def tap(*args: object, **kwargs: object) -> Nest:
                outputs = call(*args, **kwargs)
                leaves = _tree.tensors(outputs)
                if not any(map(tf.is_symbolic_tensor, leaves)):
                    found.append((path, [np.asarray(each) for each in leaves]))
                return outputs

            return tap

        with contextlib.ExitStack() as stack:
            for path, layer in _keras.layers_by_path(model):
                call = tapped(path, layer.call)
                stack.enter_context(_keras.attributes_replaced(layer, call=call))
            _keras.run_model(model, batch.x, training=True)
        return found
