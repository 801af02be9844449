"""Data sets that are read by the micro-batch: who asks for which rows, and what becomes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.errors import LengthMismatchError, ShardsError, SourceError
from packer.plan import Plan
from packer.runtime import PlanLoader
from tests.runtime.replays import Tokens, lengths, make_plan, tokens_of

SEQLENS = lengths(64)


class Rows:
    """Micro-batches made from the plan's own ids; notes what is asked of it."""

    def __init__(self, plan: Plan, rows_ahead: int = 0, change: Any = None) -> None:
        self.plan = plan
        self.rows_ahead = rows_ahead
        self.read: list[tuple[int, int]] = []
        self.named: list[list[int]] = []
        self.change = change

    def read_microbatch(self, epoch: int, row: int) -> list[dict[str, Any]]:
        self.read.append((epoch, row))
        planned = self.plan.epoch(epoch).microbatch(row)
        starts = [0] * planned.num_samples if planned.starts is None else planned.starts.tolist()
        samples = []
        for sample_id, start, seqlen in zip(
            planned.sample_ids.tolist(), starts, planned.seqlens.tolist(), strict=True
        ):
            tokens = tokens_of(sample_id, start + seqlen)[start:]
            tokens.flags.writeable = False
            samples.append({"input_ids": tokens, "labels": tokens})
        return samples if self.change is None else self.change(samples)

    def prefetch(self, epoch: int, rows: Sequence[int]) -> None:
        self.named.append(list(rows))

    def require_plan(self, fingerprint: str) -> None:
        if fingerprint != self.plan.fingerprint:
            raise ShardsError("another plan")


def labelled(seqlens: Sequence[int]) -> Tokens:
    return Tokens(seqlens, labels=lambda sample_id, seqlen: tokens_of(sample_id, seqlen))


def tensors_of(loader: PlanLoader) -> list[dict[str, Any]]:
    with loader:
        return [
            {
                name: value.tolist() if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
            for batch in loader.microbatches()
        ]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_samples(tmp_path: Path, layout: str, num_workers: int) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=2, dp_size=2, layout=layout).save(tmp_path / "plan")
    for dp_rank in (0, 1):
        at = {"dp_rank": dp_rank, "dp_size": 2, "num_workers": num_workers}
        assert tensors_of(PlanLoader(plan, Rows(plan), **at)) == tensors_of(
            PlanLoader(plan, labelled(SEQLENS), **at)
        )


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("cut", [False, True])
def test_slices_are_those_of_the_samples(layout: str, cut: bool) -> None:
    options: dict[str, Any] = {"too_long": "split", "max_seqlen": 8} if cut else {}
    config = packer.PlanConfig(
        max_tokens=64, layout=layout, sp_size=4, dp_size=2, remainder="keep", **options
    )
    plan = packer.make_plan(SEQLENS, config)
    for sp_rank in range(4):
        at = {"dp_rank": 1, "dp_size": 2, "sp_rank": sp_rank, "sp_size": 4}
        assert tensors_of(PlanLoader(plan, Rows(plan), **at)) == tensors_of(
            PlanLoader(plan, labelled(SEQLENS), **at)
        )


def test_a_resume_reads_nothing_before_its_place_and_another_topology_reads_the_same_rows() -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=4, dp_size=1)
    loader = PlanLoader(plan, Rows(plan))
    state = loader.state_dict() | {"step": 2}
    rows = []
    for dp_rank in (0, 1):
        dataset = Rows(plan)
        resumed = PlanLoader(plan, dataset, dp_rank=dp_rank, dp_size=2)
        resumed.load_state_dict(state)
        tensors_of(resumed)
        rows += [row for _, row in dataset.read]
    assert sorted(rows) == list(range(8, 16))


def test_a_worker_names_the_rows_that_it_reads_next() -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=2, dp_size=2)
    dataset = Rows(plan, rows_ahead=2)
    tensors_of(PlanLoader(plan, dataset, dp_rank=1, dp_size=2))
    assert dataset.named == [
        [1, 3, 5],
        [3, 5, 7],
        [5, 7, 9],
        [7, 9, 11],
        [9, 11, 13],
        [11, 13, 15],
        [13, 15],
        [15],
    ]


class Telling(Rows):
    """Writes down which rows were named, by the worker that was told."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, rows_ahead=2)
        self.folder = folder

    def prefetch(self, epoch: int, rows: Sequence[int]) -> None:
        worker = torch.utils.data.get_worker_info()
        with open(self.folder / str(worker.id), "a") as file:
            file.write(f"{list(rows)}\n")


def test_of_several_workers_each_names_its_own(tmp_path: Path) -> None:
    plan = make_plan(SEQLENS, steps=3, grad_accum=2).save(tmp_path / "plan")
    tensors_of(PlanLoader(plan, Telling(plan, tmp_path), num_workers=2))
    assert (tmp_path / "0").read_text().splitlines() == ["[0, 2, 4]", "[2, 4]", "[4]"]
    assert (tmp_path / "1").read_text().splitlines() == ["[1, 3, 5]", "[3, 5]", "[5]"]


def test_functions_of_the_user_may_write_into_samples() -> None:
    plan = make_plan(SEQLENS, steps=2)

    def collate(samples: Sequence[Any], shape: Any) -> dict[str, Any]:
        labels = np.full(shape.size, -100)
        for row, sample in zip(labels, samples, strict=True):
            sample["input_ids"] += 1
            row[: len(sample["labels"])] = sample["labels"]
        return {"labels": labels}

    assert len(tensors_of(PlanLoader(plan, Rows(plan), collate=collate))) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda samples: samples[1:],
            SourceError,
            "returned 1 samples for row 0 of epoch 0, where the plan has 2",
        ),
        (
            lambda samples: [{"input_ids": s["input_ids"][1:]} for s in samples],
            LengthMismatchError,
            "has .* tokens",
        ),
        (lambda samples: 1 // 0, SourceError, "ZeroDivisionError when asked for row 0 of epoch 0"),
    ],
)
def test_what_is_not_planned_stops_the_run(change: Any, error: type[Exception], message: str) -> None:
    plan = make_plan(SEQLENS, steps=2)
    with pytest.raises(error, match=message):
        tensors_of(PlanLoader(plan, Rows(plan, change=change)))


def test_the_plan_of_another_order_is_refused() -> None:
    plan, other = make_plan(SEQLENS, steps=2), make_plan(SEQLENS, steps=3)
    with pytest.raises(ShardsError, match="another plan"):
        PlanLoader(other, Rows(plan))
