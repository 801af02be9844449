"""Packing a stream until the plan reaches its total: the plan takes a beginning of the stream, whole.

All but the end is packed as the options say. The end, a step or two, is packed in the very order of the
stream, so that what the total does not reach is the stream's end, and nothing before it.
"""

from dataclasses import replace
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError
from packer.kernels import streams as kernels
from packer.kernels.limits import Limits
from packer.options.config import PlanConfig
from packer.planner.order.orders import IntArray, Purpose, key_for
from packer.planner.order.stream import Draw, Mixer
from packer.planner.packing.microbatches import MicroBatches, concatenate, positions_of, reindex
from packer.planner.packing.pack import group_width, pack, pack_in_order
from packer.planner.packing.wrapped import wrapped_in_order
from packer.wording import counted

_PILOT = 1 << 18
"""Samples, about, that tell how many tokens a micro-batch holds."""

_TRIES = 4


def pack_to_total(mixer: Mixer, limits: Limits, config: PlanConfig) -> tuple[Draw, MicroBatches]:
    """Return a stream, and micro-batches of a beginning of it that fill the plan, and a little more.

    Raises:
        ConfigError: sources that would be passed through more often than ``max_passes`` allows; or samples
            that make no micro-batch.
    """
    if config.packing == "wrapped":
        return _wrapped(mixer, limits, config)
    if config.total_tokens is not None:
        mixer.check_passes(config.total_tokens)
        body = 0 if mixer.is_strict else config.total_tokens - 1
        return _with_end(mixer, limits, config, config.total_tokens, body, None)
    rows = int(config.total_steps or 0) * config.microbatches_per_step
    mean = mean_of_microbatch(mixer, limits, config)
    # all but a step, and what the mean may be off, is packed as the options say
    spare = config.microbatches_per_step + isqrt(rows)
    for number in range(_TRIES):
        total = max(1, round(rows * mean))
        mixer.check_passes(total)
        wanted = max(0, rows - spare) if number < _TRIES - 1 else rows // 2
        body = 0 if mixer.is_strict else int(wanted * mean)
        draw, packed = _with_end(mixer, limits, config, total, body, rows)
        dealt = int(packed.num_dealt or 0)
        if mixer.is_strict or wanted - spare <= dealt <= rows:
            return draw, packed
        mean = _tokens(packed, dealt) / dealt
    # a source so small that the mean says nothing: all of it in its order, which always comes out
    return (draw, packed) if dealt <= rows else _with_end(mixer, limits, config, total, 0, rows)


def mean_of_microbatch(mixer: Mixer, limits: Limits, config: PlanConfig) -> float:
    """Return the mean real tokens of a micro-batch, from the beginning of a stream."""
    samples = max(1, int(mixer.num_pieces.sum()))
    total = max(1, sum(mixer.tokens) * _PILOT // samples)
    if config.total_tokens is not None:
        total = min(total, config.total_tokens)
    draw = mixer.stream_to(total, int(limits.budgets.max()))
    packed = _packed(draw, len(draw.pieces), limits, config)
    if not len(packed):
        raise ConfigError(_no_microbatch(config))
    return _tokens(packed, len(packed)) / len(packed)


def _wrapped(mixer: Mixer, limits: Limits, config: PlanConfig) -> tuple[Draw, MicroBatches]:
    """Wrap a stream, in its order, until the plan is full; rows that reach the total are not dealt."""
    step_size, room = config.microbatches_per_step, int(limits.budgets[0])
    num_rows = None if config.total_steps is None else config.total_steps * step_size
    total = num_rows * room if num_rows is not None else int(config.total_tokens or 0)
    if num_rows is None:
        mixer.check_passes(total)
    slack = 2 * step_size * room
    for _ in range(_TRIES):
        draw, packed = wrapped_in_order(mixer.stream_to(total, slack), limits)
        if num_rows is not None:
            num_dealt, is_full = num_rows, len(packed) >= num_rows
        else:
            reached = np.cumsum(np.add.reduceat(packed.seqlens, packed.starts, dtype=np.int64))
            whole = len(packed) // step_size * step_size
            num_dealt = int(np.searchsorted(reached, total))
            is_full = num_dealt < whole
        if is_full:
            return draw, replace(packed, num_dealt=num_dealt)
        slack *= 4
    raise ConfigError(
        f"the sources give no {counted(step_size, 'row')} of {room} tokens behind the total; lower it"
    )


def _with_end(
    mixer: Mixer, limits: Limits, config: PlanConfig, total: int, tokens: int, num_rows: int | None
) -> tuple[Draw, MicroBatches]:
    """Pack so many tokens of a stream as the options say, and then in its order until the plan is full."""
    step_size = config.microbatches_per_step
    slack = 2 * step_size * int(limits.budgets.max()) + (total // 256 if num_rows is not None else 0)
    for _ in range(_TRIES):
        draw = mixer.stream_to(total, slack)
        num_body = int(kernels.count_within(draw.pieces.seqlens, max(tokens, 0)))
        if group_width(config) > 1:
            num_body -= num_body % step_size
        body = _packed(draw, num_body, limits, config)
        if num_rows is not None and len(body) > num_rows:
            return draw, replace(body, num_dealt=len(body))
        end = _in_order(draw, num_body, limits, config)
        packed = _joined(body, end, draw, config)
        whole = len(packed) // step_size * step_size
        if num_rows is not None:
            is_full = whole >= num_rows
        else:
            # the body is less than the total
            is_full = _tokens(body) + _tokens(end, max(0, whole - len(body))) >= total and whole >= len(body)
        if is_full:
            return draw, packed
        slack *= 4
    raise ConfigError(_no_microbatch(config))


def _packed(draw: Draw, count: int, limits: Limits, config: PlanConfig) -> MicroBatches:
    """Pack the first pieces of a stream as the options say; only whole steps, where these have one shape."""
    pieces = draw.pieces
    if not count:
        return _nothing(draw, config)
    owners = pieces.owners
    packed = pack(
        np.ascontiguousarray(pieces.lengths[:, :count]),
        None if owners is None else owners[:count],
        limits,
        config,
        key_for(config.seed, 0, Purpose.SAMPLES),
        phase_starts=draw.phase_starts,
    )
    if not packed.in_steps:
        return packed
    whole = len(packed) // config.microbatches_per_step * config.microbatches_per_step
    rest = replace(packed, starts=packed.starts[whole:], sizes=packed.sizes[whole:])
    left = packed.pieces[positions_of(rest)]
    return replace(
        packed,
        starts=packed.starts[:whole],
        sizes=packed.sizes[:whole],
        leftover=np.concatenate([packed.leftover, left]),
    )


def _in_order(draw: Draw, first: int, limits: Limits, config: PlanConfig) -> MicroBatches:
    """Pack the pieces of a stream from ``first`` on in their order."""
    pieces = draw.pieces
    count = len(pieces) - first
    if not count:
        return _nothing(draw, config)
    owners = pieces.owners
    lengths = np.ascontiguousarray(pieces.lengths[:, first:])
    packed = pack_in_order(lengths, None if owners is None else owners[first:], limits, config)
    return reindex(packed, np.arange(first, len(pieces), dtype=draw.places.dtype))  # type: ignore[union-attr]


def _joined(body: MicroBatches, end: MicroBatches, draw: Draw, config: PlanConfig) -> MicroBatches:
    leftover: IntArray = np.concatenate([body.leftover, end.leftover])
    packed = concatenate([body, end])
    return replace(packed, leftover=leftover, num_dealt=len(body))


def _nothing(draw: Draw, config: PlanConfig) -> MicroBatches:
    none: NDArray[np.int64] = np.empty(0, np.int64)
    return MicroBatches(
        pieces=np.empty(0, draw.places.dtype),  # type: ignore[union-attr]
        seqlens=np.empty(0, np.int32),
        starts=none,
        sizes=none,
        leftover=none,
        in_steps=group_width(config) > 1,
    )


def _tokens(packed: MicroBatches, count: int | None = None) -> int:
    """Return the tokens of the first ``count`` micro-batches, or of all."""
    if count is None and not len(packed.leftover):
        return int(packed.seqlens.sum(dtype=np.int64))
    rows = replace(packed, starts=packed.starts[:count], sizes=packed.sizes[:count])
    return int(packed.seqlens[positions_of(rows)].sum(dtype=np.int64))


def _no_microbatch(config: PlanConfig) -> str:
    return (
        f"no micro-batch can be made of --min-samples {config.min_samples} samples; lower --min-samples or "
        "raise --max-tokens"
    )
