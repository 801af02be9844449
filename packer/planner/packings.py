"""Which packing an epoch asks for, and the repairs that packed rows may need afterwards."""

from packer.kernels.limits import Limits
from packer.planner.best_fit import best_fit
from packer.planner.config import PlanConfig
from packer.planner.microbatches import MicroBatches
from packer.planner.next_fit import next_fit
from packer.planner.orders import Purpose, key_for
from packer.planner.pieces import Pieces
from packer.planner.windowed import windowed


def pack_epoch(pieces: Pieces, limits: Limits, config: PlanConfig, epoch: int) -> MicroBatches:
    """Pack all pieces into micro-batches, in the order in which these are to run."""
    key = key_for(config.seed, epoch, Purpose.SAMPLES)
    width = config.microbatches_per_step if config.has_shape_rule and not limits.packed else 1
    if config.packing == "best-fit":
        return best_fit(pieces.lengths, limits, key=key)
    if config.packing == "windowed":
        return windowed(
            pieces.lengths,
            pieces.owners,
            limits,
            window=config.window,
            width=width,
            same_seqlen=config.same_seqlen,
            key=key,
        )
    return next_fit(
        pieces.lengths,
        pieces.owners,
        limits,
        order=config.order,
        width=width,
        same_seqlen=config.same_seqlen,
        key=key,
    )
