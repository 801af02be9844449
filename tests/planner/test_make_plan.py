"""What ``make_plan`` refuses before it begins."""

import re

import pytest

from packer.errors import ConfigError, EmptyPlanError, SampleTooLongError, TargetExistsError, TargetWriteError
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 10}, "10 (--max-tokens 10)"),
        ({"max_tokens": 99, "fixed_seqlen": 30}, "30 (--fixed-seqlen 30)"),
        ({"max_tokens": 99, "max_attention": 401}, "20 (--max-attention 401)"),
        ({"max_tokens": 100, "max_attention": 401, "max_seqlen": 7}, "7 (--max-seqlen 7)"),
        ({"max_tokens": 99, "max_attention": 1}, "1 (--max-attention 1)"),
        ({"max_tokens": 99, "fixed_seqlen": 1}, "1 (--fixed-seqlen 1)"),
        ({"max_tokens": 35, "sp_size": 16}, "32 (--max-tokens 35, --sp-size 16)"),
        ({"max_tokens": 20, "max_attention": 400}, "20 (--max-tokens 20, --max-attention 400)"),
        ({"max_tokens": {"seqlen": 30, "other": 99}}, "30 (--max-tokens 30)"),
        ({"max_tokens": {"seqlen": 99, "other": 1}}, "1 (--max-tokens 1)"),
    ],
)
def test_the_limit_that_bites_is_named(options, named):
    with pytest.raises(SampleTooLongError, match=re.escape(f"over the limit of {named}")):
        make_plan([3, 33, 7], PlanConfig(**options), metrics={"other": [2, 2, 2]})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"max_tokens": 99, "min_samples": 50},
            "3 samples cannot fill a micro-batch of --min-samples 50",
        ),
        ({"max_tokens": 2, "too_long": "drop"}, "3 over the limit of 2 (--max-tokens 2)"),
        ({"max_tokens": 9, "filter_min": 9, "too_long": "drop"}, "2 filtered out, 1 over the limit of 9"),
    ],
)
def test_why_no_sample_is_left(options, why):
    with pytest.raises(EmptyPlanError, match=re.escape(f"no sample is left: {why}")):
        make_plan([3, 33, 7], PlanConfig(**options))
