"""The bounds of a micro-batch, from the options: the room of a row, the longest sample, the most samples."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.options.config import MAX_SEQLEN, PlanConfig

_UNLIMITED = 2**62


def row_room(config: PlanConfig) -> tuple[int, int]:
    """Return the room of a packed row, and the multiple that the room of a sample is."""
    budget = min(config.budgets.values())
    if config.count == "real" and config.fixed_seqlen is None:
        return budget, 1
    if config.count == "padded":
        budget = budget // config.padded_multiple * config.padded_multiple
    # a fixed T bounds the padded samples; a real budget is no less than T where padding widens them
    return min(budget, config.fixed_seqlen or budget), config.pad_segments_to


def full_row(config: PlanConfig) -> int:
    """Return what the samples of a full packed row take of its room: a multiple of what each is padded to."""
    room, multiple = row_room(config)
    return room // multiple * multiple


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
    _, multiple = row_room(config)
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
    if config.packing == "wrapped":
        return MAX_SEQLEN  # it goes on in the next row
    budget = config.budgets.get(metric, MAX_SEQLEN)
    attention = config.max_attention or _UNLIMITED
    if config.layout == "packed":
        room, multiple = row_room(config)
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


def longest_sample(config: PlanConfig, metric: str = "seqlen", company: Company = ALONE) -> int:
    """Return the longest sample that is not too long; below 1 where not a single token fits."""
    # nothing bounds what companions are padded to in a length without a budget
    company = company if metric in config.budgets else ALONE
    longest = min(longest_alone(config, metric, company), MAX_SEQLEN)
    if metric == "seqlen" and config.max_seqlen is not None:
        longest = min(longest, config.max_seqlen)
    return longest


def most_samples(config: PlanConfig) -> int:
    """Return how many samples of one token a micro-batch may hold at most."""
    budget = min(config.budgets.values())
    if config.count == "padded":
        budget //= config.padded_multiple if config.layout == "padded" else config.pad_segments_to
    return min(budget, config.max_samples or budget)
