"""Messages through a chat template: counts equal ids, the assistant's tokens are the loss tokens."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import ConfigError, MissingExtraError, SourceError
from packer.samples import LengthDefinition, chat, check_definition, measure_unit, open_dataset
from packer.sources import open_source
from tests.samples.chat_templates import TEMPLATES, marked, plain, write_chat_tokenizer

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


def test_on_all_tokens_there_are_no_labels(tmp_path, folder):
    path = write("parquet", tmp_path, CHATS)
    definition = LengthDefinition.by_messages("chat", tokenizer=str(folder), train_on="all")
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


def spans(dataset, tokenizer):
    """Return what of each chat trains, as text."""
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(tokenizer)
    return [opened.decode([token for token in sample["labels"] if token != -100]) for sample in dataset]


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": " hi ", "reasoning_content": "greet"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.mark.parametrize("write_template", [plain, marked])
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("chatml", "<think>greet</think> hi <|im_end|>no<|im_end|>"),
        ("headers", "hi<|eot|>no<|eot|>"),
        ("inst", " hi</s> no</s>"),
        ("merged system", "hi<end>no<end>"),
    ],
)
def test_a_turn_trains_with_its_end_token(tmp_path, name, trained, write_template):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", write_template(TEMPLATES[name]))
    path = write("jsonl", tmp_path, [CHAT, CHAT[:2], CHAT[1:3]])
    dataset = open_dataset(path, definition=LengthDefinition.by_messages("chat", tokenizer=str(tokenizer)))
    first, second, third = spans(dataset, tokenizer)
    assert (first, second) == (trained, "")
    assert trained.startswith(third)
    assert third
    assert repr(dataset) == "Dataset(3 samples of messages, with input_ids, labels; loss on the assistant)"


FORGETS = (  # the last turn alone keeps what it thought
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if loop.last and m.role == 'assistant' %}<think>"
    "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def test_a_chat_of_which_spans_cannot_be_told_is_refused(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", FORGETS)
    definition = LengthDefinition.by_messages("chat", tokenizer=str(tokenizer))
    assert measured(write("jsonl", tmp_path, [CHAT[:3]]), definition)["loss_tokens"] != [0]
    cure = r"put {% generation %} and {% endgeneration %} around .* or choose --train-on all"
    with pytest.raises(SourceError, match=rf"row 1: the chat template has no marks .*{cure}"):
        measured(write("jsonl", tmp_path, [CHAT[:3], CHAT]), definition)
    with pytest.raises(SourceError, match=rf"row 0: the chat begins with the assistant, .*{cure}"):
        measured(write("jsonl", tmp_path, [CHAT[2:]]), definition)
    on_all = LengthDefinition.by_messages("chat", tokenizer=str(tokenizer), train_on="all")
    assert measured(write("jsonl", tmp_path, [CHAT]), on_all).keys() == {"seqlen"}


def test_a_template_of_which_spans_can_never_be_told_is_refused_before_reading(tmp_path):
    counts = "{{ messages | length }}" + FORGETS
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", counts)
    with pytest.raises(ConfigError, match=r"tokenizer .*: the chat template has no marks .*--train-on all"):
        LengthDefinition.by_messages("chat", tokenizer=str(tokenizer))
    LengthDefinition.by_messages("chat", tokenizer=str(tokenizer), train_on="all")


def test_definitions_before_there_was_a_choice_mean_what_they_meant(tmp_path, folder):
    path = write("jsonl", tmp_path, [CHAT])
    for write_template, part in ((marked, "assistant"), (plain, "all")):
        tokenizer = write_chat_tokenizer(tmp_path / part, write_template(TEMPLATES["chatml"]))
        content = LengthDefinition.by_messages("chat", tokenizer=str(tokenizer)).to_json()
        del content["train_on"]
        definition = LengthDefinition.from_json(content)
        assert definition.trained_part == part
        assert ("loss_tokens" in measured(path, definition)) == (part == "assistant")
        assert ("labels" in open_dataset(path, definition=definition)[0]) == (part == "assistant")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}


@pytest.mark.parametrize(
    ("kind", "tools"),
    [
        ("jsonl", [TOOL]),
        ("jsonl", json.dumps([TOOL])),
        ("jsonl", [json.dumps(TOOL)]),
        ("parquet", [TOOL]),
        ("parquet", json.dumps([TOOL])),
    ],
)
def test_tools_reach_the_template(tmp_path, kind, tools):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["chatml"]))
    path = tmp_path / "rows"
    rows = [{"chat": CHAT[1:3], "tools": tools}, {"chat": CHAT[1:3], "tools": None}]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    packer.analyze(path, out=tmp_path / "m", messages_column="chat", tokenizer=tokenizer)
    assert packer.open_metrics(tmp_path / "m").definition["tools_column"] == "tools"
    with_tools, without = packer.open_dataset(path, metrics=tmp_path / "m")
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(tokenizer)
    told = opened.apply_chat_template(CHAT[1:3], tools=[TOOL], return_dict=True)["input_ids"]
    untold = opened.apply_chat_template(CHAT[1:3], return_dict=True)["input_ids"]
    assert with_tools["input_ids"].tolist() == told
    assert without["input_ids"].tolist() == untold
    assert packer.open_metrics(tmp_path / "m").metric("seqlen").tolist() == [len(told), len(untold)]


def test_arguments_reach_the_template(tmp_path):
    template = "{% if not thinks %}<think>{% endif %}" + plain(TEMPLATES["chatml"])
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", template)
    rows = [
        {"chat": CHAT, "chat_template_kwargs": arguments} for arguments in (None, {"thinks": True}, {}, 5)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    packer.analyze(path, out=tmp_path / "m", messages_column="chat", tokenizer=tokenizer)
    lengths = packer.open_metrics(tmp_path / "m").metric("seqlen").tolist()
    assert lengths[0] == lengths[2] > lengths[1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SourceError, match="row 3: arguments of the chat template must be an object"):
        packer.analyze(path, out=tmp_path / "m", messages_column="chat", tokenizer=tokenizer, overwrite=True)


@pytest.mark.parametrize(("tools", "message"), [("{", "must be JSON"), ({"a": 1}, "tools must be a list")])
def test_bad_tools_name_their_row(tmp_path, folder, tools, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"chat": CHATS[0], "tools": tools}))
    with pytest.raises(SourceError, match=rf"row 0: .*{message}"):
        packer.analyze(path, out=tmp_path / "m", messages_column="chat", tokenizer=folder)


def test_prompts_as_messages_find_their_tools_too(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["chatml"]))
    rows = [{"prompt": CHAT[:2], "completion": CHAT[2:3], "tools": [TOOL]}, {"prompt": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packer.analyze(
        path,
        out=tmp_path / "m",
        prompt_column="prompt",
        completion_column="completion",
        tokenizer=tokenizer,
    )
    metrics = packer.open_metrics(tmp_path / "m")
    assert (metrics.definition["form"], metrics.definition["tools_column"]) == ("messages", "tools")
    assert metrics.manifest.num_nulls == 1
    dataset = packer.open_dataset(path, metrics=metrics)
    assert spans(dataset, tokenizer) == ["<think>greet</think> hi <|im_end|>\n", ""]


def test_token_files_hold_no_labels(tmp_path, folder):
    path = write("jsonl", tmp_path, CHATS)
    options = {"messages_column": "chat", "tokenizer": folder, "write_tokens": tmp_path / "tokens"}
    packer.analyze(path, out=tmp_path / "m", **options)
    with pytest.raises(ConfigError, match="token files do not say which tokens are the assistant's"):
        packer.open_dataset(tmp_path / "tokens", metrics=tmp_path / "m")
    packer.analyze(path, out=tmp_path / "m", overwrite=True, train_on="all", **options)
    assert len(packer.open_dataset(tmp_path / "tokens", metrics=tmp_path / "m")[0]["input_ids"]) == LENGTHS[0]


def test_without_jinja_the_extra_is_named(monkeypatch, folder):
    monkeypatch.setattr(chat, "find_spec", lambda name: None)
    chat.open_chat_tokenizer.cache_clear()
    with pytest.raises(MissingExtraError, match=r"install 'microbatch-packer\[chat\]'"):
        LengthDefinition.by_messages("chat", tokenizer=str(folder))


def test_a_slow_tokenizer_cannot_tell_where_a_token_stands(tmp_path):
    class Slow:
        chat_template = plain(TEMPLATES["chatml"])
        is_fast = False

        def get_chat_template(self):
            return self.chat_template

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(ConfigError, match="save a fast tokenizer, or choose --train-on all"):
        chat.ChatTokenizer(Slow(), "slow").check_masks()


def test_what_arrow_fills_in_is_left_out(tmp_path):
    """A column of structs has every key in every row, at any depth."""
    from transformers import AutoTokenizer

    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["chatml"]))
    other = {"type": "function", "function": {"name": "say", "parameters": {"b": {"type": "str"}}}}
    rows = [{"chat": CHAT, "tools": [TOOL]}, {"chat": CHAT[1:3], "tools": [other]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows")
    packer.analyze(tmp_path / "rows", out=tmp_path / "m", messages_column="chat", tokenizer=tokenizer)
    opened = AutoTokenizer.from_pretrained(tokenizer)
    for row, sample in zip(rows, packer.open_dataset(tmp_path / "rows", metrics=tmp_path / "m"), strict=True):
        right = opened.apply_chat_template(row["chat"], tools=row["tools"], return_dict=True)
        assert sample["input_ids"].tolist() == right["input_ids"]
