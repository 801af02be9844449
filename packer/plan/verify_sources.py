"""What must hold where a plan mixes sources: passes, shares, totals, and no sample twice in a step."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan.epoch import DROP_REASONS
from packer.plan.reader import Plan
from packer.plan.sources import source_of
from packer.plan.verify_samples import pieces_of
from packer.wording import counted

_TRAINED = DROP_REASONS.index("trained")
_UNREACHED = DROP_REASONS.index("unreached")

SHARE_TOLERANCE = 0.01
"""Of a phase's tokens, or samples; or two steps, where that is more: phases begin and end with whole ones."""


class SourceRules:
    """The rules of one plan; ``check`` applies them to an epoch whose samples and steps are in order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self._sources = plan.sources
        # (sources,)
        self._passes = np.array([source.num_passes for source in plan.sources], np.int64)

    def check(self, epoch: int) -> None:
        """Check one epoch.

        Raises:
            InvariantError: the first rule that is broken.
        """
        self._check_passes(epoch, self._unreached(epoch))
        if self._passes.max() > 1:
            self._check_steps_hold_no_sample_twice(epoch)
        self._check_total(epoch)
        if self._plan.header.get("phases"):
            self._check_shares(epoch)

    def _unreached(self, epoch: int) -> NDArray[np.int64]:
        """Return (sources,) how many whole samples an epoch does not reach: of the newest pass, each once."""
        counts_by_source = np.zeros(len(self._sources), np.int64)
        seen = np.zeros(self._plan.num_samples, np.bool_)
        for part in self._plan.dropped():
            mine = (part.reason == _UNREACHED) & (part.epoch == epoch) & (part.num_tokens == part.seqlen)
            ids = part.sample_id[mine]
            distinct, counts = np.unique(ids, return_counts=True)
            again = seen[distinct] | (counts > 1)
            if again.any():
                raise InvariantError(
                    f"epoch {epoch}: sample {distinct[np.argmax(again)]} is unreached twice, and only the "
                    "newest pass may be cut short"
                )
            seen[ids] = True
            np.add.at(counts_by_source, source_of(ids, self._sources), 1)
        return counts_by_source

    def _check_passes(self, epoch: int, unreached: NDArray[np.int64]) -> None:
        """How often each source is passed through is what was asked for, and what the rows leave of it."""
        repeat, most = self._config.get("repeat") or {}, self._config.get("max_passes")
        is_cut = any(table.starts is not None for table in self._plan.epoch(epoch).microbatches())
        for source, missing, available in zip(
            self._sources, unreached.tolist(), self._available(epoch).tolist(), strict=True
        ):
            stated = f"epoch {epoch}: {source.label} is passed through {source.passes:g} times in plan.json"
            if math.ceil(source.passes) != source.num_passes:
                raise InvariantError(f"{stated}, and {source.num_passes} passes are begun")
            asked, one_piece = repeat.get(source.name), 1 / max(available, 1)
            if asked is not None and abs(source.passes - asked) > one_piece:
                raise InvariantError(f"{stated}, repeat={asked:g}")
            bound = most.get(source.name) if isinstance(most, dict) else most
            if bound is not None and source.passes > bound + one_piece:
                raise InvariantError(f"{stated}, over max_passes={bound:g}")
            left = (source.num_passes - source.passes) * available
            if not is_cut and abs(left - missing) > 0.5 + 1e-6 * available:
                raise InvariantError(
                    f"{stated}, which leaves {left:.0f} samples unreached; the rows leave {missing}"
                )

    def _check_steps_hold_no_sample_twice(self, epoch: int) -> None:
        """A step holds a piece twice only if it has more pieces than there are samples in the source."""
        available = self._available(epoch)
        for first_step, pieces, in_step in self._pieces_of_steps(epoch):
            pieces = pieces[:, np.lexsort(pieces)]
            again = pieces[:2, 1:][:, (pieces[:, 1:] == pieces[:, :-1]).all(axis=0)]
            room = available[source_of(again[1], self._sources)]
            wrong = in_step[again[0]] <= room
            if wrong.any():
                at = int(np.argmax(wrong))
                step, sample = again[:, at].tolist()
                raise InvariantError(
                    f"epoch {epoch}, step {first_step + step}, sample {sample}: it is in it twice, which "
                    f"holds {counted(int(in_step[step]), 'sample')}, and its source has {room[at]}"
                )

    def _available(self, epoch: int) -> NDArray[np.int64]:
        """Return (sources,) how many samples an epoch may plan at all."""
        available = np.array([source.num_samples for source in self._sources], np.int64)
        # what no epoch plans has one line, what was trained before one for each pass; both may be parts
        lost: list[NDArray[np.int64]] = [np.empty((3, 0), np.int64)]
        for part in self._plan.dropped():
            never, trained = part.epoch == -1, (part.reason == _TRAINED) & (part.epoch == epoch)
            passes = np.maximum(self._passes[source_of(part.sample_id, self._sources)], 1)
            tokens = part.num_tokens * np.where(never, passes, 1)
            rows = np.stack([part.sample_id.astype(np.int64), tokens, part.seqlen * passes])
            lost.append(rows[:, never | trained])
        ids, tokens, whole = np.concatenate(lost, axis=1)
        ids, firsts, names = np.unique(ids, return_index=True, return_inverse=True)
        sums = np.zeros(len(ids), np.int64)
        np.add.at(sums, names, tokens)
        gone = ids[sums >= whole[firsts]]
        return available - np.bincount(source_of(gone, self._sources), minlength=len(self._sources))

    def _pieces_of_steps(self, epoch: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the pieces of some whole steps at a time, in order.

        Yields:
            The first step; (3, P) steps, counted from it, samples, and starts, of sources that are passed
            through more than once; (steps,) how many pieces each step has, of all sources.
        """
        step_size = self._plan.dp_size * self._plan.grad_accum
        first_step, begun = 0, np.empty((3, 0), np.int64)  # of the step that goes on in the next table
        for table, pieces in pieces_of(self._plan.epoch(epoch)):
            is_copy = np.repeat(table.is_filler | table.is_repeat, np.diff(table.offsets))
            steps = np.repeat(table.step, np.diff(table.offsets))[~is_copy]
            mine = np.stack([steps, pieces.sample_ids.astype(np.int64), pieces.starts.astype(np.int64)])
            held = np.concatenate([begun, mine], axis=1)
            next_step = (table.first_row + len(table.step)) // step_size
            begun, whole = held[:, held[0] >= next_step], held[:, held[0] < next_step]
            whole[0] -= first_step
            in_step = np.bincount(whole[0], minlength=next_step - first_step)
            repeated = self._passes[source_of(whole[1], self._sources)] > 1
            if repeated.any():
                yield first_step, whole[:, repeated], in_step
            first_step = next_step

    def _check_total(self, epoch: int) -> None:
        """The plan ends with the step that reaches its total."""
        opened = self._plan.epoch(epoch)
        wanted = self._config.get("total_steps")
        if wanted is not None and opened.num_steps != wanted:
            raise InvariantError(
                f"epoch {epoch}: it has {counted(opened.num_steps, 'step')}, total_steps={wanted}"
            )
        wanted = self._config.get("total_tokens")
        if wanted is None:
            return
        tokens = sum(int(table.num_tokens.sum()) for table in opened.steps())
        last = opened.step(opened.num_steps - 1).num_tokens if opened.num_steps else 0
        if not tokens - last < wanted <= tokens:
            raise InvariantError(
                f"epoch {epoch}: its steps have {tokens} tokens, the last one {last}, and the plan is to end "
                f"with the step that reaches total_tokens={wanted}"
            )

    def _check_shares(self, epoch: int) -> None:
        """Each phase has its shares, to a hundredth of it or two steps."""
        phases = self._plan.header["phases"]
        first_steps = np.array([phase["first_step"] for phase in phases])
        if first_steps[0] != 0 or (np.diff(first_steps) <= 0).any():
            raise InvariantError(f"phases begin at steps {first_steps.tolist()} in plan.json; the first is 0")
        by_samples = self._config.get("mix_by") == "samples"
        # (phases, sources)
        held = np.zeros((len(phases), len(self._sources)), np.int64)
        largest = np.zeros(len(phases), np.int64)
        for table, pieces in pieces_of(self._plan.epoch(epoch)):
            is_copy = np.repeat(table.is_filler | table.is_repeat, np.diff(table.offsets))
            steps = np.repeat(table.step, np.diff(table.offsets))[~is_copy]
            phase = np.searchsorted(first_steps, steps, side="right") - 1
            weights = np.ones_like(pieces.seqlens) if by_samples else pieces.seqlens
            np.add.at(held, (phase, source_of(pieces.sample_ids, self._sources)), weights)
        for steps_table in self._plan.epoch(epoch).steps():
            phase = np.searchsorted(first_steps, steps_table.step, side="right") - 1
            np.maximum.at(largest, phase, steps_table.num_samples if by_samples else steps_table.num_tokens)
        unit = "samples" if by_samples else "tokens"
        for number, phase in enumerate(phases):
            whole = int(held[number].sum())
            allowed = max(SHARE_TOLERANCE * whole, 2 * int(largest[number]))
            for source, found in zip(self._sources, held[number].tolist(), strict=True):
                share = phase["shares"].get(source.name, 0.0)
                if abs(found - share * whole) > allowed:
                    raise InvariantError(
                        f"epoch {epoch}, from step {phase['first_step']} on: {source.name} has {found} of "
                        f"{whole} {unit}, its share is {share:g}"
                    )
