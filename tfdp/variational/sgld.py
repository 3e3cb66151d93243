"""Private Langevin dynamics: private SGD at a temperature."""

import math

from tfdp import _validate
from tfdp.optimizers import DPSGD, DPOptimizer


def dp_sgld(
    step_size: float,
    *,
    number_of_examples: int,
    expected_batch_size: int,
    l2_norm_clip: float,
    temperature: float = 1.0,
) -> DPOptimizer:
    """Make the optimizer of stochastic gradient Langevin dynamics, with clipping.

    Langevin dynamics with step size eta moves weights along minus the gradient of
    ``U = sum_i loss_i - ln prior`` and adds noise of variance ``2 eta T``. With
    gradients of batches that is SGD on the mean loss with a learning rate of
    ``eta N``, and its noise is that of private SGD with a noise multiplier of [1]_::

        z = sqrt(2 T / eta) * expected_batch_size / (N * l2_norm_clip)

    So it is private SGD, with a noise multiplier that the temperature sets, and is
    accounted like it: see `DPModel.epsilon`. It samples the posterior at temperature T
    only as far as nothing is clipped, eta is small, and the noise of the batches is
    small beside the other; whether that is so does not touch the privacy.

    The prior is a weight regularizer, divided by N: for ``N(0, s^2)`` use
    ``keras.regularizers.L2(0.5 / (s**2 * N))``. The step size must stay as it is: with
    a schedule of it, z would have to follow.

    Args:
        step_size: eta, positive.
        number_of_examples: N, public.
        expected_batch_size: As in `fit`.
        l2_norm_clip: C.
        temperature: T, positive; 1 for the posterior itself.

    Returns:
        A `DPSGD`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of its range.

    Example:
        >>> optimizer = dp_sgld(
        ...     1e-4, number_of_examples=1000, expected_batch_size=100, l2_norm_clip=5.0
        ... )
        >>> round(float(optimizer.noise_multiplier), 3)
        2.828

    References:
        .. [1] Wang et al., "Privacy for Free: Posterior Sampling and Stochastic
           Gradient Monte Carlo", ICML 2015, section 4.
           https://arxiv.org/abs/1502.07645
    """
    eta = _validate.positive("step_size", step_size)
    number = _validate.positive_int("number_of_examples", number_of_examples)
    batch = _validate.positive_int("expected_batch_size", expected_batch_size)
    clip = _validate.positive("l2_norm_clip", l2_norm_clip)
    temperature = _validate.positive("temperature", temperature)
    return DPSGD(
        eta * number,
        l2_norm_clip=clip,
        noise_multiplier=math.sqrt(2 * temperature / eta) * batch / (number * clip),
        expected_batch_size=batch,
    )
