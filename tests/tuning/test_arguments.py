"""Arguments of tries that would tell of other tries."""

import pytest
import tensorflow as tf

import tfdp
from tests import small
from tfdp.tuning.arguments import arguments_of, check_data

X, Y = small.data(20, outlier=False)
OTHER = small.data(10, outlier=False)


def drawn():
    return tfdp.data.PoissonDataset(X, Y, expected_batch_size=5)


def declared():
    return tfdp.data.DeclaredDataset(drawn(), 20, 5, "poisson")


def batches():
    return ((X[:10], Y[:10]) for _ in range(100))


def check(x=X, public=None):
    arguments = {"x": x, "validation_data": public}
    check_data({}, arguments, arguments_of({}, arguments, None))


@pytest.mark.parametrize("make", [drawn, declared, batches])
def test_what_remembers_its_draws_is_made_for_each_try(make):
    shared = make()
    for given in (shared, lambda settings: shared):
        with pytest.raises(ValueError, match=r"must not share data.* x with the same"):
            check(given)
        with pytest.raises(ValueError, match=r"`public_data=lambda settings: "):
            check(public=given)
    check(lambda settings: make(), public=OTHER)
    check(OTHER, public=lambda settings: make())


def test_arrays_and_pipelines_may_be_shared():
    pipeline = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    for given in (X, {"a": X}, pipeline, tf.constant(X)):
        check(given)
        check(lambda settings, given=given: given)


def test_public_rows_are_not_those_of_the_training():
    pipeline = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    for private, public in [
        (X, (X, Y)),
        (X, (X[5:], Y[5:])),
        (X[:10], (X[9:], Y[9:])),
        ({"a": X}, ({"b": X.view()}, Y, Y)),
        (lambda settings: drawn(), (X, Y)),
        (X, lambda settings: drawn()),
        (lambda settings: X, lambda settings: (X, Y)),
        (pipeline, pipeline),
        ((OTHER[0], X), [X, Y]),
    ]:
        with pytest.raises(ValueError, match="must be other rows") as error:
            check(private, public)
        assert "public_data=(x_public, y_public)" in str(error.value)
    check(X[:10], (X[10:], Y[10:]))
    check(X, OTHER)
    check(X, None)
    check(lambda settings: drawn(), pipeline)
