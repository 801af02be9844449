"""A share of the stories; the whole is a script."""

import pytest

from tests.soak.stories import kill_and_go_on, nothing_left_behind, tell

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than there are cores
]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_breaks_a_run_off_every_batch_is_the_planned_one(seed):
    with nothing_left_behind():
        assert tell(seed) > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_run_whose_worker_is_killed_goes_on_and_leaves_nothing_behind(seed):
    with nothing_left_behind():
        kill_and_go_on(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_hundred_stories():
    with nothing_left_behind():
        assert sum(tell(seed) for seed in range(1000, 1100)) > 2500


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_of_forty_killed_runs_go_on():
    with nothing_left_behind():
        assert sum(kill_and_go_on(seed) for seed in range(1000, 1040)) > 0
