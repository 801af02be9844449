"""A batch stays a batch, and its tensors are found wherever they are."""

import copy
import pickle
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from packer.runtime import Batch, PlanLoader
from tests.runtime.replays import Tokens, lengths, make_plan

SEQLENS = lengths(8)


def one_batch() -> Batch:
    def images(sample_id: int, seqlen: int) -> dict[str, Any]:
        return {"pixels": torch.full((2, 2), sample_id), "name": f"image {sample_id}"}

    dataset = Tokens(SEQLENS, crops=lambda i, n: (torch.ones(2), [torch.zeros(1)]), images=images)
    return next(iter(PlanLoader(make_plan(SEQLENS, steps=2), dataset).microbatches()))


def test_copies_and_unions_keep_what_the_plan_says() -> None:
    batch = one_batch()
    more = {"extra": torch.ones(1)}
    copies = [batch.copy(), copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))]
    for made in (*copies, batch | more, more | batch):
        assert isinstance(made, Batch)
        assert made.num_tokens == batch.num_tokens
        np.testing.assert_array_equal(made.sample_ids, batch.sample_ids)
        assert made.step == batch.step
    assert list(batch | more)[-1] == next(iter(more | batch)) == "extra"
    assert (batch | {"labels": 1})["labels"] == 1
    assert ({"labels": 1} | batch)["labels"] is batch["labels"]
    assert batch.copy()["labels"] is batch["labels"]


def test_tensors_in_lists_and_mappings_are_moved_and_pinned(monkeypatch: Any) -> None:
    batch = one_batch()
    assert isinstance(batch["images"][0], dict)
    moved = batch.to("meta")
    found = [
        moved["input_ids"],
        *(image["pixels"] for image in moved["images"]),
        *(crop[0] for crop in moved["crops"]),
        *(crop[1][0] for crop in moved["crops"]),
    ]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert [image["name"] for image in moved["images"]] == [f"image {i}" for i in batch.sample_ids]
    assert isinstance(moved["crops"][0], tuple)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch.pin_memory()
    assert len(pinned) == len(list(filter(torch.is_tensor, pytree.tree_leaves(dict(batch)))))


def test_torchs_walk_over_nested_values_gives_a_batch_back() -> None:
    batch = one_batch()
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, {"inputs": [batch]})["inputs"][0]
    assert isinstance(doubled, Batch)
    assert torch.equal(doubled["input_ids"], batch["input_ids"] * 2)
    assert doubled.num_tokens == batch.num_tokens
    assert doubled.step is batch.step
    leaves, structure = pytree.tree_flatten(batch)
    assert structure == pytree.tree_flatten(doubled)[1]
    assert list(pytree.tree_unflatten(leaves, structure)) == list(batch)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert "['input_ids']" in paths
