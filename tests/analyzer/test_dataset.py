"""Any map-style data set, measured by a function."""

import numpy as np
import pytest

import packer
from packer.errors import ConfigError, SourceError
from packer.metrics import open_metrics


def count(batch: list[list[int]]) -> list[int]:
    return [len(sample) for sample in batch]


class Batched:
    """Gives samples by the batch, and notes how many."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return 25

    def __getitems__(self, rows: list[int]) -> list[list[int]]:
        self.sizes.append(len(rows))
        return [[0] * row for row in rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_lengths_are_those_of_the_function(tmp_path, workers):
    dataset = [[0] * (n % 5) for n in range(25)]
    result = packer.analyze_dataset(dataset, count, out=tmp_path / "m", batch_size=4, workers=workers)
    metrics = open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [n % 5 for n in range(25)]
    assert metrics.definition["kind"] == "dataset"
    assert metrics.definition["function"].endswith("test_dataset:count")
    assert metrics.sources == [{"format": "dataset", "num_rows": 25}]
    assert result.manifest.num_empties == 5
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_batches_are_used_where_offered(tmp_path):
    dataset = Batched()
    packer.analyze_dataset(dataset, count, out=tmp_path / "m", batch_size=10)
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == list(range(25))
    assert dataset.sizes == [10, 10, 5]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda batch: [1], SourceError, r"shape \(1,\) for 3 samples; it has to return one integer"),
        (lambda batch: 3, SourceError, r"shape \(\) for 3 samples"),
        (lambda batch: [1.5] * 3, SourceError, "returned float64"),
        (lambda batch: np.array([1, -2, 3]), SourceError, "returned -2 for sample 1"),
    ],
)
def test_what_is_no_length(tmp_path, function, error, message):
    with pytest.raises(error, match=message):
        packer.analyze_dataset(["a", "b", "c"], function, out=tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run(tmp_path):
    with pytest.raises(SourceError, match="is empty"):
        packer.analyze_dataset([], count, out=tmp_path / "m")
    with pytest.raises(ConfigError, match="batch_size=0"):
        packer.analyze_dataset(["a"], count, out=tmp_path / "m", batch_size=0)
    with pytest.raises(ConfigError, match="top of a module"):
        packer.analyze_dataset(["a", "b"], lambda b: [1], out=tmp_path / "m", batch_size=1, workers=2)
    assert list(tmp_path.iterdir()) == []


class Stream:
    """What cannot be asked for a sample by its place."""

    def __iter__(self):
        return iter([])


class IterableDataset(Stream):
    """Torch's has ``__getitem__`` by inheritance, and may have a length."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise NotImplementedError


@pytest.mark.parametrize("dataset", [Stream(), IterableDataset()])
def test_a_stream_is_refused(tmp_path, dataset):
    with pytest.raises(ConfigError, match=f"a {type(dataset).__name__} cannot be asked for its length"):
        packer.analyze_dataset(dataset, lambda samples: [1] * len(samples), out=tmp_path / "metrics")
    assert not (tmp_path / "metrics").exists()


@pytest.mark.parametrize("source", [Stream(), [{"input_ids": [1]}], 5])
def test_a_data_set_in_memory_is_no_source_of_files(tmp_path, source):
    with pytest.raises(ConfigError, match=r"is no path; .*packer\.analyze_dataset"):
        packer.analyze(source, out=tmp_path / "metrics", tokens_column="input_ids")
    with pytest.raises(ConfigError, match="is no path"):
        packer.open_dataset(source)


def pair(batch):
    return {"source": [len(sample) for sample in batch], "target": [2 * len(sample) for sample in batch]}


def rank(batch):
    return np.array([-len(sample) for sample in batch])


@pytest.mark.parametrize("workers", [1, 2])
def test_pairs_and_further_metrics(tmp_path, workers):
    dataset = [[0] * (n % 5) for n in range(25)]
    further = {"rank": rank, "loss_tokens": count}
    packer.analyze_dataset(dataset, pair, out=tmp_path / "m", batch_size=4, metrics=further, workers=workers)
    metrics = open_metrics(tmp_path / "m")
    lengths = np.arange(25) % 5
    assert metrics.names == ("source", "target", "rank", "loss_tokens")
    for name, expected in zip(metrics.names, (lengths, 2 * lengths, -lengths, lengths), strict=True):
        assert metrics.metric(name).tolist() == expected.tolist()
    assert metrics.definition["columns"] == {"source": "source", "target": "target"}
    assert set(metrics.manifest.functions) == {"rank", "loss_tokens"}
    config = packer.PlanConfig(max_tokens={"source": 8, "target": 16})
    loader = packer.PlanLoader(
        packer.make_plan(metrics, config),
        [{"source": sample, "target": sample * 2} for sample in dataset],
        dp_rank=0,
        dp_size=1,
    )
    seen = [int(at) for step in loader for batch in step for at in batch.sample_ids]
    assert sorted(seen) == [n for n in range(25) if n % 5]


def test_one_length_and_further_metrics(tmp_path):
    result = packer.analyze_dataset(
        [[1] * 5, [1] * 3], count, out=tmp_path / "m", metrics={"loss_tokens": lambda batch: [2, 1]}
    )
    assert (result.trained_part, result.num_loss_tokens) == ("labels", 3)
    plan = packer.make_plan(open_metrics(tmp_path / "m"), packer.PlanConfig(max_tokens=10))
    assert plan.header["loss_tokens"] == "labels"


@pytest.mark.parametrize(
    ("function", "metrics", "error", "message"),
    [
        (lambda batch: {}, {}, ConfigError, "returned no metric"),
        (lambda batch: {"a/b": [1]}, {}, ConfigError, "'a/b' cannot name a metric"),
        (count, {"": count}, ConfigError, "'' cannot name a metric"),
        (count, {"seqlen": count}, ConfigError, "returned seqlen, and metrics or key_fns has that name"),
        (lambda batch: {"a": [1], "b": [-1]}, {}, SourceError, "returned -1 as b for sample 0"),
        (count, {"loss_tokens": lambda batch: [-1]}, SourceError, "returned -1 as loss_tokens for sample 0"),
        (lambda batch: {"a": [1], "b": [1, 2]}, {}, SourceError, r"shape \(2,\) for 1 samples"),
        (lambda batch: {batch[0][0]: [1]}, {}, SourceError, "of some samples are a, of others b"),
    ],
)
def test_metrics_that_are_none(tmp_path, function, metrics, error, message):
    with pytest.raises(error, match=message):
        packer.analyze_dataset(["a", "b"], function, out=tmp_path / "m", batch_size=1, metrics=metrics)
    assert list(tmp_path.iterdir()) == []
