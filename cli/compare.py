"""``packer compare``."""

import json
from pathlib import Path

import click

from packer.plan import load_plan
from packer.report import compare as compare_plans
from packer.report import side_by_side

from .options import PlanPath
from .terminal import print_rich


@click.command()
@click.argument("plan_a", type=PlanPath())
@click.argument("plan_b", type=PlanPath())
@click.option("--json", "as_json", is_flag=True, help="Print the comparison for machines.")
def compare(plan_a: Path | str, plan_b: Path | str, as_json: bool) -> None:
    """Show what differs between two plans, in configuration and effect."""
    left, right = load_plan(plan_a), load_plan(plan_b)
    if as_json:
        click.echo(json.dumps(compare_plans(left, right).as_json()))
    else:
        print_rich(side_by_side(left, right, (str(plan_a), str(plan_b))))
