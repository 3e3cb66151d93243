"""Rule of variational layers: gradients of means and of scales, in factors."""

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.rules import Call, OuterProducts, PerRow, ScaledProducts, Term
from tfdp.rules.embedding import row_numbers
from tfdp.variational.embedding import of_rows
from tfdp.variational.product import VariationalProduct


def variational_product(call: Call) -> Tensor:
    """Rule of layers that multiply by a kernel, such as `VariationalDense`.

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
    x = tf.cast(layer.seen(call.inputs), layer.wide_dtype)
    if training and layer.draws != "local":
        noise = layer.noise(x)

        def of_weights(g: Tensor) -> list[Term]:
            return _terms(layer, (x, g), (x, g), noise)

        return layer.activation(call.watch(layer.multiplied(x, noise), of_weights))

    def of_moments(g_mean: Tensor, g_variance: Tensor) -> list[Term]:
        # The derivatives of variances by scales, the same for all rows.
        twice = {
            name: 2 * weights.scale[None] for name, weights in layer.posteriors.items()
        }
        return _terms(layer, (x, g_mean), (tf.square(x), g_variance), twice)

    # No linear terms: variances are not linear in the scales.
    moments = call.watch_all([*layer.moments(x)], of_moments, linear_terms=None)
    return layer.outputs(*moments, training=training)


def variational_embedding(call: Call) -> Tensor:
    """Rule of `tfdp.variational.VariationalEmbedding`.

    The gradient of ``rho`` at a drawn vector is that of the mean times ``eps * d scale /
    d rho`` of this vector, which goes to the outputs' gradient: no example has a
    gradient as large as all vectors.

    Args:
        call: The call.

    Returns:
        The layer's outputs.
    """
    layer, training = call.layer, call.bound()["training"]
    ids = row_numbers(call.inputs, layer.input_dim)
    weights = layer.posteriors["embeddings"]
    if not training:
        # The means alone are read.
        return call.watch(
            call.run_with(), lambda g: [OuterProducts(weights.mean, ids, g)]
        )
    noise = layer.noise(ids)["embeddings"]

    def terms(g: Tensor) -> list[Term]:
        by_rho = of_rows(weights.by_rho(noise), ids)
        g_wide = tf.cast(g, by_rho.dtype)
        return [
            OuterProducts(weights.mean, ids, g),
            OuterProducts(weights.rho, ids, g_wide * by_rho),
        ]

    return call.watch(layer.looked_up(ids, noise), terms)


def _terms(
    layer: VariationalProduct,
    of_means: tuple[Tensor, Tensor],
    of_scales: tuple[Tensor, Tensor],
    by_scales: dict[str, Tensor],
) -> list[Term]:
    """List the terms of all variables.

    Args:
        layer: The layer.
        of_means: Inputs and gradients of the product with the means.
        of_scales: Those of the product that the scales are in.
        by_scales: The derivatives by the scales of what is multiplied there.

    Returns:
        Two terms, or four with a bias.
    """
    by_rho = {
        name: layer.posteriors[name].by_rho(each) for name, each in by_scales.items()
    }
    found = [
        OuterProducts(layer.kernel_mean, *of_means),
        ScaledProducts(layer.kernel_rho, *of_scales, by_rho["kernel"]),
    ]
    if "bias" in by_rho:
        (_, g_mean), (_, g_scale) = of_means, of_scales
        found += [
            PerRow(layer.bias_mean, g_mean),
            PerRow(layer.bias_rho, _for_rows(by_rho["bias"], g_scale) * g_scale),
        ]
    return found


def _for_rows(of_views: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """``(V, p)`` -> ``(R, 1, ..., p)``: row r takes number ``r % V``."""
    times = tf.shape(g)[0] // tf.shape(of_views)[0]
    rows = tf.cast(tf.tile(of_views, [times, 1]), g.dtype)
    between = [1] * (g.shape.rank - 2)
    return tf.reshape(rows, [tf.shape(g)[0], *between, g.shape[-1]])
