"""What activations are applied to: sums that a bias is added to last."""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.terms import PerRow, Term


def watch_preactivation(
    call: Call,
    terms: Callable[[Tensor], list[Term]],
    bias: Variable | None = None,
) -> Nest:
    """Run a call, watching what its `activation` is applied to.

    Args:
        call: The call.
        terms: From the gradients of that to all terms but the bias's.
        bias: What Keras adds last, if it does.

    Returns:
        The layer's outputs.
    """
    activation = call.layer.activation or keras.activations.linear
    return call.run_with(
        activation=lambda z: activation(watch_sum(call, z, terms, bias))
    )


def watch_sum(
    call: Call,
    z: Tensor,
    terms: Callable[[Tensor], list[Term]],
    bias: Variable | None,
) -> Tensor:
    """Watch what Keras has added a bias to; see `watch_preactivation`."""
    of_bias = None if bias is None else _bias_term(call, bias, z)

    def all_terms(g: Tensor) -> list[Term]:
        return terms(g) if of_bias is None else [*terms(g), of_bias(g)]

    # Adapters multiply two variables.
    is_linear = not getattr(call.layer, "lora_enabled", False)
    return call.watch(z, all_terms, is_linear=is_linear)


def _bias_term(call: Call, bias: Variable, z: Tensor) -> Callable[[Tensor], Term]:
    """Return what takes gradients of a sum to the term of the bias in it.

    Where several axes are as long as the bias, Keras may add it along another one than
    it was meant for: the operation tells which.

    Raises:
        UnsupportedLayerError: If it does not.
    """
    shape, lengths = tuple(bias.shape), _lengths_added(z)
    if lengths is None or math.prod(lengths) != math.prod(shape):
        raise UnsupportedLayerError(
            "A rule must know along which axes a bias is added. Received: "
            f"`{call.path}`, in which {z.op.type} adds `{bias.path}` last. Add it last, by "
            "`keras.ops.add(outputs, self.bias)`."
        )
    if tuple(lengths[len(lengths) - len(shape) :]) == shape:
        return lambda g: PerRow(bias, _sum_to_bias(g, shape))
    axes = [axis for axis, length in enumerate(lengths) if axis and length == 1]

    def term(g: Tensor) -> Term:
        of_rows = tf.reduce_sum(at_least_float32(g), axes)
        return PerRow(bias, tf.reshape(of_rows, [-1, *shape]))

    return term


def _lengths_added(z: Tensor) -> list[int] | None:
    """Return the lengths of what was added last, for each axis; None if not known."""
    rank = z.shape.rank
    if z.op.type == "BiasAdd":
        along = rank - 1 if z.op.get_attr("data_format") == b"NHWC" else 1
        return [z.shape[axis] if axis == along else 1 for axis in range(rank)]
    if z.op.type == "AddV2" and z.op.inputs[1].shape.is_fully_defined():
        added: list[int] = z.op.inputs[1].shape.as_list()
        return [1] * (rank - len(added)) + added
    return None


def _sum_to_bias(g: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum output gradients over the axes along which a bias was broadcast."""
    offset = g.shape.rank - len(shape)
    axes = [offset + axis for axis, size in enumerate(shape) if size == 1]
    axes = [axis for axis in axes if g.shape[axis] != 1]
    return tf.reduce_sum(g, axes, keepdims=True) if axes else g
