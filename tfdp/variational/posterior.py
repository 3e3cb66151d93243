"""What a trained posterior says. All of it is post-processing, and costs nothing."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

from tfdp import _keras, _validate
from tfdp._types import Array, Tensor
from tfdp.model import DPModel
from tfdp.variational.base import VariationalLayer, Weights


class Gaussian(NamedTuple):
    """Gaussians, each by itself.

    Attributes:
        mean: Means.
        scale: Standard deviations, of the same shape.
    """

    mean: Array
    scale: Array


def posterior(model: keras.Model) -> dict[str, Gaussian]:
    """Return the posterior of every weight.

    Args:
        model: A model with variational layers, built; or a `tfdp.DPModel` of one.

    Returns:
        By the path of the layer with ``/kernel`` or ``/bias``.

    Raises:
        ValueError: If there is no variational layer.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((2,)),
        ...     tfdp.variational.VariationalDense(
        ...         1, number_of_examples=100, name="dense"
        ...     ),
        ... ])
        >>> posterior(model)["dense/bias"]
        Gaussian(mean=array([0.], dtype=float32), scale=array([0.1], dtype=float32))
    """
    return {
        name: Gaussian(
            keras.ops.convert_to_numpy(weights.mean),
            keras.ops.convert_to_numpy(weights.scale),
        )
        for name, weights in weights_by_name(model)
    }


def posterior_samples(
    model: keras.Model, number: int, *, seed: int | None = None
) -> dict[str, np.ndarray]:
    """Draw weights from the posterior.

    Args:
        model: See `posterior`.
        number: How many draws of all weights together.
        seed: None for one of the operating system's.

    Returns:
        As `posterior`, arrays with a leading axis of length `number`.

    Raises:
        TypeError: If `number` is not a number.
        ValueError: If it is less than 1, or there is no variational layer.
    """
    number = _validate.positive_int("number", number)
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return keras.ops.convert_to_tensor(rng.standard_normal(shape))

    samples = {}
    for path, layer in _layers_by_path(model):
        noise = layer.noise_of(normal, number)
        for kind, weights in layer.posteriors.items():
            drawn = keras.ops.cast(weights.drawn(noise[kind]), weights.mean.dtype)
            samples[f"{path}/{kind}"] = keras.ops.convert_to_numpy(drawn)
    return samples


def credible_intervals(
    model: keras.Model, level: float = 0.95
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the central interval in which each weight lies.

    Args:
        model: See `posterior`.
        level: Probability under the posterior, between 0 and 1. The posterior is the
            variational one: where weights depend on each other it is too narrow, and
            of the noise of private training it knows nothing.

    Returns:
        As `posterior`, lower and upper ends.

    Raises:
        TypeError: If `level` is not a number.
        ValueError: If `level` is out of its range, or there is no variational layer.
    """
    level = _validate.probability("level", level)
    half = statistics.NormalDist().inv_cdf((1 + level) / 2)
    return {
        name: (mean - half * scale, mean + half * scale)
        for name, (mean, scale) in posterior(model).items()
    }


def weights_by_name(model: keras.Model) -> Iterator[tuple[str, Weights]]:
    """Yield the posteriors of all weights, by name; see `posterior`."""
    for path, layer in _layers_by_path(model):
        for kind, weights in layer.posteriors.items():
            yield f"{path}/{kind}", weights


def _layers_by_path(model: keras.Model) -> list[tuple[str, VariationalLayer]]:
    """List the variational layers, of which there must be some, by different names."""
    model = unwrapped(model)
    layers = [
        (path, layer)
        for path, layer in _keras.layers_by_path(model)
        if isinstance(layer, VariationalLayer) and layer.built
    ]
    if not layers:
        raise ValueError(
            f"Model `{model.name}` must have a variational layer that is built. "
            "Received: none. Use `tfdp.variational.VariationalDense(...)`, and fit the "
            "model first."
        )
    if len({path for path, _ in layers}) < len(layers):
        names = ", ".join(f"`{path}`" for path, _ in layers)
        raise ValueError(
            f"Layers must have names of their own. Received: {names}. Use "
            "`VariationalDense(..., name='...')`."
        )
    return layers


def unwrapped(model: keras.Model) -> keras.Model:
    """Return the model inside a `tfdp.DPModel`, others as they are."""
    inner: keras.Model = model.model if isinstance(model, DPModel) else model
    return inner
