"""Preference pairs from the file to the batch: packed, where no member sees another, or padded by member."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.errors import ConfigError, LengthMismatchError
from tests.word_tokenizer import write_tokenizer

MEMBERS = ("chosen", "rejected")


@pytest.fixture
def pairs(tmp_path: Path) -> Any:
    """Metrics and data set of 40 pairs."""
    rows = [
        {"q": f"w{2 + n % 5}" + " w3" * (n % 4), "good": " w4" * (1 + n % 3), "bad": " w5" * (n % 6)}
        for n in range(40)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packer.analyze(
        path,
        out=tmp_path / "metrics",
        prompt_column="q",
        completion_column={"chosen": "good", "rejected": "bad"},
        tokenizer=write_tokenizer(tmp_path, 20),
    )
    metrics = packer.open_metrics(tmp_path / "metrics")
    return metrics, packer.open_dataset(path, metrics=metrics)


def test_packed_members_are_samples_of_their_own(pairs: Any) -> None:
    metrics, dataset = pairs
    config = packer.PlanConfig(max_tokens=60, layout="packed", grad_accum=2, remainder="keep")
    plan = packer.make_plan(metrics, config)
    seen = []
    for step in packer.PlanLoader(plan, dataset, num_workers=0):
        found = 0
        for batch in step:
            edges = batch["cu_seqlens"].tolist()
            for at, sample_id in enumerate(batch.sample_ids.tolist()):
                for number, member in enumerate(MEMBERS):
                    start, stop = edges[len(MEMBERS) * at + number :][:2]
                    expected = dataset[sample_id][member]
                    assert batch["input_ids"][0, start:stop].tolist() == expected["input_ids"].tolist()
                    labels = np.concatenate([[-100], expected["labels"][1:]])
                    if not batch.is_filler:
                        assert batch["labels"][0, start:stop].tolist() == labels.tolist()
                    assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
            found += int((batch["labels"] != -100).sum())
            seen += [] if batch.is_filler else batch.sample_ids.tolist()
        assert found == step.num_loss_tokens
    assert sorted(seen) == list(range(40))


def test_padded_members_are_batches_of_their_own(pairs: Any) -> None:
    metrics, dataset = pairs
    config = packer.PlanConfig(max_tokens={"chosen": 40, "rejected": 40}, remainder="keep")
    plan = packer.make_plan(metrics, config)
    seen = []
    for batch in packer.PlanLoader(plan, dataset, num_workers=0).microbatches():
        for at, sample_id in enumerate(batch.sample_ids.tolist()):
            for member in MEMBERS:
                ids = batch[member]["input_ids"][at][batch[member]["attention_mask"][at].bool()]
                assert torch.equal(ids, torch.from_numpy(dataset[sample_id][member]["input_ids"]).long())
        seen += batch.sample_ids.tolist()
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "padded"}, "plan with --layout packed, or give each a budget: --max-tokens chosen=N,rej"),
        ({"layout": "packed", "pad_segments_to": 4}, "plan without it"),
        ({"layout": "packed", "too_long": "split"}, "--too-long split cannot cut a pair"),
        ({"layout": "packed", "sp_size": 2}, "pairs of sequences are not sliced"),
    ],
)
def test_plans_that_have_no_place_for_pairs(pairs: Any, options: dict[str, Any], message: str) -> None:
    metrics, dataset = pairs
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=64, **options))
    with pytest.raises(ConfigError, match=message):
        packer.PlanLoader(plan, dataset, sp_size=options.get("sp_size", 1), sp_rank=0)


def test_another_length_stops_the_run(pairs: Any) -> None:
    metrics, dataset = pairs
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=64, layout="packed"))
    samples = [dataset[row] for row in range(len(dataset))]
    for sample in samples:
        sample["rejected"] = sample["chosen"]
    with pytest.raises(LengthMismatchError, match=r"sample \d+ has"):
        list(packer.PlanLoader(plan, samples, num_workers=0).microbatches())
