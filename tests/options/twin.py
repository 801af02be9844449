"""The bounds of a micro-batch once more, from the options as plan.json has them; no code of packer's."""

import math
from collections.abc import Mapping
from typing import Any

_MOST = 2**31 - 1


def longest_sample(config: Mapping[str, Any], metric: str | None = None, *, company: int = 1) -> int:
    """Return the longest sample that is not too long.

    Args:
        config: the options.
        metric: which of several budgets is meant.
        company: samples of the micro-batch, all padded to the longest (padded layout, padding counted).
    """
    budget = config["max_tokens"]
    if isinstance(budget, dict) and metric not in budget:
        company = 1  # nothing bounds what its companions are padded to
    longest = _longest_alone(config, _budget(config, metric), company)
    most = config.get("max_seqlen") if metric in (None, "seqlen") else None
    return longest if most is None else min(longest, most)


def most_samples(config: Mapping[str, Any]) -> int:
    """Return how many samples of one token a micro-batch may hold at most."""
    budget = config["max_tokens"]
    budget = min(budget.values()) if isinstance(budget, dict) else budget
    if config["count"] == "padded":
        least = _multiple(config) if config["layout"] == "padded" else config.get("pad_segments_to", 1)
        budget //= least
    return int(min(budget, config.get("max_samples") or budget))


def _multiple(config: Mapping[str, Any]) -> int:
    return math.lcm(config.get("sp_size", 1), config.get("pad_multiple", 1))


def _budget(config: Mapping[str, Any], metric: str | None) -> int:
    budget = config["max_tokens"]
    return int(budget.get(metric, _MOST) if isinstance(budget, dict) else budget)


def _longest_alone(config: Mapping[str, Any], budget: int, company: int) -> int:
    if config.get("packing") == "wrapped":
        return _MOST
    multiple, fixed = _multiple(config), config.get("fixed_seqlen")
    attention, is_real = config.get("max_attention"), config["count"] == "real"
    if config["layout"] == "packed":
        room = budget if is_real else budget // multiple * multiple
        segment = 1 if is_real and fixed is None else config.get("pad_segments_to", 1)
        longest = min(room, fixed or room) // segment * segment
        return min(longest, _MOST if attention is None else math.isqrt(attention))
    # S is rounded up, so that both B·S and B·S² hold for what it is rounded to
    longest = _MOST if attention is None else math.isqrt(attention // company) // multiple * multiple
    if not is_real:
        longest = min(longest, budget // company // multiple * multiple)
    if fixed is not None:
        longest = fixed if fixed <= longest else 0
    return min(longest, budget) if is_real else longest
