"""The design effect of a plan's rows equals the one that its definition gives, and is what a plan states."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import InvariantError
from packer.plan import plan_in_memory, verify_plan
from packer.plan.design_effect import design_effect
from tests import invariants, plans

# small steps, and such that a square takes more than 64 bits
steps = st.sampled_from([[1, 2, 3, 10, 40], [2**28, 2**29, 2**30]]).flatmap(
    lambda pool: st.lists(
        st.lists(st.lists(st.sampled_from(pool), min_size=1, max_size=4), min_size=2, max_size=2), max_size=6
    )
)


def planned(steps, fillers=()):
    """Return a plan of steps of two packed rows, each a list of lengths."""
    lengths = [length for step in steps for row in step for length in row]
    ids = iter(range(len(lengths)))
    rows = [
        plans.Row(pieces=[(next(ids), length) for length in row], padded_seqlen=max(row))
        for step in steps
        for row in step
    ]
    for at in fillers:
        rows[at].is_filler = True
    options = {"layout": "packed", "grad_accum": 2}
    facts = plans.facts(lengths, **options, remainder="keep")
    return plan_in_memory(facts, [plans.epoch(rows, **options)], dropped=plans.drops())


@pytest.mark.parametrize("pieces_per_batch", [1 << 18, 2])
@given(steps, st.booleans())
def test_it_equals_the_definition_over_any_record_batches(pieces_per_batch, drawn, with_filler):
    fillers = [2 * len(drawn) - 1] if with_filler and drawn else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.plan.schema.PIECES_PER_BATCH", pieces_per_batch)
        plan = planned(drawn, fillers)
    trained = [[length for row in step for length in row] for step in drawn]
    if fillers:
        trained[-1] = list(drawn[-1][0])
    expected, found = invariants.design_effect(trained), design_effect(plan.epoch(0), 2)
    assert (found is None) == (expected is None)
    assert found is None or isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)


def test_steps_of_one_length_each_and_steps_of_one_mix():
    apart = planned([[[1] * 8, [1] * 8], [[16], [16]], [[1] * 8, [1] * 8]])
    alike = planned([[[1] * 8, [16]], [[1] * 8, [16]], [[1] * 8, [16]]])
    assert design_effect(apart.epoch(0), 2) > 2
    assert design_effect(alike.epoch(0), 2) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("design_effect.seqlen", {"design_effect": {"seqlen": 1.23, "source": None}}),
        ("design_effect.seqlen", {"design_effect": {"seqlen": None, "source": None}}),
        ("rank_imbalance", {"rank_imbalance": 0.5}),
        ("rank_imbalance_by_step", {"rank_imbalance_by_step": 0.5}),
    ],
)
def test_a_figure_that_the_rows_do_not_give_is_named(tmp_path, name, values):
    plan, seqlens = plans.whole_plan()
    plan.save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", "plan.json", lambda header: header["epochs"][1].update(values))
    with pytest.raises(InvariantError, match=rf"epoch 1: {name} is .* in plan.json, the rows give "):
        verify_plan(tmp_path / "plan")
    with pytest.raises(AssertionError):
        invariants.check(tmp_path / "plan", seqlens)


def test_a_plan_of_version_1_opens_and_has_no_design_effect(tmp_path):
    plan, _ = plans.whole_plan()
    plan.save(tmp_path / "plan")

    def older(header):
        header["version"] = 1
        header |= {"sources": [], "definition": None}
        del header["phases"]
        for counts in header["epochs"]:
            del (
                counts["design_effect"],
                counts["rank_imbalance_by_step"],
                counts["num_cut"],
                counts["sources"],
            )
            counts["rank_imbalance"] = 0.117  # by an older rule

    plans.forge(tmp_path / "plan", "plan.json", older)
    assert verify_plan(tmp_path / "plan").num_steps == 4
