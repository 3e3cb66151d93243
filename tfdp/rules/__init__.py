"""How the gradients of layers factorise: one rule for each class of layers.

A rule runs one call of a layer and says what the gradients of the layer's variables
are made of. That is enough to compute the norm of each example's gradient, and the
clipped sum, without any example's gradient. Keras's layers have rules, and those of
KerasHub that need one; other layers get one by `register`.

Example:
    A layer that multiplies by a matrix and then squares. What the matrix gives is
    watched; its gradient ``g`` and the inputs are the factors of the gradient.

    >>> @keras.saving.register_keras_serializable("example")
    ... class Squared(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.kernel = self.add_weight(shape=(input_shape[-1], 4))
    ...
    ...     def call(self, inputs):
    ...         return keras.ops.square(inputs @ self.kernel)
    >>> def squared_rule(call):
    ...     x, kernel = call.inputs, call.layer.kernel
    ...     z = call.watch(
    ...         x @ kernel,
    ...         lambda g: [tfdp.rules.OuterProducts(kernel, x, g)],
    ...         is_linear=True,
    ...     )
    ...     return keras.ops.square(z)
    >>> tfdp.rules.register(Squared, squared_rule)
"""

from tfdp.rules import conv_lstm as conv_lstm
from tfdp.rules import convolutional as convolutional
from tfdp.rules import dense as dense
from tfdp.rules import embedding as embedding
from tfdp.rules import generic as generic
from tfdp.rules import hub as hub
from tfdp.rules import normalization as normalization
from tfdp.rules import recurrent as recurrent
from tfdp.rules import standardized as standardized
from tfdp.rules import time_distributed as time_distributed
from tfdp.rules.call import Call as Call
from tfdp.rules.registry import find as find
from tfdp.rules.registry import is_own as is_own
from tfdp.rules.registry import register as register
from tfdp.rules.terms import Convolution as Convolution
from tfdp.rules.terms import OuterProducts as OuterProducts
from tfdp.rules.terms import PerRow as PerRow
from tfdp.rules.terms import ScaledProducts as ScaledProducts
from tfdp.rules.terms import Term as Term
