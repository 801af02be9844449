"""Analyze and read damaged data sets of every format: each gives what another reader says, or a PackerError.

    python -m tests.fuzz.fuzz_sources --inputs 10000
    python -m tests.fuzz.fuzz_sources --inputs 500 --seed 20000 --only parquet

The other reader is pyarrow, json, gzip, zstandard or struct, straight. Where it cannot read the damaged file,
what packer reads must be what was written.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import packer
import packer.analyzer.work
from packer.errors import PackerError
from packer.samples import open_dataset
from tests.fuzz.children import WrongOutcomeError, main
from tests.fuzz.formats import FORMATS, Format
from tests.word_tokenizer import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ ' w9 ' }}{% endfor %}"
)
COLUMNS = {"length": "n", "text": "text", "prompt": "text", "template": "text", "messages": "chat"}
"""Where a length comes from that is no list's."""


@dataclass
class SourceFile:
    """A data set of one format, one of its files damaged."""

    layout: Format
    kinds: tuple[str, ...]

    def prepare(self, place: Path) -> None:
        write_chat_tokenizer(place)
        for number, write in enumerate(self.layout.writers):
            (place / f"good-{number}").mkdir()
            write(place / f"good-{number}")
            for kind in self.kinds:
                good = place / f"good-{number}"
                compare(self.layout, good, good, kind, place, Random(0))

    def attempt(self, random: Random, place: Path) -> str:
        good, bad = place / f"good-{random.randrange(len(self.layout.writers))}", place / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        self.layout.damage(bad, random)
        kind = random.choice(self.kinds)
        return compare(self.layout, bad, good, kind, place, random)


def compare(layout: Format, bad: Path, good: Path, kind: str, place: Path, random: Random) -> str:
    """Hold what packer makes of a data set against what it says to another reader."""
    path = bad / layout.opened
    lengths, samples = {}, []
    with naming(bad):
        lengths = measured(path, kind, place, random)
    try:
        right = expected(layout, path, kind, place)
    except Exception:  # the other reader refuses it, or takes no such value
        right = expected(layout, good / layout.opened, kind, place)
    if any(lengths[name] != right[name] for name in lengths):
        raise WrongOutcomeError(f"{kind}: lengths {lengths}, not {right}")
    with naming(bad):
        samples = delivered(path, kind, place, random)
    ids = [sample["input_ids"].tolist() for sample in samples]
    if "ids" in right and ids != right["ids"]:
        raise WrongOutcomeError(f"{kind}: ids {ids}, not {right['ids']}")
    if kind != "length" and [len(row) for row in ids] != lengths["seqlen"]:
        raise WrongOutcomeError(f"{kind}: lengths {lengths} of ids {ids}")
    return "read"


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Check that an error names the data set."""
    try:
        yield
    except PackerError as error:
        if str(folder) not in str(error):
            raise WrongOutcomeError(f"a message that names no file: {error!r}") from error
        raise


def measured(path: Path, kind: str, place: Path, random: Random) -> dict[str, list[int]]:
    """Return the lengths that analyze takes, by metric."""
    packer.analyzer.work.UNIT_BYTES = packer.analyzer.work.TEXT_UNIT_BYTES = random.choice((100, 1 << 20))
    options: dict[str, dict[str, Any]] = {
        "tokens": {"tokens_column": "ids"},
        "labels": {"tokens_column": "ids", "labels_column": "labels"},
        "length": {"length_column": "n"},
        "text": {"text_column": "text", "tokenizer": place / "tokenizer.json"},
        "prompt": {
            "prompt_column": "text",
            "completion_column": "text",
            "tokenizer": place / "tokenizer.json",
        },
        "template": {"text_template": "w1 {text}\n{text}", "tokenizer": place / "tokenizer.json"},
        "messages": {"messages_column": "chat", "tokenizer": place},
        "indexed": {},
        "arrays": {"tokens_column": "ids.npy", "labels_column": "labels.npy"},
    }
    packer.analyze(path, out=place / "metrics", overwrite=True, **options[kind])
    metrics = packer.open_metrics(place / "metrics")
    metrics.check_files()
    return {name: metrics.metric(name).tolist() for name in metrics.names}


def delivered(path: Path, kind: str, place: Path, random: Random) -> list[dict[str, Any]]:
    """Return the samples that open_dataset gives, and cut one of them, too."""
    fields = {"input_ids": "ids"} if kind == "length" else {}
    dataset = open_dataset(path, metrics=place / "metrics", fields=fields)
    order = random.sample(range(len(dataset)), len(dataset))
    taken = dict(zip(order, dataset.__getitems__(order), strict=True))
    start, stop, row = random.randrange(4), random.randrange(4, 9), random.randrange(len(dataset))
    for name, values in dataset.read_slice(row, start, stop).items():
        if values.tolist() != taken[row][name][start:stop].tolist():
            raise WrongOutcomeError(f"{kind}: sample {row} cut to {start}:{stop} gives {values}")
    return [taken[row] for row in range(len(dataset))]


def expected(layout: Format, path: Path, kind: str, place: Path) -> dict[str, list[Any]]:
    """Return lengths by metric, and the ids, of what another reader says."""
    values = layout.read(path, COLUMNS.get(kind, "ids"))
    if kind == "length":
        return {"seqlen": [value or 0 for value in values]}
    if kind == "text":
        tokenizer = text_tokenizer(place)
        ids = [[] if value is None else tokenizer.encode(value).ids for value in values]
        return {"seqlen": [len(row) for row in ids], "ids": ids}
    if kind == "template":
        tokenizer = text_tokenizer(place)
        joined = [value and f"w1 {value}\n{value}" for value in values]
        ids = [[] if text is None else tokenizer.encode(text).ids for text in joined]
        return {"seqlen": [len(row) for row in ids], "ids": ids}
    if kind == "prompt":
        ids, masks = zip(*(completed(value, place) for value in values), strict=True)
        return {
            "seqlen": [len(row) for row in ids],
            "loss_tokens": [sum(mask[1:]) for mask in masks],
            "ids": list(ids),
        }
    if kind == "messages":
        ids, masks = zip(*(rendered(chat, place) for chat in values), strict=True)
        return {
            "seqlen": [len(row) for row in ids],
            "loss_tokens": [sum(mask[1:]) for mask in masks],
            "ids": list(ids),
        }
    ids = [value or [] for value in values]
    right: dict[str, list[Any]] = {"seqlen": [len(row) for row in ids], "ids": ids}
    if kind in ("labels", "arrays"):
        labels = layout.read(path, "labels")
        if any(row is not None and len(row) != len(of) for row, of in zip(labels, ids, strict=True)):
            raise ValueError("labels that are not one a token")
        right["loss_tokens"] = [sum(label not in (None, -100) for label in (row or [])[1:]) for row in labels]
    return right


def write_chat_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json and, for transformers, a chat template beside it."""
    write_tokenizer(folder, 40)
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@lru_cache(maxsize=1)
def text_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=1)
def chat_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def completed(text: str | None, folder: Path) -> tuple[list[int], list[int]]:
    """Return the ids of a text that is prompt and completion, and which of them are behind the prompt's."""
    if text is None:
        return [], []
    tokenizer = text_tokenizer(folder)
    prompt, whole = tokenizer.encode(text).ids, tokenizer.encode(text + text).ids
    edge = next(
        (at for at, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(prompt)
    )
    return whole, [int(at >= edge) for at in range(len(whole))]


def rendered(chat: list[dict[str, Any]] | None, folder: Path) -> tuple[list[int], list[int]]:
    """Return the ids of one chat, and which of them the assistant wrote."""
    if not chat:
        return [], []
    messages = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in chat
    ]
    encoded = chat_tokenizer(folder).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def _without_messages(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds that need no chat template, those that texts are joined for among them."""
    joined = ("prompt", "template") if "text" in kinds else ()
    return (*(kind for kind in kinds if kind != "messages"), *joined)


SUBJECTS = {name: SourceFile(layout, _without_messages(layout.kinds)) for name, layout in FORMATS.items()} | {
    f"{name} of chats": SourceFile(layout, ("messages",))
    for name, layout in FORMATS.items()
    if "messages" in layout.kinds
}

if __name__ == "__main__":
    main("tests.fuzz.fuzz_sources", __doc__, SUBJECTS)
