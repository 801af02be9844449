"""Every sample, in every epoch: planned once, or in pieces that tile it, or dropped with a reason."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan import schema
from packer.plan.epoch import DROP_REASONS
from packer.plan.reader import Epoch, Plan
from packer.plan.rows import MicroBatches

PIECES_PER_PASS = 1 << 24
"""Pieces of cut samples that are held at a time."""

_TRUNCATED = DROP_REASONS.index("truncated")


class Pieces(NamedTuple):
    """Planned pieces, or dropped tokens, of some samples."""

    sample_ids: NDArray[np.integer]
    starts: NDArray[np.integer]
    seqlens: NDArray[np.integer]
    """Tokens planned, or lost."""


def pieces_of(epoch: Epoch, *, copies: bool = False) -> Iterator[tuple[MicroBatches, Pieces]]:
    """Yield the pieces that count as planned, or else those of fillers and repeats."""
    for table in epoch.microbatches():
        pieces = Pieces(
            table.sample_ids,
            np.broadcast_to(np.int32(0), table.seqlens.shape) if table.starts is None else table.starts,
            table.seqlens,
        )
        is_copy = table.is_filler | table.is_repeat
        if copies or is_copy.any():
            wanted = np.repeat(is_copy == copies, np.diff(table.offsets))
            pieces = Pieces(*(array[wanted] for array in pieces))
        yield table, pieces


def place_of(epoch: int, table: MicroBatches, sample: int) -> str:
    """Return where a sample last appears in a table, as messages say it."""
    piece = int(np.flatnonzero(table.sample_ids == sample)[-1])
    at = int(np.searchsorted(table.offsets, piece, side="right")) - 1
    return (
        f"epoch {epoch}, step {table.step[at]}, micro-batch {table.accum[at]} of rank {table.dp_rank[at]} "
        f"(row {table.first_row + at}), sample {sample}"
    )


def check_samples(plan: Plan, epoch: int, seqlens: NDArray[np.integer] | None) -> None:
    """Check the first invariant for one epoch; the drops must be in order.

    Args:
        plan: the plan.
        epoch: which epoch.
        seqlens: (num_samples,) the metric; lengths of samples that are not dropped are unknown without it.

    Raises:
        InvariantError: a sample is planned twice, or neither planned nor dropped, or in pieces that do not
            tile it.
    """
    checked = _Epoch(plan, epoch, seqlens)
    if checked.has_cuts():
        checked.check_pieces()
    else:
        checked.check_whole_samples()
    checked.check_totals()


class _Epoch:
    def __init__(self, plan: Plan, epoch: int, seqlens: NDArray[np.integer] | None) -> None:
        self._plan = plan
        self._number = epoch
        self._epoch = plan.epoch(epoch)
        self._metric = seqlens
        self._name = f"epoch {epoch}"

    def planned(self) -> Iterator[tuple[MicroBatches, Pieces]]:
        """Yield the pieces that count as planned."""
        return pieces_of(self._epoch)

    def drops(self) -> Iterator[tuple[Pieces, NDArray[np.int64], NDArray[np.int8]]]:
        """Yield what this epoch does not plan: tokens lost, whole lengths, reasons."""
        for part in self._plan.dropped():
            mine = (part.epoch == -1) | (part.epoch == self._number)
            if mine.any():
                starts = np.zeros_like(part.num_tokens) if part.start is None else part.start
                yield (
                    Pieces(part.sample_id[mine], starts[mine], part.num_tokens[mine]),
                    part.seqlen[mine],
                    part.reason[mine],
                )

    def has_cuts(self) -> bool:
        """Return whether a sample may be in several pieces, or partly dropped."""
        if any(table.starts is not None for table in self._epoch.microbatches()):
            return True
        return any((lost.seqlens < lengths).any() for lost, lengths, _ in self.drops())

    def check_whole_samples(self) -> None:
        """Check that every sample is planned once, or dropped once."""
        seen = np.zeros(self._plan.num_samples, np.bool_)
        count = 0
        for _, pieces in self.planned():
            seen[pieces.sample_ids] = True
            count += len(pieces.sample_ids)
        if count != np.count_nonzero(seen):
            self._refuse_second_time()
        for lost, _, _ in self.drops():
            ids = lost.sample_ids
            self._refuse(seen[ids], ids, "is planned and dropped, or dropped twice")
            seen[ids] = True
            count += len(ids)
        if count != np.count_nonzero(seen):
            self._refuse_dropped_twice()
        if count != len(seen):
            raise InvariantError(
                f"{self._name}: sample {int(np.argmin(seen))} is neither planned nor dropped"
            )

    def _refuse_second_time(self) -> None:
        """Find a sample that is planned twice, and say where."""
        seen = np.zeros(self._plan.num_samples, np.bool_)
        for table, pieces in self.planned():
            order = np.argsort(pieces.sample_ids, kind="stable")
            ids = pieces.sample_ids[order]
            again = np.zeros(len(ids), np.bool_)
            again[order[1:]] = ids[1:] == ids[:-1]
            again |= seen[pieces.sample_ids]
            seen[pieces.sample_ids] = True
            if again.any():
                sample = int(pieces.sample_ids[np.argmax(again)])
                raise InvariantError(f"{place_of(self._number, table, sample)}: it is planned twice")

    def _refuse_dropped_twice(self) -> None:
        seen = np.zeros(self._plan.num_samples, np.bool_)
        for lost, _, _ in self.drops():
            ids, counts = np.unique(lost.sample_ids, return_counts=True)
            self._refuse(seen[ids] | (counts > 1), ids, "is dropped twice")
            seen[ids] = True

    def check_pieces(self) -> None:
        """Check that the pieces of every sample tile what is not dropped, some samples at a time."""
        num_pieces = self._plan.num_samples + sum(len(pieces.sample_ids) for _, pieces in self.planned())
        passes = -(-num_pieces // PIECES_PER_PASS)
        width = -(-self._plan.num_samples // max(passes, 1))
        for first in range(0, self._plan.num_samples, width):
            self._check_pieces_of(first, min(first + width, self._plan.num_samples))

    def _check_pieces_of(self, first: int, last: int) -> None:
        """Check the samples first … last − 1."""
        planned = _collect((pieces for _, pieces in self.planned()), first, last)
        if self._states_starts():
            lost_pieces = _collect((pieces for pieces, _, _ in self.drops()), first, last)
            self._check_tiles(planned, lost_pieces)
        # (last − first,) what is known of each sample
        lost = np.zeros(last - first, np.int64)
        lengths = np.full(last - first, -1, np.int64)
        listed, may_gap = (np.zeros(last - first, np.bool_) for _ in range(2))
        for part, known, reasons in self.drops():
            mine = (part.sample_ids >= first) & (part.sample_ids < last)
            at = part.sample_ids[mine] - first
            np.add.at(lost, at, part.seqlens[mine])
            lengths[at] = known[mine]
            self._refuse(lengths[at] != known[mine], at + first, "is dropped with two different lengths")
            listed[at] = True
            may_gap[at] |= reasons[mine] != _TRUNCATED  # a piece between two others may be dropped
        if self._metric is not None:
            lengths = self._metric[first:last].astype(np.int64)
        order = np.lexsort((planned.starts, planned.sample_ids))
        ids, starts = planned.sample_ids[order] - first, planned.starts[order].astype(np.int64)
        ends = starts + planned.seqlens[order]
        tokens = np.zeros(last - first, np.int64)
        np.add.at(tokens, ids, ends - starts)
        end = np.zeros(last - first, np.int64)
        np.maximum.at(end, ids, ends)
        overlap = (ids[1:] == ids[:-1]) & (starts[1:] < ends[:-1])
        self._refuse(overlap, ids[1:] + first, "is planned twice: two of its pieces share tokens")
        everyone = np.arange(first, last)
        seen = np.zeros(last - first, np.bool_)
        seen[ids] = True
        self._refuse(~seen & ~listed, everyone, "is neither planned nor dropped")
        gaps = seen & (tokens != end) & ~may_gap
        self._refuse(gaps, everyone, "is planned in pieces that leave a gap")
        unequal = (lengths >= 0) & (tokens + lost != lengths)
        self._refuse(
            unequal, everyone, "has more or fewer tokens planned and dropped than it is long", lengths
        )
        self._refuse((lengths >= 0) & (end > lengths), everyone, "is planned beyond its end", lengths)

    def _states_starts(self) -> bool:
        """Return whether the drops say where they begin; an older packer did not."""
        return "start" in self._plan.columns(schema.DROPPED_FILE).names

    def _check_tiles(self, planned: Pieces, lost: Pieces) -> None:
        """Check that every piece, planned or dropped, begins where the one before it ends."""
        ids, starts, seqlens = (np.concatenate(pair) for pair in zip(planned, lost, strict=True))
        order = np.lexsort((seqlens, starts, ids))
        ids, starts = ids[order], starts[order].astype(np.int64)
        ends = starts + seqlens[order]
        follows = np.zeros(len(ids), np.bool_)
        follows[1:] = ids[1:] == ids[:-1]
        due = np.where(follows, np.append(0, ends[:-1]), 0)
        self._refuse(
            starts < due, ids, "is planned twice, or planned and dropped: two of its pieces share tokens"
        )
        self._refuse(starts > due, ids, "is planned in pieces that leave a gap")

    def check_totals(self) -> None:
        """Check that tokens in = tokens planned + tokens dropped, and the counts of the header."""
        counts = self._plan.header["epochs"][self._number]
        tokens = sum(int(pieces.seqlens.sum(dtype=np.int64)) for _, pieces in self.planned())
        samples = sum(int(np.count_nonzero(pieces.starts == 0)) for _, pieces in self.planned())
        num_pieces = sum(len(pieces.sample_ids) for _, pieces in self.planned())
        lost = sum(int(lost.seqlens.sum()) for lost, _, _ in self.drops())
        source = self._plan.header["num_tokens"]
        if tokens + lost != source:
            raise InvariantError(
                f"{self._name}: {tokens} tokens planned + {lost} dropped are not the source's {source}"
            )
        actual = {"num_tokens": tokens, "num_samples": samples} | self._losses()
        if self._plan.header["version"] >= 2:
            actual["num_pieces"] = num_pieces
        for name, value in actual.items():
            if counts[name] != value:
                raise InvariantError(
                    f"{self._name}: {name} is {counts[name]} in plan.json, the rows give {value}"
                )

    def _losses(self) -> dict[str, Any]:
        """Return what this epoch alone does not plan, by reason, and how many samples are cut.

        A sample in pieces counts where its first one is; format version 1 counts its pieces.
        """
        counts_pieces = self._plan.header["version"] < 2
        # (num_samples,) planned or counted already, and in pieces
        is_counted, is_cut = np.zeros((2, self._plan.num_samples), np.bool_)
        for _, pieces in self.planned():
            is_counted[pieces.sample_ids[pieces.starts == 0]] = True
            is_cut[pieces.sample_ids[pieces.starts > 0]] = True
        for _, pieces in pieces_of(self._epoch, copies=True):
            is_cut[pieces.sample_ids[pieces.starts > 0]] = True
        losses: dict[str, dict[str, int]] = {}
        for part in self._plan.dropped():
            of_epoch = (part.epoch == -1) | (part.epoch == self._number)
            is_cut[part.sample_id[of_epoch & (part.num_tokens < part.seqlen)]] = True
            mine = np.flatnonzero(part.epoch == self._number)
            ids, reasons = part.sample_id[mine], part.reason[mine]
            is_first = np.zeros(len(ids), np.bool_)
            is_first[np.unique(ids, return_index=True)[1]] = True
            is_sample = counts_pieces | (is_first & ~is_counted[ids])
            is_counted[ids] = True
            for code in np.unique(reasons).tolist():
                counts = losses.setdefault(DROP_REASONS[code], {"num_samples": 0, "num_tokens": 0})
                counts["num_samples"] += int(np.count_nonzero(is_sample & (reasons == code)))
                counts["num_tokens"] += int(part.num_tokens[mine][reasons == code].sum())
        num_cut = {} if counts_pieces else {"num_cut": int(np.count_nonzero(is_cut))}
        return {"dropped": losses} | num_cut

    def _refuse(
        self,
        wrong: NDArray[np.bool_],
        sample_ids: NDArray[np.integer],
        why: str,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Raise for the first sample that is wrong."""
        if wrong.any():
            at = int(np.argmax(wrong))
            length = "" if lengths is None else f" (seqlen {lengths[at]})"
            raise InvariantError(f"{self._name}: sample {sample_ids[at]}{length} {why}")


def _collect(parts: Iterator[Pieces], first: int, last: int) -> Pieces:
    """Gather the pieces of the samples first … last − 1."""
    found = []
    for pieces in parts:
        mine = (pieces.sample_ids >= first) & (pieces.sample_ids < last)
        found.append(Pieces(*(array[mine] for array in pieces)))
    empty = np.zeros(0, np.int64)
    found = found or [Pieces(empty, empty, empty)]
    return Pieces(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
