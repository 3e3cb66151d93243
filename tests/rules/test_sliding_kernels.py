"""Kernels that layers slide over rows by themselves, compared with single rows."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfdp
from tests.engine_checks import OUTLIER, check, check_clipped, runner
from tests.problems import Problem, floats, register, sequential
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

SIZE, DEPTH = 5, 2
IMAGE, SERIES, VOLUME = (SIZE, SIZE, DEPTH), (SIZE, DEPTH), (3, 4, 3, DEPTH)


@register
class Sliding(layers.Layer):
    """Has a kernel, and something that it does with it; and a layer inside.

    Of layers that have none inside the generic rule runs the whole once more.
    """

    def __init__(self, shape, use, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(DEPTH, "tanh")
        self.shape, self.use = shape, use

    def build(self, shape):
        self.inner.build(shape)
        start = keras.initializers.RandomNormal(seed=1)
        self.kernel = self.add_weight(shape=self.shape, initializer=start, name="own")
        self.gain = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return ops.tanh(self.gain * USES[self.use](self.inner(x), self.kernel))


@register
class Masked(layers.Layer):
    """Convolves by a part of a kernel; the layer whose it is is never called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(3, 3)

    def build(self, shape):
        self.conv.build(shape)
        mask = np.zeros(self.conv.kernel.shape, "float32")
        mask[0], mask[1, :2] = 1, 1
        self.mask = mask

    def call(self, x):
        kernel = self.conv.kernel * ops.cast(self.mask, x.dtype)
        return ops.conv(x, kernel, padding="same") + self.conv.bias


@register
class Assigned(Masked):
    """Takes the same part of the kernel for good, and calls the layer."""

    def call(self, x):
        self.conv.kernel.assign(self.conv.kernel * ops.cast(self.mask, x.dtype))
        return self.conv(x)


@register
class Standardized(layers.Conv2D):
    """Overrides what Keras offers for it."""

    def convolution_op(self, inputs, kernel):
        mean, variance = ops.moments(kernel, axes=[0, 1, 2], keepdims=True)
        kernel = (kernel - mean) / ops.sqrt(variance + 1e-3)
        return super().convolution_op(inputs, kernel)


def of_length_one(kernel):
    return kernel / ops.sqrt(ops.sum(kernel**2, axis=(0, 1), keepdims=True))


# What is done with a kernel of some shape, and rows of some shape.
USES = {
    "itself": ops.conv,
    "equalized": lambda x, w: ops.conv(x, 0.3 * w, 2, "same"),
    "of_one_number": lambda x, w: ops.conv(x, ops.tanh(w), 1, "valid"),
    "normed": lambda x, w: ops.conv(x, of_length_one(w), 1, "same"),
    "series": lambda x, w: ops.conv(x, w, 2),
    "volume": lambda x, w: ops.conv(x, ops.sin(w)),
    "depthwise": lambda x, w: ops.depthwise_conv(x, w[..., :1] * w, padding="same"),
    "transposed": lambda x, w: ops.conv_transpose(x, ops.tanh(w), 2, "same"),
    "dilated": lambda x, w: ops.conv(x, w, 1, "same", dilation_rate=2),
    "dilated_series": lambda x, w: ops.conv(x, of_length_one(w), dilation_rate=2),
    "dilated_depthwise": lambda x, w: ops.depthwise_conv(
        x, ops.tanh(w), padding="same", dilation_rate=2
    ),
    "twice": lambda x, w: ops.conv(ops.conv(x, w, 1, "same"), w, 1, "same"),
}
SHAPES = {
    "itself": (IMAGE, (3, 2, DEPTH, 3)),
    "equalized": (IMAGE, (3, 3, DEPTH, 3)),
    "of_one_number": (IMAGE, (1, 1, DEPTH, 3)),
    "normed": (SERIES, (3, DEPTH, 3)),
    "series": (SERIES, (3, DEPTH, 3)),
    "volume": (VOLUME, (2, 2, 2, DEPTH, 3)),
    "depthwise": (IMAGE, (2, 3, DEPTH, 2)),
    "transposed": (IMAGE, (3, 3, 3, DEPTH)),
    "dilated": (IMAGE, (2, 3, DEPTH, 3)),
    "dilated_series": (SERIES, (2, DEPTH, 3)),
    "dilated_depthwise": (IMAGE, (2, 3, DEPTH, 2)),
    "twice": (IMAGE, (3, 3, DEPTH, DEPTH)),
}


def used(name):
    shape, of_kernel = SHAPES[name]
    return shape, lambda: Sliding(of_kernel, name)


LAYERS = {name: used(name) for name in USES} | {
    "masked": (IMAGE, Masked),
    "assigned": (IMAGE, Assigned),
    "standardized": (IMAGE, functools.partial(Standardized, 3, 3)),
}
# What is called on the rows themselves: nothing before it has a gradient.
FIRST = {"masked", "assigned"}


def problem(name):
    shape, layer = LAYERS[name]

    def build():
        # Places are told by the names of layers.
        keras.utils.clear_session(free_memory=False)
        first = [] if name in FIRST else [layers.Dense(DEPTH, "tanh")]
        return sequential(shape, *first, layer(), layers.Flatten(), layers.Dense(1))

    return Problem(name, build, floats(shape, 1), "mse")


def chosen(of_problem):
    objective = Objective.of(of_problem.build(), of_problem.loss())
    engine = choose("auto", objective, tuple(of_problem.batch(3)))
    assert type(engine) is BookkeepingEngine  # And not one of its kind.
    return engine


QUICK = {"masked", "assigned", "transposed", "dilated"}
CASES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in LAYERS
]


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_one_example_at_a_time(name):
    of_problem = problem(name)
    check(of_problem, runner(of_problem, [chosen(of_problem)]), OUTLIER)


# One for each kind of convolution, and for what is done to a kernel.
COMPILED = {
    "itself",
    "normed",
    "series",
    "depthwise",
    "transposed",
    "twice",
    "assigned",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMPILED else pytest.mark.exhaustive)
        for name in LAYERS
    ],
)
def test_under_xla_with_units_of_two(name):
    of_problem = problem(name)
    run = runner(of_problem, [chosen(of_problem)], "xla", unit_size=2)
    check(of_problem, run, OUTLIER, unit_size=2)


@pytest.mark.parametrize("name", ["masked"])
def test_an_outlier_is_clipped(name):
    of_problem = problem(name)
    check_clipped(of_problem, runner(of_problem, [chosen(of_problem)]), [1e-3, 1e6])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "assigned", "standardized"])
def test_models_with_such_kernels_train(name):
    """Eagerly, too: graphs tell there where kernels meet the rows."""
    of_problem = problem(name)
    x, y, _ = of_problem.batch(8)
    for run_eagerly in (False, True):
        private = tfdp.DPModel(of_problem.build("float32"))
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
        private.compile(optimizer, "mse", run_eagerly=run_eagerly)
        before = private.get_weights()
        private.fit(x, y, batch_size=4, verbose=0)
        for old, new in zip(before, private.get_weights(), strict=True):
            assert np.any(old != new)


def test_two_values_of_a_variable_are_not_told_apart():
    """What is read before it is assigned has a gradient of its own."""

    @register
    class Both(Assigned):
        def call(self, x):
            return ops.sum(self.conv.kernel) * super().call(x)

    model = sequential(IMAGE, Both(), layers.Flatten(), layers.Dense(1))
    data = tuple(problem("masked").batch(3))
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="AssignVariableOp"):
        choose("bookkeeping", Objective.of(model, "mse"), data)
