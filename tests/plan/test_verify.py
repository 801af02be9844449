"""Verification accepts what is right and names what is wrong: one planted fault a test."""

from dataclasses import replace

import numpy as np
import pytest

from packer.errors import InvariantError, PlanError, SourceChangedError
from packer.plan import Plan, load_plan, plan_in_memory, verify_plan, verify_samples
from tests import invariants, plans

ROWS = "epoch-00000/microbatches.arrow"
STEPS = "epoch-00000/steps.arrow"
DROPS = "dropped.arrow"


@pytest.fixture(params=["whole", "cut", "keep", "fill"])
def good(request) -> tuple[Plan, list[int]]:
    makers = {"whole": plans.whole_plan, "cut": plans.cut_plan}
    return makers[request.param]() if request.param in makers else plans.copying_plan(request.param)


def test_a_good_plan_is_accepted_in_memory_and_on_disk(good, tmp_path):
    plan, seqlens = good
    assert verify_plan(plan).num_samples == len(seqlens)
    plan.save(tmp_path / "plan")
    checked = verify_plan(tmp_path / "plan")
    assert checked.num_microbatches == sum(plan.epoch(e).num_microbatches for e in range(plan.num_epochs))
    assert not checked.with_metrics
    invariants.check(tmp_path / "plan", seqlens)


def put(row: int, **values):
    """Return an edit that sets columns of one row."""
    return lambda rows: rows[row].update(values)


def option(**values):
    """Return an edit that sets options in the header: rows that kept another promise now break this one."""
    return lambda header: header["config"].update(values)


def stated(**values):
    """Return an edit that sets entries of the header."""
    return lambda header: header.update(values)


def without(*rows_to_remove: int):
    def edit(rows):
        rows[:] = [row for at, row in enumerate(rows) if at not in rows_to_remove]

    return edit


def again(row: int):
    return lambda rows: rows.append(dict(rows[row]))


WHOLE = [
    # every sample once, or dropped
    (
        ROWS,
        put(0, sample_ids=[0, 4]),
        r"epoch 0, step 1, micro-batch 0 of rank 0 \(row 2\), sample 4: .*twice",
    ),
    (ROWS, put(0, sample_ids=[0, 0]), r"epoch 0, step 0, .*\(row 0\), sample 0: it is planned twice"),
    (ROWS, put(0, sample_ids=[0, 3]), r"epoch 0: sample 3 .*planned and dropped"),
    (ROWS, put(2, sample_ids=[4, 13]), r"step 1, .*\(row 2\), sample 13: the source has samples 0 to 12"),
    (ROWS, put(2, sample_ids=[4, -1]), r"step 1, .*\(row 2\), sample -1: the source has"),
    (DROPS, without(4), r"epoch 0: sample 8 is neither planned nor dropped"),
    (DROPS, again(0), r"epoch 0: sample 9 .*dropped twice"),
    (DROPS, put(0, seqlen=1, num_tokens=1), r"sample 9 \(seqlen 1\) is dropped as empty, which it is not"),
    (DROPS, put(1, seqlen=10, num_tokens=10), r"sample 10 \(seqlen 10\) is dropped as too_long, which"),
    (DROPS, put(2, seqlen=50, num_tokens=50), r"sample 12 \(seqlen 50\) is dropped as filtered, which"),
    (DROPS, put(2, reason="truncated"), r"sample 12 \(seqlen 100\) is dropped as truncated, which"),
    (DROPS, put(3, num_tokens=3), r"epoch 0: sample 3 is dropped with more tokens than it has"),
    (DROPS, put(3, num_tokens=-1), r"epoch 0: sample 3 is dropped with more tokens than it has"),
    (DROPS, put(3, num_tokens=1), r"epoch 0: sample 3 .*more or fewer tokens"),
    (DROPS, put(3, sample_id=13), r"sample 13 is not in the source"),
    (DROPS, put(3, seqlen=3, num_tokens=3), r"epoch 0: 34 tokens planned \+ 145 dropped .*178"),
    ("plan.json", stated(num_tokens=177), r"num_tokens is 177, the sources have 178"),
    ("plan.json", stated(metrics_fingerprint="0" * 64), r"metrics_fingerprint is 0+, the sources give None"),
    (
        "plan.json",
        lambda h: (h.update(num_tokens=177), h["sources"][0].update(num_tokens=177)),
        r"34 tokens planned \+ 144 dropped are not the source's 177",
    ),
    ("plan.json", lambda h: h["epochs"][0].update(num_samples=6), r"epoch 0: num_samples is 6 .*rows give 7"),
    ("plan.json", lambda h: h["epochs"][0]["dropped"].clear(), r"epoch 0: dropped is {} in plan.json"),
    # bounds
    ("plan.json", option(max_tokens=13), r"epoch 0, step 1, .*\(row 2\): its tensor has 14 tokens \(2 × 7\)"),
    ("plan.json", option(max_tokens=10, count="real"), r"\(row 2\): it has 11 tokens, over max_tokens=10"),
    ("plan.json", option(max_samples=1), r"step 0, .*\(row 0\): it has 2 samples, over max_samples=1"),
    (
        "plan.json",
        option(min_samples=2),
        r"step 0, .*rank 1 \(row 1\): it has 1 sample, under min_samples=2",
    ),
    ("plan.json", option(max_attention=97), r"\(row 2\): its attention takes 98, over max_attention=97"),
    ("plan.json", option(max_seqlen=7), r"step 0, .*\(row 1\), sample 2: seqlen 8 is over max_seqlen=7"),
    # shapes
    (ROWS, put(2, padded_seqlen=6), r"step 1, .*\(row 2\): padded_seqlen is 6, its samples need 7"),
    ("plan.json", option(pad_multiple=5), r"rank 1 \(row 1\): padded_seqlen 8 is no multiple of 5"),
    ("plan.json", option(sp_size=5), r"rank 1 \(row 1\): padded_seqlen 8 is no multiple of 5"),
    ("plan.json", option(fixed_seqlen=5), r"rank 1 \(row 1\): padded_seqlen is 8, fixed_seqlen=5"),
    (
        "plan.json",
        option(num_shapes=4),
        r"padded_seqlen takes 5 values \(5, 6, 7, 8, 9, …\), over num_shapes=4",
    ),
    ("plan.json", option(same_num_samples=True), r"\(row 1\): num_samples is 1, .* has 2: same_num_samples"),
    ("plan.json", option(same_seqlen=True), r"\(row 1\): padded_seqlen is 8, .* has 5: same_seqlen"),
    (
        "plan.json",
        lambda h: h["shapes"][0].update(count=9),
        r'shapes in plan.json are not those of the rows: .*"count": 9.* is stated, the rows give',
    ),
    ("plan.json", lambda h: h["shapes"].pop(), r"shapes .*: \d are stated, the rows give \d"),
    ("plan.json", stated(shapes=None), r"shapes .*: the table is left out"),
    # rows
    (ROWS, put(2, step=0), r"\(row 2\): its columns say step 0, accum 0, dp_rank 0"),
    (ROWS, put(2, accum=1), r"\(row 2\): its columns say step 1, accum 1, dp_rank 0"),
    (ROWS, put(2, dp_rank=1), r"\(row 2\): its columns say step 1, accum 0, dp_rank 1"),
    (ROWS, put(1, sample_ids=[], seqlens=[]), r"\(row 1\): it holds no sample"),
    (ROWS, put(1, seqlens=[0]), r"\(row 1\), sample 2: seqlen is 0"),
    (ROWS, put(1, num_samples=2), r"\(row 1\): num_samples is 2, its samples give 1"),
    (ROWS, put(1, num_tokens=9), r"\(row 1\): num_tokens is 9, its samples give 8"),
    (ROWS, put(1, max_seqlen=9), r"\(row 1\): max_seqlen is 9, its samples give 8"),
    (ROWS, put(1, cost=9), r"\(row 1\): cost is 9, its samples give 8"),
    ("plan.json", option(balance="flops", hidden_size=1), r"\(row 0\): cost is 8, its samples give 130"),
    (ROWS, put(1, is_filler=True), r"\(row 1\): it is a filler, with remainder=drop"),
    (ROWS, put(1, is_repeat=True), r"\(row 1\): it is a repeat, with remainder=drop"),
    (ROWS, put(1, is_repeat=True, is_filler=True), r"\(row 1\): it is a filler and a repeat at once"),
    # steps
    (STEPS, put(1, step=2), r"epoch 0, step 1: step is 2"),
    (STEPS, put(1, num_samples=5), r"epoch 0, step 1: num_samples is 5, its micro-batches give 4"),
    (STEPS, put(1, num_tokens=19), r"epoch 0, step 1: num_tokens is 19, its micro-batches give 18"),
    (STEPS, put(1, num_loss_tokens=1), r"epoch 0, step 1: num_loss_tokens is 1, .* give 14"),
    (STEPS, put(1, max_seqlen=9), r"epoch 0, step 1: max_seqlen is 9, its micro-batches give 7"),
    (STEPS, put(1, samples_before=4), r"epoch 0, step 1: samples_before is 4, its micro-batches give 3"),
    (STEPS, put(1, tokens_before=4), r"epoch 0, step 1: tokens_before is 4, its micro-batches give 16"),
    (STEPS, put(0, num_loss_tokens=None), r"num_loss_tokens"),
    ("plan.json", stated(loss_tokens=None), r"epoch 0: num_loss_tokens must be unknown"),
    # learning rate
    (STEPS, put(1, lr_scale=1.0), r"epoch 0, step 1: lr_scale is 1, linear of 4 over 3.75 gives 1.06"),
    ("plan.json", stated(lr_base=4.0), r"lr_base is 4.0 in plan.json, the steps give 3.75"),
    ("plan.json", option(lr_base=4.0), r"lr_base is 3.75 in plan.json, the steps give 4"),
    ("plan.json", option(lr_by="tokens"), r"lr_base is 3.75 in plan.json, the steps give"),
    ("plan.json", option(lr_by="loss-tokens"), r"lr_base is 3.75 in plan.json, the steps give"),
    ("plan.json", option(lr_scaling="sqrt"), r"epoch 0, step 0: lr_scale is 0.8, sqrt of 3 over 3.75"),
    ("plan.json", option(lr_scaling="none"), r"epoch 0, step 0: lr_scale is 0.8, none of 3 over 1 gives 1"),
    ("plan.json", option(lr_max_scale=1.0), r"epoch 0, step 1: lr_scale is 1.06667, .* gives 1"),
    # all ranks have the same number of micro-batches
    (ROWS, without(3), r"3 micro-batches, 2 steps of 2 planned"),
    (STEPS, without(1), r"4 micro-batches, 1 step of 2 planned"),
]

CUT = [
    (ROWS, put(0, starts=[0, -1]), r"\(row 0\), sample 1: it starts at token -1"),
    (ROWS, put(0, sample_ids=[0, 0]), r"\(row 0\), sample 0: it has two pieces in one micro-batch"),
    (ROWS, put(1, starts=[7]), r"epoch 0: sample 0 is planned twice: two of its pieces share tokens"),
    (ROWS, put(1, starts=[18]), r"epoch 0: sample 0 \(seqlen 25\) is planned beyond its end"),
    (ROWS, put(3, starts=[2]), r"epoch 0: sample 3 is planned in pieces that leave a gap"),
    (ROWS, put(0, starts=[0, 3]), r"epoch 0: sample 1 is planned in pieces that leave a gap"),
    (DROPS, put(0, num_tokens=5), r"sample 3 \(seqlen 14\) is dropped as truncated, which it is not"),
    (DROPS, put(2, seqlen=26), r"epoch 0: sample 0 is dropped with two different lengths"),
    (DROPS, put(1, sample_id=2), r"epoch 0: sample 0 \(seqlen 25\) has more or fewer tokens"),
    (ROWS, put(0, padded_seqlen=8), r"\(row 0\): padded_seqlen is 8, its samples need 10"),
    ("plan.json", option(pad_segments_to=8), r"\(row 0\): padded_seqlen is 12, its samples need 16"),
    (
        "plan.json",
        option(max_tokens=11),
        r"\(row 0\): its tensor has 12 tokens \(1 × 12\), over max_tokens=11",
    ),
    ("plan.json", option(max_attention=67), r"\(row 0\): its attention takes 68, over max_attention=67"),
]


def plant(plan: Plan, folder, name, edit, message) -> None:
    plan.save(folder)
    plans.forge(folder, name, edit)
    with pytest.raises(PlanError, match=message) as caught:
        verify_plan(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "edit", "message"), WHOLE, ids=[f"{i}-{c[2][:40]}" for i, c in enumerate(WHOLE)]
)
def test_a_fault_in_a_plan_of_whole_samples_is_named(tmp_path, name, edit, message):
    plan, seqlens = plans.whole_plan()
    plant(plan, tmp_path / "plan", name, edit, message)
    with pytest.raises((AssertionError, KeyError, ValueError, TypeError)):
        invariants.check(tmp_path / "plan", seqlens)


@pytest.mark.parametrize(
    ("name", "edit", "message"), CUT, ids=[f"{i}-{c[2][:40]}" for i, c in enumerate(CUT)]
)
def test_a_fault_in_a_plan_of_pieces_is_named(tmp_path, name, edit, message):
    plan, seqlens = plans.cut_plan()
    plant(plan, tmp_path / "plan", name, edit, message)
    with pytest.raises((AssertionError, KeyError, ValueError, TypeError)):
        invariants.check(tmp_path / "plan", seqlens)


def test_lengths_are_compared_with_the_metrics(good, tmp_path):
    plan, seqlens = good
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", seqlens)
    assert verify_plan(plan, metrics=metrics).with_metrics
    for sample in range(len(seqlens)):
        other = [n + (i == sample) for i, n in enumerate(seqlens)]
        folder = plans.write_metric(tmp_path / str(sample), "seqlen", other)
        with pytest.raises(InvariantError, match=rf"sample {sample}\b"):
            verify_plan(plan, metrics=folder)


def test_metrics_of_another_data_set_are_refused(tmp_path):
    plan, seqlens = plans.whole_plan()
    shorter = plans.write_metric(tmp_path / "shorter", "seqlen", seqlens[:-1])
    with pytest.raises(SourceChangedError, match=r"13 samples.*has 12"):
        verify_plan(plan, metrics=shorter)
    plan.save(tmp_path / "plan")

    def of_others(header):
        header["metrics_fingerprint"] = header["sources"][0]["fingerprint"] = "0" * 64

    plans.forge(tmp_path / "plan", "plan.json", of_others)
    same = plans.write_metric(tmp_path / "same", "seqlen", seqlens)
    with pytest.raises(SourceChangedError, match="made from metrics 000000000000"):
        verify_plan(tmp_path / "plan", metrics=same)


def test_loss_tokens_of_labels_are_compared_with_their_metric(tmp_path):
    seqlens, labels = [4, 4, 2, 3], [1, 0, 2, 3]
    rows = [plans.Row(pieces=[(0, 4), (1, 4)]), plans.Row(pieces=[(2, 2), (3, 3)])]
    epoch = replace(plans.epoch(rows), step_num_loss_tokens=np.array([1, 5]))
    facts = replace(plans.facts(seqlens), loss_tokens="labels")
    plan = plan_in_memory(facts, [epoch], dropped=plans.drops())
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", seqlens)
    plans.write_metric(metrics, "loss_tokens", labels)
    verify_plan(plan, metrics=metrics)
    wrong = replace(epoch, step_num_loss_tokens=np.array([1, 4]))
    with pytest.raises(InvariantError, match=r"epoch 0, step 1: num_loss_tokens is 4, .* give 5"):
        verify_plan(plan_in_memory(facts, [wrong], dropped=plans.drops()), metrics=metrics)


def of_one_sample_more(header):
    header["num_samples"] += 1
    header["sources"][0]["num_samples"] += 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [("keep", "copies no cheapest micro-batch"), ("fill", "repeated, but planned nowhere")],
)
def test_a_copy_of_what_is_planned_nowhere_is_named(tmp_path, kind, message):
    plan, _ = plans.copying_plan(kind)
    plan.save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", "plan.json", of_one_sample_more)
    plans.forge(tmp_path / "plan", ROWS, put(3, sample_ids=[3]))
    plans.forge(tmp_path / "plan", DROPS, lambda rows: rows.append(lost(3)))
    with pytest.raises(InvariantError, match=rf"step 1, .*rank 1 \(row 3\), sample 3: .*{message}"):
        verify_plan(tmp_path / "plan")


def test_a_filler_that_is_not_the_cheapest_is_named(tmp_path):
    rows = [plans.Row(pieces=[(i, n)]) for i, n in enumerate((5, 2, 4))]
    copies = [plans.Row(pieces=rows[i].pieces, is_filler=True) for i in (1, 0)]
    facts = plans.facts([5, 2, 4], grad_accum=4, remainder="keep")
    for copy, message in zip(copies, (None, "copies no cheapest micro-batch"), strict=True):
        epoch = plans.epoch([*rows, copy], grad_accum=4)
        plan = plan_in_memory(facts, [epoch], dropped=plans.drops())
        if message is None:
            verify_plan(plan)
            continue
        with pytest.raises(InvariantError, match=message):
            verify_plan(plan)


def test_the_number_of_copies_is_as_stated(tmp_path):
    plan, _ = plans.copying_plan("fill")
    plan.save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", "plan.json", lambda h: h["epochs"][0].update(num_repeats=2))
    with pytest.raises(InvariantError, match=r"2 micro-batches are is_repeat in plan.json, 1 in"):
        verify_plan(tmp_path / "plan")


def lost(sample: int) -> dict[str, object]:
    return {"epoch": None, "sample_id": sample, "seqlen": 0, "num_tokens": 0, "reason": "empty"}


@pytest.mark.parametrize("passes", [1, 3])
def test_pieces_are_checked_some_samples_at_a_time(monkeypatch, passes):
    plan, _ = plans.cut_plan()
    monkeypatch.setattr(verify_samples, "PIECES_PER_ROUND", 10 // passes)
    verify_plan(plan)


def test_a_changed_file_and_a_changed_content_are_told_apart(tmp_path):
    plan, _ = plans.whole_plan()
    plan.save(tmp_path / "plan")
    path = tmp_path / "plan" / STEPS
    data = bytearray(path.read_bytes())
    at = data.index(np.float64(3 / 3.75).tobytes())  # a learning-rate factor
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(PlanError, match=r"steps.arrow is not the file that was written: its SHA-256"):
        verify_plan(tmp_path / "plan")
    with pytest.raises(PlanError, match=r"batch 0 of .*steps.arrow is damaged \(its values are not those"):
        load_plan(tmp_path / "plan").epoch(0).step(0)
    plan.save(tmp_path / "other")
    plans.forge(tmp_path / "other", "plan.json", stated(content_hash="0" * 64))
    with pytest.raises(InvariantError, match=r"content_hash is 000000000000… in plan.json, .* over the"):
        verify_plan(tmp_path / "other")


def test_progress_is_told(good):
    plan, _ = good
    told = []
    verify_plan(plan, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == verify_plan(plan).num_microbatches


def test_both_budgets_of_pairs_hold(tmp_path):
    source, target = [3, 5], [4, 2]
    row = plans.Row(pieces=[(0, 3), (1, 5)], padded_seqlens={"source": 5, "target": 4})
    facts = plans.facts(source, max_tokens={"source": 10, "target": 8})
    metrics = plans.write_metric(tmp_path / "metrics", "source", source)
    plans.write_metric(metrics, "target", target)
    for padded, budget, message in (
        ({"source": 5, "target": 4}, {"source": 10, "target": 8}, None),
        (
            {"source": 5, "target": 4},
            {"source": 10, "target": 7},
            r"tensor has 8 tokens \(2 × 4\), .* target=7",
        ),
        (
            {"source": 5, "target": 3},
            {"source": 10, "target": 8},
            "padded_seqlen_target is 3, its samples need 4",
        ),
        ({"source": 5}, {"source": 10, "target": 8}, "column padded_seqlen_target is missing"),
    ):
        epoch = plans.epoch([replace(row, padded_seqlens=padded)])
        config = dict(facts.config) | {"max_tokens": budget}
        plan = plan_in_memory(replace(facts, config=config), [epoch], dropped=plans.drops())
        if message is None:
            verify_plan(plan, metrics=metrics)
            invariants.check(plan.save(tmp_path / "plan").path, source)
            continue
        with pytest.raises(InvariantError, match=message):
            verify_plan(plan, metrics=metrics)
