"""Labels that are shifted already, and steps that have none: in every integration that hands labels on."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import packer
from packer.integrations.accelerate import AcceleratedPlan
from packer.integrations.labels import IGNORE_INDEX, labels_are_shifted, shifted_labels
from packer.integrations.megatron import MegatronIterator
from packer.integrations.torchtitan import TorchtitanLoader
from packer.planner import PlanConfig, make_plan

IDS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


def planned(tmp_path, labels: list[list[int]], *, shift: bool, **options):
    """Analyze and plan ids with labels; return a loader of the plan."""
    pq.write_table(pa.table({"ids": IDS, "labels": labels}), tmp_path / "x.parquet")
    metrics = tmp_path / "metrics"
    packer.analyze(
        tmp_path / "x.parquet", out=metrics, tokens_column="ids", labels_column="labels", shift=shift
    )
    plan = make_plan(packer.open_metrics(metrics), PlanConfig(max_tokens=12, order="sequential", **options))
    dataset = packer.open_dataset(tmp_path / "x.parquet", metrics=metrics)
    return packer.PlanLoader(plan, dataset)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_labels_that_are_shifted_already_are_not_shifted_once_more(tmp_path, layout: str):
    labels = [[2, 3, 4, 90], [6, 91], [8, 9, 92]]
    loader = planned(tmp_path, labels, shift=False, layout=layout)
    assert labels_are_shifted(loader.plan)
    expected = sorted(label for sample in labels for label in sample)
    batches = [batch for _, batch in TorchtitanLoader(loader)]
    assert sorted(torch.cat([b[b != IGNORE_INDEX] for b in batches]).tolist()) == expected
    loader.set_epoch(0)
    fields = list(MegatronIterator(loader))
    assert sorted(torch.cat([f["labels"][f["loss_mask"] == 1] for f in fields]).tolist()) == expected
    loader.set_epoch(0)
    (batch,) = (batch for step in loader for batch in step)
    assert shifted_labels(batch, are_shifted=True).equal(batch["labels"])


def test_a_step_without_a_token_to_learn_has_no_loss_and_no_nan(tmp_path):
    nothing = [[IGNORE_INDEX] * len(ids) for ids in IDS[:2]]
    loader = planned(tmp_path, [*nothing, IDS[2]], shift=True, max_samples=2)
    titan = TorchtitanLoader(loader)
    weights = [titan.loss_weight() for _ in titan]
    assert weights == [1.0, 0.5]
    loader.set_epoch(0)

    weight = torch.nn.Parameter(torch.ones(()))
    accelerator = SimpleNamespace(
        device="cpu", distributed_type="NO", process_index=0, num_processes=1, gradient_accumulation_steps=1
    )
    accelerator.backward = lambda loss: loss.backward()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    training = AcceleratedPlan(
        accelerator, loader.plan, [None] * 3, model=None, optimizer=optimizer, dp_rank=0, dp_size=1
    )
    training.backward(weight * 0.0, next(iter(loader)))
    optimizer.step()
    assert weight == 1
