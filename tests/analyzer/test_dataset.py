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
