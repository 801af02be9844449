"""A share of the random plans; the whole is a script."""

import pytest

from tests.soak.random_plans import play


@pytest.mark.parametrize("tens", range(4))
def test_random_plans_give_what_a_plain_reimplementation_gives(tens):
    assert sum(play(10 * tens + number) for number in range(10)) > 10


@pytest.mark.slow
def test_five_hundred_random_plans():
    assert sum(play(seed) for seed in range(1000, 1500)) > 2000
