"""What leaves a client: clipped, noised, and a function of its examples alone."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.reference import per_example_gradients
from tfdp.errors import NotPrivateError
from tfdp.federated import client_update, privatize

CLIP = 0.3
UPDATE = {
    "l2_norm_clip": CLIP,
    # Standard deviations of 3e-13: as good as none.
    "noise_multiplier": 1e-12,
}


@functools.cache
def small_model():
    """Nobody trains it."""
    return keras.Sequential([
        keras.Input((3,), dtype="float64"),
        layers.Dense(4, activation="tanh", dtype="float64"),
        layers.Dense(2, dtype="float64"),
    ])


def squares(y_true, y_pred):
    return ops.sum(ops.square(y_pred - y_true), axis=-1)


def expected(model, x, y, clip):
    """The mean gradient of the examples, clipped."""
    gradients = per_example_gradients(model, squares, x, y)
    means = [gradient.mean(0) for gradient in gradients]
    norm = math.sqrt(sum((mean**2).sum() for mean in means))
    return [mean * min(1.0, clip / norm) for mean in means], norm


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rows", [1, 5])
def test_is_the_clipped_gradient_of_the_mean_loss(rng, rows, factor):
    model = small_model()
    x = rng.normal(size=(rows, 3))
    x[0] *= factor
    y = rng.normal(size=(rows, 2))
    means, norm = expected(model, x, y, CLIP)
    assert norm > CLIP or factor < 1
    update = client_update(model, squares, x, y, **UPDATE)
    for found, mean in zip(update, means, strict=True):
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-9)


def test_inside_the_ball_nothing_is_clipped(rng):
    model = small_model()
    x, y = rng.normal(size=(5, 3)), rng.normal(size=(5, 2))
    means, norm = expected(model, x, y, 1e6)
    update = client_update(
        model, squares, x, y, l2_norm_clip=2 * norm, noise_multiplier=1e-12
    )
    for found, mean in zip(update, means, strict=True):
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-9)


def length(update):
    return math.sqrt(sum(float(tf.reduce_sum(tf.square(part))) for part in update))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e10, 1e30])
def test_an_update_is_clipped_as_a_whole(rng, scale):
    arrays = [scale * rng.normal(size=shape) for shape in ((40, 5), (7,), ())]
    private = privatize(arrays, **UPDATE)
    norm = math.sqrt(sum((array**2).sum() for array in arrays))
    assert length(private) <= min(CLIP, norm) * (1 + 1e-9)
    for found, array in zip(private, arrays, strict=True):
        np.testing.assert_allclose(
            found, array * min(1.0, CLIP / norm), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_noise_alone(bad):
    private = privatize([np.array([1.0, bad]), np.ones(3)], **UPDATE)
    assert length(private) < 1e-10


def test_zero_updates_are_noise_alone():
    private = privatize([np.zeros((2, 2), "float32"), np.zeros(0, "float32")], **UPDATE)
    assert [part.shape.as_list() for part in private] == [[2, 2], [0]]
    assert length(private) < 1e-10


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_noise_is_the_clip_times_its_multiplier(dtype):
    (noised,) = privatize(
        [np.zeros(200_000, dtype)], l2_norm_clip=0.25, noise_multiplier=3.0
    )
    assert noised.dtype == ("float64" if dtype == "float64" else "float32")
    assert float(tf.math.reduce_std(noised)) == pytest.approx(0.75, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_bit_of_a_reply_tells_which_numbers_were_zero(dtype, rng):
    """Zero or not, a noised number lies on the same grid, and may be any on it."""
    clip, noise_multiplier = 0.25, 3.0
    numbers = np.where(rng.random(100_000) < 0.5, 0.0, 1e-4 * rng.random(100_000))
    (reply,) = privatize(
        [numbers.astype(dtype)], l2_norm_clip=clip, noise_multiplier=noise_multiplier
    )
    grid = 2.0 ** (math.ceil(math.log2(clip * noise_multiplier)) - 18)
    steps = reply.numpy().astype("float64") / grid
    np.testing.assert_array_equal(steps, np.round(steps))
    odd = steps % 2 == 1
    for chosen in (numbers == 0, numbers != 0):
        assert odd[chosen].mean() == pytest.approx(0.5, abs=0.015)


def test_the_grid_does_not_lengthen_an_update(rng):
    array = rng.normal(size=10_000)
    (reply,) = privatize([array], l2_norm_clip=1.0, noise_multiplier=1e-3)
    (other,) = privatize([-array], l2_norm_clip=1.0, noise_multiplier=1e-3)
    # The noise cancels in neither; without it both would be inside the ball.
    assert length([reply]) <= 1 + 1e-3 * math.sqrt(10_000) * 0.1
    assert length([reply + other]) < 2e-3 * 100


@pytest.mark.parametrize("update", [[], (), np.ones(3), None])
def test_an_update_is_a_list_of_arrays(update):
    with pytest.raises(TypeError, match="list of arrays"):
        privatize(update, **UPDATE)


def test_every_reply_has_noise_of_its_own():
    zeros = [np.zeros(50_000, "float32")]
    one, other = (
        privatize(zeros, l2_norm_clip=1.0, noise_multiplier=1.0)[0].numpy()
        for _ in range(2)
    )
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(50_000)


def test_seeds_of_others_do_not_decide_the_noise():
    replies = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        (reply,) = privatize([np.zeros(3)], l2_norm_clip=1.0, noise_multiplier=1.0)
        replies.append(reply.numpy())
    assert (replies[0] != replies[1]).all()


def test_a_graph_would_repeat_the_noise_and_is_refused():
    @tf.function(autograph=False)
    def update(gradient):
        return privatize([gradient], l2_norm_clip=1.0, noise_multiplier=1.0)

    model = small_model()

    @tf.function(autograph=False)
    def update_of(x, y):
        return client_update(model, squares, x, y, **UPDATE)

    with pytest.raises(NotPrivateError, match="outside of"):
        update(tf.zeros(3))
    with pytest.raises(NotPrivateError, match="outside of"):
        update_of(tf.ones((5, 3), tf.float64), tf.ones((5, 2), tf.float64))


@pytest.mark.parametrize("name", ["l2_norm_clip", "noise_multiplier"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        privatize([np.ones(3)], **(UPDATE | {name: value}))
    with pytest.raises(ValueError, match=name):
        client_update(
            small_model(),
            squares,
            np.ones((1, 3)),
            np.ones((1, 2)),
            **(UPDATE | {name: value}),
        )


def test_no_noise_is_warned_of():
    with pytest.warns(UserWarning, match="calibrate_local_noise_multiplier"):
        (reply,) = privatize([np.ones(4)], l2_norm_clip=1.0, noise_multiplier=0.0)
    np.testing.assert_allclose(reply, np.full(4, 0.5), rtol=1e-6)


def test_no_clip_norm_is_zero():
    with pytest.raises(ValueError, match="l2_norm_clip"):
        privatize([np.ones(3)], l2_norm_clip=0.0, noise_multiplier=1.0)


def test_what_cannot_be_noised_is_refused():
    with pytest.raises(TypeError, match=r"update\[1\] of dtype int64"):
        privatize([np.ones(3), np.arange(3)], **UPDATE)


def test_a_client_without_examples_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        client_update(
            small_model(), squares, np.zeros((0, 3)), np.zeros((0, 2)), **UPDATE
        )
