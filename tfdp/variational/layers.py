"""A dense layer whose weights have a posterior: independent Gaussians."""

from collections.abc import Callable

import keras

from tfdp import _validate
from tfdp._types import Config, Tensor
from tfdp.variational.product import VariationalProduct


class DenseProduct(VariationalProduct):
    """A product with a matrix; abstract. Arguments are those of `VariationalDense`."""

    all_draws = (*VariationalProduct.all_draws, "local")

    def __init__(
        self,
        units: int,
        *,
        number_of_examples: int,
        prior_scale: float = 1.0,
        draws: str = "local",
        kl: str = "outside",
        activation: Callable[[Tensor], Tensor] | str | None = None,
        use_bias: bool = True,
        initial_scale: float = 0.1,
        kernel_initializer: keras.initializers.Initializer | str = "glorot_uniform",
        bias_initializer: keras.initializers.Initializer | str = "zeros",
        rank: int = 0,
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(
            number_of_examples=number_of_examples,
            prior_scale=prior_scale,
            draws=draws,
            kl=kl,
            activation=activation,
            use_bias=use_bias,
            initial_scale=initial_scale,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            rank=rank,
            seed=seed,
            **kwargs,
        )
        self.units = _validate.positive_int("units", units)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add means and scales of the kernel, and of the bias."""
        if self.draws == "local" and len(input_shape) != 2:
            raise ValueError(
                "`draws='local'` needs inputs of shape (N, d): positions that share "
                "weights would be drawn as if they did not. Received: inputs of shape "
                f"{tuple(input_shape)} of layer `{self.name}`. Use `draws='flipout'` or "
                "`draws='shared'`."
            )
        self._add_product((input_shape[-1], self.units))

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Return the shape of the outputs."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> Config:
        """Return the arguments."""
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalDense(DenseProduct):
    """A dense layer with a Gaussian posterior over each of its weights.

    Each weight is ``w ~ N(mean, scale^2)``, ``scale = ln(1 + exp(rho))``, all
    independent of each other (mean field) but for a `rank`; the prior is ``N(0, prior_scale^2)``. In
    training, weights are drawn as ``mean + scale * eps`` [1]_, and the layer's weight
    regularizers are the Kullback-Leibler divergence from the prior over N: with a loss
    that is minus the log-likelihood of an example, `fit` minimizes minus the evidence
    lower bound over N, under `keras.Model` and, privately [3]_, `tfdp.DPModel`.
    `tfdp.variational.KLAnnealing` lets the divergence's weight rise to that.
    Several draws for each example are averaged before clipping by ``DPModel(model,
    augmentation_multiplicity=draws)``. At inference the weights are their means;
    `tfdp.variational.predictive_mean` averages over the posterior.

    Guarantees:
        Under `DPModel` the gradients of means and scales of all layers are clipped
        together, to one norm. What is drawn here does not depend on data.

    Args:
        units: Size of the outputs, p.
        number_of_examples: N, of the training data; public. `DPModel.fit` refuses data
            that have another number.
        prior_scale: Standard deviation of the prior of every weight.
        draws: `"local"`: outputs are drawn instead of weights [2]_, for inputs of shape
            ``(N, d)``; it has the least variance. `"per_example"`: each example has
            weights of its own, ``d p`` numbers for each. `"shared"`: one draw for all
            examples of a step. `"flipout"`: that draw, whose numbers each example adds to
            the means with signs of its own, ``d + p`` for each [4]_: for one example it
            is a draw from the posterior, and those of two are not correlated.
        kl: `"outside"`: the divergence's gradient is added after the noise, because
            no data enter it. `"inside"`: each example's loss has ``KL / N``, which is
            clipped with it, as in [3]_.
        activation: Name of a Keras activation, or a function.
        use_bias: Whether there is a bias, with a posterior too.
        initial_scale: Standard deviation of the posterior at first.
        kernel_initializer: Of the kernel's means, as in `keras.layers.Dense`.
        bias_initializer: Of the bias's means.
        rank: With r of at least 1, the layer's weights vary together: their covariance is
            a diagonal and ``U U^T``, with r columns of U that train [5]_, and scales stay
            the standard deviations. `covariance` returns it. For `draws="shared"` or
            `"per_example"`.
        seed: Of the draws. Like masks of dropout, draws of rows have a secret beside it in
            private training.
        **kwargs: Name, dtype, and `trainable`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or inputs of `draws="local"`
            have more than two axes.

    Example:
        >>> x, y = np.random.normal(size=(100, 3)), np.ones((100, 1))
        >>> model = keras.Sequential([
        ...     keras.Input((3,)),
        ...     VariationalDense(8, number_of_examples=100, activation="tanh"),
        ...     VariationalDense(1, number_of_examples=100),
        ... ])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPAdam(0.01, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss="mse",
        ... )
        >>> history = private.fit(x, y, batch_size=10, verbose=0)
        >>> model.layers[0].kernel_scale.shape
        TensorShape([3, 8])

    References:
        .. [1] Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015,
           section 3.2. https://arxiv.org/abs/1505.05424
        .. [2] Kingma et al., "Variational Dropout and the Local Reparameterization
           Trick", NeurIPS 2015, equation 6. https://arxiv.org/abs/1506.02557
        .. [3] Jälkö et al., "Differentially Private Variational Inference for
           Non-conjugate Models", UAI 2017, Algorithm 1.
           https://arxiv.org/abs/1610.08749
        .. [4] Wen et al., "Flipout: Efficient Pseudo-Independent Weight Perturbations on
           Mini-Batches", ICLR 2018, section 3.1. https://arxiv.org/abs/1803.04386
        .. [5] Ong et al., "Gaussian Variational Approximation with a Factor Covariance
           Structure", JCGS 2018. https://arxiv.org/abs/1701.03208
    """
