"""``step_tokens``: how many micro-batches come nearest to so many tokens a step."""

from collections.abc import Sequence

import numpy as np

from packer.errors import ConfigError, EmptyPlanError
from packer.options.config import MAX_SEQLEN, PlanConfig
from packer.plan.sources import PlanSource
from packer.planner.choose.pieces import Pieces
from packer.planner.order.orders import Purpose, key_for
from packer.planner.order.stream import mixer_of
from packer.planner.packing.microbatches import positions_of
from packer.planner.packing.pack import limits_of, pack_pieces, pack_stream


def resolve_step_tokens(config: PlanConfig, pieces: Pieces, sources: Sequence[PlanSource]) -> PlanConfig:
    """Return the configuration with ``grad_accum``, found from the mean micro-batch of the first epoch.

    The samples are packed with one micro-batch a rank. A is the multiple of ``accum_multiple`` nearest to
    ``step_tokens`` / (D · mean real tokens of a micro-batch).

    Raises:
        EmptyPlanError: no micro-batch can be made.
        ConfigError: more micro-batches a step than there can be.
    """
    if config.step_tokens is None:
        return config
    limits, key = limits_of(config, pieces.seqlens), key_for(config.seed, 0, Purpose.SAMPLES)
    mixer = mixer_of(pieces, sources, config)
    if mixer is None:
        pieces, packed = pack_pieces(pieces, limits, config, key)
    else:
        # a total below a step is a step
        tokens = config.step_tokens * (config.total_steps or 1)
        if config.total_tokens is not None:
            tokens = max(tokens, config.total_tokens)
        drawn = mixer.stream_to(tokens, 0) if config.has_total else mixer.stream(0)
        drawn, packed = pack_stream(drawn, limits, config, key)
        pieces = drawn.pieces
    if not len(packed):
        raise EmptyPlanError(
            f"no micro-batch can be made of --min-samples {config.min_samples} samples; lower --min-samples "
            "or raise --max-tokens"
        )
    places = packed.pieces[positions_of(packed)]
    mean = int(pieces.seqlens[places].sum(dtype=np.int64)) / len(packed)
    unit = config.dp_size * config.accum_multiple * mean
    grad_accum = config.accum_multiple * max(1, round(config.step_tokens / unit))
    if grad_accum * config.dp_size > MAX_SEQLEN:
        raise ConfigError(
            f"--step-tokens {config.step_tokens} takes {grad_accum:,} micro-batches of {mean:,.0f} tokens a "
            f"rank, over {MAX_SEQLEN}; lower it or raise --max-tokens"
        )
    return config.with_grad_accum(grad_accum)
