"""A configuration as the ``packer plan`` command line that makes it."""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from packer.options.config import PlanConfig

_FILES = {"sample_ids": "FILE", "curriculum": "FILE.json"}
"""Options that the command line reads from files, whose names a configuration does not know."""


def plan_command(config: PlanConfig, source: str | None = None, *, out: str = "plan") -> str:
    """Return the command line that plans with a configuration; what has its default is left out.

    Args:
        config: The options.
        source: The metrics directory.
        out: The plan's directory.
    """
    plain = PlanConfig(max_tokens=config.max_tokens, layout=config.layout, order=config.order)
    words = ["packer", "plan", source or "METRICS", "--out", out]
    words += ["--max-tokens", _value(config.max_tokens)]
    for option in fields(config):
        name, value = option.name, getattr(config, option.name)
        # what step_tokens asks for is found by it
        is_found = name == "grad_accum" and config.step_tokens is not None
        if name == "max_tokens" or is_found or _is_default(name, value, plain):
            continue
        words.append("--" + name.replace("_", "-"))
        if name in _FILES:
            words.append(_FILES[name])
        elif value is not True:
            words.append(_value(value))
    return shlex.join(words)


def _is_default(name: str, value: Any, plain: PlanConfig) -> bool:
    if name in ("layout", "order"):
        return bool(value == PlanConfig.__dataclass_fields__[name].default)
    return value is None or bool(name not in _FILES and value == getattr(plain, name))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{metric}={limit}" for metric, limit in value.items())
    return str(value)
