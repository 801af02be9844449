"""The documentation is true: commands and Python run, errors are the real ones, no option is missing."""

import multiprocessing
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cli.main import cli
from tests.doc_pages import ROOT, blocks_of, pages, run_page

QUICK_START = ROOT / "docs" / "quick-start.md"
FOLLOWING = [page for page in pages() if page != QUICK_START]
WITH_FRAMEWORKS = [page for page in FOLLOWING if any(block.needs_framework for block in blocks_of(page))]

LAUNCHED = {
    # What a launcher says to the only process that it starts.
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
    # No GPU, no hub, no progress bars.
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def after_quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has followed the quick start."""
    folder = tmp_path_factory.mktemp("quick-start")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_page(QUICK_START, folder)
    return folder


@pytest.fixture
def folder(after_quick_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the other pages begin; only the README makes its own metrics and plan."""
    shutil.copytree(after_quick_start, tmp_path / "page", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "page"


def test_quick_start_makes_what_the_other_pages_begin_with(after_quick_start: Path) -> None:
    assert (after_quick_start / "metrics" / "manifest.json").is_file()
    assert (after_quick_start / "plan" / "plan.json").is_file()


@pytest.mark.parametrize("page", FOLLOWING, ids=name_of)
def test_page_runs(page: Path, folder: Path) -> None:
    if page.name == "README.md":
        shutil.rmtree(folder / "metrics")
        shutil.rmtree(folder / "plan")
    run_page(page, folder)


def run_page_with_frameworks(page: Path, folder: Path) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for minutes
    run_page(page, folder, frameworks=True)


@pytest.mark.frameworks
@pytest.mark.parametrize("page", WITH_FRAMEWORKS, ids=name_of)
def test_page_runs_with_frameworks(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a framework leaves its mark on the one that imports it."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    process = multiprocessing.get_context("spawn").Process(
        target=run_page_with_frameworks, args=(page, folder)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    context = click.Context(cli)
    missing = [
        f"{name} {option}"
        for name in cli.list_commands(context)
        for parameter in _command(cli.get_command, context, name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--") and option != "--help" and f"`{option}" not in text
    ]
    assert not missing


def _command(
    get: Callable[[click.Context, str], click.Command | None], context: click.Context, name: str
) -> click.Command:
    command = get(context, name)
    assert command is not None
    return command


LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name: str) -> None:
    """Those of docs/ are checked where it is built."""
    links = LINK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nfalse\n```\n",
        "```bash\npacker plan nowhere --out p --max-tokens 1\n```\n",
        "```bash\npacker plan nowhere --out p --max-tokens 1\n```\n```text\nError: something else\n```\n",
        "```bash\ntrue\n```\n```text\nError: nothing failed\n```\n",
        "```python\nassert False\n```\n",
        "```python\n1\n```\n```text\npacker.errors.PlanError: nothing failed\n```\n",
    ],
)
def test_a_page_that_is_not_true_fails(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        run_page(page_of(tmp_path, text), tmp_path)


def test_a_quoted_error_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quoted = "Error: nowhere is not a directory; name the --out of `packer analyze`"
    text = f"```bash\npacker plan nowhere --out p --max-tokens 1\n```\n\n```text\n{quoted}\n```\n"
    run_page(page_of(tmp_path, text), tmp_path)
