"""Lengths come in the type that their writer chose; the plan does not depend on it."""

import numpy as np
import pytest

from packer.planner import PlanConfig, make_plan

SEQLENS = [3, 5, 99, 0, 7, 12, 100, 1] * 8
OPTIONS = [
    {},
    {"layout": "packed"},
    {"packing": "next-fit", "order": "sequential", "count": "real"},
    {"too_long": "split", "max_seqlen": 10},
    {"too_long": "truncate", "max_seqlen": 10},
    {"too_long": "drop", "max_seqlen": 400},
    {"filter_min": 2, "filter_max": 500},
    {"order": "seqlen", "same_seqlen": True},
    {"balance": "flops", "hidden_size": 64, "lr_scaling": "linear", "lr_by": "tokens"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_integer_type_gives_the_same_plan(options):
    config = PlanConfig(max_tokens=1000, **options)
    types = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
    plans = {make_plan(np.array(SEQLENS, dtype), config).fingerprint for dtype in types}
    assert len(plans) == 1
