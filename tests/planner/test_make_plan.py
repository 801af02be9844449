"""What ``make_plan`` refuses before it begins."""

import pytest

from packer.errors import ConfigError, TargetExistsError, TargetWriteError
from packer.planner import PlanConfig, make_plan


@pytest.mark.parametrize(
    ("config", "cure"),
    [
        ({"max_tokens": 5}, r"PlanConfig\(\*\*config\)"),
        (5, r"PlanConfig\(max_tokens"),
        (None, "not NoneType"),
    ],
)
def test_a_configuration_of_another_kind(config, cure):
    with pytest.raises(ConfigError, match=f"config must be a PlanConfig.*{cure}"):
        make_plan([1, 2, 3], config)


def test_a_target_is_refused_before_the_metrics_are_looked_at(tmp_path):
    config = PlanConfig(max_tokens=5)
    (tmp_path / "plan").mkdir()
    with pytest.raises(TargetExistsError, match="exists already"):
        make_plan(tmp_path / "nowhere", config, out=tmp_path / "plan")
    (tmp_path / "afile").write_text("")
    with pytest.raises(TargetWriteError, match=r"afile is a file, not a folder; .*choose another --out"):
        make_plan(tmp_path / "nowhere", config, out=tmp_path / "afile" / "plan")
