"""``analyze``: a data set in, a metrics directory out."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from packer.analyzer.keys import resolve_keys
from packer.analyzer.options import ColumnChoice, LengthOptions, define_length
from packer.analyzer.result import AnalyzeResult, suspicions
from packer.analyzer.sample_metrics import MetricFunction, resolve_metrics
from packer.analyzer.token_files import TokenFiles
from packer.analyzer.work import Work
from packer.analyzer.writing import write_metrics
from packer.errors import (
    ConfigError,
    PackerError,
    SourceChangedError,
    SourceError,
    TargetWriteError,
    WorkerLostError,
)
from packer.jobs.executors import choose_executor
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener
from packer.metrics import MANIFEST_NAME
from packer.publish import check_target, published_directory
from packer.samples import check_definition
from packer.samples.definition import TrainOn
from packer.samples.tokenizer import Counter
from packer.sources import OnError, Source, open_source

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_JOURNAL = ".journal"


def analyze(
    source: Paths,
    *,
    out: str | os.PathLike[str],
    tokens_column: ColumnChoice = None,
    length_column: ColumnChoice = None,
    text_column: str | None = None,
    messages_column: str | None = None,
    prompt_column: str | None = None,
    completion_column: ColumnChoice = None,
    text_template: str | None = None,
    completion_template: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    special_tokens: bool = True,
    counter: Counter = "tokenizers",
    train_on: TrainOn | None = None,
    eos: bool | None = None,
    tools_column: str | None = None,
    labels_column: str | None = None,
    shift: bool = True,
    metrics: Sequence[str | MetricFunction] = (),
    key_columns: str | Sequence[str] | Mapping[str, str] = (),
    curriculum_files: bool = False,
    write_tokens: str | os.PathLike[str] | None = None,
    on_error: OnError = "error",
    workers: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> AnalyzeResult:
    r"""Measure every sample of a data set and write a metrics directory.

    Exactly one length definition is given; a ``.bin/.idx`` source needs none. A run that was interrupted
    goes on where it was when started again, if the data set, the definition and the version are the same.

    Args:
        source: files, folders, patterns or URLs; a list keeps its order.
        out: the metrics directory to make.
        tokens_column: list column whose elements are counted; a mapping ``{metric: column}`` for several.
        length_column: integer column that holds the length; or a mapping.
        text_column: string column to tokenize.
        messages_column: column of chats, tokenized through the tokenizer's template.
        prompt_column: column of what comes before a completion: texts, or messages.
        completion_column: column of what is to be learnt; ``{metric: column}`` for pairs, such as
            ``{"chosen": "chosen", "rejected": "rejected"}``.
        text_template: joins string columns, ``"{instruction}\n{input}\n{response}"``; a line whose columns
            are all empty is left out.
        completion_template: what comes behind ``text_template`` and is to be learnt.
        tokenizer: ``tokenizer.json``, a folder that holds one, or a name that transformers knows offline.
        special_tokens: count the tokens that the tokenizer adds to a text.
        counter: ``gigatoken`` counts texts faster, where it agrees with ``tokenizers``; it is checked.
        train_on: ``assistant`` (chats), ``completion`` (prompts, templates) or ``all``: what the loss is on.
            The first of these by default, where it has a meaning.
        eos: append the tokenizer's end token; by default to prompts' completions and templates alone.
        tools_column: tools that the template of chats describes; by default ``tools`` beside the chats.
        labels_column: list column of labels; those that are not −100 give the metric ``loss_tokens``.
        shift: leave out the first label of each sample, as a model does that predicts the next token.
        metrics: further ones: ``vocab_rarity``, ``module:function``, or functions; see ``sample_metric``.
        key_columns: columns of texts, integers or binaries; each becomes a metric of integers that are equal
            where the values are, for ``no_repeat_key``. ``{metric: column}`` names it otherwise.
        curriculum_files: write the index files of DeepSpeed's curriculum sampler beside every metric.
        write_tokens: keep the tokens of a text as ``PREFIX.bin`` and ``PREFIX.idx`` for Megatron.
        on_error: what becomes of a row that cannot be read: ``error`` ends the run, ``skip`` gives it
            length 0 under its id, ``replace`` puts U+FFFD in the place of unpaired surrogates in JSON. The
            manifest holds the choice, and `open_dataset` repeats it.
        workers: processes (1), or CPUs of Ray (all); any number gives the same files.
        executor: ``local`` or ``ray``.
        ray_address: of a Ray cluster; by default Ray is started here.
        overwrite: replace an existing metrics directory, and existing token files.
        progress: called after every unit of work, and now and then within one that takes long.

    Raises:
        ConfigError: no length definition, or several, or options that do not fit each other.
        SourceError: the data set cannot be read, or changed meanwhile; the message names file and place.
        TargetExistsError: ``out``, or a token file, exists already.
        TargetBusyError: another run is writing ``out``.
        WorkerLostError: a worker process died; what was finished is kept for the next run.
    """
    start = monotonic()
    check_target(out, marker=MANIFEST_NAME, overwrite=overwrite)
    run = choose_executor(workers, executor, ray_address)
    opened = open_source(source).tolerating(on_error)
    definition = define_length(
        opened,
        LengthOptions(
            tokens_column=tokens_column,
            length_column=length_column,
            text_column=text_column,
            messages_column=messages_column,
            prompt_column=prompt_column,
            completion_column=completion_column,
            text_template=text_template,
            completion_template=completion_template,
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            counter=counter,
            train_on=train_on,
            eos=eos,
            tools_column=tools_column,
            labels_column=labels_column,
            shift=shift,
        ),
    )
    definition = replace(definition, on_error=on_error)
    check_definition(opened, definition)
    further = resolve_metrics(metrics, definition)
    keys = resolve_keys(key_columns, opened, [*definition.metrics, *(metric.name for metric in further)])
    tokens = None if write_tokens is None else TokenFiles(write_tokens, definition)
    _check_apart(Path(out), source, opened, tokens)
    with (
        published_directory(out, marker=MANIFEST_NAME, overwrite=overwrite, keep_partial=True) as folder,
        _resumable(folder, tokens, overwrite),
    ):
        identity = opened.identity()
        work = Work.over(opened, definition, further, tokens.dtype if tokens else None, keys)
        with Journal(folder / _JOURNAL, work.job(identity)) as journal:
            try:
                num_units_reused = work.run(journal, run, progress)
            except SourceError:
                _check_unchanged(source, identity)
                raise
            _check_unchanged(source, identity)
            manifest = write_metrics(
                folder,
                partial(work.lengths, journal),
                sources=work.with_row_counts(identity, journal),
                definition=definition.to_json(),
                further=further,
                curriculum_files=curriculum_files,
                tokens=tokens,
                keys={key.name: key.column for key in keys},
                blocks=partial(work.blocks, journal),
            )
        if tokens is not None:
            tokens.publish()
        (folder / _JOURNAL).unlink()
    return AnalyzeResult(
        path=Path(out),
        manifest=manifest,
        warnings=suspicions(manifest),
        seconds=monotonic() - start,
        num_units_reused=num_units_reused,
    )


def _check_apart(out: Path, paths: Paths, source: Source, tokens: TokenFiles | None) -> None:
    """Refuse a target that holds the data set or the token files: replacing it would remove them.

    Token files among the data would be data the next time; a metrics directory is told from it.
    """
    folder = out.resolve()
    for file in source.files:
        if folder in Path(file).resolve().parents:
            raise ConfigError(f"--out {out} holds the data set itself ({file}); choose another directory")
    if tokens is None:
        return
    above = tokens.prefix.resolve().parents
    if folder in above:
        raise ConfigError(f"--write-tokens {tokens.prefix} is inside --out {out}; choose another place")
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if Path(path).is_dir() and Path(path).resolve() in above:
            raise ConfigError(
                f"--write-tokens {tokens.prefix} is inside the data set {path}, which would be another one "
                "then; choose another place"
            )


@contextmanager
def _resumable(folder: Path, tokens: TokenFiles | None, overwrite: bool) -> Iterator[None]:
    """Start from the journal alone; after an error that another run would meet again, leave nothing."""
    with nullcontext() if tokens is None else tokens.reserved(folder, overwrite=overwrite):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _JOURNAL:
                path.unlink()
        try:
            yield
        except PackerError as error:
            if not isinstance(error, WorkerLostError | TargetWriteError):
                shutil.rmtree(folder)
            raise


def _check_unchanged(source: Paths, identity: list[dict[str, Any]]) -> None:
    if open_source(source).identity() != identity:
        raise SourceChangedError(
            "the data set changed while it was analyzed; run again once nothing writes to it"
        )
