"""What workers send: every batch arrives as it was, whichever way its bytes travel."""

import pickle
import select
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import SourceError
from packer.runtime import Batch, PlanLoader
from packer.runtime.loader.parcel import INLINE_BYTES, Parcel
from packer.runtime.loader.progress import Place, Read
from tests.runtime.replays import Tokens, lengths, make_plan

PLACE = Place(1, 20, 3)


def sent(batch: Batch) -> Batch:
    """Send a batch as a worker does."""
    parcel: Parcel = pickle.loads(bytes(ForkingPickler.dumps(Parcel.of(Read(PLACE, batch, ("w",))))))
    read = parcel.unpack()
    assert (read.place, read.fields) == (PLACE, ("w",))
    assert isinstance(read.outcome, Batch)
    return read.outcome


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j, 3j]),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor(3.5),
        torch.empty((0, 5)),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([1.5]).expand(3, 4),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.arange(INLINE_BYTES),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.layout}",
)
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    before = tensor.detach().clone()
    arrived = sent(Batch({"flag": torch.ones(3, dtype=torch.uint8), "tensor": tensor, "names": ["a", "b"]}))
    assert list(arrived) == ["flag", "tensor", "names"]
    found = arrived["tensor"]
    assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found.detach(), before)
    assert arrived["names"] == ["a", "b"]
    # Each can be written to without a trace in the others.
    arrived["flag"].zero_()
    assert torch.equal(found.detach(), before)


@pytest.mark.parametrize("long", [False, True])
def test_nested_batches_keep_what_the_plan_says_of_them(long: bool) -> None:
    seqlens = lengths(8, longest=INLINE_BYTES if long else 4)
    batch = next(iter(PlanLoader(make_plan(seqlens, steps=2), Tokens(seqlens)).microbatches()))
    batch.step = None
    outer = sent(Batch({"source": batch, "target": batch}, batch.info))
    for member in (outer["source"], outer["target"]):
        assert isinstance(member, Batch)
        assert all(torch.equal(member[name], batch[name]) for name in batch)
        assert member.num_tokens == batch.num_tokens
        np.testing.assert_array_equal(member.sample_ids, batch.sample_ids)
    assert outer.padded_seqlen == batch.padded_seqlen


def test_a_batch_without_tensors_arrives() -> None:
    empty: dict[str, Any] = {}
    assert sent(Batch(empty)) == empty


def test_a_parcel_is_pinned_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = Batch({"input_ids": torch.arange(5), "mask": torch.ones(3), "inner": Batch({"x": torch.ones(2)})})
    arrived = Parcel.of(Read(PLACE, batch)).pin_memory().unpack().outcome
    assert len(pinned) == 1
    for tensor in (arrived["input_ids"], arrived["mask"], arrived["inner"]["x"]):
        # Views, so that the allocator knows which copies its piece must outlive.
        assert tensor.untyped_storage().data_ptr() == pinned[0].data_ptr()
    assert torch.equal(arrived["input_ids"], torch.arange(5))


def test_every_message_is_written_whole_or_not_at_all() -> None:
    """However much hangs on a batch: a worker that is killed meanwhile leaves nothing half-written."""
    names = [f"sample {number}" for number in range(5000)]
    parcel = Parcel.of(Read(PLACE, Batch({"names": names, "ids": torch.arange(5000)})))
    assert len(ForkingPickler.dumps((PLACE.step, parcel))) < select.PIPE_BUF
    assert pickle.loads(bytes(ForkingPickler.dumps(parcel))).unpack().outcome["names"] == names


def test_what_cannot_be_sent_is_an_error_in_its_place() -> None:
    read = pickle.loads(ForkingPickler.dumps(Parcel.of(Read(PLACE, Batch({"f": [lambda: 1]}))))).unpack()
    assert read.place == PLACE
    assert isinstance(read.outcome, SourceError)
    assert "micro-batch 3 of step 20 holds what cannot be sent from a worker" in str(read.outcome)
