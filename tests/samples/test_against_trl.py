"""Token by token what TRL's SFTTrainer prepares of the same rows: ids, and what the loss is on."""

import gzip
import json

import pytest

import packer
from tests.samples.chat_templates import EXAMPLES, TEMPLATES, marked, plain, write_chat_tokenizer

pytest.importorskip("trl")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def lines_of(name):
    with gzip.open(EXAMPLES / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def chats():
    """1,000 real chats: with tools and without, some with a system message; of several turns and of one."""
    of_tools = [
        {
            "messages": [{"role": ROLES[m["from"]], "content": m["value"]} for m in row["conversations"]],
            "tools": row["tools"],
        }
        for row in lines_of("chats.jsonl.gz")
    ]
    of_questions = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ],
            "tools": "[]",
        }
        for row in lines_of("questions.jsonl.gz")[:700]
    ]
    rows = of_tools + of_questions
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row["messages"].insert(0, {"role": "system", "content": f"You are assistant {number}."})
    return rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return what a real SFTTrainer makes of rows: (ids, labels) of each."""
    import datasets
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4200, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )

    def prepare(rows, tokenizer, **settings):
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                max_length=None,
                report_to=[],
                use_cpu=True,
                bf16=False,
                **settings,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
        )
        return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    return prepare


def delivered(folder, rows, **options):
    """Return what our data set delivers of the same rows, and that the metrics have counted it."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = packer.analyze(path, out=folder / "metrics", overwrite=True, **options)
    dataset = packer.open_dataset(path, metrics=folder / "metrics")
    samples = [
        (sample["input_ids"].tolist(), sample.get("labels", sample["input_ids"]).tolist())
        for sample in (dataset[row] for row in range(len(dataset)))
    ]
    metrics = packer.open_metrics(folder / "metrics")
    assert metrics.metric("seqlen").tolist() == [len(ids) for ids, _ in samples]
    assert result.num_loss_tokens == sum(label != -100 for _, labels in samples for label in labels[1:])
    return samples


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 0
    different = [row for row, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    assert not different, f"{len(different)} rows, the first is {different[0]}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_with_and_without_marks(tmp_path, prepared, name):
    rows = chats()
    with_marks = write_chat_tokenizer(tmp_path / "marked", marked(TEMPLATES[name]))
    without = write_chat_tokenizer(tmp_path / "plain", plain(TEMPLATES[name]))
    theirs = prepared(rows, with_marks, assistant_only_loss=True)
    assert sum(label == -100 for _, labels in theirs for label in labels)
    for tokenizer in (with_marks, without):
        assert_same(delivered(tmp_path, rows, messages_column="messages", tokenizer=tokenizer), theirs)
    on_all = {"messages_column": "messages", "tokenizer": without, "train_on": "all"}
    assert_same(delivered(tmp_path, rows, **on_all), prepared(rows, without))


def test_sharegpt_chats_with_their_tools(tmp_path, prepared):
    tokenizer = write_chat_tokenizer(tmp_path / "chatml", marked(TEMPLATES["chatml"]))
    shared = lines_of("chats.jsonl.gz")
    theirs = prepared(
        [
            {
                "messages": [{"role": ROLES[m["from"]], "content": m["value"]} for m in row["conversations"]],
                "tools": row["tools"],
            }
            for row in shared
        ],
        tokenizer,
        assistant_only_loss=True,
    )
    assert_same(delivered(tmp_path, shared, messages_column="conversations", tokenizer=tokenizer), theirs)


def test_prompts_and_completions(tmp_path, prepared):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["chatml"]))
    options = {"prompt_column": "prompt", "completion_column": "completion", "tokenizer": tokenizer}
    rows = [
        # every other completion ends in the end token already; some merge with the prompt's last token
        {"prompt": row["question"] + " " * (n % 3), "completion": row["answer"] + "</s>" * (n % 2)}
        for n, row in enumerate(lines_of("questions.jsonl.gz"))
    ]
    assert_same(delivered(tmp_path, rows, **options), prepared(rows, tokenizer))
    on_all = prepared(rows, tokenizer, completion_only_loss=False)
    assert_same(delivered(tmp_path, rows, train_on="all", **options), on_all)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_completions_as_messages(tmp_path, prepared, name):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES[name]))
    rows = [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], "tools": row["tools"]}
        for row in chats()
    ]
    options = {"prompt_column": "prompt", "completion_column": "completion", "tokenizer": tokenizer}
    assert_same(delivered(tmp_path, rows, **options), prepared(rows, tokenizer))


def test_texts(tmp_path, prepared):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["chatml"]))
    rows = [
        {"text": row["question"] + "\n" + row["answer"] + "</s>" * (n % 2)}
        for n, row in enumerate(lines_of("questions.jsonl.gz"))
    ]
    theirs = prepared(rows, tokenizer)
    assert_same(delivered(tmp_path, rows, text_column="text", tokenizer=tokenizer, eos=True), theirs)
    parts = [{"a": row["question"], "b": "", "c": row["answer"]} for row in lines_of("questions.jsonl.gz")]
    joined = [{"text": row["a"] + "\n" + row["c"]} for row in parts]
    template = {"text_template": "{a}\n{b}\n{c}", "tokenizer": tokenizer}
    assert_same(delivered(tmp_path, parts, **template), prepared(joined, tokenizer))
    completions = [{"prompt": row["a"] + "\n", "completion": row["c"]} for row in parts]
    template = {"text_template": "{a}\n{b}\n", "completion_template": "{c}", "tokenizer": tokenizer}
    assert_same(delivered(tmp_path, parts, **template), prepared(completions, tokenizer))


@pytest.mark.parametrize("are_messages", [False, True])
def test_preference_pairs(tmp_path, are_messages):
    import datasets
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(0)
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", plain(TEMPLATES["headers"]))
    answers = [row["answer"] for row in lines_of("questions.jsonl.gz")[:101]]
    rows = [
        {"prompt": row["question"] + " " * (n % 3), "chosen": answers[n], "rejected": answers[n + 1]}
        for n, row in enumerate(lines_of("questions.jsonl.gz")[:100])
    ]
    if are_messages:
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        rows = [{name: [{"role": roles[name], "content": row[name]}] for name in row} for row in rows]
    config = LlamaConfig(
        vocab_size=4200, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    trainer = DPOTrainer(
        model=LlamaForCausalLM(config),
        ref_model=LlamaForCausalLM(config),
        args=DPOConfig(
            output_dir=str(tmp_path / "trl"), max_length=None, report_to=[], use_cpu=True, bf16=False
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    packer.analyze(
        path,
        out=tmp_path / "metrics",
        prompt_column="prompt",
        completion_column={"chosen": "chosen", "rejected": "rejected"},
        tokenizer=tokenizer,
    )
    dataset = packer.open_dataset(path, metrics=tmp_path / "metrics")
    for ours, theirs in zip(dataset, trainer.train_dataset, strict=True):
        for name in ("chosen", "rejected"):
            prompt, completion = theirs["prompt_ids"], theirs[f"{name}_ids"]
            assert ours[name]["input_ids"].tolist() == prompt + completion
            assert ours[name]["labels"].tolist() == [-100] * len(prompt) + completion
