"""From options to the bounds of a micro-batch, and to the longest sample that keeps them alone."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError
from packer.kernels.limits import UNLIMITED, Limits
from packer.planner.config import MAX_SEQLEN, PlanConfig


def limits_for(config: PlanConfig, shapes: NDArray[np.int64] | None = None) -> Limits:
    """Return the bounds of one micro-batch.

    Args:
        config: the options.
        shapes: the values that S may take, where ``num_shapes`` chose them.
    """
    packed = config.layout == "packed"
    if shapes is None:
        shapes = np.array([config.fixed_seqlen] if config.fixed_seqlen else [], np.int64)
    room, segment_multiple = _row(config)
    return Limits(
        budgets=np.array([room] if packed else list(config.budgets.values()), np.int64),
        packed=packed,
        real=config.count == "real",
        min_samples=config.min_samples,
        max_samples=config.max_samples or UNLIMITED,
        max_attention=config.max_attention or UNLIMITED,
        multiple=config.padded_multiple,
        segment_multiple=segment_multiple,
        shapes=shapes,
    )


def _row(config: PlanConfig) -> tuple[int, int]:
    """Return the room of a packed row, and the multiple that the room of a sample is."""
    budget = min(config.budgets.values())
    if config.count == "real" and config.fixed_seqlen is None:
        return budget, 1
    if config.count == "padded":
        budget = budget // config.padded_multiple * config.padded_multiple
    # a fixed T bounds the padded samples; a real budget is no less than T where padding widens them
    return min(budget, config.fixed_seqlen or budget), config.pad_segments_to


class Company(NamedTuple):
    """The least company that a sample can have in a micro-batch: the shortest of the others."""

    num_samples: int = 0
    """How many there are besides the sample."""
    tokens: int = 0
    room: int = 0
    """Their tokens with each sample padded on its own."""
    squares: int = 0


ALONE = Company()


def least_company(shortest: NDArray[np.int64], config: PlanConfig) -> Company:
    """Return what the ``shortest`` samples take of a micro-batch."""
    _, multiple = _row(config)
    return Company(
        num_samples=len(shortest),
        tokens=int(shortest.sum()),
        room=int((-(-shortest // multiple) * multiple).sum()),
        squares=sum(length * length for length in shortest.tolist()),
    )


def longest_alone(config: PlanConfig, metric: str = "seqlen", company: Company = ALONE) -> int:
    """Return the longest sample that fits into a micro-batch, after rounding.

    Args:
        config: the options.
        metric: the length that is meant, where there are several budgets.
        company: samples that share the micro-batch.
    """
    budget = config.budgets.get(metric, MAX_SEQLEN)
    attention = config.max_attention or UNLIMITED
    if config.layout == "packed":
        room, multiple = _row(config)
        squares = attention - company.squares
        return min((room - company.room) // multiple * multiple, math.isqrt(max(squares, 0)))
    multiple, num_rows = config.padded_multiple, company.num_samples + 1
    longest = math.isqrt(attention // num_rows) // multiple * multiple
    if config.count == "padded":
        longest = min(longest, budget // num_rows // multiple * multiple)
    # a fixed S is held to what bounds the tensor; real tokens bound the sample in it
    if config.fixed_seqlen is not None and metric == "seqlen":
        longest = config.fixed_seqlen if longest >= config.fixed_seqlen else 0
    if config.count == "real":
        longest = min(longest, budget - company.tokens)
    return longest


def max_seqlen(config: PlanConfig, metric: str = "seqlen") -> int:
    """Return the longest sample that is not too long.

    Raises:
        ConfigError: not a single token fits.
    """
    longest = min(longest_alone(config, metric), MAX_SEQLEN)
    if longest < 1:
        raise ConfigError(
            f"no sample fits a micro-batch of --max-tokens {config.budgets.get(metric)} after rounding; "
            "raise it or --max-attention, or lower --fixed-seqlen, --pad-multiple or --sp-size"
        )
    if metric == "seqlen" and config.max_seqlen is not None:
        longest = min(longest, config.max_seqlen)
    return longest
