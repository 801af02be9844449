"""Pages of the documentation as programs: their blocks in order, in one folder, with one Python namespace.

```bash and ```python blocks are run, but for commands that set up an environment (``make``, ``pip``). A
```text block is output, and not compared, unless it ends in an error: then the block before it has to fail
with that very message, white space apart; … stands for anything. A comment ``<!-- needs a framework -->``
stands in front of blocks that the core extras cannot run.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.main import cli
from packer.errors import PackerError

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORK_MARK = "<!-- needs a framework -->"

_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_ALONE = re.compile(r"packer [^|<>&;$\\]*")
_SETS_UP = re.compile(r"(make|pip) ")
_ERROR = re.compile(r"^(packer\.errors\.(?P<kind>\w+)|Error): (?P<message>.*)\Z", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block that is to be run."""

    place: str
    language: str
    text: str
    needs_framework: bool
    error: re.Match[str] | None
    """The error that the output below it quotes."""


def pages() -> list[Path]:
    """Return the pages that have blocks, the README first."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if any(blocks_of(page))]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that are to be run."""
    content = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(content))
    for index, fence in enumerate(fences):
        language, text = fence["language"], fence["text"]
        if language not in ("bash", "python") or _SETS_UP.match(text):
            continue
        follower = fences[index + 1] if index + 1 < len(fences) else None
        is_output = follower is not None and follower["language"] == "text"
        line = content.count("\n", 0, fence.start()) + 1
        yield Block(
            place=f"{page.name}:{line}",
            language=language,
            text=text,
            needs_framework=content[: fence.start()].rstrip().endswith(FRAMEWORK_MARK),
            error=_ERROR.search(follower["text"].rstrip()) if is_output else None,
        )


def run_page(page: Path, folder: Path, *, frameworks: bool = False) -> None:
    """Run a page's blocks in ``folder``, those that need a framework or the others.

    The first block that does not do what the page says raises.
    """
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.needs_framework != frameworks:
            continue
        run = _run_bash if block.language == "bash" else _run_python
        message = run(block, names)
        quoted = "" if block.error is None else block.error["message"]
        if not _says(message, quoted):
            raise AssertionError(f"{block.place} quotes {quoted!r}, and the error is {message!r}")


def _run_bash(block: Block, _: dict[str, Any]) -> str:
    """Return the message of the error that ended the block, or nothing."""
    lines = block.text.splitlines()
    if all(_ALONE.fullmatch(line) for line in lines):  # in this process: a second's imports less for each
        code, output = _run_commands([shlex.split(line, comments=True)[1:] for line in lines])
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        code, output = done.returncode, done.stdout + done.stderr
    if code == 0:
        return ""
    if block.error is None:
        raise AssertionError(f"{block.place} failed:\n{block.text}\n{output}")
    error = _ERROR.search(output.rstrip())
    return output if error is None else error["message"]


def _run_commands(commands: list[list[str]]) -> tuple[int, str]:
    """Run packer's commands one after the other, up to the first that fails; return its exit code."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for words in commands:
            try:
                cli.main(words, prog_name="packer")
            except SystemExit as end:
                if end.code:
                    return int(end.code), output.getvalue()
    return 0, output.getvalue()


def _run_python(block: Block, names: dict[str, Any]) -> str:
    """Return the message of the error that the block raised, or nothing."""
    try:
        exec(compile(block.text, block.place, "exec"), names)
    except PackerError as error:
        if block.error is None:
            raise
        kind = block.error["kind"]
        return str(error) if type(error).__name__ == kind else f"{type(error).__name__}, not {kind}: {error}"
    return ""


def _says(message: str, quoted: str) -> bool:
    """Whether a message is the quoted one, white space apart; … stands for anything."""
    parts = [re.escape(" ".join(part.split())) for part in quoted.split("…")]
    return re.fullmatch(r" ?.* ?".join(parts), " ".join(message.split())) is not None
