"""A map-style data set over a source: sample id in, token ids out, as many as were measured."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import ConfigError, SourceError
from packer.rereading import Rereading, play
from packer.samples.definition import LengthDefinition
from packer.samples.encoded import Encoded
from packer.samples.features import features_of_row
from packer.samples.measure import IGNORED_LABEL, measure
from packer.samples.ragged import RowError, is_list_type, is_text_type
from packer.samples.tokens import encode, values_of_row
from packer.samples.tolerance import apply_to_readable
from packer.sources import Columns, Source, take_column, without_rows
from packer.wording import counted

Sample = dict[str, Any]
"""Arrays by field; of a pair such a mapping by member."""

INPUT_IDS = "input_ids"
LABELS = "labels"


class Dataset:
    """The samples of a source as mappings of arrays: ``input_ids`` and the fields beside them.

    Where not all tokens train, ``labels`` are beside them, −100 where nothing is to be learnt. A pair of
    completions is a mapping of such mappings, by their names. Where features are counted, arrays of shape
    ``(length, …)`` are in the place of ``input_ids``, and other fields may have another length.

    Made by `open_dataset`. Pickles as paths and names; every process, forked ones too, opens the files.
    """

    def __init__(
        self,
        source: Source,
        definition: LengthDefinition,
        fields: Mapping[str, str],
        length_field: str = INPUT_IDS,
        *,
        metrics_fingerprint: str | None = None,
        always_labels: bool = False,
    ) -> None:
        """See `open_dataset`.

        Args:
            source: the rows.
            definition: what the length of a row is.
            fields: list columns to deliver, by the name they get; what is counted first, unless of text.
            length_field: the field that is counted.
            metrics_fingerprint: of the metrics that it was opened with.
            always_labels: deliver ``labels``, the ids, also where every token trains.
        """
        self.length_field = length_field
        """What the length of a sample is counted of; where it is not ``input_ids``, there need be none."""
        self.metrics_fingerprint = metrics_fingerprint
        """Of the metrics that it was opened with, by which a loader tells it from others; None without."""
        self._always_labels = always_labels
        self._source = source
        self._definition = definition
        self._fields = dict(fields)
        self._num_rows = source.num_rows
        self._process = os.getpid()

    @property
    def delivers_labels(self) -> bool:
        """Whether samples have ``labels`` beside their ids."""
        trains_part = self._definition.is_tokenized and self._definition.trained_part != "all"
        return self._always_labels or trains_part or LABELS in self._fields

    def with_labels(self) -> "Dataset":
        """Return the data set with ``labels``: the ids themselves where it has no others."""
        if self.delivers_labels:
            return self
        return Dataset(
            self._source,
            self._definition,
            self._fields,
            self.length_field,
            metrics_fingerprint=self.metrics_fingerprint,
            always_labels=True,
        )

    @property
    def definition(self) -> LengthDefinition:
        """What the length of a sample is."""
        return self._definition

    @property
    def source(self) -> Source:
        """The rows that the samples are made of."""
        return self._source

    @property
    def fields(self) -> dict[str, str]:
        """The list columns that are delivered, by the name they get."""
        return dict(self._fields)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, sample_id: int) -> Sample:
        """Return one sample, each field an array with memory of its own.

        Raises:
            IndexError: there is no such sample.
            SourceError: the row cannot be read; names file and place.
        """
        return self._read([sample_id], 0, None)[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample]:
        """Return several samples, in the order asked for; a row group that they share is read once."""
        return self._read(sample_ids, 0, None)

    def rereading(self, microbatches: Iterable[NDArray[np.integer]]) -> Rereading | None:
        """Return what an order of reads costs one process; see `packer.rereading.play`."""
        if self._process != os.getpid():
            self._source.close()
            self._process = os.getpid()
        blocks = self._source.block_sizes(list(self._columns))
        return play(microbatches, blocks, self._source.cache_bytes)

    def read_slice(self, sample_id: int, start: int, stop: int) -> Sample:
        """Return tokens ``[start, stop)`` of a sample, its further fields cut alike.

        Of a mapped file only those tokens are read. A text is tokenized as a whole.

        Raises:
            ConfigError: a sample is a pair, of which there is no piece.
        """
        if self._definition.is_pair:
            raise ConfigError("a pair of sequences cannot be cut; plan with --too-long drop, and sp_size=1")
        return self._read([sample_id], start, stop)[0]

    def __repr__(self) -> str:
        definition = self._definition
        names = [metric for metric, _ in definition.columns] if definition.is_pair else [self.length_field]
        loss = ""
        if definition.is_tokenized:
            part = definition.trained_part
            names += [LABELS] if part != "all" and not definition.is_pair else []
            loss = f"; loss on {'all tokens' if part == 'all' else f'the {part}'}"
        fields = ", ".join(dict.fromkeys([*names, *self._fields]))
        return f"Dataset({counted(self._num_rows, 'sample')} of {definition.kind}, with {fields}{loss})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def _read(self, sample_ids: Sequence[int], start: int, stop: int | None) -> list[Sample]:
        if self._process != os.getpid():
            self._source.close()  # handles of the parent process
            self._process = os.getpid()
        batches = self._source.rows(sample_ids, self._columns)
        samples = []
        for sample_id, batch in zip(sample_ids, batches, strict=True):
            try:
                samples.append(self._cut(batch, start, stop))
            except RowError as error:
                if not self._is_skipped(batch):
                    raise SourceError(f"{self._source.place_of_row(int(sample_id))}: {error}") from error
                samples.append(self._cut(without_rows(batch, [0]), start, stop))
        return samples

    def _is_skipped(self, batch: pa.RecordBatch) -> bool:
        """Whether the one row of a batch has length 0 because it could not be measured."""
        if self._definition.on_error != "skip":
            return False
        _, skipped = apply_to_readable(partial(measure, definition=self._definition), batch, "skip")
        return bool(skipped)

    @property
    def _columns(self) -> Columns:
        listed = pa.list_(pa.int64())
        columns: dict[str, pa.DataType | None] = dict.fromkeys(self._fields.values(), listed)
        if self._definition.kind == "features" or self.length_field != INPUT_IDS:
            counted = {column for _, column in self._definition.columns}
            columns |= {
                column: None
                for name, column in self._fields.items()
                if name == self.length_field or column in counted
            }
        if self._definition.is_tokenized:
            return {**columns, **self._definition.read_columns}
        return columns

    def _cut(self, batch: pa.RecordBatch, start: int, stop: int | None) -> Sample:
        sample: Sample = {}
        num_tokens = None
        if self._definition.is_tokenized:
            encoded = encode(batch, self._definition)
            if self._definition.is_pair:
                return self._pair(encoded)
            num_tokens = len(encoded.ids)
            sample = _labelled(encoded, start, stop)
        for name, column in self._fields.items():
            row = take_column(batch, column)[0]
            if name == LABELS and num_tokens is not None and not row.is_valid:
                sample[name] = np.full(num_tokens, IGNORED_LABEL)[start:stop]
                continue
            values, length = _values(row, column, start, stop)
            if num_tokens is None or column in self._metric_columns:
                num_tokens = length
            if length != num_tokens and self._are_aligned:
                raise RowError(
                    0,
                    f"column {column!r} holds {length} elements beside {num_tokens} tokens; make them equal",
                )
            # Beside features there may be labels of another length, which no cut concerns.
            sample[name] = values if length == num_tokens else _values(row, column, 0, None)[0]
        if self._always_labels and LABELS not in sample:
            sample[LABELS] = sample[INPUT_IDS].copy()
        return sample

    def _pair(self, encoded: Encoded) -> Sample:
        """Return the members of a pair by their names, each a mapping like a sample of its own."""
        pair: Sample = {}
        start = 0
        for (metric, _), length in zip(self._definition.columns, encoded.lengths[0].tolist(), strict=True):
            pair[metric] = _labelled(encoded, start, start + length)
            start += length
        return pair

    @property
    def _are_aligned(self) -> bool:
        """Whether every field has one element a token."""
        is_pair_of_lengths = self._definition.kind == "length" and len(self._definition.columns) > 1
        return self.length_field == INPUT_IDS and not is_pair_of_lengths

    @property
    def _metric_columns(self) -> set[str]:
        """Columns that each have a length of their own."""
        return {column for _, column in self._definition.columns}


def _values(row: pa.Scalar, column: str, start: int, stop: int | None) -> tuple[NDArray[Any], int]:
    """Return elements ``[start, stop)`` of one row, and how many there are; no others are touched."""
    if is_text_type(row.type) or (is_list_type(row.type) and is_list_type(row.type.value_type)):
        features = features_of_row(row, column)
        return features[start:stop].copy(), len(features)
    return values_of_row(row, column, start, stop), len(row.values) if row.is_valid else 0


def _labelled(encoded: Encoded, start: int, stop: int | None) -> Sample:
    """Return ids, and labels where not all of them train."""
    sample: Sample = {INPUT_IDS: encoded.ids[start:stop].copy()}
    if encoded.mask is not None:
        sample[LABELS] = np.where(encoded.mask, encoded.ids, IGNORED_LABEL)[start:stop]
    return sample
