"""What must hold for every micro-batch on its own, and for the shapes of a step's micro-batches."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan.counts import ShapeTable
from packer.plan.reader import Plan
from packer.plan.rows import MicroBatches
from packer.wording import counted

Columns = NDArray[Any]


class RowRules:
    """The rules of one configuration; ``check`` applies them to consecutive rows of an epoch."""

    def __init__(
        self, plan: Plan, seqlens: NDArray[np.integer] | None, budgeted: Mapping[str, NDArray[np.integer]]
    ) -> None:
        self._plan = plan
        self._budgeted = budgeted
        self._config = plan.config
        self._metric = seqlens
        self._multiple = math.lcm(self._config.get("sp_size", 1), self._config.get("pad_multiple", 1))
        self._lengths: set[int] = set()
        self._shapes = ShapeTable(self._config)
        self._last: tuple[int, int, int] | None = None  # step, B and S of the row before

    def check(self, epoch: int, table: MicroBatches) -> None:
        """Check rows that follow those of the call before.

        Raises:
            InvariantError: the first rule that is broken, at its first micro-batch.
        """
        if table.first_row == 0:
            self._last = None
        checked = Rows(epoch, table)
        self._check_place(checked)
        self._check_samples(checked)
        self._check_sums(checked)
        self._check_padding(checked)
        self._check_budget(checked)
        self._check_limits(checked)
        self._check_same_shape(checked)
        self._lengths.update(np.unique(table.padded_seqlen).tolist())
        height = np.ones_like(table.num_samples) if self._plan.layout == "packed" else table.num_samples
        self._shapes.add(height, table.padded_seqlen, table.num_tokens * ~table.is_filler)

    def check_shapes(self) -> None:
        """Check, after the last row, the shapes that the whole plan has, and the table of them."""
        most = self._config.get("num_shapes")
        if most is not None and len(self._lengths) > most:
            listed = ", ".join(map(str, sorted(self._lengths)[:8]))
            raise InvariantError(
                f"padded_seqlen takes {len(self._lengths)} values ({listed}, …), over num_shapes={most}"
            )
        stated, actual = self._plan.header["shapes"], self._shapes.as_json()
        if stated != actual:
            raise InvariantError(
                f"shapes in plan.json are not those of the rows: {_first_odd(stated, actual)}"
            )

    def _check_place(self, rows: "Rows") -> None:
        table = rows.table
        ranks, accum = self._plan.dp_size, self._plan.grad_accum
        row = table.first_row + np.arange(len(table.step))
        rows.refuse(
            (table.step != row // (accum * ranks))
            | (table.accum != row // ranks % accum)
            | (table.dp_rank != row % ranks),
            lambda at: (
                f"its columns say step {table.step[at]}, accum {table.accum[at]}, dp_rank {table.dp_rank[at]}"
            ),
        )

    def _check_samples(self, rows: "Rows") -> None:
        table = rows.table
        rows.refuse(np.diff(table.offsets) < 1, lambda _: "it holds no sample")
        outside = (table.sample_ids < 0) | (table.sample_ids >= self._plan.num_samples)
        rows.refuse_piece(outside, lambda _: f"the source has samples 0 to {self._plan.num_samples - 1}")
        rows.refuse_piece(table.seqlens < 1, lambda p: f"seqlen is {table.seqlens[p]}")
        limit = self._config.get("max_seqlen")
        if limit is not None:
            rows.refuse_piece(
                table.seqlens > limit, lambda p: f"seqlen {table.seqlens[p]} is over max_seqlen={limit}"
            )
        if table.starts is not None:
            starts = table.starts
            rows.refuse_piece(starts < 0, lambda p: f"it starts at token {starts[p]}")
            rows.refuse_piece(rows.repeated_in_row(), lambda _: "it has two pieces in one micro-batch")
            if self._plan.header["version"] >= 2:
                rows.refuse_piece(
                    self._train_nothing(table, starts),
                    lambda p: f"its piece at token {starts[p]} is a single token, which trains nothing",
                )
        self._check_lengths(rows)
        self._check_filters(rows)

    def _train_nothing(self, table: MicroBatches, starts: Columns) -> Columns:
        """Return which pieces a cut has left with one token; of first ones only the metric tells."""
        if self._metric is None or self._plan.header["max_seqlen"] == 1:
            is_part = starts > 0
        else:
            is_part = self._metric[table.sample_ids] > 1
        trains_nothing: Columns = is_part & (table.seqlens == 1)
        return trains_nothing

    def _check_filters(self, rows: "Rows") -> None:
        """Refuse a sample whose length leaves it out; of one that is cut only the metric tells it."""
        least, most = self._config.get("filter_min"), self._config.get("filter_max")
        if self._metric is None and rows.table.starts is not None:
            return
        lengths = rows.table.seqlens if self._metric is None else self._metric[rows.table.sample_ids]
        if least is not None:
            rows.refuse_piece(lengths < least, lambda p: f"seqlen {lengths[p]} is under filter_min={least}")
        if most is not None:
            rows.refuse_piece(lengths > most, lambda p: f"seqlen {lengths[p]} is over filter_max={most}")

    def _check_lengths(self, rows: "Rows") -> None:
        """Compare lengths with the metric; a piece of a cut sample must lie inside its sample."""
        if self._metric is None:
            return
        table = rows.table
        actual = self._metric[table.sample_ids]
        if table.starts is None:
            wrong = actual != table.seqlens
        else:
            wrong = actual < table.starts.astype(np.int64) + table.seqlens
        rows.refuse_piece(
            wrong, lambda p: f"{table.seqlens[p]} tokens are planned, the metrics say {actual[p]}"
        )

    def _check_sums(self, rows: "Rows") -> None:
        table = rows.table
        rows.compare("num_samples", table.num_samples, np.diff(table.offsets))
        rows.compare("num_tokens", table.num_tokens, rows.sums(table.seqlens))
        rows.compare("max_seqlen", table.max_seqlen, np.maximum.reduceat(table.seqlens, table.offsets[:-1]))
        rows.compare("cost", table.cost, self._costs(rows))
        rows.refuse(table.is_filler & table.is_repeat, lambda _: "it is a filler and a repeat at once")
        remainder = self._config.get("remainder")
        rows.refuse(
            table.is_filler & (remainder != "keep"), lambda _: f"it is a filler, with remainder={remainder}"
        )
        rows.refuse(
            table.is_repeat & (remainder != "fill"), lambda _: f"it is a repeat, with remainder={remainder}"
        )

    def _costs(self, rows: "Rows") -> Columns:
        """Return 12·H·L + L² summed over the samples where FLOPs are balanced, else the tokens."""
        lengths = rows.table.seqlens.astype(np.int64)
        if self._config.get("balance") == "flops":
            return rows.sums(lengths * (12 * self._config["hidden_size"] + lengths))
        return rows.sums(lengths)

    def _check_padding(self, rows: "Rows") -> None:
        table, multiple = rows.table, self._multiple
        padded = table.padded_seqlen.astype(np.int64)
        rows.refuse(
            padded % multiple != 0, lambda at: f"padded_seqlen {padded[at]} is no multiple of {multiple}"
        )
        fixed = self._config.get("fixed_seqlen")
        rows.refuse(
            padded != (fixed or padded), lambda at: f"padded_seqlen is {padded[at]}, fixed_seqlen={fixed}"
        )
        if self._plan.layout == "packed":
            segment = self._config.get("pad_segments_to", 1)
            needed: Columns = rows.sums(-(-table.seqlens.astype(np.int64) // segment) * segment)
        else:
            needed = table.max_seqlen
        rows.refuse(
            padded < needed, lambda at: f"padded_seqlen is {padded[at]}, its samples need {needed[at]}"
        )

    def _check_budget(self, rows: "Rows") -> None:
        table = rows.table
        budget = self._config["max_tokens"]
        if isinstance(budget, dict):
            for metric, limit in budget.items():
                if self._config["count"] == "real":
                    self._check_real(rows, metric, limit)
                shape = table.padded_seqlens.get(metric)
                if shape is None:
                    raise InvariantError(
                        f"column padded_seqlen_{metric} is missing, max_tokens has {metric}={limit}"
                    )
                if self._config["count"] == "padded":
                    self._check_area(rows, shape, limit, f"max_tokens {metric}")
                self._check_member(rows, metric, shape)
        elif self._config["count"] == "real":
            rows.refuse(
                table.num_tokens > budget,
                lambda at: f"it has {table.num_tokens[at]} tokens, over max_tokens={budget}",
            )
        else:
            self._check_area(rows, table.padded_seqlen, budget, "max_tokens")

    def _check_real(self, rows: "Rows", metric: str, limit: int) -> None:
        """Check the tokens of one member of a pair, where its lengths are known."""
        if metric in self._budgeted:
            tokens = rows.sums(self._budgeted[metric][rows.table.sample_ids])
        elif metric == "seqlen":
            tokens = rows.table.num_tokens
        else:
            return
        rows.refuse(
            tokens > limit,
            lambda at: f"it has {tokens[at]} tokens of {metric}, over max_tokens {metric}={limit}",
        )

    def _check_member(self, rows: "Rows", metric: str, shape: Columns) -> None:
        """Check the shape of one member of a pair of sequences."""
        multiple = self._multiple
        rows.refuse(
            shape.astype(np.int64) % multiple != 0,
            lambda at: f"padded_seqlen_{metric} {shape[at]} is no multiple of {multiple}",
        )
        if metric in self._budgeted:
            lengths = self._budgeted[metric][rows.table.sample_ids]
            longest = np.maximum.reduceat(lengths, rows.table.offsets[:-1])
            rows.refuse(
                shape < longest,
                lambda at: f"padded_seqlen_{metric} is {shape[at]}, its samples need {longest[at]}",
            )

    def _check_area(self, rows: "Rows", padded: Columns, budget: int, name: str) -> None:
        height = rows.table.num_samples.astype(np.int64) if self._plan.layout == "padded" else 1
        area = height * padded.astype(np.int64)
        rows.refuse(
            area > budget,
            lambda at: (
                f"its tensor has {area[at]} tokens ({area[at] // max(padded[at], 1)} × {padded[at]}), "
                f"over {name}={budget}"
            ),
        )

    def _check_limits(self, rows: "Rows") -> None:
        table, config = rows.table, self._config
        count = table.num_samples
        least, most = config.get("min_samples") or 1, config.get("max_samples")
        rows.refuse(
            count < least, lambda at: f"it has {counted(count[at], 'sample')}, under min_samples={least}"
        )
        if most is not None:
            rows.refuse(
                count > most, lambda at: f"it has {counted(count[at], 'sample')}, over max_samples={most}"
            )
        limit = config.get("max_attention")
        if limit is None:
            return
        work: Columns
        if self._plan.layout == "padded":
            work = count * table.padded_seqlen.astype(np.int64) ** 2
        else:
            work = rows.sums(table.seqlens.astype(np.int64) ** 2)
        rows.refuse(work > limit, lambda at: f"its attention takes {work[at]}, over max_attention={limit}")

    def _check_same_shape(self, rows: "Rows") -> None:
        """Compare every row with the one before it, where both are of one step."""
        table = rows.table
        before = self._last or (-1, 0, 0)
        follows = table.step == np.concatenate(([before[0]], table.step[:-1]))
        if self._config.get("same_num_samples"):
            rows.refuse_change("num_samples", table.num_samples, before[1], follows)
        if self._config.get("same_seqlen"):
            rows.refuse_change("padded_seqlen", table.padded_seqlen, before[2], follows)
        if len(table.step):
            self._last = (int(table.step[-1]), int(table.num_samples[-1]), int(table.padded_seqlen[-1]))


def _first_odd(stated: list[dict[str, int]] | None, actual: list[dict[str, int]] | None) -> str:
    """Say where two tables of shapes differ."""
    if stated is None or actual is None:
        return "the table is left out" if stated is None else "there are too many to list"
    for one, other in zip(stated, actual, strict=False):
        if one != other:
            return f"{json.dumps(one)} is stated, the rows give {json.dumps(other)}"
    return f"{len(stated)} are stated, the rows give {len(actual)}"


class Rows:
    """Rows under test: sums over their pieces, and errors that say where."""

    def __init__(self, epoch: int, table: MicroBatches) -> None:
        self.epoch = epoch
        self.table = table

    def sums(self, values: Columns) -> NDArray[np.int64]:
        """Return per row the sum of its pieces' values."""
        totals: NDArray[np.int64] = np.add.reduceat(values, self.table.offsets[:-1], dtype=np.int64)
        return totals

    def repeated_in_row(self) -> NDArray[np.bool_]:
        """Return which pieces belong to a sample that has another piece in the same row.

        One and the same piece twice is of two passes; see ``verify_sources``.
        """
        row = np.repeat(np.arange(len(self.table.step)), np.diff(self.table.offsets))
        starts = self.table.starts
        assert starts is not None
        order = np.lexsort((starts, self.table.sample_ids, row))
        ids, row, starts = self.table.sample_ids[order], row[order], starts[order]
        repeated = np.zeros(len(ids), np.bool_)
        repeated[order[1:]] = (ids[1:] == ids[:-1]) & (row[1:] == row[:-1]) & (starts[1:] != starts[:-1])
        return repeated

    def compare(self, name: str, stated: Columns, actual: Columns) -> None:
        """Raise for the first row that states something else than its pieces give."""
        self.refuse(stated != actual, lambda at: f"{name} is {stated[at]}, its samples give {actual[at]}")

    def refuse_change(self, name: str, column: Columns, before: int, follows: Columns) -> None:
        """Raise for the first row that differs from the one before it, where it follows it in a step."""
        previous = np.concatenate(([before], column[:-1]))
        self.refuse(
            follows & (column != previous),
            lambda at: (
                f"{name} is {column[at]}, the micro-batch before it in the step has {previous[at]}: "
                f"same_{'seqlen' if name == 'padded_seqlen' else name} does not hold"
            ),
        )

    def refuse(self, wrong: Columns, why: Callable[[int], str]) -> None:
        """Raise for the first row that is wrong."""
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvariantError(f"{self.place(at)}: {why(at)}")

    def refuse_piece(self, wrong: Columns, why: Callable[[int], str]) -> None:
        """Raise for the first piece that is wrong."""
        if wrong.any():
            piece = int(np.argmax(wrong))
            at = int(np.searchsorted(self.table.offsets, piece, side="right")) - 1
            raise InvariantError(f"{self.place(at)}, sample {self.table.sample_ids[piece]}: {why(piece)}")

    def place(self, at: int) -> str:
        """Return how messages call a row."""
        table = self.table
        return (
            f"epoch {self.epoch}, step {table.step[at]}, micro-batch {table.accum[at]} of rank "
            f"{table.dp_rank[at]} (row {table.first_row + at})"
        )
