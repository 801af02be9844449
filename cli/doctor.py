"""``packer doctor``."""

import json

import click

from packer.doctor import diagnose, diagnosis_lines


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis for machines.")
def doctor(as_json: bool) -> None:
    """Show versions, machine and cache, and test that kernels and files work: for a bug report.

    Exit code 1 if a package is too old or missing, or the self-test finds something wrong.
    """
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps(diagnosis.to_json()))
    else:
        for line in diagnosis_lines(diagnosis):
            click.echo(line)
    if not diagnosis.is_well:
        raise click.exceptions.Exit(1)
