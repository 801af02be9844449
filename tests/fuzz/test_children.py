"""What ends a child: its own work that does not end, never a machine that is busy."""

import time
from random import Random

from tests.fuzz import children
from tests.fuzz.children import fuzz, main

MODULE = "tests.fuzz.test_children"
FIRST_OF_ONE = Random("endless 1").random()


class Endless:
    """Input 1 works for ever; the others wait, longer than they may work."""

    def prepare(self, place):
        children.PROCESSOR_SECONDS = 0.2

    def attempt(self, random, place):
        if random.random() == FIRST_OF_ONE:
            while True:
                pass
        time.sleep(0.5)
        return "waited"


class Waiting(Endless):
    """Waits for what never comes."""

    def prepare(self, place):
        children.SECONDS = 0.2

    def attempt(self, random, place):
        time.sleep(60)


def test_a_loop_is_ended_by_its_processor_time_and_a_wait_is_not():
    failures, outcomes = fuzz(MODULE, "endless", 3, seed=0)
    assert outcomes == {"waited": 2}
    (failure,) = failures
    assert failure.startswith("endless, input 1: exit -27")
    assert "in attempt" in failure


def test_a_wait_without_end_is_ended_by_the_clock():
    failures, outcomes = fuzz(MODULE, "waiting", 1, seed=0)
    assert outcomes == {}
    assert "Timeout" in failures[0]
    assert "in attempt" in failures[0]


if __name__ == "__main__":
    main(MODULE, None, {"endless": Endless(), "waiting": Waiting()})
