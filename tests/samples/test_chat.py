"""Messages through a chat template: counts equal ids, the assistant's tokens are the loss tokens."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import ConfigError, SourceError
from packer.samples import LengthDefinition, check_definition, measure_unit, open_dataset
from packer.sources import open_source

pytestmark = pytest.mark.frameworks

TEMPLATE = (
    "{% for m in messages %}{{ ' if ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% elif m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ raise_exception('no role ' ~ m.role) }}{% endif %}{% endfor %}"
)
CHATS = [
    [{"role": "user", "content": "a bb"}, {"role": "assistant", "content": "ccc if é"}],
    None,
    [],
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
]
LENGTHS, LOSS_TOKENS = [7, 0, 0, 2, 3], [3, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_json):
    return save(tmp_path_factory.mktemp("chat"), tokenizer_json, chat_template=TEMPLATE)


def save(folder, tokenizer_json, **settings):
    (folder / "tokenizer.json").write_text(tokenizer_json.read_text())
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def write(kind, folder, chats):
    path = folder / f"{kind}.data"
    if kind == "parquet":
        pq.write_table(pa.table({"chat": chats}), path)
    elif kind == "json in parquet":
        texts = [None if chat is None else json.dumps(chat) for chat in chats]
        pq.write_table(pa.table({"chat": pa.array(texts, pa.string())}), path)
    else:
        path.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    return path


def measured(path, definition):
    source = open_source(path)
    check_definition(source, definition)
    units = source.units(list(definition.read_columns), target_bytes=1)
    parts = [m for unit in units for m in measure_unit(source, unit, definition)]
    return {
        metric: np.concatenate([m.lengths[metric] for m in parts]).tolist() for metric in parts[0].lengths
    }


@pytest.mark.parametrize("kind", ["parquet", "json in parquet", "jsonl"])
def test_lengths_and_loss_tokens(tmp_path, folder, kind):
    path = write(kind, tmp_path, CHATS)
    definition = LengthDefinition.by_messages("chat", tokenizer=str(folder))
    assert measured(path, definition) == {"seqlen": LENGTHS, "loss_tokens": LOSS_TOKENS}
    dataset = open_dataset(path, definition=LengthDefinition.from_json(definition.to_json()))
    for sample, length, loss_tokens in zip(dataset, LENGTHS, LOSS_TOKENS, strict=True):
        assert len(sample["input_ids"]) == len(sample["labels"]) == length
        assert np.count_nonzero(sample["labels"][1:] != -100) == loss_tokens
    assert dataset[0]["input_ids"].tolist() == [7, 4, 5, 7, 6, 7, 8]
    assert dataset.read_slice(0, 3, 5)["labels"].tolist() == [-100, 6]


def test_sharegpt_messages(tmp_path, folder):
    chats = [[{"from": "human", "value": "a bb"}, {"from": "gpt", "value": "ccc if é"}]]
    definition = LengthDefinition.by_messages("chat", tokenizer=str(folder / "tokenizer.json"))
    assert measured(write("jsonl", tmp_path, chats), definition) == {"seqlen": [7], "loss_tokens": [3]}


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "wizard", "content": "a"}], "template refuses it .*no role wizard"),
        ("not json", "must be JSON"),
        ([["user", "a"]], "must be a list of objects"),
        ([{"content": "a"}], "template refuses it"),
    ],
)
def test_a_bad_chat_names_its_row(tmp_path, folder, chat, message):
    path = write("jsonl", tmp_path, [CHATS[0], chat])
    definition = LengthDefinition.by_messages("chat", tokenizer=str(folder))
    with pytest.raises(SourceError, match=rf"jsonl\.data, row 1: .*{message}"):
        measured(path, definition)


def test_without_a_mask_there_are_no_loss_tokens(tmp_path, tokenizer_json):
    template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain = save(tmp_path, tokenizer_json, chat_template=template)
    path = write("parquet", tmp_path, CHATS)
    definition = LengthDefinition.by_messages("chat", tokenizer=str(plain))
    assert measured(path, definition) == {"seqlen": LENGTHS}
    assert "labels" not in open_dataset(path, definition=definition)[0]


def test_a_tokenizer_without_a_template_is_refused(tmp_path, tokenizer_json):
    with pytest.raises(ConfigError, match="has no chat template"):
        LengthDefinition.by_messages("chat", tokenizer=str(save(tmp_path, tokenizer_json)))


def test_another_template_is_another_tokenizer(tmp_path, folder, tokenizer_json):
    other = save(tmp_path, tokenizer_json, chat_template=TEMPLATE + " ")
    path = write("parquet", tmp_path, CHATS)
    definition = LengthDefinition.by_messages("chat", tokenizer=str(folder))
    with pytest.raises(ConfigError, match="is not the one"):
        open_dataset(path, definition=definition, tokenizer=str(other))


def test_a_name_that_nobody_knows(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for define in (LengthDefinition.by_text, LengthDefinition.by_messages):
        with pytest.raises(ConfigError, match="transformers has none of that name offline"):
            define("chat", tokenizer="nobody/nothing")
