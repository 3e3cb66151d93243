"""Rule of variational layers: gradients of means and of scales, in factors."""

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules import Call, OuterProducts, PerRow, ScaledProducts, Term
from tfdp.rules.embedding import row_numbers
from tfdp.variational.correlation import derivatives_by_factors
from tfdp.variational.embedding import of_rows
from tfdp.variational.product import VariationalProduct


def variational_product(call: Call) -> Tensor:
    """Rule of layers that multiply by a kernel, such as `VariationalDense`.

    Where weights are drawn, ``z = x (mean + scale * eps)``, the gradient of a mean is
    that of a dense layer's kernel, and that of ``rho`` is the same times
    ``eps * d scale / d rho``. With signs of a row's inputs and outputs, ``z = x mean +
    ((x s) (scale * eps)) r``, the factors of the latter are ``x s`` and ``g r``. Where
    outputs are drawn, their mean ``x mean`` and their variance ``x^2 scale^2`` are
    watched, and each is a product with a matrix.

    Args:
        call: The call.

    Returns:
        The layer's outputs.
    """
    layer = call.layer
    x = tf.cast(layer.seen(call.inputs), layer.wide_dtype)
    if not call.bound()["training"]:
        return layer.finished(
            call.watch(layer.mean(x), lambda g: _terms_of_means(layer, x, g))
        )
    if layer.draws == "local":
        return layer.finished(layer.local(*_watched_moments(call, x)))
    noise, signs = layer.noise(x), layer.signs(x)

    def of_weights(g: Tensor) -> list[Term]:
        deviating = x, g
        if signs is not None:
            of_inputs, of_outputs = signs
            deviating = x * of_inputs, g * tf.cast(of_outputs, g.dtype)
        terms = [
            *_terms_of_means(layer, x, g),
            *_terms_of_scales(layer, *deviating, noise),
        ]
        return [*terms, _term_of_factors(layer, x, g, noise)] if layer.rank else terms

    return layer.finished(call.watch(layer.multiplied(x, noise, signs), of_weights))


def predictive_logit(call: Call) -> Tensor:
    """Rule of the layer of `tfdp.variational.BayesianLogisticRegression`.

    Args:
        call: The call.

    Returns:
        The layer's outputs; at inference made of their moments, as `variational_product`
        does where outputs are drawn.

    Raises:
        UnsupportedLayerError: If it is called for inference, with a `rank`: its weights
            are followed then.
    """
    if call.bound()["training"]:
        return variational_product(call)
    if call.layer.rank:
        raise UnsupportedLayerError(
            "The variance of outputs of weights that vary together is no product of "
            f"matrices. Received: `{call.path}` with rank={call.layer.rank}, called for "
            "inference. Call it with `training=True`."
        )
    x = tf.cast(call.inputs, call.layer.wide_dtype)
    return call.layer.averaged(*_watched_moments(call, x))


def variational_embedding(call: Call) -> Tensor:
    """Rule of `tfdp.variational.VariationalEmbedding`.

    The gradient of ``rho`` at a drawn vector is that of the mean times ``eps * d scale /
    d rho`` of this vector, and times the signs of its row, if it has some. That goes to the
    outputs' gradient: no example has a gradient as large as all vectors.

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
    noise, signs = layer.noise(ids)["embeddings"], layer.signs(ids)

    def terms(g: Tensor) -> list[Term]:
        by_rho = of_rows(weights.by_rho(noise), ids)
        if signs is not None:
            by_rho *= tf.cast(signs, by_rho.dtype)
        g_wide = tf.cast(g, by_rho.dtype)
        return [
            OuterProducts(weights.mean, ids, g),
            OuterProducts(weights.rho, ids, g_wide * by_rho),
        ]

    return call.watch(layer.looked_up(ids, noise, signs), terms)


def _watched_moments(call: Call, x: Tensor) -> list[Tensor]:
    """Watch mean and variance of the outputs."""
    layer = call.layer

    def of_moments(g_mean: Tensor, g_variance: Tensor) -> list[Term]:
        # The derivatives of variances by scales, the same for all rows.
        twice = {
            name: 2 * weights.scale[None] for name, weights in layer.posteriors.items()
        }
        return [
            *_terms_of_means(layer, x, g_mean),
            *_terms_of_scales(layer, tf.square(x), g_variance, twice),
        ]

    # No linear terms: variances are not linear in the scales.
    return call.watch_all([*layer.moments(x)], of_moments, linear_terms=None)


def _terms_of_means(layer: VariationalProduct, x: Tensor, g: Tensor) -> list[Term]:
    """List the terms of the means, of a product with them."""
    terms: list[Term] = [OuterProducts(layer.kernel_mean, x, g)]
    return [*terms, PerRow(layer.bias_mean, g)] if layer.use_bias else terms


def _terms_of_scales(
    layer: VariationalProduct, x: Tensor, g: Tensor, by_scales: dict[str, Tensor]
) -> list[Term]:
    """List the terms of the scales.

    Args:
        layer: The layer.
        x: Inputs of the product that the scales are in.
        g: Its gradients.
        by_scales: The derivatives by the scales of what is multiplied there.

    Returns:
        One term, or two with a bias.
    """
    by_rho = {
        name: weights.by_rho(by_scales[name])
        for name, weights in layer.posteriors.items()
    }
    terms: list[Term] = [ScaledProducts(layer.kernel_rho, x, g, by_rho["kernel"])]
    if layer.use_bias:
        terms.append(PerRow(layer.bias_rho, _for_rows(by_rho["bias"], g) * g))
    return terms


def _term_of_factors(
    layer: VariationalProduct, x: Tensor, g: Tensor, noise: dict[str, Tensor]
) -> Term:
    """Return the term of the factors by which weights vary together.

    A weight has the derivatives ``scale * d noise / d factors`` by r numbers, so that of
    each output's gradient there are r.
    """
    scales = {name: of.scale[None] for name, of in layer.posteriors.items()}
    by_factors = derivatives_by_factors(
        layer.together(noise), noise["common"], layer.factors
    )
    by_factors *= tf.cast(layer.together(scales)[..., None], by_factors.dtype)
    if layer.use_bias:
        x = tf.concat([x, tf.ones_like(x[..., :1])], -1)
    return ScaledProducts(
        layer.factors, x, tf.repeat(g, layer.rank, axis=-1), by_factors
    )


def _for_rows(of_views: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """``(V, p)`` -> ``(R, 1, ..., p)``: row r takes number ``r % V``."""
    times = tf.shape(g)[0] // tf.shape(of_views)[0]
    rows = tf.cast(tf.tile(of_views, [times, 1]), g.dtype)
    between = [1] * (g.shape.rank - 2)
    return tf.reshape(rows, [tf.shape(g)[0], *between, g.shape[-1]])
