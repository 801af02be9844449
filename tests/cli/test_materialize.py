"""``packer materialize`` and ``packer verify --shards`` as a user types them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import packer
from cli.main import cli
from tests.shards.worlds import World, content_of, planned, rows_of_tokens, token_world, write_lines
from tests.word_tokenizer import write_tokenizer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return token_world(tmp_path, epochs=2)


def test_the_way_from_a_plan_to_verified_shards(world: World, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    result = run("materialize", tmp_path / "plan", world.source, "--out", out, "--shard-size", 9000)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    rows = sum(world.plan.epoch(epoch).num_microbatches for epoch in (0, 1))
    assert lines[0].startswith(f"{out}: {rows} micro-batches in ")
    assert "of 2 epochs" in lines[1]
    assert lines[2] == "  columns sample_id, start, ids, name"
    assert lines[3].startswith("Next: packer verify ")
    checked = run(*lines[3].removeprefix("Next: packer ").split())
    assert checked.exit_code == 0, checked.output
    assert checked.stdout.splitlines()[-1].endswith("as in the plan and in the source")
    alone = json.loads(run("verify", tmp_path / "plan", "--shards", out, "--json").stdout)["shards"]
    assert alone == {
        "num_shards": len(packer.open_dataset(out).header.shards),
        "num_microbatches": rows,
        "num_pieces": sum(
            world.plan.epoch(epoch).microbatch(row).num_samples
            for epoch in (0, 1)
            for row in range(world.plan.epoch(epoch).num_microbatches)
        ),
        "with_source": False,
    }


def test_for_machines(world: World, tmp_path: Path) -> None:
    arguments = [
        "materialize",
        tmp_path / "plan",
        world.source,
        "--out",
        tmp_path / "s",
        "--json",
        "--epoch",
        1,
    ]
    found = json.loads(run(*arguments).stdout)
    assert found["epochs"] == [1]
    assert found["content_hash"] == world.plan.fingerprint
    assert found["num_bytes"] == sum(
        len(b) for n, b in content_of(tmp_path / "s").items() if n.endswith("arrow")
    )
    assert list(found["columns"]) == ["sample_id", "start", "ids", "name"]


def test_options_reach_their_place(world: World, tmp_path: Path) -> None:
    options = ["--compression", "zstd", "--keep-columns", "none", "--workers", 2, "--metrics", world.metrics]
    assert (
        run("materialize", tmp_path / "plan", world.source, "--out", tmp_path / "s", *options).exit_code == 0
    )
    header = packer.open_dataset(tmp_path / "s").header
    assert (header.compression, list(header.columns)) == ("zstd", ["sample_id", "start", "ids"])


def test_errors_are_one_line(world: World, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan", tmp_path / "shards"
    for arguments, code, message in (
        ([tmp_path / "nowhere", world.source, "--out", out], 1, "Error: .*nowhere does not exist"),
        ([plan, tmp_path / "no.parquet", "--out", out], 1, "Error: .*no such file"),
        ([plan, world.source, "--out", world.metrics], 1, "Error: .*metrics exists already"),
        ([plan, world.source, "--out", out, "--workers", 0], 2, "Error: --workers 0"),
        ([plan, world.source, "--out", out, "--keep-columns", "zzz"], 1, "Error: .*has no column 'zzz'"),
        ([plan, world.source], 2, "Missing option '--out'"),
    ):
        result = run("materialize", *arguments)
        assert (result.exit_code, result.stdout) == (code, "")
        assert re.search(message, result.stderr), result.stderr
    assert not out.exists()


def test_texts_need_to_know_their_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, 50)
    path = write_lines(tmp_path / "x.jsonl", [{"text": f"w{n} w3"} for n in range(2, 40)])
    planned(tmp_path, path, {}, text_column="text", tokenizer=tokenizer)
    arguments = ["materialize", tmp_path / "plan", path, "--out", tmp_path / "shards"]
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "add --metrics, or --tokenizer" in refused.stderr
    assert run(*arguments, "--tokenizer", tokenizer).exit_code == 0
    assert run(*arguments, "--metrics", tmp_path / "metrics", "--overwrite").exit_code == 0


def test_shards_of_another_plan_are_refused(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    another = token_world(other, rows_of_tokens(90))
    assert run("materialize", other / "plan", another.source, "--out", tmp_path / "shards").exit_code == 0
    result = run("verify", tmp_path / "plan", "--shards", tmp_path / "shards")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "holds the samples of plan" in result.stderr
    shutil.rmtree(tmp_path / "shards")
    assert "holds no shards.json" in run("verify", tmp_path / "plan", "--shards", tmp_path / "shards").stderr
