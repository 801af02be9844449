"""The search for the largest budget, on memory that follows a formula."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.budget import Peak
from packer.budget.search import RESOLUTION, Search, confirm_largest, find_largest
from packer.budget.trial import Trial

USABLE = 1_000_000_000


def search(
    memory: Callable[[int], float], *, constant: int, first: int, most: int = 2**40
) -> tuple[Search, list[Trial]]:
    """Search where a budget takes what ``memory`` says, of data of ``most`` tokens."""

    def try_budget(budget: int) -> Trial:
        taken = int(memory(min(budget, most)))
        fits = taken <= USABLE
        peak = Peak(taken, taken) if fits else None
        return Trial(budget=budget, fits=fits, peak=peak, largest_area=min(budget, most))

    found = Search(constant=constant, usable=USABLE, rounded=int)
    return found, list(find_largest(found, try_budget, first))


def largest_by_force(memory: Callable[[int], float], first: int) -> int:
    """Return the largest budget that fits, by halving."""
    low, high = first, first
    while memory(high) <= USABLE:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(middle) <= USABLE else (low, middle)
    return low


@given(
    st.integers(0, USABLE // 2),
    st.floats(10, 1e5),
    st.floats(0, 20),
    st.floats(0, 0.2),
    st.integers(64, 4096),
)
def test_the_largest_is_found_within_the_resolution(
    constant: int, per_token: float, per_square: float, wasted: float, first: int
) -> None:
    def memory(budget: int) -> float:
        # what fragments take begins somewhere on the way
        growing = per_token * budget + per_square * budget**2 / 1000
        return constant + growing * (1 + (wasted if budget > 20 * first else 0))

    if memory(first) > USABLE:
        return
    found, trials = search(memory, constant=constant, first=first)
    expected = largest_by_force(memory, first)
    assert found.largest is not None
    assert found.largest.budget <= expected
    assert found.largest.budget >= expected * (1 - 2 * RESOLUTION) - 1
    assert found.next_budget() is None
    assert len(trials) <= 24


@pytest.mark.parametrize("per_token", [1_000, 33_333, 200_000])
def test_memory_that_grows_with_tokens_takes_few_trials_and_no_failure(per_token: int) -> None:
    found, trials = search(lambda budget: 5e7 + per_token * budget, constant=50_000_000, first=512)
    assert all(trial.fits for trial in trials)
    assert len(trials) <= 5
    assert found.failed is None


def test_a_data_set_that_ends_first_ends_the_search() -> None:
    found, trials = search(lambda budget: 1000 * budget, constant=0, first=512, most=10_000)
    assert found.is_bounded_by_data
    assert found.next_budget() is None
    assert len(trials) == 4
    assert found.largest is not None
    assert found.largest.largest_area == 10_000


def test_memory_that_does_not_grow_ends_with_the_data() -> None:
    found, _ = search(lambda budget: 1000, constant=1000, first=512, most=100_000)
    assert found.is_bounded_by_data


def test_a_first_budget_that_does_not_fit_ends_the_search() -> None:
    found, trials = search(lambda budget: 2 * USABLE, constant=0, first=512)
    assert found.largest is None
    assert len(trials) == 1


@pytest.mark.parametrize("most", [9_990, 9_800, 5_000, 2_000, 999])
def test_what_fits_alone_and_not_among_all_the_others_is_given_up(most: int) -> None:
    """A budget whose largest micro-batch fits may fail as a run plays it, with what the others leave."""

    def thoroughly(budget: int) -> Trial:
        return Trial(budget=budget, fits=budget <= most, peak=Peak(budget, budget), largest_area=budget)

    found = Search(constant=0.0, usable=10_000.0, rounded=int)
    fitting = [Trial(budget=n, fits=True, peak=Peak(n, n), largest_area=n) for n in (1_000, 4_000, 10_000)]
    found.trials.extend(fitting)
    list(confirm_largest(found, thoroughly, 1_000))
    largest = found.largest
    if most < 1_000:
        assert largest is None
    else:
        assert largest is not None
        assert most * (1 - 2 * RESOLUTION) < largest.budget <= most
