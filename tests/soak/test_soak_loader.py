"""A share of the soak; the whole is a script."""

import pytest

from tests.soak.soak_loader import grown, soak


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_twenty_thousand_steps():
    usages = soak(20_000, seed=1)
    assert usages[-1].steps == 20_000
    assert not grown(usages)
