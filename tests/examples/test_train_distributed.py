"""The examples for several processes run as they stand, and agree with each other."""

import gzip
import json
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest

from tests.examples.launches import EXAMPLES, TORCHRUN, run
from tests.ranks import FSDP2_ON_CPU


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first short texts of the shipped data."""
    path = tmp_path_factory.mktemp("texts") / "short.jsonl"
    with gzip.open(EXAMPLES / "data" / "instructions.jsonl.gz", "rt") as lines:
        short = islice((line for line in lines if len(json.loads(line)["text"]) < 600), 200)
        path.write_text("".join(short))
    return path


def losses(script: str, source: Path, out: Path, *options: object) -> dict[int, float]:
    """Run an example on two processes; return the loss that it prints for each step."""
    printed = run(
        *TORCHRUN, EXAMPLES / script, "--source", source, "--out", out, "--max-tokens", 512, *options
    )
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+) over", printed)}


def test_ddp(source: Path, tmp_path: Path) -> None:
    trained = losses("train_ddp.py", source, tmp_path, "--steps", 6)
    assert list(trained) == [0, 1, 2, 3, 4, 5]
    assert trained[5] < trained[0]


@pytest.mark.skipif(not FSDP2_ON_CPU, reason="this torch runs FSDP2 on GPUs only")
def test_fsdp2_on_shared_rows_goes_on_where_it_was_and_equals_whole_rows(
    source: Path, tmp_path: Path
) -> None:
    begun = losses("train_fsdp2_sp.py", source, tmp_path / "shared", "--steps", 2)
    for name in ("metrics", "plan"):
        shutil.copytree(tmp_path / "shared" / name, tmp_path / "whole" / name)
    resumed = losses("train_fsdp2_sp.py", source, tmp_path / "shared", "--steps", 2)
    whole = losses("train_fsdp2_sp.py", source, tmp_path / "whole", "--steps", 4, "--sp-size", 1)
    assert list(begun) + list(resumed) == list(whole) == [0, 1, 2, 3]
    assert (begun | resumed) == pytest.approx(whole, rel=1e-4)
