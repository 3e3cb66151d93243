"""Rule of variational layers: gradients of means and of scales, in factors."""

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.rules import Call, OuterProducts, PerRow, ScaledProducts, Term


def variational_dense(call: Call) -> Tensor:
    """Rule of `tfdp.variational.VariationalDense`.

    Where weights are drawn, ``z = x (mean + scale * eps)``, the gradient of a mean is
    that of a dense layer's kernel, and that of ``rho`` is the same times
    ``eps * d scale / d rho``. Where outputs are drawn, their mean ``x mean`` and their
    variance ``x^2 scale^2`` are watched, and each is a product with a matrix.

    Args:
        call: The call.

    Returns:
        The layer's outputs.
    """
    layer, training = call.layer, call.bound()["training"]
    x = tf.cast(call.inputs, layer.wide_dtype)
    if training and layer.draws != "local":
        return _of_drawn_weights(call, x)
    mean, variance = layer.moments(x)

    def terms(g_mean: tf.Tensor, g_variance: tf.Tensor) -> list[Term]:
        # The derivative of scale^2.
        scales = [
            2 * layer.kernel_scale * tf.sigmoid(tf.convert_to_tensor(layer.kernel_rho))
        ]
        found = [
            OuterProducts(layer.kernel_mean, x, g_mean),
            ScaledProducts(layer.kernel_rho, tf.square(x), g_variance, scales),
        ]
        if layer.bias_mean is not None:
            slope = tf.sigmoid(tf.convert_to_tensor(layer.bias_rho))
            slope *= 2 * layer.bias_scale
            found += [
                PerRow(layer.bias_mean, g_mean),
                PerRow(layer.bias_rho, g_variance * tf.cast(slope, g_mean.dtype)),
            ]
        return found

    moments = call.watch_all([mean, variance], terms, linear_terms=None)
    return layer.outputs(*moments, training=training)


def _of_drawn_weights(call: Call, x: Tensor) -> Tensor:
    layer = call.layer
    noise = layer.noise(x)

    def terms(g: tf.Tensor) -> list[Term]:
        slopes = tf.sigmoid(tf.convert_to_tensor(layer.kernel_rho))
        scales = noise.kernel * tf.cast(slopes, noise.kernel.dtype)
        found = [
            OuterProducts(layer.kernel_mean, x, g),
            ScaledProducts(layer.kernel_rho, x, g, scales),
        ]
        if layer.bias_mean is not None:
            slope = tf.sigmoid(tf.convert_to_tensor(layer.bias_rho))
            of_rows = noise.bias * tf.cast(slope, noise.bias.dtype)
            found += [
                PerRow(layer.bias_mean, g),
                PerRow(layer.bias_rho, _for_rows(of_rows, g) * g),
            ]
        return found

    return layer.activation(call.watch(layer.multiplied(x, noise), terms))


def _for_rows(of_views: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """``(V, p)`` -> ``(R, 1, ..., p)``: row r takes number ``r % V``."""
    times = tf.shape(g)[0] // tf.shape(of_views)[0]
    rows = tf.cast(tf.tile(of_views, [times, 1]), g.dtype)
    between = [1] * (g.shape.rank - 2)
    return tf.reshape(rows, [tf.shape(g)[0], *between, g.shape[-1]])
