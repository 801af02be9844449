"""Prompts and completions of texts, templates, end tokens, pairs: counted as delivered, trained as asked."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, SourceError
from packer.samples import LengthDefinition, check_definition, measure_unit, open_dataset
from packer.samples.encoded import Encoded, common_prefixes
from packer.sources import open_source

UNK, BOS, EOS, A, BB, CCC = 0, 1, 2, 4, 5, 6
WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "[EOS]", "x"]), max_size=5).map(" ".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_json):
    """A tokenizer that begins texts, does not end them, and has an end token."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", BOS)]
    )
    tokenizer.add_special_tokens(["[EOS]"])
    folder = tmp_path_factory.mktemp("ended")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    return folder


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in rows[0]}
        pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def measured(path, definition):
    source = open_source(path)
    check_definition(source, definition)
    units = source.units(list(definition.read_columns), target_bytes=1)
    parts = [m for unit in units for m in measure_unit(source, unit, definition)]
    names = parts[0].lengths
    lengths = {name: np.concatenate([m.lengths[name] for m in parts]).tolist() for name in names}
    return lengths, sum(m.num_null for m in parts), sum(m.num_empty for m in parts)


def trained(sample):
    """Return the ids of a sample, and those of them that train."""
    labels = sample["labels"] if "labels" in sample else sample["input_ids"]
    return sample["input_ids"].tolist(), labels[labels != -100].tolist()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_loss_is_on_the_completion_and_the_end_token(tmp_path, folder, suffix):
    rows = [
        {"q": "a bb", "r": " ccc a"},
        {"q": "a", "r": "bb"},  # "abb" is one token, so nothing is left of the prompt but its beginning
        {"q": "a", "r": " bb[EOS]"},
        {"q": "a", "r": None},
        {"q": None, "r": "a"},
        {"q": "", "r": ""},
    ]
    path = write(tmp_path / f"rows{suffix}", rows)
    definition = LengthDefinition.by_prompt("q", "r", tokenizer=str(folder))
    lengths, num_null, num_empty = measured(path, definition)
    assert lengths == {"seqlen": [6, 3, 4, 0, 0, 2], "loss_tokens": [3, 2, 2, 0, 0, 1]}
    assert (num_null, num_empty) == (2, 0)
    dataset = open_dataset(path, definition=LengthDefinition.from_json(definition.to_json()))
    assert [trained(sample) for sample in dataset] == [
        ([BOS, A, BB, CCC, A, EOS], [CCC, A, EOS]),
        ([BOS, UNK, EOS], [UNK, EOS]),
        ([BOS, A, BB, EOS], [BB, EOS]),
        ([], []),
        ([], []),
        ([BOS, EOS], [EOS]),
    ]
    assert dataset.read_slice(0, 2, 4)["labels"].tolist() == [-100, CCC]
    assert repr(dataset) == "Dataset(6 samples of prompt, with input_ids, labels; loss on the completion)"


def test_on_all_there_are_no_labels(tmp_path, folder):
    path = write(tmp_path / "rows.parquet", [{"q": "a bb", "r": " ccc a"}])
    definition = LengthDefinition.by_prompt("q", "r", tokenizer=str(folder), train_on="all", eos=False)
    assert measured(path, definition)[0] == {"seqlen": [5]}
    dataset = open_dataset(path, definition=definition)
    assert {name: ids.tolist() for name, ids in dataset[0].items()} == {"input_ids": [BOS, A, BB, CCC, A]}
    assert repr(dataset) == "Dataset(1 sample of prompt, with input_ids; loss on all tokens)"


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(tmp_path, tokenizer_json, folder):
    path = write(tmp_path / "rows.parquet", [{"q": "a", "r": " bb"}])
    for place in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / place).write_text((tokenizer_json.parent / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    definition = LengthDefinition.by_prompt("q", "r", tokenizer=str(tmp_path))
    assert definition.eos is None
    dataset = open_dataset(path, definition=definition)
    assert trained(dataset[0]) == ([BOS, A, BB, EOS], [BB, EOS])


def test_texts_end_where_asked(tmp_path, folder, tokenizer_json):
    path = write(tmp_path / "rows.parquet", [{"t": "a"}, {"t": "a [EOS]"}, {"t": None}])
    as_it_is = LengthDefinition.by_text("t", tokenizer=str(folder))
    assert measured(path, as_it_is)[0] == {"seqlen": [2, 3, 0]}
    ended = LengthDefinition.by_text("t", tokenizer=str(folder), eos=True)
    assert measured(path, ended)[0] == {"seqlen": [3, 3, 0]}
    assert open_dataset(path, definition=ended)[0]["input_ids"].tolist() == [BOS, A, EOS]
    with pytest.raises(ConfigError, match="nothing says which token of tokenizer"):
        LengthDefinition.by_text("t", tokenizer=str(tokenizer_json), eos=True)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_templates(tmp_path, folder, suffix):
    rows = [
        {"a": "a", "b": "", "c": "ccc"},
        {"a": "a", "b": "bb", "c": ""},
        {"a": "a", "b": "bb", "c": None},
        {"a": None, "b": None, "c": None},
    ]
    path = write(tmp_path / f"rows{suffix}", rows)
    joined = LengthDefinition.by_template("{a}\n{b}\n{c}", tokenizer=str(folder))
    lengths, num_null, _ = measured(path, joined)
    assert (lengths, num_null) == ({"seqlen": [4, 4, 4, 0]}, 1)
    assert open_dataset(path, definition=joined)[0]["input_ids"].tolist() == [BOS, A, CCC, EOS]
    in_parts = LengthDefinition.by_template(
        "{a}\n{b}\n", completion_template="{c}", tokenizer=str(folder), eos=False
    )
    lengths, num_null, _ = measured(path, in_parts)
    assert (lengths, num_null) == ({"seqlen": [3, 3, 0, 0], "loss_tokens": [1, 0, 0, 0]}, 2)
    assert trained(open_dataset(path, definition=in_parts)[0]) == ([BOS, A, CCC], [CCC])


def test_pairs_are_delivered_by_name(tmp_path, folder):
    rows = [{"q": "a", "good": " bb ccc", "bad": " x"}, {"q": "a", "good": None, "bad": " x"}]
    path = write(tmp_path / "rows.parquet", rows)
    definition = LengthDefinition.by_prompt("q", {"chosen": "good", "rejected": "bad"}, tokenizer=str(folder))
    lengths, num_null, _ = measured(path, definition)
    assert num_null == 1
    assert lengths == {"seqlen": [9, 0], "chosen": [5, 0], "rejected": [4, 0], "loss_tokens": [5, 0]}
    dataset = open_dataset(path, definition=LengthDefinition.from_json(definition.to_json()))
    assert trained(dataset[0]["chosen"]) == ([BOS, A, BB, CCC, EOS], [BB, CCC, EOS])
    assert trained(dataset[0]["rejected"]) == ([BOS, A, UNK, EOS], [UNK, EOS])
    assert dataset[1]["chosen"]["input_ids"].tolist() == []
    assert "with chosen, rejected; loss on the completion" in repr(dataset)
    with pytest.raises(ConfigError, match="cannot be cut"):
        dataset.read_slice(0, 0, 2)


@settings(max_examples=60)
@given(
    rows=st.lists(st.fixed_dictionaries({name: st.none() | WORDS for name in "qrs"}), min_size=1, max_size=6),
    train_on=st.sampled_from(["completion", "all"]),
    eos=st.booleans(),
)
def test_as_many_ids_as_were_counted(tmp_path_factory, folder, rows, train_on, eos):
    path = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    options = {"tokenizer": str(folder), "train_on": train_on, "eos": eos}
    for definition in (
        LengthDefinition.by_prompt("q", "r", **options),
        LengthDefinition.by_prompt("q", {"r": "r", "s": "s"}, **options),
        LengthDefinition.by_template("{q}\n{r}", completion_template="\n{s}", **options),
    ):
        assert LengthDefinition.from_json(json.loads(json.dumps(definition.to_json()))) == definition
        lengths, _, _ = measured(path, definition)
        assert tuple(lengths) == definition.metrics
        for row, sample in enumerate(open_dataset(path, definition=definition)):
            members = [sample[name] for name in "rs"] if definition.is_pair else [sample]
            assert sum(len(member["input_ids"]) for member in members) == lengths["seqlen"][row]
            num_trained = sum(
                np.count_nonzero(member.get("labels", member["input_ids"])[1:] != -100) for member in members
            )
            if "loss_tokens" in lengths:
                assert num_trained == lengths["loss_tokens"][row]


@given(st.lists(st.tuples(*[st.lists(st.integers(0, 2), max_size=5)] * 2), max_size=6))
def test_common_prefixes_equal_a_naive_twin(rows):
    def together(sequences):
        return Encoded(
            np.array([i for s in sequences for i in s], np.int32), np.array([len(s) for s in sequences], int)
        )

    def naive(some, others):
        pairs = list(zip(some, others, strict=False))
        return next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))

    some, others = [list(side) for side in zip(*rows, strict=True)] if rows else ([], [])
    found = common_prefixes(together(some), together(others))
    assert found.tolist() == [naive(*row) for row in rows]


def test_a_text_that_is_none_names_its_row(tmp_path, folder):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "a", "r": "bb"}\n{"q": "a", "r": 5}\n')
    definition = LengthDefinition.by_prompt("q", "r", tokenizer=str(folder))
    with pytest.raises(SourceError, match=r"row 1: column 'r' holds number 5 where a text was expected"):
        measured(path, definition)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_on": "assistant"}, "--train-on assistant has no meaning for a definition by prompt"),
        ({"prompt_column": None}, "names a prompt column and its form"),
        ({"form": "songs"}, "names a prompt column and its form"),
        ({"text_template": "{a}"}, "has a text template"),
        ({"completion_template": "{a}"}, "stands beside a text template"),
        ({"tools_column": "t"}, "tools go with chats"),
        ({"form": "messages", "eos": "[EOS]"}, "chat templates end a turn themselves"),
        ({"columns": {"loss_tokens": "r"}}, "cannot be named loss_tokens"),
        ({"eos": 5}, "eos of a length definition cannot be 5"),
        ({"songs": "x"}, "another version of packer"),
    ],
)
def test_a_manifest_that_makes_no_sense(folder, changes, message):
    content = LengthDefinition.by_prompt("q", "r", tokenizer=str(folder), eos=False).to_json() | changes
    with pytest.raises(ConfigError, match=message):
        LengthDefinition.from_json(content)
