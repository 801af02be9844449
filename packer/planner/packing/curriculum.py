"""An epoch under a curriculum: micro-batches from a pool that grows as the schedule admits harder samples.

The pool holds what is admitted and not yet used. For each stretch of steps between two admissions as many
random samples are drawn from it as the steps take, packed, and what the steps do not take goes back. A pool
that cannot fill a step runs dry: the next difficulty is admitted early, so every sample still has its turn.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.curriculum import BEYOND
from packer.kernels import rng
from packer.kernels.limits import Limits
from packer.options.config import PlanConfig
from packer.planner.order.orders import Purpose, id_dtype, key_for, subkey
from packer.planner.packing.microbatches import IntArray, MicroBatches, concatenate, positions_of, reindex
from packer.planner.packing.pack import group_width, pack

_ENOUGH = 1.1  # times the samples that the steps take, by estimate


class _Pool:
    """Samples that are admitted and not yet used."""

    def __init__(self, size: int, key: np.uint64) -> None:
        self._values = np.empty(size, id_dtype(size))
        self._key = key
        self._draws = 0
        self.size = 0

    def add(self, samples: IntArray) -> None:
        self._values[self.size : self.size + len(samples)] = samples
        self.size += len(samples)

    def draw(self, count: int) -> IntArray:
        """Take random samples out."""
        rng.draw_to_end(self._values, self.size, count, subkey(self._key, self._draws))
        self._draws += 1
        self.size -= count
        return self._values[self.size : self.size + count].copy()


def pack_by_admission(
    lengths: IntArray,
    owners: IntArray | None,
    admissions: NDArray[np.int64],
    limits: Limits,
    config: PlanConfig,
    *,
    epoch: int,
    first_step: int,
    progress: Callable[[float], None],
) -> MicroBatches:
    """Pack the samples of an epoch so that none is used before it is admitted.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece; None where no sample is cut.
        admissions: (n,) the step, over all epochs, from which on a sample may be used.
        limits: bounds of a micro-batch.
        config: the options.
        epoch: whose random choices are meant.
        first_step: of the epoch, counted over all epochs.
        progress: told which share of the samples is packed.

    Returns:
        The micro-batches in the order in which they are to run; its figures say where the pool ran dry
        (``curriculum_raises``, see ``PlannedEpoch.figures``).
    """
    order = np.argsort(admissions, kind="stable")
    thresholds, starts = np.unique(admissions[order], return_index=True)
    ends = np.append(starts[1:], len(order))
    pool = _Pool(len(order), key_for(config.seed, epoch, Purpose.POOL))
    key = key_for(config.seed, epoch, Purpose.SAMPLES)
    parts: list[MicroBatches] = []
    barriers: list[int] = []
    raises: dict[int, int] = {}  # step -> admissions up to which samples are admitted early
    mean = max(1.0, int(lengths[0].sum(dtype=np.int64)) / len(order))
    per_microbatch = min(limits.max_samples, max(1.0, int(limits.budgets[0]) / mean))
    step, admitted, num_packed = first_step, 0, 0

    def admit_next() -> None:
        nonlocal admitted
        pool.add(order[starts[admitted] : ends[admitted]])
        admitted += 1

    while True:
        while admitted < len(thresholds) and thresholds[admitted] <= step:
            admit_next()
        if admitted == len(thresholds):
            break
        wanted = int(min(thresholds[admitted] - step, len(order)))
        part, drawn = _pack_steps(
            pool, lengths, owners, limits, config, wanted, per_microbatch, subkey(key, len(barriers))
        )
        num_steps = len(part) // config.microbatches_per_step
        if num_steps:
            pool.add(np.setdiff1d(drawn, _used(part)))
            parts.append(part)
            step += num_steps
            barriers.append(step - first_step)
            num_packed += int(part.sizes.sum())
            progress(num_packed / len(order))
        else:
            pool.add(drawn)
        if num_steps < wanted:
            raises[step] = int(thresholds[admitted])
            admit_next()
    last = pool.draw(pool.size)
    parts.append(_pack_drawn(last, lengths, owners, limits, config, subkey(key, len(barriers))))
    figures = {"curriculum_raises": [_raised(step, until) for step, until in raises.items()]}
    return replace(concatenate(parts), barriers=tuple(barriers), figures=figures)


def _raised(step: int, until: int) -> dict[str, int]:
    """Spell out that samples of admissions up to ``until`` are admitted from ``step`` on."""
    if until < BEYOND:
        return {"step": step, "as_of": until, "beyond": 0}
    return {"step": step, "as_of": step, "beyond": until - BEYOND + 1}


def _pack_steps(
    pool: _Pool,
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    config: PlanConfig,
    num_steps: int,
    per_microbatch: float,
    key: np.uint64,
) -> tuple[MicroBatches, IntArray]:
    """Pack up to ``num_steps`` whole steps; return them and all samples that were drawn for them."""
    wanted = num_steps * config.microbatches_per_step
    count = int(min(pool.size, wanted * per_microbatch * _ENOUGH + 1))
    while True:
        drawn = pool.draw(count)
        part = _pack_drawn(drawn, lengths, owners, limits, config, key)
        if len(part) >= wanted or pool.size == 0:
            break
        pool.add(drawn)
        count = min(pool.size, 2 * count)
    whole = min(wanted, len(part) // config.microbatches_per_step * config.microbatches_per_step)
    none = part.leftover[:0]
    return replace(part, starts=part.starts[:whole], sizes=part.sizes[:whole], leftover=none), drawn


def _pack_drawn(
    drawn: IntArray,
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    config: PlanConfig,
    key: np.uint64,
) -> MicroBatches:
    if not len(drawn):
        nothing = np.empty(0, np.int64)
        return MicroBatches(
            pieces=drawn,
            seqlens=np.empty(0, np.int32),
            starts=nothing,
            sizes=nothing,
            leftover=drawn,
            in_steps=group_width(config) > 1,
        )
    drawn = np.sort(drawn)  # pieces of one sample next to each other, as packings expect them
    chosen = np.ascontiguousarray(lengths[:, drawn])
    part = pack(chosen, None if owners is None else owners[drawn], limits, config, key)
    return reindex(part, drawn)


def _used(part: MicroBatches) -> IntArray:
    """Return the samples of a part's micro-batches."""
    return part.pieces[positions_of(part)]
