"""The command: what it prints, and how it fails."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from cli.main import cli
from cli.terminal import COMMAND, fitted
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
        (
            ("--text-column", "text", "--text-column", "target", "--tokenizer", "x"),
            2,
            "--text-column takes one value, and was given 'text' and 'target'; leave all but one out",
        ),
        (("--messages-column", "a", "--messages-column", "a"), 2, "--messages-column takes one value"),
        (
            ("--tokens-column", "input_ids", "--labels-column", "a", "--labels-column", "b"),
            2,
            "--labels-column takes one value",
        ),
        (("--tokens-column", "in\nput\x1b"), 1, r"has no column 'in\nput\x1b'"),
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


def test_a_newline_in_the_name_of_a_column_leaves_an_error_on_one_line(tmp_path):
    pq.write_table(pa.table({"new\nline": [[1]], "good": ["a"]}), tmp_path / "x.parquet")
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "m", "--tokens-column", "ids")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert r"it has: new\nline, good" in result.stderr
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "m", "--tokens-column", "new\nline")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("typed", "meant"), [("plna", "plan"), ("analyse", "analyze"), ("inspct", "inspect")]
)
def test_a_mistyped_command_is_guessed(typed, meant):
    result = CliRunner().invoke(cli, [typed, "x"])
    assert result.exit_code == 2
    assert (
        f"Error: no command is named '{typed}'; did you mean '{meant}'? There are analyze, plan"
        in result.stderr
    )
    assert "there are analyze, plan" in CliRunner().invoke(cli, ["zzz"]).stderr


def test_rows_that_are_skipped_are_told_of(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n{"n": "a"}\n{"n": 3}\n')
    arguments = (tmp_path / "x.jsonl", "--length-column", "n", "--on-error", "skip")
    result = run(*arguments, "--out", tmp_path / "m")
    assert result.exit_code == 0, result.output
    assert (
        "Warning: 1 sample could not be read and is skipped, of length 0; the first is sample 1"
        in result.stdout
    )
    assert "  0 samples are null, 0 empty" in result.stdout
    found = json.loads(run(*arguments, "--out", tmp_path / "n", "--json").stdout)
    assert (found["num_skipped"], found["num_nulls"]) == (1, 0)


def test_texts_of_special_tokens_alone_are_empty(tmp_path):
    pq.write_table(pa.table({"text": ["w2", "", None, " "]}), tmp_path / "x.parquet")
    tokenizer = write_tokenizer(tmp_path, 9)
    arguments = (tmp_path / "x.parquet", "--text-column", "text", "--tokenizer", tokenizer)
    lines = run(*arguments, "--out", tmp_path / "m").stdout.splitlines()
    assert lines[2] == "  1 sample is null, 2 empty: without tokens but special ones"
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [2, 1, 0, 1]
    run(*arguments, "--out", tmp_path / "tokens", "--write-tokens", tmp_path / "tok")
    assert open_metrics(tmp_path / "tokens").manifest.num_empties == 2
    lines = run(*arguments, "--out", tmp_path / "bare", "--no-special-tokens").stdout.splitlines()
    assert lines[2] == "  1 sample is null, 2 empty: of length 0"


@pytest.mark.parametrize("length", [2**40, 2**62, 2**63 - 1])
def test_any_length_of_64_bits_is_measured(tmp_path, length):
    pq.write_table(pa.table({"n": pa.array([length] * 3 + [0])}), tmp_path / "x.parquet")
    result = run(
        tmp_path / "x.parquet", "--out", tmp_path / "m", "--length-column", "n", "--curriculum-files"
    )
    assert result.exit_code == 0, result.output
    assert f"4 samples, {3 * length:,} tokens" in result.stdout
    assert f"seqlen is up to {length:,}, and a plan takes lengths up to 2,147,483,647" in result.stdout
    assert "Next:" not in result.stdout
    metrics = open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [length] * 3 + [0]
    assert metrics.manifest.metrics["seqlen"].total == 3 * length


def test_lines_fit_a_narrow_terminal():
    lines = [
        "short",
        "  a longer line of words that go on for longer than the width",
        f"{COMMAND}packer " + "x " * 60,
    ]
    assert list(fitted(lines, 40)) == [
        "short",
        "  a longer line of words that go on for",
        "      longer than the width",
        lines[2],
    ]
    for command in ([], ["analyze"]):
        text = CliRunner().invoke(cli, [*command, "--help"], terminal_width=60).stdout
        assert max(map(len, text.splitlines())) <= 60
