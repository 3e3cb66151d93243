import collections

import pytest

from tfdp.tuning.spaces import space_of


@pytest.mark.statistical
def test_all_combinations_of_a_grid_are_equally_likely():
    space = space_of({"a": [1, 2], "b": ("x", "y")})
    drawn = collections.Counter(tuple(space.draw().items()) for _ in range(2000))
    assert len(drawn) == 4
    assert all(abs(count - 500) < 120 for count in drawn.values())
    assert len(space.to_plan([])) == 4
    assert not space.has_one_plan


def test_an_empty_grid_tries_the_same_again():
    assert space_of({}).draw() == {}


def test_what_is_drawn_can_be_changed():
    space = space_of({"a": [1]})
    space.draw()["a"] = 2
    assert space.draw() == {"a": 1}


def test_samplers_are_looked_at_in_all_that_was_drawn():
    space = space_of(lambda random: {"rate": random.random()})
    drawn = [space.draw(), space.draw()]
    assert drawn[0] != drawn[1]
    assert space.to_plan(drawn)[1:] == drawn
    assert space.has_one_plan


def test_samplers_return_dictionaries():
    with pytest.raises(TypeError, match="must return a dictionary"):
        space_of(lambda random: 3).draw()


@pytest.mark.parametrize("space", [{"a": []}, {"a": "xy"}, {"a": 3}, {3: [1]}])
def test_grids_are_checked(space):
    with pytest.raises(ValueError, match="`space` must have a list"):
        space_of(space)
