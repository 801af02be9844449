"""Curriculum: from which step on a sample may be used. The planner obeys it, and verification checks that.

The keys are DeepSpeed's (https://www.deepspeed.ai/docs/config-json, curriculum learning, data efficiency),
and so is the schedule, but computed in integers: the same on every machine. Step t of ours, counted from 0
over all epochs, is DeepSpeed's step t + 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError

IntArray = NDArray[Any]

BEYOND = 2**40
"""Samples that the schedule never admits come after all steps, in the order of their difficulty."""

MOST_DIFFICULTY = 2**62
MOST_DEGREE = 64
MOST_LEVELS = 2**20

_SHARED_KEYS = {"enabled", "metric", "curriculum_type", "difficulty_type", "clustering_type"}
_FILE_KEYS = {
    "index_to_sample_path",
    "index_to_metric_path",
    "data_cluster_path",
}  # files that we do not need
_SCHEDULES = {
    "fixed_linear": {"total_curriculum_step", "difficulty_step"},
    "fixed_root": {"total_curriculum_step", "difficulty_step", "root_degree"},
    "fixed_discrete": {"difficulty", "max_step"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The difficulty that one metric admits, step by step."""

    metric: str
    whole: int | None
    """Difficulties are percentiles, and this one takes in every sample; None where they are values."""
    levels: tuple[int, ...]
    """Rising difficulties."""
    steps: tuple[int, ...]
    """The first step, from 0, of each level."""

    def level_at(self, step: int) -> int:
        """Return the difficulty of a step."""
        return self.levels[int(np.searchsorted(self.steps, step, side="right")) - 1]

    def levels_at(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the difficulty of each of some steps."""
        return np.array(self.levels, np.int64)[np.searchsorted(self.steps, steps, side="right") - 1]

    def admissions(self, values: IntArray) -> NDArray[np.int64]:
        """Return the first step at which each sample may be used; ``BEYOND`` and more for never."""
        values = values.astype(np.int64)
        if self.whole is not None:
            values = _percentiles(values, self.whole)
        place = np.searchsorted(np.array(self.levels), values)
        admitted = np.append(np.array(self.steps, np.int64), BEYOND)[place]
        never = place == len(self.levels)
        if never.any():
            admitted[never] += np.unique(values[never], return_inverse=True)[1]
        return admitted


def parse_curriculum(curriculum: Mapping[str, Any]) -> list[Schedule]:
    """Read the schedules of a curriculum, one a metric.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    for name in ("data_efficiency", "data_sampling", "curriculum_learning"):
        curriculum = _mapping(curriculum.get(name, curriculum), name)
    if curriculum.get("enabled") is False:
        raise ConfigError("--curriculum says enabled: false; leave the option out")
    if "curriculum_metrics" not in curriculum:
        metric = curriculum.get("metric", curriculum.get("curriculum_type", "seqlen"))
        return [_parse_schedule(str(metric), curriculum)]
    metrics = _mapping(curriculum["curriculum_metrics"], "curriculum_metrics")
    if not metrics:
        raise ConfigError("--curriculum names no metric in curriculum_metrics; give a schedule for one")
    return [_parse_schedule(str(name), _mapping(schedule, name)) for name, schedule in metrics.items()]


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"--curriculum: {name} must be a JSON object, not {value!r}")
    return value


def _parse_schedule(metric: str, entries: Mapping[str, Any]) -> Schedule:
    entries = dict(entries)
    entries |= _mapping(entries.pop("schedule_config", {}), "schedule_config")
    kind = entries.pop("schedule_type", None)
    if kind not in _SCHEDULES:
        raise ConfigError(
            f"--curriculum: schedule_type of {metric} is {kind!r}; choose one of {', '.join(_SCHEDULES)}"
        )
    known = _SHARED_KEYS | _FILE_KEYS | _SCHEDULES[kind] | {"min_difficulty", "max_difficulty"}
    unknown = sorted(set(entries) - known)
    if unknown:
        raise ConfigError(
            f"--curriculum: {metric} has the key {unknown[0]!r}, which {kind} does not know; it takes "
            f"{', '.join(sorted(known - _FILE_KEYS))}"
        )
    difficulty_type = entries.get("difficulty_type", "value")
    if difficulty_type not in ("value", "percentile"):
        raise ConfigError(
            f"--curriculum: difficulty_type of {metric} is {difficulty_type!r}; choose value or percentile"
        )
    if kind == "fixed_discrete":
        levels, steps = _discrete(metric, entries)
    else:
        levels, steps = _rooted(metric, entries, 1 if kind == "fixed_linear" else None)
    whole = None
    if difficulty_type == "percentile":
        whole = _integer(metric, {"max_difficulty": 100} | entries, "max_difficulty", 1)
    return Schedule(metric=metric, whole=whole, levels=levels, steps=steps)


def _integer(
    metric: str, entries: Mapping[str, Any], key: str, least: int, most: int = MOST_DIFFICULTY
) -> int:
    value = entries.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bounds = f"from {least} to {most}"
        raise ConfigError(f"--curriculum: {key} of {metric} is {value!r}; it must be an integer {bounds}")
    return value


def _rising(metric: str, entries: Mapping[str, Any], key: str, most: int = MOST_DIFFICULTY) -> list[int]:
    values = entries.get(key)
    if not isinstance(values, list | tuple) or not values:
        raise ConfigError(f"--curriculum: {key} of {metric} is {values!r}; it must be a list of integers")
    numbers = [_integer(metric, {key: value}, key, 0, most) for value in values]
    if any(after <= before for before, after in pairwise(numbers)):
        raise ConfigError(f"--curriculum: {key} of {metric} is {values!r}; it must rise")
    return numbers


def _discrete(metric: str, entries: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return levels and steps of a list of difficulties, each up to and with its last step."""
    levels = _rising(metric, entries, "difficulty")
    last_steps: list[int] = []
    if len(levels) > 1 or entries.get("max_step"):
        last_steps = _rising(metric, entries, "max_step", BEYOND - 1)
    if len(last_steps) != len(levels) - 1:
        raise ConfigError(
            f"--curriculum: {metric} has {len(levels)} difficulties and {len(last_steps)} of max_step; "
            "all but the last difficulty need one"
        )
    return tuple(levels), (0, *last_steps)


def _rooted(
    metric: str, entries: Mapping[str, Any], degree: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return levels and steps of min + (max − min)·(step / total)^(1 / degree), rounded down to multiples."""
    least = _integer(metric, entries, "min_difficulty", 0)
    most = _integer(metric, entries, "max_difficulty", max(least, 1))
    total = _integer(metric, entries, "total_curriculum_step", 1, BEYOND - 1)
    multiple = _integer(metric, entries, "difficulty_step", 1)
    degree = degree or _integer(metric, entries, "root_degree", 1, MOST_DEGREE)
    span = most - least
    if span // multiple > MOST_LEVELS:
        raise ConfigError(
            f"--curriculum: difficulty_step {multiple} of {metric} makes {span // multiple} levels, over "
            f"{MOST_LEVELS}; raise it"
        )
    levels: list[int] = []
    steps: list[int] = []
    # not below the first multiple at or above the minimum, not above the maximum
    level = min(-(-least // multiple) * multiple, most)
    while True:
        # the level below ``most`` that is no multiple is reached when the next multiple is
        target = -(-level // multiple) * multiple
        # the first step g ≥ 1 with span·(g / total)^(1 / degree) ≥ target − least
        reached = max(1, -(-(total * max(target - least, 0) ** degree) // max(span, 1) ** degree))
        if steps and reached - 1 == steps[-1]:
            levels[-1] = level
        else:
            levels.append(level)
            steps.append(reached - 1)
        if level >= most:
            break
        level = min(level + multiple, most)
    steps[0] = 0
    return tuple(levels), tuple(steps)


def _percentiles(values: NDArray[np.int64], whole: int) -> NDArray[np.int64]:
    """Return the smallest percentile, of ``whole``, that takes each sample in; equal values in order."""
    rank = np.empty(len(values), np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(len(values))
    per_percentile = len(values) // whole
    if per_percentile == 0:
        return np.full(len(values), whole)
    return np.minimum(rank // per_percentile + 1, whole)
