"""Seeds of rows differ, and nothing is random where that is refused."""

import keras
import pytest
import tensorflow as tf

from tfdp._seeds import RandomError, drawing_again, seeds_of_row, without_chance


def of_row(generator, row, draws=1):
    with seeds_of_row(tf.constant(row)) as advance:
        seeds = [tuple(generator.next().numpy()) for _ in range(draws)]
    return seeds, advance


def test_every_draw_of_every_row_has_a_seed_of_its_own():
    generator = keras.random.SeedGenerator(3)
    before = generator.state.numpy().tolist()
    seeds = [seed for row in range(5) for seed in of_row(generator, row, 4)[0]]
    assert len(set(seeds)) == 20
    # The state moves when it is told to, once for each draw.
    assert generator.state.numpy().tolist() == before
    _, advance = of_row(generator, 0, 2)
    advance()
    moved = generator.state.numpy().tolist()
    other = keras.random.SeedGenerator(3)
    for _ in range(2):
        other.next()
    assert moved == other.state.numpy().tolist()


def test_generators_may_leave_the_row_out():
    generator = keras.random.SeedGenerator(3)
    generator.is_same_for_all_rows = True
    assert of_row(generator, 0)[0] == of_row(generator, 4)[0]


def test_the_same_is_drawn_again():
    generator = keras.random.SeedGenerator(3)
    with seeds_of_row(tf.constant(1)):
        first = generator.next().numpy().tolist()
        with drawing_again():
            assert generator.next().numpy().tolist() == first
        assert generator.next().numpy().tolist() != first


def test_chance_is_refused_where_it_is_and_not_behind():
    generator = keras.random.SeedGenerator(3)
    with without_chance():
        with without_chance(), pytest.raises(RandomError):
            generator.next()
        with pytest.raises(RandomError):
            generator.next()
    generator.next()


def test_an_error_sets_everything_back():
    generator = keras.random.SeedGenerator(3)
    plain = keras.random.SeedGenerator(3)

    def fail():
        with seeds_of_row(tf.constant(2)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert generator.next().numpy().tolist() == plain.next().numpy().tolist()
    assert generator.state.numpy().tolist() != [3, 0]
