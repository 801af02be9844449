"""The command line that a calibration prints makes the configuration that it recommends."""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.plan import plan
from packer import PlanConfig
from packer.budget.command import plan_command
from packer.errors import ConfigError

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "layout": st.sampled_from(["padded", "packed"]),
    "count": st.sampled_from(["padded", "real"]),
    "order": st.sampled_from(["random", "sequential", "seqlen"]),
    "packing": st.sampled_from(["windowed", "mixed", "next-fit", "best-fit"]),
    "seed": st.integers(0, 9),
    "epochs": st.integers(1, 3),
    "window": st.integers(1, 99),
    "dp_size": st.integers(1, 8),
    "grad_accum": st.integers(1, 8),
    "same_num_samples": st.booleans(),
    "same_seqlen": st.booleans(),
    "sp_size": st.sampled_from([1, 2, 4]),
    "pad_multiple": st.sampled_from([1, 8]),
    "num_shapes": st.integers(1, 4),
    "max_attention": st.integers(10**6, 10**9),
    "max_seqlen": st.integers(1, 100),
    "too_long": st.sampled_from(["error", "drop", "truncate", "split"]),
    "drop_untrainable": st.booleans(),
    "remainder": st.sampled_from(["drop", "keep", "fill"]),
    "balance": st.sampled_from(["none", "tokens", "flops"]),
    "lr_scaling": st.sampled_from(["none", "linear", "sqrt"]),
    "lr_by": st.sampled_from(["samples", "tokens"]),
}


def parsed(command: str) -> PlanConfig:
    """Return the configuration that the command line makes."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("packer", "plan")
    options = plan.make_context("plan", words).params
    for other in ("metrics", "out", "overwrite", "as_json", "pipeline", "trained"):
        options.pop(other)
    return PlanConfig(**options)


@given(st.fixed_dictionaries({}, optional=OPTIONS))
def test_the_command_line_makes_the_same_configuration(options: dict[str, Any]) -> None:
    try:
        config = PlanConfig(max_tokens=4096, **options)
    except ConfigError:
        return
    assert parsed(plan_command(config)) == config


def test_only_what_is_not_a_default_is_named() -> None:
    assert plan_command(PlanConfig(max_tokens=512)) == "packer plan METRICS --out plan --max-tokens 512"
    packed = PlanConfig(max_tokens=512, layout="packed", grad_accum=3)
    assert plan_command(packed, "my metrics", out="p") == (
        "packer plan 'my metrics' --out p --max-tokens 512 --layout packed --grad-accum 3"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": {"source": 8, "target": 9}}, "--max-tokens source=8,target=9"),
        ({"max_tokens": 64, "step_tokens": 1000}, "--step-tokens 1000"),
        ({"max_tokens": 64, "sample_ids": [1, 2]}, "--sample-ids FILE"),
        ({"max_tokens": 64, "same_seqlen": True}, "--same-seqlen"),
    ],
)
def test_words_of_options_that_are_no_plain_number(options: dict[str, Any], words: str) -> None:
    assert plan_command(PlanConfig(**options)).endswith(words)
