"""Wrapped rows as the loader delivers them: every token of the stream once, with the borders of documents."""

from itertools import pairwise

import numpy as np

from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader

LENGTHS = np.random.default_rng(5).integers(1, 90, 60)


class Documents:
    """Document i is i · 1000, i · 1000 + 1, …"""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, document):
        return {"input_ids": 1000 * document + np.arange(LENGTHS[document])}


def test_documents_come_whole_with_their_borders_and_a_label_for_all_but_the_first_of_a_piece():
    config = PlanConfig(max_tokens=64, layout="packed", packing="wrapped", remainder="keep", dp_size=2)
    plan = make_plan(LENGTHS, config)
    seen, num_labels, num_pieces = [], 0, 0
    for rank in range(2):
        for batch in PlanLoader(plan, Documents(), dp_rank=rank, dp_size=2).microbatches():
            ids, positions, labels = (
                batch[name][0].numpy() for name in ("input_ids", "position_ids", "labels")
            )
            edges = batch["cu_seqlens"].tolist()
            assert edges == [0, *np.cumsum(batch.seqlens).tolist()]
            if batch.info.is_filler:
                continue
            for first, stop in pairwise(edges):
                assert positions[first:stop].tolist() == list(range(stop - first))
                assert np.diff(ids[first:stop]).tolist() == [1] * (stop - first - 1)  # of one document
                assert labels[first] == -100
                assert labels[first + 1 : stop].tolist() == ids[first + 1 : stop].tolist()
                num_pieces += 1
            seen += ids.tolist()
            num_labels += int(np.count_nonzero(labels != -100))
    assert sorted(seen) == [1000 * i + at for i, n in enumerate(LENGTHS) for at in range(n)]
    assert num_pieces > len(LENGTHS)
    assert num_labels == LENGTHS.sum() - num_pieces
    assert num_labels == sum(int(table.num_loss_tokens.sum()) for table in plan.epoch(0).steps())
