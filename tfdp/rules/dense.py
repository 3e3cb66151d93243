"""Layers that multiply by a matrix: Dense and EinsumDense, with and without LoRA."""

import math

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.preactivations import watch_preactivation
from tfdp.rules.registry import rule
from tfdp.rules.terms import OuterProducts, PerRow, Term


@rule(keras.layers.Dense)
def dense(call: Call) -> Nest:
    """Rule of `keras.layers.Dense`."""
    layer, x = call.layer, _numbers(call)

    def terms(g: Tensor) -> list[Term]:
        if not layer.lora_enabled:
            return [OuterProducts(layer.kernel, x, g)]
        scaled, low = lora_factors(layer, layer.lora_kernel_b, g)
        a = tf.matmul(x, tf.cast(layer.lora_kernel_a, x.dtype))
        return [
            OuterProducts(layer.lora_kernel_a, x, low),
            OuterProducts(layer.lora_kernel_b, a, scaled),
        ]

    return watch_preactivation(call, terms, layer.bias)


def _numbers(call: Call) -> Tensor:
    """Return the inputs as what they are multiplied as; whole numbers are no ids."""
    # It may be a variable.
    x = tf.convert_to_tensor(call.inputs)
    return x if x.dtype.is_floating else tf.cast(x, call.layer.compute_dtype)


def lora_factors(
    layer: keras.layers.Layer, b: Variable, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output gradients that the two factors of a LoRA update see."""
    # Of z = x (K + s A B): dA is x^T (s g B^T), dB is (x A)^T (s g).
    scaled = g * tf.cast(layer.lora_alpha / layer.lora_rank, g.dtype)
    return scaled, tf.matmul(scaled, tf.cast(b, g.dtype), transpose_b=True)


@rule(keras.layers.EinsumDense)
def einsum_dense(call: Call) -> Nest:
    """Rule of `keras.layers.EinsumDense`, and so of Keras's attention layers."""
    layer, x = call.layer, _numbers(call)

    def terms(g: Tensor) -> list[Term]:
        labels = _labels(layer.equation, x.shape.rank)
        if not layer.lora_enabled:
            return [einsum_term(layer.kernel, labels, x, g)]
        return _lora_terms(layer, labels, x, g)

    return watch_preactivation(call, terms, layer.bias)


def _lora_terms(
    layer: keras.layers.Layer, labels: tuple[str, str, str], x: Tensor, g: Tensor
) -> list[Term]:
    """Differentiate ``kernel + scale a b``, b on the kernel's last axis, by a and b."""
    inputs, kernel, outputs = labels
    x = at_least_float32(x)
    scale = tf.cast(layer.lora_alpha / layer.lora_rank, g.dtype)
    a, b = (tf.cast(v, g.dtype) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    rank = next(iter(set("abcdefghijklmnopqrstuvwxyz") - set("".join(labels))))
    last = kernel[-1]
    if last in inputs and last in outputs:
        raise UnsupportedLayerError(
            "LoRA of an EinsumDense needs a last axis of the kernel that is not on both "
            f"sides. Received: equation={layer.equation!r}. Reorder the axes."
        )
    if last in inputs:
        # The last axis is summed over: the update acts on the inputs first, and what is
        # between has the rank's letter in place of that axis.
        low_inputs = tf.einsum(
            f"{inputs},{rank}{last}->{inputs.replace(last, rank)}", x, b
        )
        to_a = (inputs.replace(last, rank), kernel[:-1] + rank, outputs)
        grad_low = tf.einsum(f"{outputs},{kernel[:-1]}{rank}->{to_a[0]}", g * scale, a)
        return [
            einsum_term(layer.lora_kernel_a, to_a, low_inputs, g * scale),
            einsum_term(
                layer.lora_kernel_b, (inputs, rank + last, to_a[0]), x, grad_low
            ),
        ]
    low = outputs.replace(last, rank)
    low_outputs = tf.einsum(f"{inputs},{kernel[:-1]}{rank}->{low}", x, a)
    low_g = tf.einsum(f"{outputs},{rank}{last}->{low}", g * scale, b)
    return [
        einsum_term(layer.lora_kernel_a, (inputs, kernel[:-1] + rank, low), x, low_g),
        einsum_term(
            layer.lora_kernel_b, (low, rank + last, outputs), low_outputs, g * scale
        ),
    ]


def einsum_term(
    variable: Variable, labels: tuple[str, str, str], x: Tensor, g: Tensor
) -> Term:
    """Describe the gradient of the second operand of an einsum.

    Args:
        variable: The Keras variable that is the second operand.
        labels: Labels of the inputs, the variable and the outputs; the first of the
            inputs and of the outputs is that of the rows.
        x: First operand.
        g: Gradient of the result.

    Returns:
        Outer products, where labels of the variable come from one side each, inputs
        first; otherwise the gradients of the rows.
    """
    inputs, kernel, outputs = labels
    from_inputs = "".join(label for label in kernel if label not in outputs)
    from_outputs = "".join(label for label in kernel if label not in inputs)
    between = [label for label in inputs if label in outputs and label not in kernel]
    covered = set(kernel) == set(from_inputs + from_outputs)
    summed = set(inputs) - set(kernel) - set(outputs)
    orders = (from_inputs + from_outputs, from_outputs + from_inputs)
    if covered and not summed and from_inputs and from_outputs and kernel in orders:
        positions = "".join(between)
        a = _flat(tf.einsum(f"{inputs}->{positions}{from_inputs}", x), len(from_inputs))
        b = _flat(
            tf.einsum(f"{outputs}->{positions}{from_outputs}", g), len(from_outputs)
        )
        return OuterProducts(variable, *((a, b) if kernel == orders[0] else (b, a)))
    row = inputs[0]
    products = tf.einsum(f"{inputs},{outputs}->{row}{kernel}", at_least_float32(x), g)
    return PerRow(variable, products)


def _flat(tensor: Tensor, axes: int) -> Tensor:
    """Join the last axes to one."""
    if axes == 1:
        return tensor
    kept = tensor.shape.rank - axes
    size = math.prod(tensor.shape[kept:])
    if kept and tensor.shape[1:].is_fully_defined() and 0 not in tensor.shape[1:]:
        return tf.reshape(tensor, [-1, *tensor.shape[1:kept], size])
    shape = tf.concat([tf.shape(tensor)[:kept], [size]], 0)
    return tf.ensure_shape(tf.reshape(tensor, shape), [*tensor.shape[:kept], size])


def _labels(equation: str, input_rank: int) -> tuple[str, str, str]:
    """Write an equation with labels in place of its ellipsis.

    Args:
        equation: Of an EinsumDense.
        input_rank: Rank of its inputs.

    Returns:
        Labels of the inputs, the kernel and the outputs.

    Raises:
        UnsupportedLayerError: If rows are not the first axis, or an axis of the kernel
            alone is summed over.
    """
    left, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    missing = "".join(free[: input_rank - len(inputs.replace("...", ""))])
    inputs = inputs.replace("...", missing)
    outputs = outputs.replace("...", missing)
    row = inputs[0]
    if row != outputs[0] or row in kernel or set(kernel) - set(inputs + outputs):
        raise UnsupportedLayerError(
            "An EinsumDense must keep the examples on its first axis, and each axis of "
            f"its kernel. Received: equation={equation!r}. Use e.g. 'abc,cd->abd'."
        )
    return inputs, kernel, outputs
