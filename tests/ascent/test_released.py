"""The gradient that was released last: what is remembered, and the way uphill."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.ascent.released import ReleasedGradient


@pytest.fixture
def variables():
    return [keras.Variable([3.0, 4.0]), keras.Variable([[1.0]], dtype="float64")]


@pytest.fixture
def released(variables):
    released = ReleasedGradient()
    released.build(variables)
    return released


def values(variables):
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


GRADIENTS = [tf.constant([0.0, 2.0]), tf.constant([[-2.0]], tf.float64)]


def test_at_first_it_is_zero_and_leads_nowhere(released, variables):
    before = values(variables)
    assert [state.tolist() for state in released.state()] == [[0.0, 0.0], [[0.0]]]
    assert float(released.cosine_with(GRADIENTS)) == 0
    with released.uphill(tf.constant(5.0)):
        for now, then in zip(values(variables), before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_uphill_is_as_far_away_as_the_radius_and_ends_where_it_began(
    released, variables
):
    released.remember(GRADIENTS)
    before = values(variables)
    with released.uphill(tf.constant(0.5)):
        first, second = values(variables)
        np.testing.assert_allclose(first, [3.0, 4.0 + 0.5**1.5], rtol=1e-6)
        np.testing.assert_allclose(second, [[1.0 - 0.5**1.5]])
    for now, then in zip(values(variables), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_after_an_error_variables_are_put_back(released, variables):
    released.remember(GRADIENTS)
    before = values(variables)
    released.put_back()  # Nothing is away.
    with pytest.raises(KeyError), released.uphill(tf.constant(0.5)):
        raise KeyError
    for now, then in zip(values(variables), before, strict=True):
        np.testing.assert_array_equal(now, then)

    # A graph ends where the error is.
    begun = released.uphill(tf.constant(0.5))
    begun.__enter__()
    assert values(variables)[0].tolist() != before[0].tolist()
    released.put_back()
    for now, then in zip(values(variables), before, strict=True):
        np.testing.assert_array_equal(now, then)
    # What is moved later on is not put back again.
    variables[0].assign([1.0, 1.0])
    released.put_back()
    assert values(variables)[0].tolist() == [1.0, 1.0]


def test_cosines(released):
    released.remember(GRADIENTS)
    assert float(released.cosine_with(GRADIENTS)) == pytest.approx(1)
    assert float(released.cosine_with([-each for each in GRADIENTS])) == pytest.approx(
        -1
    )
    beside = [tf.constant([7.0, 0.0]), tf.constant([[0.0]], tf.float64)]
    assert float(released.cosine_with(beside)) == 0


def test_half_precision_is_remembered_in_float32():
    released = ReleasedGradient()
    released.build([keras.Variable([1.0], dtype="bfloat16")])
    released.remember([tf.constant([1.0 + 2**-20])])
    assert released.state()[0].tolist() == [1.0 + 2**-20]


@pytest.mark.parametrize("is_built", [True, False])
def test_a_state_is_taken_over_before_and_after_variables_are_known(
    released, variables, is_built
):
    released.remember(GRADIENTS)
    again = ReleasedGradient()
    if is_built:
        again.build(variables)
    again.restore(released.state())
    again.build(variables)
    for now, then in zip(again.state(), released.state(), strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_state_of_other_variables_is_zero(released):
    released.remember(GRADIENTS)
    released.restore([np.ones((3, 3))])
    assert [state.tolist() for state in released.state()] == [[0.0, 0.0], [[0.0]]]


def test_other_variables_begin_at_zero(released, variables):
    released.remember(GRADIENTS)
    released.build(variables)  # The same: nothing is forgotten.
    assert released.state()[0].tolist() == [0.0, 2.0]
    released.build([keras.Variable([3.0, 4.0])])
    assert [state.tolist() for state in released.state()] == [[0.0, 0.0]]
