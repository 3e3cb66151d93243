"""Weights that vary together: a covariance of low rank beside its diagonal.

For weights i and factors ``v_i``, r numbers each, take ``h_i = sqrt(1 + |v_i|^2)`` and
standard normal ``eps`` and ``z``, the r numbers of z for all weights together. Then ::

    noise_i = (eps_i + v_i.z) / h_i

has a variance of 1 for any factors, and weights ``mean + scale * noise`` have the
covariance ``diag(scale^2 / h^2) + U U^T`` with rows ``u_i = scale_i v_i / h_i``: every
covariance that is a positive diagonal and a matrix of rank r is one of these. `scale`
stays the standard deviation of each weight by itself.
"""

from keras import ops

from tfdp._types import Tensor


def correlated(eps: Tensor, z: Tensor, factors: Tensor) -> Tensor:
    """Make noise that varies together.

    Args:
        eps: Standard normal numbers, shape ``(V, n, p)``.
        z: Likewise, shape ``(V, r)``.
        factors: Shape ``(n, p, r)``.

    Returns:
        Shape ``(V, n, p)``, in the dtype of `eps`.
    """
    factors = ops.cast(factors, eps.dtype)
    return (eps + ops.einsum("npr,vr->vnp", factors, z)) / _lengths(factors)


def derivatives_by_factors(noise: Tensor, z: Tensor, factors: Tensor) -> Tensor:
    """Differentiate correlated noise by the factors of its weight.

    Args:
        noise: From `correlated`.
        z: What it was made of.
        factors: Likewise.

    Returns:
        Shape ``(V, n, p, r)``.
    """
    factors = ops.cast(factors, noise.dtype)
    lengths = _lengths(factors)[..., None]
    return (z[:, None, None] - noise[..., None] * factors / lengths) / lengths


def covariance(scales: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal and U.

    Args:
        scales: Standard deviations, shape ``(n, p)``.
        factors: Shape ``(n, p, r)``.

    Returns:
        Shapes ``(n, p)`` and ``(n, p, r)``.
    """
    factors = ops.cast(factors, scales.dtype)
    alone = scales / _lengths(factors)
    return ops.square(alone), alone[..., None] * factors


def _lengths(factors: Tensor) -> Tensor:
    return ops.sqrt(1 + ops.sum(ops.square(factors), axis=-1))
