"""Makes the report of a real plan while the site is built, so that readers can click through one."""

import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import packer
from packer.plan import load_plan
from packer.report import html_page

DATA = Path(__file__).resolve().parents[1] / "examples" / "data"


def on_files(files: Files, config: Any) -> Files:
    """Add ``example-report.html``, as ``packer inspect --html`` writes it."""
    files.append(File.generated(config, "example-report.html", content=_report()))
    return files


def _report() -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packer.analyze(
            DATA / "instructions.jsonl.gz",
            out=folder / "metrics",
            text_column="text",
            tokenizer=DATA / "tokenizer.json",
        )
        options = packer.PlanConfig(
            max_tokens=8192, layout="packed", dp_size=4, balance="flops", epochs=3, lr_scaling="sqrt"
        )
        packer.make_plan(folder / "metrics", options, out=folder / "plan")
        return html_page(load_plan(folder / "plan"))
