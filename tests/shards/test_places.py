"""The plan turned round, against a plain twin."""

from pathlib import Path

import numpy as np
import pytest

from packer.plan import plan_in_memory
from packer.shards import places
from packer.shards.places import PlaceFinder, write_places
from tests import plans


@pytest.mark.parametrize("run_places", [1, 3, 1000])
@pytest.mark.parametrize("window", [1, 4, 1000])
def test_every_place_is_found_from_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_places: int, window: int
) -> None:
    monkeypatch.setattr(places, "_RUN_PLACES", run_places)
    monkeypatch.setattr(places, "_WINDOW", window)
    seqlens = [9, 4, 6, 3]
    rows = [
        [plans.Row(pieces=[(0, 5, 0), (1, 4, 0)]), plans.Row(pieces=[(0, 4, 5), (2, 6, 0)], is_filler=True)],
        [plans.Row(pieces=[(2, 6, 0), (0, 5, 0)]), plans.Row(pieces=[(1, 4, 0), (0, 4, 5)])],
    ]
    plan = plan_in_memory(
        plans.facts(seqlens, epochs=2, layout="packed"),
        [plans.epoch(epoch, layout="packed", cut=True) for epoch in rows],
        dropped=plans.drops((3, 3, 3, "filtered")),
    )
    expected = [piece for epoch in rows for row in epoch for piece in row.pieces]
    write_places(plan, [0, 1], tmp_path)
    finder = PlaceFinder(tmp_path, num_epochs=2)
    for first, last in [(0, 1), (0, 4), (2, 3), (1, 3), (3, 4), (0, 0)]:
        found = finder.between(first, last)
        assert [tuple(row) for row in zip(*(column.tolist() for column in found), strict=True)] == sorted(
            (sample_id, place, start, seqlen)
            for place, (sample_id, seqlen, start) in enumerate(expected)
            if first <= sample_id < last
        )
    write_places(plan, [1], tmp_path)  # made anew
    assert PlaceFinder(tmp_path, num_epochs=1).between(0, 4).place.tolist() == [1, 3, 2, 0]
    assert np.array_equal(PlaceFinder(tmp_path, num_epochs=1).between(3, 4).place, [])
