"""``packer verify``."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from packer.analyzer import verify_source
from packer.plan import Verified, load_plan, verify_plan
from packer.shards.verify import VerifiedShards, verify_shards
from packer.wording import counted

from .inputs import by_source, metrics_by_source
from .options import PlanPath
from .progress import ProgressDisplay


@click.command()
@click.argument("plan", type=PlanPath(), metavar="PLAN")
@click.option(
    "--metrics",
    "directories",
    multiple=True,
    metavar="[NAME=]METRICS",
    help="Compare every planned length, and the curriculum, with the metrics that the plan was made from; of "
    "a plan of several sources one for each, by name.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="The data set: is it the one that was planned? Some samples are measured again. Repeatable: for the "
    "files of one, and by name for several.",
)
@click.option(
    "--measure", default=1000, show_default=True, metavar="N", help="Samples that --source measures again."
)
@click.option(
    "--shards",
    metavar="SHARDS",
    help="Hold what `packer materialize` wrote against the plan, and with --source every sample against it.",
)
@click.option("--tokenizer", metavar="FILE|DIR", help="Where the tokenizer is, for --source of texts.")
@click.option("--json", "as_json", is_flag=True, help="Print the result for machines.")
def verify(
    plan: Path | str,
    directories: tuple[str, ...],
    sources: tuple[str, ...],
    measure: int,
    shards: str | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Check every invariant of a plan from its files.

    Hashes first, then row by row: every sample once or dropped with a reason, no bound exceeded, the same
    number of micro-batches on every rank, sums and learning-rate factors as stated. The first fault ends the
    check with exit code 1, named by step, micro-batch and sample.
    """
    opened = load_plan(plan)
    metrics = metrics_by_source(directories, opened)
    with ProgressDisplay("checking") as progress:
        checked = verify_plan(opened, metrics=metrics, progress=progress.count)
    measured = 0
    if sources:
        measured = verify_source(
            opened, by_source(sources, opened), metrics=metrics, tokenizer=tokenizer, num_samples=measure
        )
    held = None
    if shards is not None:
        with ProgressDisplay("comparing") as progress:
            held = verify_shards(
                opened,
                shards,
                by_source(sources, opened) or None,
                metrics=metrics,
                tokenizer=tokenizer,
                progress=progress.count,
            )
    result = asdict(checked) | {"num_measured": measured, "content_hash": opened.fingerprint}
    if held is not None:
        result["shards"] = asdict(held)
    has_curriculum = opened.config.get("curriculum") is not None
    click.echo(json.dumps(result) if as_json else _for_people(plan, checked, measured, held, has_curriculum))


def _for_people(
    plan: Path | str, checked: Verified, measured: int, held: VerifiedShards | None, has_curriculum: bool
) -> str:
    once = "once in each pass of its source" if checked.has_passes else "once an epoch"
    lines = [
        f"{plan}: every invariant holds",
        f"  {counted(checked.num_files, 'file')} as written; {counted(checked.num_steps, 'step')} in "
        f"{counted(checked.num_epochs, 'epoch')}",
        f"  {counted(checked.num_microbatches, 'micro-batch')} within bounds; "
        f"{counted(checked.num_samples, 'sample')} planned {once}, or dropped with a reason",
    ]
    if checked.with_shares:
        lines.append("  every source has its share")
    if checked.with_metrics:
        lines.append("  every length as in the metrics")
    if checked.with_curriculum:
        lines.append("  no sample before the curriculum admits it")
    elif has_curriculum:
        lines.append("  not checked: its curriculum, which takes --metrics")
    if measured:
        lines.append(f"  {counted(measured, 'sample')} of the source measured again: lengths as planned")
    if held is not None:
        where = "in the plan and in the source" if held.with_source else "in the plan"
        lines.append(
            f"  {counted(held.num_shards, 'shard')} as written; {counted(held.num_pieces, 'sample')} in "
            f"{counted(held.num_microbatches, 'micro-batch')} as {where}"
        )
    return "\n".join(lines)
