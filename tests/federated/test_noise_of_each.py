"""The noise of all contributors together is the sum of one draw of each."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping import ClippedSum
from tfdp.federated.noise_of_each import GaussianOfEach
from tfdp.mechanisms import Gaussian

pytestmark = pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")

NOTHING = ClippedSum(
    [tf.zeros([100_000]), tf.zeros([50_000])], tf.zeros([0]), tf.constant(2.0), 1
)


def noise(mechanism, step):
    noised = mechanism.noised(
        NOTHING,
        noise_multiplier=tf.constant(1.5, tf.float64),
        stream=mechanism.stream(step),
    )
    return [each.numpy() if tf.executing_eagerly() else each for each in noised]


def test_a_copy_has_as_many_contributors_and_noise_of_its_own():
    of_nine = GaussianOfEach(9)
    other = copy.deepcopy(of_nine)
    assert other.contributors == 9
    step = tf.constant(0, tf.int64)
    assert np.all(noise(of_nine, step)[0] != noise(other, step)[0])


@pytest.mark.parametrize(
    "mode",
    ["graph", *(pytest.param(n, marks=pytest.mark.slow) for n in ("eager", "xla"))],
)
def test_the_noise_of_each_adds_up(mode):
    """Of nine: three times that of one, and none of their draws is another's."""
    of_nine = GaussianOfEach(9, noise_seed=7)

    def draw(step):
        return noise(of_nine, step)

    if mode != "eager":
        draw = tf.function(draw, jit_compile=mode == "xla")
    steps = [
        [np.asarray(each) for each in draw(tf.constant(step, tf.int64))]
        for step in (0, 1)
    ]
    for gradients in steps:
        for gradient in gradients:
            assert gradient.std() == pytest.approx(9.0, rel=0.02)
    streams = [gradient[:50_000] for gradients in steps for gradient in gradients]
    correlations = np.corrcoef(streams)[np.triu_indices(len(streams), 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(50_000)
    for number, gradients in enumerate(steps):
        of_one = Gaussian(7)
        drawn = [noise(of_one, tf.constant(9 * number + k, tf.int64)) for k in range(9)]
        for own, all_of_them in zip(gradients, zip(*drawn, strict=True), strict=True):
            np.testing.assert_allclose(own, np.sum(all_of_them, 0), atol=1e-4)
