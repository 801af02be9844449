"""A plan of several sources, played from a data set each: whose samples they are, and whose fault."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import ConfigError, LengthMismatchError, PackerError, SourceChangedError, SourceError
from packer.plan import PlanSource
from packer.plan.sources import with_rows
from packer.runtime import PlanLoader
from packer.runtime.batches.sources import SourceDatasets, dataset_of
from tests.plans import MIXED, mixed_plan
from tests.runtime.replays import BatchedTokens, Tokens, lengths, make_plan


def datasets(kind: type[Tokens] = Tokens) -> dict[str, Any]:
    return {name: kind(seqlens) for name, seqlens in MIXED.items()}


def load(data: Any, **options: Any) -> PlanLoader:
    return PlanLoader(mixed_plan(**options), data, dp_rank=0, dp_size=1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Tokens, BatchedTokens])
def test_every_sample_is_its_sources_own_and_says_so(kind: type[Tokens], num_workers: int) -> None:
    loader = PlanLoader(mixed_plan(), datasets(kind), dp_rank=0, dp_size=1, num_workers=num_workers)
    first_ids, names = (0, 7, 10), list(MIXED)
    seen = []
    for step in loader:
        for batch in step:
            for number, source in enumerate(batch.sources.tolist()):
                row = int(batch.sample_ids[number]) - first_ids[source]
                expected = Tokens(MIXED[names[source]])[row]["input_ids"]
                length = batch.seqlens[number]
                assert batch["input_ids"][number, :length].tolist() == expected.tolist()
                seen.append((names[source], row))
    assert sorted(seen) == sorted(
        [("web", row) for row in range(6)] + [("code", row) for row in (0, 0, 1, 2, 2)]
    )


def test_one_data_set_that_counts_through_all_sources_is_taken_as_it_is() -> None:
    joined = Tokens([length for seqlens in MIXED.values() for length in seqlens])
    loader = load(joined)
    assert [batch.sources.tolist() for step in loader for batch in step][:3] == [[0, 0], [1], [0]]
    assert joined.read[:3] == [0, 1, 7]


def test_batches_of_one_source_say_so_too() -> None:
    seqlens = lengths(8)
    loader = PlanLoader(make_plan(seqlens, steps=2), Tokens(seqlens), dp_rank=0, dp_size=1)
    assert [batch.sources.tolist() for step in loader for batch in step] == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda d: d | {"pages": d.pop("web")}, ConfigError, "for 'pages', .*sources are web, code, old"),
        (lambda d: {"web": d["web"], "old": d["old"]}, ConfigError, "no data sets are given for 'code'"),
        (
            lambda d: d | {"web": d["code"], "code": d["web"]},
            SourceChangedError,
            "data set of web has 3 .* 7",
        ),
        (lambda d: d | {"code": Tokens([6, 1])}, SourceChangedError, "data set of code has 2 .* 3"),
        (lambda d: d | {"code": 7}, ConfigError, "the data set of code, a int cannot be asked"),
        (lambda d: d["web"], SourceChangedError, 'has 7 samples and the plan was made for 12; .*"code": …'),
    ],
    ids=["renamed", "missing", "swapped", "shorter", "no data set", "one of them alone"],
)
def test_other_data_than_the_planned_sources_are_refused_by_name(
    given: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        load(given(datasets()))


def test_a_mapping_for_a_plan_without_names_is_refused() -> None:
    plan = make_plan(lengths(8), steps=2)
    with pytest.raises(ConfigError, match="for 'web', the plan's sources are one without a name"):
        PlanLoader(plan, {"web": Tokens(lengths(8))}, dp_rank=0, dp_size=1)
    by_id = dict(enumerate(Tokens(lengths(8))[i] for i in range(8)))
    assert dataset_of(plan, by_id) is by_id


class Opened(Tokens):
    metrics_fingerprint = "f" * 64


def test_a_source_that_was_opened_with_other_metrics_is_refused_by_name() -> None:
    plan = mixed_plan()
    plan.header["sources"][1]["fingerprint"] = "0" * 64
    data = datasets() | {"code": Opened(MIXED["code"])}
    with pytest.raises(SourceChangedError, match="data set of code was opened with metrics ffffffffffff…"):
        PlanLoader(plan, data, dp_rank=0, dp_size=1)
    plan = mixed_plan()
    plan.header["sources"][1]["fingerprint"] = "f" * 64
    PlanLoader(plan, data, dp_rank=0, dp_size=1)


def test_sources_with_labels_of_two_kinds_are_refused() -> None:
    plan = mixed_plan()
    plan.header["sources"][1]["definition"] = {"labels_column": "labels", "shift": False}
    with pytest.raises(ConfigError, match="labels of code were analyzed with --no-shift, those of web, old"):
        PlanLoader(plan, datasets(), dp_rank=0, dp_size=1)


class Failing(Tokens):
    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        if sample_id == 2:
            raise OSError("the disk is gone")
        return super().__getitem__(sample_id)


class Longer(Tokens):
    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return {"input_ids": np.ones(self.seqlens[sample_id] + (sample_id == 2), np.int32)}


class WithOtherFields(Tokens):
    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return super().__getitem__(sample_id) | {"note": "x"}


class BatchedFailing(Failing, BatchedTokens):
    pass


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Failing, SourceError, "^code: the data set raised OSError when asked for row 2: the disk is gone"),
        (BatchedFailing, SourceError, "^code: the data set raised OSError when asked for row 2: the disk"),
        (
            Longer,
            LengthMismatchError,
            r"sample 9 \(row 2 of code\) has 10 tokens and the plan was made for 9",
        ),
        (
            WithOtherFields,
            SourceError,
            r"sample 7 \(row 0 of code\) has the fields .* sample 0 \(row 0 of web\)",
        ),
    ],
)
def test_an_error_names_the_source_and_the_row_in_it(
    kind: type[Tokens], error: type[PackerError], message: str, num_workers: int
) -> None:
    data = datasets() | {"code": kind(MIXED["code"])}
    loader = PlanLoader(mixed_plan(), data, dp_rank=0, dp_size=1, num_workers=num_workers)
    with pytest.raises(error, match=message):
        for step in loader:
            list(step)


def test_slices_are_read_where_every_source_offers_them() -> None:
    class Sliced(Tokens):
        def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
            return {"input_ids": self[sample_id]["input_ids"][start:stop]}

    sources = mixed_plan().sources
    some = SourceDatasets([Sliced(MIXED["web"]), Tokens(MIXED["code"]), Sliced(MIXED["old"])], sources)
    assert not hasattr(some, "read_slice")
    every = SourceDatasets([Sliced(seqlens) for seqlens in MIXED.values()], sources)
    assert (
        every.read_slice(9, 2, 5)["input_ids"].tolist() == Tokens(MIXED["code"])[2]["input_ids"][2:5].tolist()
    )


def test_data_sets_of_sources_pickle_with_their_abilities() -> None:
    every = SourceDatasets([BatchedTokens(seqlens) for seqlens in MIXED.values()], mixed_plan().sources)
    copied = pickle.loads(pickle.dumps(every))
    assert len(copied) == 12
    assert torch.equal(torch.tensor(copied[9]["input_ids"]), torch.tensor(every[9]["input_ids"]))
    assert not hasattr(copied, "read_slice")


def test_messages_name_rows_of_several_samples_and_leave_ranges_alone() -> None:
    sources = mixed_plan().sources
    assert with_rows("samples 6, 7, 99 …", sources) == "samples 6 (row 6 of web), 7 (row 0 of code), 99 …"
    assert with_rows("the source has samples 0 to 12", sources) == "the source has samples 0 to 12"
    assert with_rows("12 samples; sample -1", sources) == "12 samples; sample -1"
    assert with_rows("sample 3", [PlanSource(num_samples=5, num_tokens=9)]) == "sample 3"
