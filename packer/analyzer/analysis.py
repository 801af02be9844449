"""``analyze``: a data set in, a metrics directory out."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from packer._version import __version__
from packer.analyzer.executors import choose_executor
from packer.analyzer.journal import Journal
from packer.analyzer.options import ColumnChoice, define_length
from packer.analyzer.progress import Listener
from packer.analyzer.result import AnalyzeResult, suspicions
from packer.analyzer.stages import LENGTHS, Stage
from packer.analyzer.tasks import MeasureUnit, UnitLengths
from packer.analyzer.writing import write_metrics
from packer.errors import ConfigError, PackerError, SourceChangedError, SourceError, WorkerLostError
from packer.metrics import MANIFEST_NAME, Manifest
from packer.publish import published_directory
from packer.samples import LengthDefinition, check_definition
from packer.sources import Source, Unit, open_source

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_JOURNAL = ".journal"
_UNIT_BYTES = 16 << 20
_UNIT_BYTES_OF_TEXT = 1 << 20  # enough for a tokenizer to be busy for about a second


def analyze(
    source: Paths,
    *,
    out: str | os.PathLike[str],
    tokens_column: ColumnChoice = None,
    length_column: ColumnChoice = None,
    text_column: str | None = None,
    messages_column: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    special_tokens: bool = True,
    labels_column: str | None = None,
    shift: bool = True,
    workers: int = 1,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> AnalyzeResult:
    """Measure every sample of a data set and write a metrics directory.

    Exactly one length definition is given; a ``.bin/.idx`` source needs none. A run that was interrupted
    goes on where it was when started again, if the data set, the definition and the version are the same.

    Args:
        source: files, folders, patterns or URLs; a list keeps its order.
        out: the metrics directory to make.
        tokens_column: list column whose elements are counted; a mapping ``{metric: column}`` for several.
        length_column: integer column that holds the length; or a mapping.
        text_column: string column to tokenize.
        messages_column: column of chats, tokenized through the tokenizer's template.
        tokenizer: ``tokenizer.json``, a folder that holds one, or a name that transformers knows offline.
        special_tokens: count the tokens that the tokenizer adds to a text.
        labels_column: list column of labels; those that are not −100 give the metric ``loss_tokens``.
        shift: leave out the first label of each sample, as a model does that predicts the next token.
        workers: processes; any number gives the same files.
        overwrite: replace an existing metrics directory.
        progress: called after every unit of work.

    Raises:
        ConfigError: no length definition, or several, or options that do not fit each other.
        SourceError: the data set cannot be read, or changed meanwhile; the message names file and place.
        TargetExistsError: ``out`` exists already.
        TargetBusyError: another run is writing ``out``.
        WorkerLostError: a worker process died; what was finished is kept for the next run.
    """
    start = monotonic()
    executor = choose_executor(workers)
    opened = open_source(source)
    definition = define_length(
        opened,
        tokens_column=tokens_column,
        length_column=length_column,
        text_column=text_column,
        messages_column=messages_column,
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        labels_column=labels_column,
        shift=shift,
    )
    check_definition(opened, definition)
    _check_target_apart(Path(out), opened)
    with (
        published_directory(out, marker=MANIFEST_NAME, overwrite=overwrite, keep_partial=True) as folder,
        _swept_unless_resumable(folder),
    ):
        stage = _plan_work(opened, definition)
        identity = opened.identity()
        job = {"version": __version__, "sources": identity, "definition": definition.to_json()}
        with Journal(folder / _JOURNAL, job) as journal:
            try:
                num_units_reused = stage.run(journal, executor, progress)
            except SourceError:
                _check_unchanged(source, identity)
                raise
            _check_unchanged(source, identity)
            manifest = _merge(folder, journal, stage.units, identity, definition)
        (folder / _JOURNAL).unlink()
    return AnalyzeResult(
        path=Path(out),
        manifest=manifest,
        warnings=suspicions(manifest),
        seconds=monotonic() - start,
        num_units_reused=num_units_reused,
    )


def _check_target_apart(out: Path, source: Source) -> None:
    """Refuse a target that holds the data set: ``overwrite`` would remove it."""
    folder = out.resolve()
    for file in source.files:
        if folder in Path(file).resolve().parents:
            raise ConfigError(f"--out {out} holds the data set itself ({file}); choose another directory")


@contextmanager
def _swept_unless_resumable(folder: Path) -> Iterator[None]:
    """Start from the journal alone; after an error that another run would meet again, leave nothing."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _JOURNAL:
            path.unlink()
    try:
        yield
    except PackerError as error:
        if not isinstance(error, WorkerLostError):
            shutil.rmtree(folder)
        raise


def _check_unchanged(source: Paths, identity: list[dict[str, Any]]) -> None:
    if open_source(source).identity() != identity:
        raise SourceChangedError(
            "the data set changed while it was analyzed; run again once nothing writes to it"
        )


def _plan_work(source: Source, definition: LengthDefinition) -> Stage[Unit]:
    by_text = definition.kind in ("text", "messages")
    units = source.units(
        list(definition.read_columns), target_bytes=_UNIT_BYTES_OF_TEXT if by_text else _UNIT_BYTES
    )
    return Stage(
        number=LENGTHS,
        name="measuring",
        task=MeasureUnit(source, definition),
        units=units,
        size_of=lambda unit: unit.num_bytes,
        count=lambda payload: UnitLengths.unpack(payload).totals,
    )


def _merge(
    folder: Path,
    journal: Journal,
    units: Sequence[Unit],
    identity: list[dict[str, Any]],
    definition: LengthDefinition,
) -> Manifest:
    rows_of_part = np.zeros(len(identity), dtype=np.int64)
    for number, unit in enumerate(units):
        rows_of_part[unit.part] += UnitLengths.unpack(journal.payload(LENGTHS, number)).num_rows
    sources = [
        {**described, "num_rows": int(num_rows)}
        for described, num_rows in zip(identity, rows_of_part, strict=True)
    ]
    return write_metrics(
        folder,
        lambda: (UnitLengths.unpack(journal.payload(LENGTHS, number)) for number in range(len(units))),
        sources=sources,
        definition=definition.to_json(),
    )
