"""Next-fit makes DeepSpeed's batches, wherever its faults do not bite; one named test for each that does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels.limits import UNLIMITED
from packer.planner import PlanConfig, make_plan
from packer.planner.packing.next_fit import next_fit
from tests.kernels.limits import limits

pytestmark = pytest.mark.frameworks

_ORDERS = {"sequential": "dataloader", "seqlen": "seqlen"}


def batches_of_deepspeed(seqlens, max_tokens, **options):
    """Return its micro-batches; it needs a sample behind the last one that it uses."""
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import batch_by_seqlens

    batches, _, _ = batch_by_seqlens(seqlens, max_tokens, **options)
    return [list(map(int, samples)) for _, samples in batches]


@given(st.data())
def test_next_fit_equals_batch_by_seqlens(data):
    seqlens = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=40))
    max_tokens = data.draw(st.integers(30, 120))
    order = data.draw(st.sampled_from(sorted(_ORDERS)))
    size = data.draw(st.integers(1, 4))
    same_size = data.draw(st.booleans())
    least = data.draw(st.sampled_from([1, 1, 2, 3]))
    most = data.draw(st.one_of(st.none(), st.integers(3, 6)))
    width = size if same_size else 1
    packed = next_fit(
        np.array([seqlens], np.int32),
        None,
        limits(max_tokens, real=True, min_samples=least, max_samples=most or UNLIMITED),
        order=order,
        width=width,
        same_seqlen=False,
        key=np.uint64(0),
    )
    ours = [packed.pieces[s : s + z].tolist() for s, z in zip(packed.starts, packed.sizes, strict=True)]
    if len(packed.leftover):
        return  # an unsatisfiable minimum ends DeepSpeed's plan
    if len(ours) < size:
        return  # it asserts that there is a step
    theirs = batches_of_deepspeed(
        # the sample that it never uses; the longest, to be the last one in order of length, too
        [*seqlens, max(seqlens)],
        max_tokens,
        min_batch_size=least,
        max_batch_size=most,
        sequence_picking_order=_ORDERS[order],
        effective_batch_size=size,
        required_microbatches_of_same_size=same_size,
    )
    assert ours[: len(ours) - len(ours) % size] == theirs


def plan_rows(plan):
    epoch = plan.epoch(0)
    return [epoch.microbatch(row).sample_ids.tolist() for row in range(epoch.num_microbatches)]


def like_deepspeed(**options):
    return PlanConfig(**{"order": "sequential", "count": "real", "max_tokens": 100} | options)


def test_plan_equals_batch_by_seqlens():
    seqlens = np.random.default_rng(0).integers(1, 60, 200).tolist()
    plan = make_plan(seqlens, like_deepspeed(dp_size=2, grad_accum=2))
    theirs = batches_of_deepspeed([*seqlens, 1], 100, effective_batch_size=4)
    assert plan_rows(plan) == theirs


def test_fault_the_last_sample_is_never_used():
    seqlens = [30, 30, 30]
    assert batches_of_deepspeed(seqlens, 100) == [[0, 1]]
    assert plan_rows(make_plan(seqlens, like_deepspeed())) == [[0, 1, 2]]


def test_fault_an_unsatisfiable_minimum_ends_the_plan():
    seqlens = [90, 90, 30, 30, 30, 30, 1]
    assert batches_of_deepspeed([30, 30, *seqlens], 100, min_batch_size=2) == [[0, 1]]
    plan = make_plan([30, 30, *seqlens], like_deepspeed(min_samples=2))
    assert plan_rows(plan) == [[0, 1], [4, 5, 6], [7, 8]]
    assert plan.header["epochs"][0]["dropped"] == {"min_samples": {"num_samples": 2, "num_tokens": 180}} or (
        plan.header["dropped"] == {"min_samples": {"num_samples": 2, "num_tokens": 180}}
    )


def test_fault_trimming_to_whole_steps_drops_the_longest():
    seqlens = list(range(1, 97))
    theirs = batches_of_deepspeed(
        [*seqlens, 96], 100, effective_batch_size=8, sequence_picking_order="seqlen"
    )
    lost = set(range(96)) - {sample for batch in theirs for sample in batch}
    assert lost == set(range(96 - len(lost), 96)) != set()
    dropped = set()
    for seed in range(8):
        plan = make_plan(seqlens, like_deepspeed(order="seqlen", dp_size=8, seed=seed))
        mine = set(range(96)) - {sample for batch in plan_rows(plan) for sample in batch}
        assert plan.header["epochs"][0]["dropped"]["remainder"]["num_samples"] == len(mine)
        dropped |= mine
    assert min(dropped) < 60


def test_fault_the_padded_area_is_not_bounded():
    seqlens = [1] * 50 + [100] + [1]
    (first, *_) = batches_of_deepspeed(seqlens, 150)
    assert len(first) * max(seqlens[sample] for sample in first) == 5_100
    plan = make_plan(seqlens, like_deepspeed(max_tokens=150, count="padded"))
    for row in range(plan.epoch(0).num_microbatches):
        microbatch = plan.epoch(0).microbatch(row)
        assert microbatch.num_samples * microbatch.padded_seqlen <= 150


def test_fault_samples_over_the_budget_are_only_logged():
    seqlens = [10, 500, 20, 1]
    assert batches_of_deepspeed(seqlens, 100) == [[0, 2]]
    plan = make_plan(seqlens, like_deepspeed(too_long="drop"))
    assert plan.header["dropped"] == {"too_long": {"num_samples": 1, "num_tokens": 500}}
