"""``packer materialize``."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from packer.jobs.progress import Progress
from packer.plan import load_plan
from packer.shards.materialize import COMPRESSIONS, SHARD_BYTES, Materialized
from packer.shards.materialize import materialize as write_shards
from packer.wording import counted, in_bytes

from .inputs import by_source, metrics_by_source
from .options import GroupedCommand, grouped
from .progress import ProgressDisplay, compact
from .terminal import COMMAND, print_lines

CONTENT = "What is written"
SAMPLES = "What a sample is, where the plan does not say"
RUN = "How it runs"
OUTPUT = "Output"


@click.command(cls=GroupedCommand)
@click.argument("plan", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("sources", nargs=-1, required=True, metavar="[NAME=]SOURCE...")
@grouped(
    OUTPUT, "--out", required=True, metavar="DIR|URL", help="Folder to make, here or in an object store."
)
@grouped(OUTPUT, "--overwrite", is_flag=True, help="Replace existing shards.")
@grouped(OUTPUT, "--json", "as_json", is_flag=True, help="Print the result for machines.")
@grouped(CONTENT, "--epoch", type=int, metavar="E", help="Write this epoch only.  [default: all]")
@grouped(
    CONTENT,
    "--keep-columns",
    multiple=True,
    metavar="NAME",
    help="Column of the source to write beside the tokens; repeatable; all, none.  [default: all of token "
    "lists, none of texts, chats and JSON Lines]",
)
@grouped(
    CONTENT,
    "--compression",
    type=click.Choice(COMPRESSIONS),
    default="none",
    help="Of every buffer; uncompressed ones are mapped as they are.",
)
@grouped(
    CONTENT,
    "--shard-size",
    type=int,
    default=SHARD_BYTES,
    metavar="N",
    help="Bytes of a file, before compression; a micro-batch is never cut.",
)
@grouped(
    SAMPLES,
    "--metrics",
    "directories",
    multiple=True,
    metavar="[NAME=]METRICS",
    help="The metrics that the plan was made from: they know where the tokenizer is. Of a plan of several "
    "sources one for each, by name.",
)
@grouped(SAMPLES, "--tokenizer", metavar="FILE|DIR", help="Where the tokenizer of texts and chats is.")
@grouped(
    SAMPLES,
    "--tokens-column",
    metavar="NAME",
    help="List column of the tokens, where the lengths were taken of a length column.",
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
    help="Processes on this machine, or tasks of Ray, whose nodes all see source and target.",
)
@grouped(RUN, "--ray-address", metavar="ADDRESS", help="A Ray cluster; by default Ray is started here.")
@grouped(
    RUN,
    "--scratch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where shards for an object store are made.  [default: the system's folder for such files]",
)
def materialize(
    plan: Path,
    sources: tuple[str, ...],
    directories: tuple[str, ...],
    out: str,
    keep_columns: tuple[str, ...],
    tokens_column: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the samples of a plan in the order in which it reads them.

    A micro-batch becomes one record batch of an Arrow file, so that training reads one range where it would
    read a sample here and a sample there: what a shuffled plan over Parquet, or a remote data set, needs.
    The source is read once, and an interrupted run goes on where it was when it is started again.

    \b
    packer materialize plan x.parquet --out shards --workers 4
    packer verify plan --shards shards --source x.parquet
    """  # noqa: D301 (the escape is click's)
    opened = load_plan(plan)
    with ProgressDisplay("reading") as display:
        result = write_shards(
            opened,
            by_source(sources, opened),
            out=out,
            metrics=metrics_by_source(directories, opened),
            fields={} if tokens_column is None else {"input_ids": tokens_column},
            keep_columns=list(keep_columns) or None,
            progress=partial(_show, display),
            **options,
        )
    if as_json:
        click.echo(json.dumps(_for_machines(result)))
    else:
        print_lines(_for_people(result, plan, sources))


def _show(display: ProgressDisplay, progress: Progress) -> None:
    rate = f"{compact(progress.num_tokens / max(progress.seconds, 1e-9))} tokens/s"
    display.show(progress.fraction, stage=progress.stage, left=progress.seconds_left, detail=rate)


def _for_people(result: Materialized, plan: Path, sources: tuple[str, ...]) -> list[str]:
    header = result.header
    reused = counted(result.num_units_reused, "unit")
    earlier = f" ({reused} from an earlier run)" if result.num_units_reused else ""
    named = " ".join(f"--source {shlex.quote(source)}" for source in sources)
    files = f"{counted(len(header.shards), 'shard')}, {in_bytes(result.num_bytes)}"
    return [
        f"{result.path}: {counted(header.num_rows, 'micro-batch')} in {files}, written in "
        f"{result.seconds:.1f} s{earlier}",
        f"  {counted(result.num_pieces, 'sample')} of {counted(len(header.epochs), 'epoch')}, pieces and "
        f"repeats counted; {counted(result.num_tokens, 'token')}",
        f"  columns {', '.join(header.columns)}",
        f"{COMMAND}packer verify {shlex.quote(str(plan))} --shards {shlex.quote(result.path)} {named}",
    ]


def _for_machines(result: Materialized) -> dict[str, Any]:
    header = result.header
    return {
        "shards_directory": result.path,
        "content_hash": header.content_hash,
        "epochs": [epoch.epoch for epoch in header.epochs],
        "num_microbatches": header.num_rows,
        "num_shards": len(header.shards),
        "num_samples": result.num_pieces,
        "num_tokens": result.num_tokens,
        "num_bytes": result.num_bytes,
        "columns": dict(header.columns),
        "seconds": round(result.seconds, 3),
        "num_units_reused": result.num_units_reused,
    }
