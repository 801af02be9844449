"""A ``datasets.Dataset`` in place of a path: its own rows in its own order, as ``datasets`` gives them."""

import pickle

import numpy as np
import pytest

import packer
from packer.analyzer.remeasure import verify_source
from packer.errors import ConfigError, SourceChangedError
from packer.sources import open_source

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.frameworks


def rows(count=60):
    return datasets.Dataset.from_dict(
        {
            "ids": [list(range(row % 7)) for row in range(count)],
            "meta": [{"n": row} for row in range(count)],
            "text": [None if row % 5 == 0 else f"t{row}" for row in range(count)],
        }
    )


@pytest.fixture(params=["memory", "disk"])
def dataset(request, tmp_path):
    if request.param == "memory":
        return rows()
    rows().save_to_disk(tmp_path / "saved", num_shards=3)
    return datasets.load_from_disk(tmp_path / "saved")


CHANGES = {
    "as it is": lambda data: data,
    "shuffled": lambda data: data.shuffle(seed=3),
    "selected": lambda data: data.select([5, 5, 0, 59]),
    "a range": lambda data: data.select(range(10, 30)),
    "filtered": lambda data: data.filter(lambda row: row["meta"]["n"] % 3 == 0),
    "in the form of torch": lambda data: data.shuffle(seed=4).with_format("numpy", columns=["ids"]),
    "joined": lambda data: datasets.concatenate_datasets([data.shuffle(seed=1), data.select([2, 1])]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_rows_are_those_of_datasets(dataset, change):
    data = change(dataset)
    expected = data.with_format(None).to_list()
    source = pickle.loads(pickle.dumps(open_source(data)))
    columns = {"ids": None, "meta.n": None, "text": None}
    units = source.units(list(columns), target_bytes=100)
    assert len(units) > 1 or len(expected) < 5
    read = [row for unit in units for batch in source.read(unit, columns) for row in batch.to_pylist()]
    assert [{name: row[name] for name in ("ids", "meta", "text")} for row in read] == expected
    order = list(reversed(range(0, len(expected), 3)))
    taken = [batch.to_pylist()[0]["meta"] for batch in source.rows(order, columns)]
    assert taken == [expected[row]["meta"] for row in order]


@pytest.mark.parametrize("workers", [1, 2])
def test_from_analysis_to_training(dataset, tmp_path, workers):
    data = dataset.shuffle(seed=3)
    packer.analyze(data, out=tmp_path / "m", tokens_column="ids", workers=workers)
    metrics = packer.open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [len(ids) for ids in data["ids"]]
    opened = packer.open_dataset(data, metrics=metrics)
    assert [sample["input_ids"].tolist() for sample in opened] == list(data["ids"])
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=16))
    with packer.PlanLoader(plan, opened, dp_rank=0, dp_size=1, num_workers=1) as loader:
        for step in loader:
            for batch in step:
                for ids, sample_id in zip(batch["input_ids"], batch.sample_ids.tolist(), strict=True):
                    assert ids[: len(data[sample_id]["ids"])].tolist() == data[sample_id]["ids"]
    assert verify_source(plan, data, num_samples=20) == 20


def test_another_order_is_another_data_set(tmp_path):
    data = rows()
    packer.analyze(data, out=tmp_path / "m", tokens_column="ids")
    order = np.arange(60)
    order[[30, 31]] = [31, 30]  # far from the edges
    for other in (data.shuffle(seed=1), data.select(order), data.rename_column("text", "words")):
        with pytest.raises(
            SourceChangedError, match=r"the datasets\.Dataset of 60 rows is not the file that"
        ):
            packer.open_dataset(other, metrics=tmp_path / "m")
    packer.open_dataset(rows(), metrics=tmp_path / "m")


def test_several_and_paths_beside_them(tmp_path):
    rows(3).to_parquet(tmp_path / "x.parquet")
    source = open_source([rows(4), tmp_path / "x.parquet", rows(2).shuffle(seed=0)])
    assert source.num_rows == 9
    assert [part.format for part in source.parts] == ["huggingface", "parquet", "huggingface"]


def test_what_is_no_data_set_of_rows_is_told_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"several splits \('train', 'test'\); give one of them"):
        packer.analyze(rows().train_test_split(0.5, seed=0), out=tmp_path / "m", tokens_column="ids")
    with pytest.raises(ConfigError, match="streaming=False"):
        packer.analyze(rows().to_iterable_dataset(), out=tmp_path / "m", tokens_column="ids")
    with pytest.raises(ConfigError, match=r"has a transform.*apply it with map"):
        packer.analyze(rows().with_transform(dict), out=tmp_path / "m", tokens_column="ids")
