"""``packer inspect``."""

import json
from pathlib import Path
from typing import Any

import click

from packer.plan import Plan, load_plan
from packer.report import overview, step_picture, step_rows, summarize, write_html

from .options import PlanPath
from .progress import ProgressDisplay
from .terminal import print_rich


@click.command()
@click.argument("plan", type=PlanPath(), metavar="PLAN")
@click.option("--step", type=int, metavar="T", help="Show this step, rank by rank.")
@click.option("--epoch", type=int, metavar="E", help="The epoch of --step.  [default: 0]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures for machines.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a report with pictures: one file that needs no network.",
)
def inspect(plan: Path | str, step: int | None, epoch: int | None, as_json: bool, html: Path | None) -> None:
    """Show what a plan does.

    Steps, samples and drops, padding, tokens and samples per step along the epochs, how much more the steps
    differ than random ones, the range of the learning-rate factor, how even the ranks are.

    \b
    packer inspect plan
    packer inspect plan --step 12
    packer inspect plan --html report.html
    """  # noqa: D301 (the escape is click's)
    if epoch is not None and step is None:
        raise click.UsageError("--epoch says whose --step is meant; add --step, or leave it out")
    opened, epoch = load_plan(plan), epoch or 0
    if html is not None:
        with ProgressDisplay("reading") as progress:
            write_html(opened, html, progress=progress.count)
        click.echo(f"{html}: report written, {html.stat().st_size:,} bytes")
    if as_json:
        click.echo(json.dumps(_for_machines(opened, epoch, step)))
    elif html is None:
        print_rich(overview(opened) if step is None else step_picture(opened, epoch, step))


def _for_machines(plan: Plan, epoch: int, step: int | None) -> dict[str, Any]:
    if step is not None:
        rows = list(step_rows(plan, epoch, step))
        counts = plan.header["epochs"][epoch]
        return {
            "epoch": epoch,
            "step": step,
            "design_effect": counts.get("design_effect"),
            "microbatches": rows,
        }
    return {"content_hash": plan.fingerprint, "config": plan.config} | summarize(plan).as_json()
