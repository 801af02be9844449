"""Rows of ``--packing wrapped``: documents end to end, cut where a row ends, no row short but the last."""

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.options import PlanConfig
from packer.options.bounds import full_row, longest_sample, row_room
from packer.plan.epoch import DROP_REASONS
from packer.plan.reader import Plan
from packer.plan.rows import MicroBatches
from packer.plan.sources import source_of
from packer.plan.trained import accounts_of
from packer.plan.verify_rows import Rows
from packer.wording import counted

_TRAINED = DROP_REASONS.index("trained")
_UNCUT = 3
"""Tokens of a document that cannot be cut: a row with room for 2 may find nothing else to fill it."""


class WrappedRules:
    """What must hold for the rows of one plan; nothing, where they are packed otherwise."""

    def __init__(self, plan: Plan, seqlens: NDArray[np.integer] | None) -> None:
        """Take the plan, and (num_samples,) the metric that it calls seqlen, where it is known."""
        self._plan = plan
        self._metric = seqlens
        self._num_passes = np.array([source.num_passes for source in plan.sources])
        self._is_wrapped = plan.config.get("packing") == "wrapped"
        if self._is_wrapped:
            options = PlanConfig.from_json(plan.config)
            self._room, (_, self._multiple) = full_row(options), row_room(options)
            self._limit = int(plan.header["max_seqlen"] or longest_sample(options))
            self._is_split = options.too_long == "split"

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._short: list[str] = []  # the first two, in words
        self._borders = np.empty(0, np.int64)
        if self._is_wrapped and epoch == 0 and accounts_of(self._plan):
            self._borders = self._borders_of_trained()
        # rows that end two tokens short, or more; documents that may not fill them
        self._num_short = self._num_shorter = self._num_uncut = self._num_met = 0

    def check(self, epoch: int, table: MicroBatches) -> None:
        """Check rows that follow those of the call before.

        Raises:
            InvariantError: a sample is cut inside a row.
        """
        if not self._is_wrapped:
            return
        if table.starts is None:
            raise InvariantError(f"epoch {epoch}: its rows do not say where their pieces start; plan again")
        rows, starts = Rows(epoch, table), table.starts
        is_first, is_last = np.zeros((2, len(starts)), np.bool_)
        is_first[table.offsets[:-1]] = is_last[table.offsets[1:] - 1] = True
        begins_anew = self._begins(table.sample_ids, starts)
        rows.refuse_piece(
            ~is_first & ~begins_anew,
            lambda p: f"it goes on at token {starts[p]}, and is not the first of its row (packing=wrapped)",
        )
        if self._metric is not None:
            ends = starts.astype(np.int64) + table.seqlens
            lengths = self._metric[table.sample_ids]
            ends_here = (ends == lengths) | (ends == self._limit) | self._begins(table.sample_ids, ends)
            rows.refuse_piece(
                ~is_last & ~ends_here,
                lambda p: f"it is cut at token {ends[p]}, and is not the last of its row (packing=wrapped)",
            )
        rooms = -(-table.seqlens.astype(np.int64) // self._multiple) * self._multiple
        missing = (self._room - rows.sums(rooms)) * ~(table.is_filler | table.is_repeat)
        for at in np.flatnonzero(missing > 1)[: 2 - len(self._short)].tolist():
            self._short.append(f"{rows.place(at)}: it ends {counted(int(missing[at]), 'token')} short")
        self._num_short += int(np.count_nonzero(missing > 1))
        self._num_shorter += int(np.count_nonzero(missing > 2))
        self._num_uncut += int(np.count_nonzero(table.seqlens == _UNCUT))
        # a sample may meet another piece, or pass, of its own in the row that it would fill
        comes_again = self._num_passes[source_of(table.sample_ids, self._plan.sources)] > 1
        self._num_met += int(np.count_nonzero(begins_anew & ((starts > 0) | comes_again)))

    def finish(self, epoch: int) -> None:
        """Check, after the last row of an epoch, how many rows are short.

        Raises:
            InvariantError: more than one is, and more than there are documents that could not fill them.
        """
        if not self._is_wrapped:
            return
        for part in self._plan.dropped():
            mine = part.epoch == epoch
            self._num_uncut += int(np.count_nonzero(part.num_tokens[mine] == _UNCUT))
            if self._is_split or len(self._borders):
                self._num_met += int(np.count_nonzero(mine))
        # one is the last; a piece of a sample that is in the row already cannot fill it either
        most = 1 + self._num_met
        if self._num_shorter > most or self._num_short > most + self._num_uncut:
            raise InvariantError(
                f"{self._short[-1]}, as {counted(self._num_short, 'row')} of the epoch do; only the last may "
                "(packing=wrapped)"
            )

    def _borders_of_trained(self) -> NDArray[np.int64]:
        """Return where stretches that were trained before begin and end, as sample · 2^31 + token."""
        found = [np.empty(0, np.int64)]
        for part in self._plan.dropped():
            mine = part.reason == _TRAINED
            starts = np.zeros_like(part.num_tokens) if part.start is None else part.start
            key = part.sample_id[mine].astype(np.int64) << 31
            found += [key + starts[mine], key + starts[mine] + part.num_tokens[mine]]
        return np.concatenate(found)

    def _begins(self, sample_ids: NDArray[np.integer], tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return at which tokens a document begins or ends: the first, or where it was cut before packing."""
        begins: NDArray[np.bool_] = tokens == 0
        if len(self._borders):
            begins = begins | np.isin((sample_ids.astype(np.int64) << 31) + tokens, self._borders)
        if self._is_split:
            # a last piece of one token takes one from the piece before
            begins = begins | np.isin(tokens % self._limit, (0, self._limit - 1))
        return begins
