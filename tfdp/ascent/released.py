"""The gradient that was released last, and steps uphill along it."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Config, Tensor, Variable

# How names of saved arrays begin.
_SAVED = "released_gradient_"


class ReleasedGradient:
    """Remembers the noised mean gradient of the step before; zeros at first.

    It was released already: what is done with it is post-processing.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._variables: list[Variable] = []
        self._gradients: list[tf.Variable] = []
        self._restored: list[np.ndarray] = []
        # Where the variables were, while they are uphill.
        self._home: list[tf.Variable] = []
        with tf.init_scope(), _keras.unmirrored_variables():
            self._is_away = tf.Variable(initial_value=False, trainable=False)

    def build(self, variables: list[Variable]) -> None:
        """Hold a gradient for each variable, zeros if they are others than before.

        Args:
            variables: The trainable Keras variables.
        """
        if list(map(id, variables)) == list(map(id, self._variables)):
            return
        values = [np.zeros(v.shape, _wide(v.dtype).as_numpy_dtype) for v in variables]
        if [v.shape for v in values] == [v.shape for v in self._restored]:
            values, self._restored = self._restored, []
        with tf.init_scope(), _keras.unmirrored_variables():
            self._gradients = [tf.Variable(v, trainable=False) for v in values]
            self._home = [tf.Variable(v.value, trainable=False) for v in variables]
        self._variables = list(variables)

    def remember(self, gradients: list[Tensor]) -> None:
        """Take a gradient that was just released; one tensor for each variable."""
        for held, gradient in zip(self._gradients, gradients, strict=True):
            held.assign(tf.cast(gradient, held.dtype))

    def cosine_with(self, gradients: list[Tensor]) -> Tensor:
        """Return the cosine with another gradient, 0 where one is zero.

        Args:
            gradients: One tensor for each variable.

        Returns:
            A float64 scalar tensor.
        """
        pairs = [
            (tf.cast(held, tf.float64), tf.cast(gradient, tf.float64))
            for held, gradient in zip(self._gradients, gradients, strict=True)
        ]
        product = tf.add_n([tf.reduce_sum(one * other) for one, other in pairs])
        lengths = [
            tf.linalg.global_norm([pair[side] for pair in pairs]) for side in (0, 1)
        ]
        return tf.math.divide_no_nan(product, lengths[0] * lengths[1])

    @contextlib.contextmanager
    def uphill(self, radius: Tensor) -> Iterator[None]:
        """Move the variables by `radius` along the gradient, and put them back.

        Args:
            radius: Length of the step, a scalar tensor.
        """
        # In float64, as squares of small gradients would be 0 in float32.
        norm = tf.linalg.global_norm([
            tf.cast(held, tf.float64) for held in self._gradients
        ])
        factor = tf.math.divide_no_nan(tf.cast(radius, tf.float64), norm)
        # Kept, not computed back: rounding would move the weights in every step.
        for home, variable in zip(self._home, self._variables, strict=True):
            home.assign(variable.value)
        self._is_away.assign(value=True)
        for variable, held in zip(self._variables, self._gradients, strict=True):
            step = held * tf.cast(factor, held.dtype)
            variable.assign_add(tf.cast(step, variable.dtype))
        try:
            yield
        except Exception:
            # In a graph nothing has moved yet. Eagerly the weights stand uphill.
            if tf.executing_eagerly():
                self._go_home()
            raise
        self._go_home()

    def put_back(self) -> None:
        """Put the variables back where an error has left them uphill."""
        if self._is_away.numpy():
            self._go_home()

    def _go_home(self) -> None:
        for variable, home in zip(self._variables, self._home, strict=True):
            variable.assign(home)
        # Only when all passes are over, which an error would have ended.
        with tf.control_dependencies([tf.identity(v.value) for v in self._variables]):
            self._is_away.assign(value=False)

    def state(self) -> list[np.ndarray]:
        """Return what a saved model must remember."""
        return [held.numpy() for held in self._gradients] or self._restored

    def save(self, store: Config) -> None:
        """Put what a saved model must remember into a store of arrays."""
        for number, gradient in enumerate(self.state()):
            store[f"{_SAVED}{number}"] = gradient

    def load(self, store: Config) -> None:
        """Take what `save` has put there out again; zeros if it put nothing."""
        saved = sum(key.startswith(_SAVED) for key in store)
        self.restore([np.asarray(store.pop(f"{_SAVED}{n}")) for n in range(saved)])

    def restore(self, state: list[np.ndarray]) -> None:
        """Take over what `state` returned; zeros if it does not fit the variables."""
        held = self._gradients
        if [value.shape for value in state] != [tuple(each.shape) for each in held]:
            self._restored, state = state, [np.zeros(each.shape) for each in held]
        self.remember([tf.convert_to_tensor(value) for value in state])


def _wide(dtype: str) -> tf.DType:
    return tf.float64 if dtype == "float64" else tf.float32
