"""``packer export``."""

import json
import shlex
from pathlib import Path
from typing import get_args

import click

from packer.plan import load_plan
from packer.plan.export import ExportFormat, export_plan
from packer.wording import counted

from .options import PlanPath
from .progress import ProgressDisplay

_HOW_TO_READ = {
    "deepspeed": "json.load(open({file!r})): microbatch_ids, batch_sizes, batch_max_seqlens",
    "npz": "numpy.load({file!r}): offsets, sample_ids, seqlens, …",
    "parquet": "pandas.read_parquet({file!r})",
    "samples": "pandas.read_parquet({file!r}): source, row, start, num_tokens, …",
}


@click.command()
@click.argument("plan", type=PlanPath(), metavar="PLAN")
@click.option(
    "--to",
    required=True,
    type=click.Choice(get_args(ExportFormat)),
    help="deepspeed: the three lists of batch_by_seqlens, as JSON. npz: NumPy arrays, micro-batches as "
    "offsets into the samples. parquet: the tables of the plan. samples: what was trained before a step, as "
    "Parquet.",
)
@click.option(
    "--epoch", type=int, metavar="E", help="Of samples: the epoch.  [default: 0 with --step, else all]"
)
@click.option("--step", type=int, metavar="T", help="Of samples: the first step that was not trained.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory to make.  [default: PLAN with the format's name]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing export.")
@click.option("--json", "as_json", is_flag=True, help="Print the result for machines.")
def export(
    plan: Path | str,
    to: ExportFormat,
    epoch: int | None,
    step: int | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a plan for readers that do not know packer."""
    opened = load_plan(plan)
    if out is None:
        folder = Path(plan.rstrip("/").rsplit("/", 1)[-1]) if isinstance(plan, str) else plan
        out = folder.with_name(f"{folder.absolute().name}-{to}")
    with ProgressDisplay("exporting") as progress:
        names = export_plan(
            opened, out, to=to, epoch=epoch, step=step, overwrite=overwrite, progress=progress.show
        )
    if as_json:
        result = {"export_directory": str(out), "files": names, "content_hash": opened.fingerprint}
        click.echo(json.dumps(result))
    else:
        first = max(names)
        click.echo(f"{shlex.quote(str(out))}: {counted(len(names), 'file')}")
        click.echo(f"Next: {_HOW_TO_READ[to].format(file=str(out / first))}")
