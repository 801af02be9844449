"""What goes together to say what a length is, and what is refused with which words."""

import json

import pytest

import packer
from packer.errors import ConfigError
from tests.word_tokenizer import write_tokenizer

ROWS = [{"text": "w2 w3", "ids": [1, 2], "n": 2, "q": "w4", "r": "w5", "chat": [{"role": "user"}]}]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "q"}, "--prompt-column needs --tokenizer"),
        ({"prompt_column": "q", "tokenizer": "T"}, "--prompt-column needs --completion-column"),
        ({"completion_column": "r"}, "--completion-column is what follows --prompt-column"),
        ({"completion_template": "{r}"}, "--completion-template is what follows --text-template"),
        ({"text_column": "text", "prompt_column": "q"}, "--text-column and --prompt-column each say"),
        (
            {"text_column": "text", "completion_column": "r", "tokenizer": "T"},
            "--completion-column has no mean",
        ),
        ({"text_column": "text", "train_on": "completion", "tokenizer": "T"}, "give --prompt-column and"),
        ({"text_column": "text", "train_on": "assistant", "tokenizer": "T"}, "or --messages-column"),
        ({"text_template": "{q}", "train_on": "completion", "tokenizer": "T"}, "needs --completion-template"),
        (
            {"prompt_column": "q", "completion_column": "r", "train_on": "assistant", "tokenizer": "T"},
            "choose",
        ),
        ({"tokens_column": "ids", "train_on": "all"}, "--train-on has no meaning with --tokens-column"),
        ({"tokens_column": "ids", "eos": True}, "--eos has no meaning with --tokens-column"),
        ({"length_column": "n", "tokenizer": "T"}, "--tokenizer has no meaning with --length-column"),
        ({"text_template": "{q}", "labels_column": "ids", "tokenizer": "T"}, "labels go with token ids"),
        ({"text_template": "{q}", "counter": "gigatoken", "tokenizer": "T"}, "without --text-column"),
        ({"text_template": "q", "tokenizer": "T"}, "names no column"),
        ({"text_template": "{q}", "eos": True, "tokenizer": "T"}, "--eos: nothing says which token"),
        (
            {"prompt_column": "q", "completion_column": "r", "tools_column": "n", "tokenizer": "T"},
            "--tools-column has no meaning for prompts that are texts",
        ),
        (
            {"prompt_column": "q", "completion_column": {"a b": "r", "c": "r"}, "tokenizer": "T"},
            "'a b' cannot name a metric",
        ),
        (
            {
                "prompt_column": "q",
                "completion_column": {"a": "r", "b": "r"},
                "tokenizer": "T",
                "write_tokens": "tokens",
            },
            "--write-tokens keeps one sequence a sample",
        ),
    ],
)
def test_what_does_not_go_together(tmp_path, data, options, message):
    tokenizer = write_tokenizer(tmp_path, 10)
    options = {name: tokenizer if value == "T" else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        packer.analyze(data, out=tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("options", "part", "num_trained", "num_tokens"),
    [
        ({"text_column": "text"}, "all", 2, 3),
        ({"prompt_column": "q", "completion_column": "r"}, "completion", 1, 2),
        ({"prompt_column": "q", "completion_column": "r", "train_on": "all"}, "all", 1, 2),
        ({"text_template": "{q}\n{r}"}, "all", 2, 3),
        ({"text_template": "{q}\n", "completion_template": "{r}"}, "completion", 1, 3),
        ({"tokens_column": "ids"}, "all", 1, 2),
        ({"tokens_column": "ids", "labels_column": "ids"}, "labels", 1, 2),
        ({"length_column": "n"}, "all", 1, 2),
        ({"prompt_column": "q", "completion_column": {"a": "r", "b": "r"}}, "completion", 2, 4),
        ({"tokens_column": {"a": "ids", "b": "ids"}}, None, None, 2),
    ],
)
def test_what_the_loss_is_on(tmp_path, data, options, part, num_trained, num_tokens):
    if not {"tokens_column", "length_column"} & options.keys():
        options |= {"tokenizer": write_tokenizer(tmp_path, 10)}
    result = packer.analyze(data, out=tmp_path / "m", **options)
    found = (result.trained_part, result.num_loss_tokens, result.main.total)
    assert found == (part, num_trained, num_tokens)


def test_any_number_of_workers_gives_the_same_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"w{n % 9}", "r": " w5" * (n % 7)}) + "\n" for n in range(500)))
    options = {
        "prompt_column": "q",
        "completion_column": {"a": "r", "b": "q"},
        "tokenizer": write_tokenizer(tmp_path, 10),
    }
    for workers in (1, 2):
        packer.analyze(path, out=tmp_path / f"m{workers}", workers=workers, **options)
    one, two = (packer.open_metrics(tmp_path / f"m{workers}") for workers in (1, 2))
    assert one.names == ("seqlen", "a", "b", "loss_tokens")
    assert one.fingerprint == two.fingerprint
