"""``ShardDataset``: what a loader asks for a whole micro-batch at a time, in the order of one plan."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from packer.arrays import to_numpy, validity
from packer.errors import ColumnError, ConfigError, ShardsError
from packer.samples.dataset import INPUT_IDS, Sample
from packer.shards.format import OWN_COLUMNS, Header
from packer.shards.reader import AHEAD, ShardReader
from packer.wording import counted


class ShardDataset:
    """The samples of one plan, by its micro-batches. Made by `open_dataset`; pickles as its path.

    A sample has no place of its own here: it stands in every micro-batch that reads it, cut as it is there.
    """

    def __init__(self, reader: ShardReader, fields: Sequence[str] | Mapping[str, str] = ()) -> None:
        """See `open_dataset`.

        Args:
            reader: the shards.
            fields: further columns to deliver, lists with one number for each token.
        """
        self._reader = reader
        further = (
            dict(fields)
            if isinstance(fields, Mapping)
            else {name.rsplit(".", 1)[-1]: name for name in fields}
        )
        own = dict(self.header.fields)
        if self.header.kind == "length" and INPUT_IDS not in own and INPUT_IDS not in further:
            raise ConfigError(
                "the lengths were taken of a length column, which says not where the tokens are; "
                'give fields={"input_ids": COLUMN}'
            )
        taken = [name for name in further if name in own and further[name] != own[name]]
        if taken:
            raise ConfigError(
                f"a field cannot be named {taken[0]!r}, which the shards deliver already; rename it"
            )
        for column in further.values():
            self._check_column(column)
        self._fields: dict[str, Any] = own | further
        names = self._reader.schema.names[: self.header.num_columns_read]
        self._reads_all = any(column not in names for column in further.values())

    @property
    def header(self) -> Header:
        """The content of ``shards.json``."""
        return self._reader.header

    @property
    def rows_ahead(self) -> int:
        """Micro-batches that the loader is to name ahead: none of mapped files."""
        return AHEAD if self._reader.folder.is_remote else 0

    def __len__(self) -> int:
        """Return the samples of the data set that was planned, written or not."""
        return self.header.num_samples

    def read_microbatch(self, epoch: int, row: int) -> list[Sample]:
        """Return the samples, or pieces, of a micro-batch in the order of the plan: one range of one file.

        Args:
            epoch: of the plan.
            row: of the epoch, (step · grad_accum + accum) · dp_size + dp_rank.

        Returns:
            For each sample field → (tokens,) array, a read-only view; of a pair such a mapping by member.

        Raises:
            PlanError: the epoch was not written.
            ShardsError: damaged bytes; names file and micro-batch.
            SourceError: the store cannot be reached.
        """
        batch = self._reader.record_batch(epoch, row, whole=self._reads_all)
        columns = {name: self._split(batch, column) for name, column in self._fields.items()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def prefetch(self, epoch: int, rows: Sequence[int]) -> None:
        """Begin to fetch micro-batches that are asked for soon, in that order; others are forgotten."""
        self._reader.prefetch(epoch, rows)

    def require_plan(self, fingerprint: str) -> None:
        """Refuse a plan that is not the one whose order this is.

        Raises:
            ShardsError: it is another one.
        """
        if fingerprint != self.header.content_hash:
            raise ShardsError(
                f"{self._reader.folder.path} holds the samples of plan {self.header.content_hash[:12]}…, and "
                f"this is plan {fingerprint[:12]}…; give the plan that they were made for, or materialize "
                "this one"
            )

    def __repr__(self) -> str:
        epochs = counted(len(self.header.epochs), "epoch")
        return (
            f"ShardDataset({self._reader.folder.path}, {counted(self.header.num_rows, 'micro-batch')} of "
            f"{epochs}, with {', '.join(self._fields)})"
        )

    def _split(self, batch: pa.RecordBatch, column: str | Mapping[str, str]) -> list[Any]:
        """Return one value a row: an array, or a mapping of them."""
        if not isinstance(column, str):
            members = {name: self._split(batch, below) for name, below in column.items()}
            return [dict(zip(members, values, strict=True)) for values in zip(*members.values(), strict=True)]
        lists = batch.column(column)
        offsets = to_numpy(lists.offsets).tolist()
        values = to_numpy(lists.values)
        found = [values[start:stop] for start, stop in itertools.pairwise(offsets)]
        if lists.null_count:
            nothing = np.zeros(0, values.dtype)
            found = [
                row if is_there else nothing for row, is_there in zip(found, validity(lists), strict=True)
            ]
        return found

    def _check_column(self, column: str) -> None:
        schema = self._reader.schema
        if column not in schema.names or column in OWN_COLUMNS:
            raise ColumnError(
                f"{self._reader.folder.path} has no column {column!r}; it has: "
                f"{', '.join(name for name in schema.names if name not in OWN_COLUMNS)}; materialize with "
                "--keep-columns, or without this field"
            )
        kind = schema.field(column).type
        if not pat.is_list(kind) or not (pat.is_integer(kind.value_type) or pat.is_floating(kind.value_type)):
            raise ColumnError(
                f"{self._reader.folder.path}: column {column!r} is of type {kind}; name a list of numbers"
            )
