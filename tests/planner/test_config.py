"""Options are checked where they are born; every refusal names the cure."""

import json

import numpy as np
import pytest

from packer.errors import ConfigError
from packer.planner import PlanConfig

WRAPPED = {"packing": "wrapped", "layout": "packed"}
REFUSED = [
    ({"max_tokens": 0}, "--max-tokens 0 is not an integer from 1"),
    ({"max_tokens": 2**31}, "--max-tokens"),
    ({"max_tokens": True}, "--max-tokens True"),
    ({"max_tokens": {}}, "names no metric"),
    ({"max_tokens": {"source": -1}}, "source=-1"),
    ({"layout": "ragged"}, "choose one of padded, packed"),
    ({"seed": -1}, "--seed -1"),
    ({"dp_size": 1.5}, "--dp-size 1.5"),
    ({"same_seqlen": 1}, "on or off"),
    ({"packing": "best-fit"}, "add --layout packed"),
    ({"packing": "best-fit", "layout": "packed", "order": "seqlen"}, "choose --packing next-fit"),
    ({"packing": "windowed", "order": "sequential"}, "choose --packing next-fit"),
    ({"packing": "wrapped"}, "add --layout packed"),
    ({"packing": "wrapped", "layout": "packed", "order": "seqlen"}, "choose --packing next-fit"),
    (WRAPPED | {"min_samples": 2}, "--min-samples 2 bounds the samples of a row"),
    (WRAPPED | {"max_samples": 9}, "leave it out, or choose --packing mixed"),
    (WRAPPED | {"max_attention": 10**6}, "--max-attention 1000000 bounds"),
    (WRAPPED | {"curriculum": {"schedule_type": "fixed_linear"}}, "choose --packing mixed"),
    ({"layout": "packed", "same_num_samples": True}, "choose --layout padded"),
    ({"pad_segments_to": 8}, "add --layout packed"),
    ({"min_samples": 4, "max_samples": 3}, "lower the one"),
    ({"filter_min": 4, "filter_max": 3}, "no sample is left"),
    ({"fixed_seqlen": 100, "sp_size": 8}, "choose 104"),
    ({"fixed_seqlen": 64, "num_shapes": 2}, "leave --num-shapes out"),
    ({"fixed_seqlen": 2000}, "holds no micro-batch"),
    ({"min_samples": 600, "pad_multiple": 2}, "holds no micro-batch"),
    ({"layout": "packed", "pad_segments_to": 600, "min_samples": 2}, "holds no micro-batch"),
    (
        {"layout": "packed", "count": "real", "pad_segments_to": 3, "fixed_seqlen": 1200},
        "choose --max-tokens 1200",
    ),
    ({"grad_accum": 6, "accum_multiple": 4}, "choose --grad-accum 8"),
    ({"dp_size": 2**20, "grad_accum": 2**20}, "lower one of them"),
    ({"lr_base": 3}, "without --lr-scaling"),
    ({"lr_max_scale": 3.0}, "without --lr-scaling"),
    ({"lr_scaling": "linear", "lr_base": 0}, "--lr-base 0 is not a number above 0"),
    ({"lr_scaling": "linear", "lr_base": float("nan")}, "--lr-base nan"),
    ({"sample_ids": []}, "names no sample"),
    ({"sample_ids": [-1, 2]}, "holds -1"),
    ({"sample_ids": np.array([3, 2**63 + 5], np.uint64)}, "holds 9223372036854775813"),
    ({"sample_ids": [0.5]}, "must hold integers"),
    ({"sample_ids": 7}, "--sample-ids 7 must be a list of integers"),
    ({"max_tokens": {"source": 9, "target": 9}, "layout": "packed"}, "choose --layout padded"),
    ({"max_tokens": {"source": 9, "target": 9}, "too_long": "split"}, "choose --too-long drop"),
    ({"max_tokens": {"source": 9, "target": 9}, "fixed_seqlen": 9}, "give one --max-tokens"),
    ({"curriculum": []}, "must be a JSON object"),
    ({"curriculum": {"schedule_type": "custom"}}, "choose one of fixed_linear"),
]


@pytest.mark.parametrize(("options", "cure"), REFUSED)
def test_what_has_no_meaning_is_refused_with_the_cure(options, cure):
    with pytest.raises(ConfigError) as refusal:
        PlanConfig(**{"max_tokens": 1000} | options)
    assert cure in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_default_packing_follows_order_and_layout():
    assert PlanConfig(max_tokens=9).packing == "windowed"
    assert PlanConfig(max_tokens=9, layout="packed").packing == "mixed"
    assert PlanConfig(max_tokens=9, order="sequential").packing == "next-fit"
    assert PlanConfig(max_tokens=9, layout="packed", order="seqlen").packing == "next-fit"


def test_config_is_frozen_and_comparable():
    config = PlanConfig(max_tokens=np.int64(9), sample_ids=np.array([3, 1]))
    assert config == PlanConfig(max_tokens=9, sample_ids=[1, 3])
    assert config.sample_ids.tolist() == [1, 3]
    with pytest.raises(AttributeError):
        config.max_tokens = 10


def test_to_json_is_plain_and_tells_sample_ids_by_hash():
    config = PlanConfig(max_tokens={"source": 5, "target": 7}, sample_ids=[4, 2])
    entries = json.loads(json.dumps(config.to_json()))
    assert entries["max_tokens"] == {"source": 5, "target": 7}
    assert entries["sample_ids"]["count"] == 2
    assert entries["sample_ids"] != PlanConfig(max_tokens=5, sample_ids=[4, 3]).to_json()["sample_ids"]
    assert entries["packing"] == "windowed"


def test_factors_given_as_numpy_numbers_are_plain_in_json():
    config = PlanConfig(max_tokens=9, lr_scaling="sqrt", lr_base=np.int64(7), lr_max_scale=np.float32(1.5))
    assert json.dumps([config.to_json()[name] for name in ("lr_base", "lr_max_scale")]) == "[7, 1.5]"


def test_one_budget_on_seqlen_is_a_number():
    assert PlanConfig(max_tokens={"seqlen": 7}).max_tokens == 7


def test_further_metrics():
    curriculum = {"metric": "rarity", "schedule_type": "fixed_discrete", "difficulty": [3]}
    config = PlanConfig(max_tokens={"seqlen": 5, "target": 7}, curriculum=curriculum)
    assert config.further_metrics == {"target", "rarity"}


def test_step_tokens_and_grad_accum_exclude_each_other():
    with pytest.raises(ConfigError, match="give one of them"):
        PlanConfig(max_tokens=9, step_tokens=100, grad_accum=2)
    with pytest.raises(ConfigError, match="names sample 3 twice"):
        PlanConfig(max_tokens=9, sample_ids=[3, 1, 3])


def test_from_json_gives_the_configuration_back():
    for options in ({}, {"step_tokens": 500}, {"grad_accum": 3, "layout": "packed", "too_long": "split"}):
        config = PlanConfig(max_tokens=9, **options)
        if config.grad_accum is None:
            config = config.with_grad_accum(4)
        again = PlanConfig.from_json(json.loads(json.dumps(config.to_json())))
        assert again == config
        assert again.microbatches_per_step == config.microbatches_per_step
