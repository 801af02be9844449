"""Slices of rows of real formats, put together, are the rows that one rank alone would get."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import packer
from packer.metrics import write_items

RNG = np.random.default_rng(5)
SEQLENS = [3, 40, 1, 17, 8, 64, 5, 22, 2, 31, 12, 9]
TOKENS = [RNG.integers(1, 30_000, length).astype(np.int32) for length in SEQLENS]
LABELS = [np.where(RNG.random(len(ids)) < 0.3, -100, ids) for ids in TOKENS]


def table() -> pa.Table:
    return pa.table({"ids": [ids.tolist() for ids in TOKENS], "labels": [ids.tolist() for ids in LABELS]})


def write_parquet(folder: Path) -> Path:
    pq.write_table(table(), folder / "data.parquet", row_group_size=5)
    return folder / "data.parquet"


def write_arrow(folder: Path) -> Path:
    with pa.ipc.new_file(folder / "data.arrow", table().schema) as writer:
        writer.write_table(table(), max_chunksize=4)
    return folder / "data.arrow"


def write_json_lines(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table().to_pylist()))
    return folder / "data.jsonl"


def write_token_files(folder: Path) -> Path:
    write_items(
        folder / "data", iter(TOKENS), np.array(SEQLENS), np.dtype(np.int32), np.array([0, len(SEQLENS)])
    )
    return folder / "data"


COLUMNS = {"tokens_column": "ids", "labels_column": "labels"}
FORMATS = [
    (write_parquet, COLUMNS),
    (write_arrow, COLUMNS),
    (write_json_lines, COLUMNS),
    (write_arrow, COLUMNS | {"shift": False}),
    (write_token_files, {}),
]


@pytest.mark.parametrize("too_long", ["error", "split"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("write", "columns"), FORMATS)
def test_slices_make_up_the_row(write, columns, layout, too_long, tmp_path) -> None:
    source = write(tmp_path)
    packer.analyze(source, out=tmp_path / "metrics", **columns)
    config = packer.PlanConfig(
        max_tokens=128,
        layout=layout,
        sp_size=4,
        remainder="keep",
        too_long=too_long,
        max_seqlen=64 if too_long == "error" else 24,
    )
    plan = packer.make_plan(packer.open_metrics(tmp_path / "metrics"), config)

    def load(**place):
        dataset = packer.open_dataset(source, metrics=tmp_path / "metrics")
        return packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1, **place).microbatches()

    num_rows = 0
    for whole, *slices in zip(load(), *(load(sp_rank=rank, sp_size=4) for rank in range(4)), strict=True):
        for name in ("input_ids", "position_ids"):
            assert torch.equal(torch.cat([part[name] for part in slices], dim=1), whole[name])
        labels = whole["labels"]
        if columns.get("shift", True):
            labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        assert torch.equal(torch.cat([part["shift_labels"] for part in slices], dim=1), labels)
        assert sum(part.num_loss_tokens for part in slices) == whole.num_loss_tokens
        num_rows += 1
    assert num_rows > 1
