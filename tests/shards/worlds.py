"""Small data sets of every kind, planned: what is materialised in the tests of this room."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import packer
from packer.plan import Plan
from packer.runtime import PlanLoader
from tests.sources.test_indexed import write_pair
from tests.word_tokenizer import write_tokenizer


@dataclass
class World:
    """A data set, its metrics, and a plan of it."""

    source: Path
    metrics: Path
    plan: Plan

    @property
    def dataset(self) -> Any:
        return packer.open_dataset(self.source, metrics=self.metrics)


def rows_of_tokens(num_rows: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, int(rng.integers(1, longest))).tolist() for _ in range(num_rows)]


def token_world(folder: Path, rows: Sequence[list[int] | None] | None = None, **options: Any) -> World:
    """Token lists in Parquet, beside them a column of texts; ``options`` are the plan's."""
    rows = rows_of_tokens(120) if rows is None else rows
    table = pa.table(
        {
            "ids": pa.array(rows, pa.list_(pa.int32())),
            "name": pa.array([f"n{number % 5}" for number in range(len(rows))]).dictionary_encode(),
        }
    )
    path = folder / "tokens.parquet"
    pq.write_table(table, path, row_group_size=16)
    return planned(folder, path, options, tokens_column="ids")


def world_of(kind: str, folder: Path, **options: Any) -> World:
    """Return one of the kinds in ``KINDS``."""
    rows = rows_of_tokens(60, longest=20)
    words = [" ".join(f"w{token % 40}" for token in row) for row in rows]
    if kind == "parquet":
        return token_world(folder, rows, **options)
    if kind == "labels":
        labels = [[-100 if at % 3 else token for at, token in enumerate(row)] for row in rows]
        table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32())), "labels": labels, "weight": rows})
        path = folder / "x.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return planned(folder, path, options, tokens_column="ids", labels_column="labels")
    if kind == "jsonl":
        path = write_lines(folder / "x.jsonl", [{"ids": row, "name": "x"} for row in rows])
        return planned(folder, path, options, tokens_column="ids")
    if kind == "indexed":
        write_pair(folder / "x", rows, 8, np.dtype(np.uint16))
        return planned(folder, folder / "x", options)
    tokenizer = write_tokenizer(folder, 50)
    if kind == "text":
        path = write_lines(folder / "x.jsonl", [{"text": text} for text in words])
        return planned(folder, path, options, text_column="text", tokenizer=tokenizer)
    answers = [" w3" * (1 + number % 4) for number in range(len(words))]
    if kind == "prompt":
        path = folder / "x.parquet"
        pq.write_table(pa.table({"q": words, "a": answers}), path, row_group_size=9)
        return planned(folder, path, options, prompt_column="q", completion_column="a", tokenizer=tokenizer)
    assert kind == "pair"
    content = [{"q": q, "good": a, "bad": " w5"} for q, a in zip(words, answers, strict=True)]
    path = write_lines(folder / "x.jsonl", content)
    completions = {"chosen": "good", "rejected": "bad"}
    return planned(
        folder, path, options, prompt_column="q", completion_column=completions, tokenizer=tokenizer
    )


KINDS = ("parquet", "labels", "jsonl", "indexed", "text", "prompt", "pair")


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planned(folder: Path, source: Path, options: dict[str, Any], **definition: Any) -> World:
    metrics = folder / "metrics"
    packer.analyze(source, out=metrics, **definition)
    defaults: dict[str, Any] = {"max_tokens": 96, "layout": "packed", "dp_size": 2, "remainder": "keep"}
    plan = packer.make_plan(metrics, packer.PlanConfig(**defaults | options), out=folder / "plan")
    return World(source, metrics, plan)


def batches_of(plan: Plan, dataset: Any, **options: Any) -> list[dict[str, Any]]:
    """Return all batches of all epochs of one rank as plain values."""
    loader = PlanLoader(plan, dataset, **{"dp_rank": 0, "dp_size": 1} | options)
    with loader:
        return [plain(batch) for _ in range(plan.num_epochs) for batch in loader.microbatches()]


def plain(batch: Any) -> dict[str, Any]:
    """Return a batch of tensors, or of batches, as lists."""
    return {
        name: value.tolist()
        if isinstance(value, torch.Tensor)
        else plain(value)
        if isinstance(value, dict)
        else value
        for name, value in batch.items()
    }


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
