"""A loop of one's own under accelerate."""

import pytest

from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(("backend", "stage"), [("ddp", 0), ("deepspeed", 1), ("deepspeed", 3)])
def test_gradient_and_rate_are_the_plans(backend: str, stage: int):
    for rank in run_script(SCRIPTS / "accelerated.py", backend, str(stage)):
        assert "cp_size=2" in rank.pop("refused")
        assert rank
        for trained in rank.values():
            assert trained["error"] < 3e-6
            assert len(trained["rates"]) == 3
            assert trained["rates"] == pytest.approx(trained["expected"])
