"""``packer analyze``."""

import json
import re
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from packer.analyzer import AnalyzeResult, Progress, suggest_plan
from packer.analyzer import analyze as analyze_source
from packer.errors import ConfigError
from packer.metrics import Manifest
from packer.samples import SEQLEN
from packer.wording import counted

from .inputs import only_one
from .options import GroupedCommand, grouped
from .progress import ProgressDisplay, compact
from .terminal import COMMAND, print_lines

LENGTH = "What the length of a sample is"
METRICS = "Further metrics and files"
RUN = "How it runs"
OUTPUT = "Output"

_ESCAPED = re.compile(r"\\([nt\\])")

ONCE: dict[str, Any] = {"multiple": True, "callback": only_one}
"""Of an option that says what is measured: a second value would be measured in place of the first."""


@click.command(cls=GroupedCommand)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@grouped(OUTPUT, "--out", required=True, type=click.Path(path_type=Path), help="Metrics directory to make.")
@grouped(OUTPUT, "--overwrite", is_flag=True, help="Replace an existing metrics directory and token files.")
@grouped(OUTPUT, "--json", "as_json", is_flag=True, help="Print the result for machines.")
@grouped(
    LENGTH,
    "--tokens-column",
    "tokens_columns",
    multiple=True,
    metavar="NAME",
    help="List column; the length is its number of elements. Repeat as METRIC=NAME for pairs of sequences.",
)
@grouped(
    LENGTH,
    "--length-column",
    "length_columns",
    multiple=True,
    metavar="NAME",
    help="Integer column that holds the length. Repeat as METRIC=NAME for pairs.",
)
@grouped(
    LENGTH, "--text-column", **ONCE, metavar="NAME", help="String column, counted in tokens of --tokenizer."
)
@grouped(
    LENGTH,
    "--messages-column",
    **ONCE,
    metavar="NAME",
    help="Chats, by the tokenizer's template (extra: chat).",
)
@grouped(
    LENGTH,
    "--prompt-column",
    **ONCE,
    metavar="NAME",
    help="What the model is given: texts, or messages for the tokenizer's template.",
)
@grouped(
    LENGTH,
    "--completion-column",
    "completion_columns",
    multiple=True,
    metavar="NAME",
    help="What it is to answer. Repeat as METRIC=NAME for pairs: chosen=chosen and rejected=rejected.",
)
@grouped(
    LENGTH,
    "--text-template",
    **ONCE,
    metavar="TEXT",
    help="Columns in braces, joined to a text: '{instruction}\\n{input}\\n{response}'. A line whose columns "
    "are all empty is left out.",
)
@grouped(
    LENGTH,
    "--completion-template",
    **ONCE,
    metavar="TEXT",
    help="What comes behind --text-template, and trains.",
)
@grouped(
    LENGTH,
    "--train-on",
    type=click.Choice(["assistant", "completion", "all"]),
    help="What the loss is on.  [default: assistant of chats, completion of prompts, all of texts]",
)
@grouped(
    LENGTH,
    "--eos/--no-eos",
    default=None,
    help="Append the tokenizer's end token to texts.  [default: to prompts and templates alone]",
)
@grouped(
    LENGTH,
    "--tools-column",
    **ONCE,
    metavar="NAME",
    help="Tools that the template of chats describes.  [default: tools, where there is such a column]",
)
@grouped(
    LENGTH, "--tokenizer", **ONCE, metavar="FILE|DIR", help="A tokenizer.json, or a folder that holds one."
)
@grouped(
    LENGTH,
    "--special-tokens/--no-special-tokens",
    default=True,
    help="Count the tokens that the tokenizer adds to a text.",
)
@grouped(
    LENGTH,
    "--counter",
    type=click.Choice(["tokenizers", "gigatoken"]),
    default="tokenizers",
    help="What counts a text; gigatoken is faster and held against tokenizers on part of the data.",
)
@grouped(
    METRICS,
    "--labels-column",
    **ONCE,
    metavar="NAME",
    help="List column; its labels that are not -100 become the metric loss_tokens.",
)
@grouped(METRICS, "--no-shift", is_flag=True, help="Count the first label of a sample, too.")
@grouped(
    METRICS,
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="vocab_rarity, or a function of yours as package.module:function. Repeatable.",
)
@grouped(
    METRICS,
    "--key-column",
    "key_columns",
    multiple=True,
    metavar="NAME",
    help="Column of texts, integers or binaries: equal values get equal numbers, for plan --no-repeat-key. "
    "METRIC=NAME names it otherwise. Repeatable.",
)
@grouped(
    METRICS, "--curriculum-files", is_flag=True, help="Write the index files of DeepSpeed's curriculum, too."
)
@grouped(
    METRICS,
    "--write-tokens",
    type=click.Path(path_type=Path),
    metavar="PREFIX",
    help="Keep the tokens of a text as PREFIX.bin and PREFIX.idx, for Megatron and for open_dataset.",
)
@grouped(
    RUN,
    "--on-error",
    type=click.Choice(["error", "skip", "replace"]),
    default="error",
    help="A row that cannot be read ends the run, has length 0 under its id, or, where its text holds "
    "unpaired surrogates, U+FFFD in their place.",
)
@grouped(
    RUN,
    "--workers",
    type=int,
    metavar="N",
    help="Processes, or CPUs of Ray; any number gives the same files.  [default: 1, or all of Ray]",
)
@grouped(
    RUN,
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Processes on this machine, or tasks of Ray.",
)
@grouped(RUN, "--ray-address", metavar="ADDRESS", help="A Ray cluster; by default Ray is started here.")
def analyze(
    sources: tuple[str, ...],
    out: Path,
    tokens_columns: tuple[str, ...],
    length_columns: tuple[str, ...],
    completion_columns: tuple[str, ...],
    key_columns: tuple[str, ...],
    text_template: str | None,
    completion_template: str | None,
    no_shift: bool,
    write_tokens: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure every sample of a data set.

    SOURCE is a file, a folder, a pattern or a URL: Parquet, Arrow, JSON Lines, .bin/.idx. Exactly one option
    says what the length of a sample is; a .bin/.idx source needs none. An interrupted run goes on where it
    was when it is started again.

    \b
    packer analyze x.parquet --tokens-column ids --out metrics
    packer analyze docs.jsonl.gz --out metrics \\
        --text-column text --tokenizer tokenizer.json
    packer analyze chats.jsonl --out metrics \\
        --messages-column messages --tokenizer model
    """  # noqa: D301 (the escape is click's)
    with ProgressDisplay("reading") as display:
        result = analyze_source(
            list(sources),
            out=out,
            tokens_column=_columns("--tokens-column", tokens_columns),
            length_column=_columns("--length-column", length_columns),
            completion_column=_columns("--completion-column", completion_columns),
            text_template=_unescaped(text_template),
            completion_template=_unescaped(completion_template),
            key_columns=_keys(key_columns),
            shift=not no_shift,
            write_tokens=write_tokens,
            progress=partial(_show, display),
            **options,
        )
    if as_json:
        click.echo(json.dumps(_for_machines(result)))
    else:
        print_lines(_for_people(result, write_tokens))


def _show(display: ProgressDisplay, progress: Progress) -> None:
    seconds = max(progress.seconds, 1e-9)
    rates = (
        f"{compact(progress.num_rows / seconds)} rows/s, {compact(progress.num_tokens / seconds)} tokens/s"
    )
    display.show(progress.fraction, stage=progress.stage, left=progress.seconds_left, detail=rates)


def _columns(option: str, values: tuple[str, ...]) -> str | dict[str, str] | None:
    """One NAME, or several METRIC=NAME; a single METRIC=NAME names its metric, too."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    named: dict[str, str] = {}
    for value in values:
        metric, equals, column = value.partition("=")
        if not equals:
            raise ConfigError(f"{option} {value}: of several columns each needs a metric, as METRIC={value}")
        if metric in named:
            raise ConfigError(f"{option} names metric {metric!r} twice; give each column its own")
        named[metric] = column
    return named


def _keys(values: tuple[str, ...]) -> dict[str, str]:
    """Each NAME, or METRIC=NAME."""
    named: dict[str, str] = {}
    for value in values:
        metric, _, column = value.partition("=")
        if metric in named:
            raise ConfigError(f"--key-column names metric {metric!r} twice; give each column its own")
        named[metric] = column or metric
    return named


def _unescaped(template: str | None) -> str | None:
    r"""Read ``\n`` and ``\t``, which a shell passes as they are typed, as line end and tab."""
    if template is None:
        return None
    return _ESCAPED.sub(lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), template)


def _for_people(result: AnalyzeResult, prefix: Path | None) -> list[str]:
    manifest = result.manifest
    lines = [
        f"{counted(manifest.num_samples, 'sample')}, {_tokens(manifest)}; measured in {result.seconds:.1f} s"
        + (
            f" ({counted(result.num_units_reused, 'unit')} from an earlier run)"
            if result.num_units_reused
            else ""
        )
    ]
    width = max(map(len, manifest.metrics))
    for name, summary in manifest.metrics.items():
        if name in manifest.keys:
            key = manifest.keys[name]
            lines.append(
                f"  {name:<{width}}  key: {counted(key.num_values, 'value')}, the most frequent in "
                f"{counted(key.max_count, 'sample')}; {key.num_nulls:,} without"
            )
            continue
        lines.append(
            f"  {name:<{width}}  min {summary.min:,}, median {summary.median:,}, p99 {summary.p99:,}, "
            f"max {summary.max:,}"
        )
    are = "is" if manifest.num_nulls == 1 else "are"
    nulls = counted(manifest.num_nulls, "sample")
    of_specials = manifest.num_empties > 0 and manifest.definition.get("special_tokens", False)
    which = "without tokens but special ones" if of_specials else "of length 0"
    lines.append(f"  {nulls} {are} null, {manifest.num_empties:,} empty: {which}")
    if result.trained_part is not None:
        lines.append(
            f"  loss on {result.num_loss_tokens:,} of {counted(result.main.total, 'token')} "
            f"({result.trained_part})"
        )
    if prefix is not None:
        lines.append(f"Token files: {prefix}.bin, {prefix}.idx")
    lines += [f"Warning: {warning}" for warning in result.warnings]
    suggestion = suggest_plan(manifest)
    if suggestion is not None:
        lines.append(f"{COMMAND}packer plan {shlex.quote(str(result.path))} --out plan {suggestion.options}")
    return lines


def _tokens(manifest: Manifest) -> str:
    """How many tokens there are; of pairs for each member."""
    totals = {name: counted(manifest.metrics[name].total, "token") for name in _lengths(manifest)}
    if list(totals) == [SEQLEN]:
        return totals[SEQLEN]
    return ", ".join(f"{total} of {name}" for name, total in totals.items())


def _lengths(manifest: Manifest) -> list[str]:
    """The metrics that are lengths of a sample: one, or one for each member of a pair."""
    return list(manifest.definition.get("columns", [SEQLEN]))


def _for_machines(result: AnalyzeResult) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "metrics_directory": str(result.path),
        "fingerprint": manifest.fingerprint,
        "num_samples": manifest.num_samples,
        "num_nulls": manifest.num_nulls,
        "num_empties": manifest.num_empties,
        "num_skipped": manifest.num_skipped,
        "metrics": {name: asdict(summary) for name, summary in manifest.metrics.items()},
        "keys": {name: asdict(key) for name, key in manifest.keys.items()},
        "definition": manifest.definition,
        "loss": {"tokens": result.num_loss_tokens, "of": result.main.total, "on": result.trained_part},
        "warnings": list(result.warnings),
        "seconds": round(result.seconds, 3),
        "num_units_reused": result.num_units_reused,
    }
