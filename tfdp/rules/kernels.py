"""Terms of the kernels that slide over the inputs of convolutions."""

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.rules.filters import depthwise_gradients
from tfdp.rules.geometry import Geometry
from tfdp.rules.patches import has_few_patches, patches
from tfdp.rules.terms import Convolution, OuterProducts, PerRow, Term


def kernel_term(
    variable: Variable, x: Tensor, g: Tensor, geometry: Geometry
) -> OuterProducts | Convolution:
    """Describe a kernel's gradient: as a matrix's where patches are few or trivial."""
    if geometry.groups(x.shape, variable.shape) == 1:
        # A window of one number is a matrix product at every position it visits.
        if all(size == 1 for size in variable.shape[:-2]):
            if set(geometry.strides) != {1}:
                strides = (slice(None, None, stride) for stride in geometry.strides)
                x = x[(slice(None), *strides)]
            return OuterProducts(variable, x, g)
        is_known = x.shape[1:].is_fully_defined() and len(geometry.strides) == 2
        if (
            is_known
            and not _keras.inside_xla()
            and has_few_patches(g.shape[1:-1], variable.shape)
        ):
            seen = patches(x, tuple(variable.shape), geometry)
            return OuterProducts(variable, seen, g)
    return Convolution(variable, x, g, geometry)


def depthwise_term(
    variable: Variable, x: Tensor, g: Tensor, geometry: Geometry
) -> Term:
    """Describe the gradient of a depthwise kernel, which is small."""
    shape = tuple(variable.shape)
    x, g = (tf.expand_dims(each, 1) for each in (at_least_float32(x), g))
    gradients = depthwise_gradients(x, g, kernel_shape=shape, geometry=geometry)
    return PerRow(variable, gradients)
