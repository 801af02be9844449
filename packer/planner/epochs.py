"""Epoch by epoch: pack, compose steps, and give every row its shape and every step its factor."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError
from packer.kernels.limits import Limits
from packer.metrics import Blocks
from packer.options.config import MAX_SEQLEN, PlanConfig
from packer.plan.epoch import DroppedSamples, PlannedEpoch
from packer.plan.sources import PlanSource, source_of
from packer.planner.choose.pieces import Pieces, join_drops
from packer.planner.choose.selection import reason
from packer.planner.choose.trained import LeftOver
from packer.planner.compose.block_figures import block_figures
from packer.planner.compose.composition import Composition, compose
from packer.planner.compose.mixture import Mixture
from packer.planner.order.orders import Purpose, histogram, key_for
from packer.planner.order.stream import Draw, Mixer, mixer_of
from packer.planner.packing.by_block import pack_by_block
from packer.planner.packing.curriculum import pack_by_admission
from packer.planner.packing.lower_bound import lower_bound
from packer.planner.packing.microbatches import IntArray, MicroBatches, positions_of
from packer.planner.packing.pack import limits_of, pack_in_order, pack_pieces, pack_stream
from packer.planner.packing.total import pack_to_total
from packer.planner.packing.wrapped import fewest_rows
from packer.planner.progress import Pace, Phase
from packer.planner.rate import lr_scales, mean_size
from packer.planner.shape import choose_shapes, pad_to

_HELD_PIECES = 1 << 25
"""Samples of all epochs that are held at once, rather than packed once more."""


@dataclass(kw_only=True, slots=True)
class Shared:
    """What an epoch depends on that only all epochs together tell."""

    lr_base: float | None = None
    """The size at which the learning-rate factor is 1."""
    shapes: NDArray[np.int64] | None = None
    """The values that T may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The epochs of a plan, and what all of them share."""

    lr_base: float | None
    sources: list[PlanSource]
    """With how often an epoch passes through each."""
    phases: list[dict[str, Any]] | None
    epochs: Iterator[PlannedEpoch]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlanner:
    """Plans the epochs of one configuration over one set of pieces."""

    pieces: Pieces
    """What was chosen of all sources."""
    first: LeftOver | None = None
    """What the first epoch has of them, where an earlier plan trained the rest."""
    sources: Sequence[PlanSource]
    config: PlanConfig
    loss_tokens: IntArray | None = None
    """(N,) of every sample of the source; None for all tokens but each sample's first."""
    admissions: NDArray[np.int64] | None = None
    """(P,) the step, over all epochs, from which on each piece may be used; None without a curriculum."""
    blocks: Blocks | None = None
    """How the samples of the source lie in files; needed for an order by blocks."""
    pace: Pace
    """Told what is being done."""

    def plan_epochs(self) -> "Planned":
        """Return the epochs, one at a time in memory, and what all of them share.

        Raises:
            EmptyPlanError: an epoch has no full step.
            ConfigError: a size that the plan cannot know.
        """
        if (
            self.config.lr_by == "loss-tokens"
            and self.loss_tokens is not None
            and self.pieces.starts is not None
        ):
            raise ConfigError(
                "--lr-by loss-tokens needs the loss tokens of cut samples, which no metric tells; choose "
                "--lr-by tokens, or --too-long drop"
            )
        limits = limits_of(self.config, self.pieces.seqlens)
        mixer = self._mixer(0)
        fixed = None if mixer else self._fixed(self.pieces)
        # Base and shapes come before the first row: epochs are held until then, or, if large, planned twice.
        waits = self._needs_base or self._needs_shapes
        held: list[Composition] | None = None
        if self.config.epochs == 1 or (waits and self.config.epochs * len(self.pieces) <= _HELD_PIECES):
            held = list(self._compositions(limits, fixed))
        elif waits:
            self.pace.survey_first()
        shared = self._shared(self._compositions(limits, fixed) if held is None else held)

        def planned() -> Iterator[PlannedEpoch]:
            epochs = self._compositions(limits, fixed) if held is None else _taken_out(held)
            for epoch, steps in enumerate(epochs):
                self.pace.begin(Phase.WRITE, epoch)
                yield self._finish(steps, limits, shared)
            self.pace.begin(Phase.FLUSH)

        sources, phases = self._accounts(mixer, held)
        return Planned(lr_base=shared.lr_base, sources=sources, phases=phases, epochs=planned())

    def _fixed(self, pieces: Pieces) -> tuple[Draw, Mixture]:
        """Return what an epoch is packed from that passes once through all that was chosen."""
        sources = None
        if len(self.sources) > 1:
            ids = np.arange(len(pieces)) if pieces.ids is None else pieces.ids
            sources = source_of(ids, self.sources).astype(np.uint16)
        drawn = Draw(pieces=pieces, sources=sources)
        return drawn, Mixture.of(drawn, len(self.sources))

    def _accounts(
        self, mixer: Mixer | None, held: list[Composition] | None
    ) -> tuple[list[PlanSource], list[dict[str, Any]] | None]:
        """Return the sources with how often an epoch passes through each, and the phases."""
        if mixer is None:
            return list(self.sources), None
        passes = mixer.repeats()
        if self.config.has_total:
            assert held is not None  # a total is of one epoch
            passes = mixer.passes_used(*held[0].reached)
            for source, times in zip(self.sources, passes, strict=True):
                most = mixer.most_passes(source)
                if most is not None and times > most:  # by the last step
                    mixer.refuse_passes(source, times, int(held[0].num_tokens[:-1].sum()))
        sources = [
            replace(source, passes=float(times), num_passes=ceil(times))
            for source, times in zip(self.sources, passes, strict=True)
        ]
        if self.config.phases is None or held is None:
            return sources, None
        starts = held[0].phases.tolist()
        phases = [
            {"first_step": first, "shares": dict(phase.shares)}
            for first, end, phase in zip(
                starts, [*starts[1:], len(held[0].num_samples)], self.config.phases, strict=True
            )
            if first < end
        ]
        return sources, phases

    @property
    def _needs_base(self) -> bool:
        return self.config.lr_scaling != "none" and self.config.lr_base is None

    @property
    def _needs_shapes(self) -> bool:
        return self.config.num_shapes is not None and self.config.layout == "packed"

    def _compositions(self, limits: Limits, fixed: tuple[Draw, Mixture] | None) -> Iterator[Composition]:
        num_steps = 0
        for epoch in range(self.config.epochs):
            composed = self._compose(epoch, limits, fixed, num_steps)
            num_steps += len(composed.num_samples)
            yield composed

    def _compose(
        self, epoch: int, limits: Limits, fixed: tuple[Draw, Mixture] | None, first_step: int
    ) -> Composition:
        composed = (
            self._compose_stream(epoch, limits)
            if fixed is None
            # handed over without a name, so that they can go while they are composed
            else compose(*self._pack(epoch, limits, fixed, first_step), self.config, epoch, self.loss_tokens)
        )
        if self.first is not None and not epoch:
            composed = replace(composed, dropped=join_drops(composed.dropped, self._trained(composed)))
        if self.pieces.keys is not None:
            figure = _max_count(self.pieces.keys, composed)
            composed = replace(composed, figures=composed.figures | {"key_max_count": figure})
        if self.blocks is None:
            return composed
        figures = block_figures(
            self.blocks,
            composed.sample_ids,
            composed.seqlens,
            composed.offsets,
            composed.rows.is_filler,
            self.config,
        )
        return replace(composed, figures=composed.figures | {"blocks": figures})

    def _given(self, epoch: int) -> Pieces:
        """Return what an epoch is made of."""
        return self.pieces if self.first is None or epoch else self.first.pieces

    def _mixer(self, epoch: int, *, is_strict: bool = False) -> Mixer | None:
        return mixer_of(self._given(epoch), self.sources, self.config, is_strict=is_strict)

    def _passes(self, mixer: Mixer, composed: Composition) -> list[Fraction]:
        """Return how often an epoch passes through each source."""
        return mixer.passes_used(*composed.reached) if self.config.has_total else mixer.repeats()

    def _trained(self, composed: Composition) -> DroppedSamples:
        """Return what was trained before the first epoch, once for each pass that would come to it again."""
        assert self.first is not None
        dropped, mixer = self.first.dropped, self._mixer(0)
        if mixer is None:
            return dropped
        num_passes = np.array([ceil(times) for times in self._passes(mixer, composed)], np.int64)
        return dropped.taken(
            np.repeat(
                np.arange(len(dropped.sample_ids)), num_passes[source_of(dropped.sample_ids, self.sources)]
            )
        )

    def _compose_stream(self, epoch: int, limits: Limits) -> Composition:
        mixer = self._mixer(epoch)
        assert mixer is not None
        composed = self._compose_in_turn(epoch, limits, mixer)
        if composed.num_met:
            # a source that is hardly larger than a step: only its own order, pass after pass, keeps it apart
            strict = self._mixer(epoch, is_strict=True)
            assert strict is not None
            composed = self._compose_in_turn(epoch, limits, strict)
            if composed.num_met and self.config.packing == "wrapped":
                raise ConfigError(
                    "--packing wrapped would bring a sample into one step twice, of a source that is hardly "
                    "larger than a step; choose --packing mixed, or make the steps smaller"
                )
        unreached = mixer.newest_unused(*composed.reached, self._passes(mixer, composed))
        if not len(unreached):
            return composed
        codes = np.full(len(unreached), reason("unreached"), np.uint8)
        return replace(composed, dropped=join_drops(composed.dropped, mixer.chosen.drop(unreached, codes)))

    def _compose_in_turn(self, epoch: int, limits: Limits, mixer: Mixer) -> Composition:
        drawn, *packed = self._pack_stream(epoch, limits, mixer)
        mixture = Mixture.of(drawn, len(self.sources), mixer.fractions())
        # handed over without a name, so that they can go while they are composed
        return compose(packed.pop(), drawn, mixture, self.config, epoch, self.loss_tokens)

    def _pack_stream(self, epoch: int, limits: Limits, mixer: Mixer) -> tuple[Draw, MicroBatches]:
        """Draw the stream of an epoch, and pack it."""
        config = self.config
        self.pace.begin(Phase.PACK, epoch)
        if config.has_total:
            drawn, microbatches = pack_to_total(mixer, limits, config)
        else:
            drawn = mixer.stream(epoch)
            if mixer.is_strict and config.packing != "wrapped":
                lengths, owners = drawn.pieces.lengths, drawn.pieces.owners
                microbatches = pack_in_order(lengths, owners, limits, config)
            else:
                key = key_for(config.seed, epoch, Purpose.SAMPLES)
                drawn, microbatches = pack_stream(drawn, limits, config, key)
            if mixer.is_strict:
                microbatches = replace(microbatches, num_dealt=0)
        self.pace.begin(Phase.LAY_OUT, epoch)
        if not limits.packed:
            return drawn, microbatches
        if drawn.cut_from is not None:
            bound = fewest_rows(drawn.pieces, limits)
        else:
            in_rows = microbatches.seqlens
            if len(microbatches.leftover):
                in_rows = in_rows[positions_of(microbatches)]
            bound = lower_bound(*histogram(in_rows), limits)
        figures = {"lower_bound": bound, "num_packed": len(microbatches)}
        return drawn, replace(microbatches, figures=microbatches.figures | figures)

    def _pack(
        self, epoch: int, limits: Limits, fixed: tuple[Draw, Mixture], first_step: int
    ) -> tuple[MicroBatches, Draw, Mixture]:
        """Return the micro-batches, what they are made of, and the mixes that the steps are to have."""
        config = self.config
        given = pieces = self._given(epoch)
        self.pace.begin(Phase.PACK, epoch)
        if self.blocks is not None:
            microbatches = pack_by_block(
                pieces.lengths,
                pieces.owners,
                self._block_edges(given),
                limits,
                config,
                epoch=epoch,
                progress=self.pace.advance,
            )
        elif self.admissions is None:
            key = key_for(config.seed, epoch, Purpose.SAMPLES)
            pieces, microbatches = pack_pieces(given, limits, config, key)
        else:
            microbatches = pack_by_admission(
                pieces.lengths,
                pieces.owners,
                self.admissions,
                limits,
                config,
                epoch=epoch,
                first_step=first_step,
                progress=self.pace.advance,
            )
        self.pace.begin(Phase.LAY_OUT, epoch)
        if pieces is not self.pieces:
            fixed = self._fixed(pieces)
        if limits.packed:
            is_cut = pieces is not given
            bound = fewest_rows(given, limits) if is_cut else _bound(pieces, microbatches, limits)
            figures = {"lower_bound": bound, "num_packed": len(microbatches)}
            microbatches = replace(microbatches, figures=microbatches.figures | figures)
        return microbatches, *fixed

    def _block_edges(self, given: Pieces) -> NDArray[np.int64]:
        """(B + 1,) the piece at which each block begins, and their number."""
        assert self.blocks is not None
        return self.blocks.edges if given.ids is None else np.searchsorted(given.ids, self.blocks.edges)

    def _shared(self, epochs: Iterable[Composition]) -> Shared:
        """Run through the epochs for what all of them need to know, if there is anything."""
        shared = Shared(lr_base=self.config.lr_base)
        if not self._needs_base and not self._needs_shapes:
            return shared
        sizes, rooms = [], [np.empty((2, 0), np.int64)]
        for composed in epochs:
            if self._needs_base:
                sizes.append((composed.sizes(self.config.lr_by), composed.is_full))
            if self._needs_shapes:
                rooms.append(np.stack(np.unique(composed.unpadded, return_counts=True)))
        if self._needs_base:
            shared.lr_base = mean_size(sizes)
        if self.config.num_shapes is not None and self._needs_shapes:
            rows, counts = np.concatenate(rooms, axis=1)
            distinct, inverse = np.unique(rows, return_inverse=True)
            shared.shapes = choose_shapes(
                distinct,
                np.bincount(inverse, counts).astype(np.int64),
                num_shapes=self.config.num_shapes,
                multiple=self.config.padded_multiple,
            )
        return shared

    def _finish(self, composed: Composition, limits: Limits, shared: Shared) -> PlannedEpoch:
        """Give an epoch its shapes and factors."""
        if shared.shapes is not None:
            limits = limits._replace(shapes=shared.shapes)
        return PlannedEpoch(
            sample_ids=composed.sample_ids,
            seqlens=composed.seqlens,
            starts=composed.starts,
            offsets=composed.offsets,
            padded_seqlens=self._shape(composed.unpadded, limits),
            costs=composed.costs,
            is_filler=composed.rows.is_filler,
            is_repeat=composed.rows.is_repeat,
            step_num_samples=composed.num_samples,
            step_num_tokens=composed.num_tokens,
            step_num_loss_tokens=composed.num_loss_tokens,
            num_loss_tokens=composed.loss_tokens_of_rows,
            step_max_seqlen=composed.max_seqlen.astype(np.int32),
            lr_scales=self._lr_scales(composed, shared),
            dropped=composed.dropped,
            padded_seqlens_by_metric={
                metric: self._shape(rows, limits) for metric, rows in composed.unpadded_by_metric.items()
            },
            design_effect=composed.design_effect,
            figures=composed.figures,
        )

    def _lr_scales(self, composed: Composition, shared: Shared) -> NDArray[np.float64]:
        if self.config.lr_scaling == "none":
            return np.ones(len(composed.num_samples))
        return lr_scales(composed.sizes(self.config.lr_by), shared.lr_base, self.config)

    def _shape(self, longest: NDArray[np.int64], limits: Limits) -> NDArray[np.int32]:
        """Return S or T of each row: rounded, and one over a step where it must be."""
        padded = pad_to(limits, longest)
        if self.config.same_seqlen:
            # (R,) -> (T, E) -> (R,)
            steps = padded.reshape(-1, self.config.microbatches_per_step)
            padded = np.repeat(steps.max(axis=1), self.config.microbatches_per_step)
        if len(padded) and int(padded.max()) > MAX_SEQLEN:
            raise ConfigError(
                f"a micro-batch would be padded to {int(padded.max())} tokens, over {MAX_SEQLEN}; lower "
                "--pad-multiple, --pad-segments-to or --sp-size"
            )
        return padded.astype(np.int32)


def _max_count(keys: IntArray, composed: Composition) -> int:
    """Return how many rows, copies left out, hold the key that most hold."""
    is_copy = composed.rows.is_filler | composed.rows.is_repeat
    planned = keys[composed.sample_ids[~np.repeat(is_copy, np.diff(composed.offsets))]]
    _, counts = np.unique(planned[planned >= 0], return_counts=True)
    return int(counts.max(initial=0))


def _bound(pieces: Pieces, microbatches: MicroBatches, limits: Limits) -> int:
    """Return below how many rows nothing can go, for all but what found no company."""
    lengths, counts = histogram(pieces.seqlens)
    np.subtract.at(counts, np.searchsorted(lengths, pieces.seqlens[microbatches.leftover]), 1)
    return lower_bound(lengths[counts > 0], counts[counts > 0], limits)


def _taken_out(held: list[Composition]) -> Iterator[Composition]:
    """Yield compositions in order, and let each go."""
    held.reverse()
    while held:
        yield held.pop()
