"""The command: what it prints, and how it fails."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from cli.main import cli
from packer.metrics import open_metrics
from tests.word_tokenizer import write_tokenizer


@pytest.fixture
def data(tmp_path):
    ids = pa.array([[1, 2, 3], [], None, [1] * 1500], pa.list_(pa.int32()))
    other = pa.array([[1], [2], [3], [4]], pa.list_(pa.int32()))
    pq.write_table(
        pa.table({"input_ids": ids, "target": other, "text": ["a", "b", "c", "d"], "answer": [" w5"] * 4}),
        tmp_path / "x",
    )
    return tmp_path / "x"


def run(*arguments):
    return CliRunner().invoke(cli, ["analyze", *map(str, arguments)])


def test_the_summary_is_for_people(tmp_path, data):
    result = run(data, "--out", tmp_path / "m", "--tokens-column", "input_ids")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"4 samples, 1,503 tokens; measured in \d+\.\d s", lines[0])
    assert lines[1:] == [
        "  seqlen  min 0, median 0, p99 1,500, max 1,500",
        "  1 sample is null, 1 empty: of length 0",
        "  loss on 1,501 of 1,503 tokens (all)",
        f"Next: packer plan {tmp_path / 'm'} --out plan --max-tokens 2048",
    ]
    assert result.stderr == ""


def test_the_result_is_for_machines(tmp_path, data):
    result = run(data, "--out", tmp_path / "m", "--tokens-column", "input_ids", "--json")
    found = json.loads(result.stdout)
    assert found["num_samples"] == 4
    assert found["num_nulls"] == found["num_empties"] == 1
    assert found["metrics"]["seqlen"] == {"min": 0, "median": 0, "p99": 1500, "max": 1500, "total": 1503}
    assert found["fingerprint"] == open_metrics(tmp_path / "m").fingerprint
    assert found["warnings"] == []


def test_a_warning_is_part_of_the_summary(tmp_path, data):
    result = run(data, "--out", tmp_path / "m", "--tokens-column", "target")
    assert "Warning: seqlen is 1 for all 4 samples" in result.stdout


def test_pairs_of_columns(tmp_path, data):
    columns = ("--tokens-column", "source=input_ids", "--tokens-column", "target=target")
    result = run(data, "--out", tmp_path / "m", *columns)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "4 samples, 1,503 tokens of source, 4 tokens of target; measured" in lines[0]
    assert lines[-1].endswith("--max-tokens source=2048,target=2")
    assert open_metrics(tmp_path / "m").names == ("source", "target")


def test_tokens_and_further_metrics(tmp_path, data):
    tokenizer = write_tokenizer(tmp_path, 50)
    result = run(
        *(data, "--out", tmp_path / "m", "--text-column", "text", "--tokenizer", tokenizer),
        *("--write-tokens", tmp_path / "tok", "--metric", "vocab_rarity", "--curriculum-files"),
    )
    assert result.exit_code == 0, result.output
    assert f"Token files: {tmp_path / 'tok'}.bin, {tmp_path / 'tok'}.idx" in result.stdout
    assert open_metrics(tmp_path / "m").names == ("seqlen", "vocab_rarity")
    assert (tmp_path / "m" / "vocab_rarity" / "vocab_rarity_index_to_sample.bin").is_file()
    assert (tmp_path / "tok.idx").is_file()


def test_completions_and_templates(tmp_path, data):
    tokenizer = ("--tokenizer", write_tokenizer(tmp_path, 50))
    columns = ("--prompt-column", "text", "--completion-column", "answer")
    result = run(data, "--out", tmp_path / "m", *columns, *tokenizer)
    assert result.exit_code == 0, result.output
    assert "  loss on 4 of 12 tokens (completion)" in result.stdout.splitlines()
    template = ("--text-template", r"{text}\n{text}\\n", "--train-on", "all", "--no-eos", "--json")
    result = run(data, "--out", tmp_path / "t", *template, *tokenizer)
    found = json.loads(result.stdout)
    assert found["definition"]["text_template"] == "{text}\n{text}\\n"
    assert found["loss"] == {
        "tokens": found["metrics"]["seqlen"]["total"] - 4,
        "of": found["metrics"]["seqlen"]["total"],
        "on": "all",
    }


def test_pairs_of_completions(tmp_path, data):
    pair = ("--completion-column", "chosen=text", "--completion-column", "rejected=text")
    tokenizer = ("--tokenizer", write_tokenizer(tmp_path, 50))
    result = run(data, "--out", tmp_path / "m", "--prompt-column", "text", *pair, *tokenizer)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "4 samples, 8 tokens of chosen, 8 tokens of rejected; measured" in lines[0]
    assert lines[-1].endswith("--max-tokens chosen=2,rejected=2")
    assert open_metrics(tmp_path / "m").names == ("seqlen", "chosen", "rejected", "loss_tokens")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("--tokens-column", "inputs"), 1, "has no column 'inputs'; did you mean 'input_ids'?"),
        (("--tokens-column", "text"), 1, "column 'text' is of type string"),
        ((), 2, "nothing says what the length of a sample is"),
        (("--tokens-column", "a", "--tokens-column", "b"), 2, "as METRIC=a"),
        (("--tokens-column", "m=a", "--tokens-column", "m=b"), 2, "names metric 'm' twice"),
        (("--tokens-column", "input_ids", "--workers", "0"), 2, "--workers 0"),
    ],
)
def test_failures_are_one_line(tmp_path, data, arguments, exit_code, message):
    result = run(data, "--out", tmp_path / "m", *arguments)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert message in line
    assert not (tmp_path / "m").exists()


def test_a_missing_source_is_named(tmp_path):
    result = run(tmp_path / "gone.parquet", "--out", tmp_path / "m", "--tokens-column", "x")
    assert result.exit_code == 1
    assert "gone.parquet" in result.stderr
