"""What all layers have in common whose weights have a posterior."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor, Variable
from tfdp._views_per_example import number_of_views
from tfdp.losses.regularizers import GaussianDivergence

# Signs must not come of the bits that numbers come of, also not those of another layer,
# whose seed may be the next one.
_FROM_SEED_TO_SIGNS = 0x5DEECE66

# From a shape to standard normal numbers.
Normal: TypeAlias = Callable[[tuple[int | Tensor, ...]], Tensor]


class Weights(NamedTuple):
    """The posterior of a kernel, or of a bias.

    Attributes:
        mean: Means.
        rho: The standard deviations are ``ln(1 + exp(rho))``; of the same shape.
    """

    mean: Variable
    rho: Variable

    @property
    def scale(self) -> Tensor:
        """Standard deviations."""
        return ops.softplus(ops.convert_to_tensor(self.rho))

    def drawn(self, noise: Tensor) -> Tensor:
        """Make weights of standard normal numbers, in the dtype of these."""
        mean = ops.cast(ops.convert_to_tensor(self.mean), noise.dtype)
        return mean + self.deviations(noise)

    def deviations(self, noise: Tensor) -> Tensor:
        """Return how far weights that are made of these numbers lie from their means."""
        return ops.cast(self.scale, noise.dtype) * noise

    def by_rho(self, by_scale: Tensor) -> Tensor:
        """Return derivatives by `rho`, given those by the scale."""
        slope = ops.sigmoid(ops.convert_to_tensor(self.rho))  # That of softplus.
        return by_scale * ops.cast(slope, by_scale.dtype)


class VariationalLayer(keras.layers.Layer):
    """A layer whose weights are independent Gaussians; abstract.

    Args:
        number_of_examples: See `VariationalDense`, as all that follow.
        prior_scale: Of every weight.
        draws: One of `all_draws`.
        kl: Where the divergence is added.
        initial_scale: Of every weight.
        seed: Of the draws.
        **kwargs: Name, dtype, and `trainable`.
    """

    all_draws: tuple[str, ...] = ("shared", "per_example", "flipout")

    def __init__(
        self,
        *,
        number_of_examples: int,
        prior_scale: float = 1.0,
        draws: str = "shared",
        kl: str = "outside",
        initial_scale: float = 0.1,
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        # No weight of the layer: those are what models release, copy and average.
        weight = keras.Variable(
            1.0, trainable=False, dtype=self.wide_dtype, name="kl_weight"
        )
        self._divergences = {
            part: GaussianDivergence(
                part,
                prior_scale=prior_scale,
                number_of_examples=number_of_examples,
                kl=kl,
                weight=weight,
            )
            for part in ("mean", "scale", "factors")
        }
        self.draws = _validate.one_of("draws", draws, self.all_draws)
        self.initial_scale = _validate.positive("initial_scale", initial_scale)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        # Read by the engine that takes one example at a time.
        self.seed_generator.is_same_for_all_rows = self.shares_draws
        if draws == "flipout":
            if seed is not None:
                seed = (seed + _FROM_SEED_TO_SIGNS) % 2**32
            self.sign_generator = keras.random.SeedGenerator(seed)
        self._names: tuple[str, ...] = ()

    @property
    def shares_draws(self) -> bool:
        """Whether all examples of a step have what is drawn for one of them."""
        return self.draws in {"shared", "flipout"}

    def _add(
        self,
        name: str,
        shape: tuple[int | None, ...],
        initializer: keras.initializers.Initializer,
    ) -> None:
        """Add weights as the attributes `name_mean` and `name_rho`."""
        # So that its softplus is the scale.
        rho = self.initial_scale + math.log(-math.expm1(-self.initial_scale))
        starts = (initializer, keras.initializers.Constant(rho))
        parts = (self._divergences[part] for part in ("mean", "scale"))
        for of, start, part in zip(("_mean", "_rho"), starts, parts, strict=True):
            variable = self.add_weight(
                shape, initializer=start, regularizer=part, name=name + of
            )
            setattr(self, name + of, variable)
        self._names = (*self._names, name)

    @property
    def kl_weight(self) -> Variable:
        """What the divergence over N is multiplied by; see `KLAnnealing`."""
        return self._divergences["mean"].weight

    @property
    def posteriors(self) -> dict[str, Weights]:
        """The posteriors of the layer's weights, by name."""
        return {
            name: Weights(getattr(self, f"{name}_mean"), getattr(self, f"{name}_rho"))
            for name in self._names
        }

    @property
    def wide_dtype(self) -> str:
        """The dtype of sums and squares, which would overflow in half precision."""
        return str(keras.backend.result_type(self.compute_dtype, "float32"))

    def noise(self, inputs: Tensor) -> dict[str, Tensor]:
        """Draw what weights are made of.

        Args:
            inputs: Shape ``(R, ...)``.

        Returns:
            See `noise_of`. There are R draws, or one for each view of an example.
        """
        number = number_of_views() if self.shares_draws else ops.shape(inputs)[0]
        return self.noise_of(self._normal, number)

    def noise_of(self, normal: Normal, number: int | Tensor) -> dict[str, Tensor]:
        """Make what weights are made of from standard normal numbers.

        Args:
            normal: Draws them, of a shape.
            number: How many draws of all weights, V.

        Returns:
            Numbers as `posteriors`, with a leading axis of V draws, each of mean 0 and
            variance 1.
        """
        return {
            name: normal((number, *weights.mean.shape))
            for name, weights in self.posteriors.items()
        }

    def _normal(self, shape: tuple[int | Tensor, ...]) -> Tensor:
        dtype = self.wide_dtype
        return keras.random.normal(shape, dtype=dtype, seed=self.seed_generator)

    def _signs(self, shape: tuple[int | Tensor, ...]) -> Tensor:
        """Draw numbers 1 and -1, the leading axis of which is that of rows."""
        bits = keras.random.randint(shape, 0, 2, seed=self.sign_generator)
        return ops.cast(2 * bits - 1, self.wide_dtype)

    def save_own_variables(self, store: Config) -> None:
        """Save the weights, and that of the divergence."""
        super().save_own_variables(store)
        store["kl_weight"] = self.kl_weight.numpy()

    def load_own_variables(self, store: Config) -> None:
        """Load what was saved."""
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118 (HDF5)
        self.kl_weight.assign(np.asarray(saved.pop("kl_weight", 1.0)))
        super().load_own_variables(saved)

    def get_config(self) -> Config:
        """Return the arguments."""
        divergence = self._divergences["mean"]
        return {
            **super().get_config(),
            "number_of_examples": divergence.number_of_examples,
            "prior_scale": divergence.prior_scale,
            "kl": divergence.kl,
            "draws": self.draws,
            "initial_scale": self.initial_scale,
            "seed": self.seed,
        }
