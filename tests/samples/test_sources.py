"""``open_dataset`` of several sources: a data set each, by name, that deliver alike."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.analyzer import analyze
from packer.errors import ConfigError, SourceChangedError
from packer.metrics import open_metrics
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader
from packer.samples import open_dataset

WEB = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
CODE = [[11, 12], [13, 14, 15]]
CODE_LABELS = [[-100, 12], [-100, -100, 15]]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Parquet with tokens alone, and JSON Lines with labels; metrics beside each."""
    pq.write_table(pa.table({"input_ids": WEB}), tmp_path / "web.parquet")
    analyze(tmp_path / "web.parquet", out=tmp_path / "m-web", tokens_column="input_ids")
    lines = [json.dumps({"ids": i, "target": t}) for i, t in zip(CODE, CODE_LABELS, strict=True)]
    (tmp_path / "code.jsonl").write_text("\n".join(lines) + "\n")
    analyze(tmp_path / "code.jsonl", out=tmp_path / "m-code", tokens_column="ids", labels_column="target")
    return tmp_path


def files(folder: Path) -> dict[str, Path]:
    return {"web": folder / "web.parquet", "code": folder / "code.jsonl"}


def metrics(folder: Path) -> dict[str, Path]:
    return {"web": folder / "m-web", "code": folder / "m-code"}


def test_each_source_is_opened_by_its_own_metrics(made: Path) -> None:
    opened = open_dataset(files(made), metrics=metrics(made))
    assert list(opened) == ["web", "code"]
    assert [opened["web"][row]["input_ids"].tolist() for row in range(4)] == WEB
    assert [opened["code"][row]["input_ids"].tolist() for row in range(2)] == CODE
    assert opened["web"].metrics_fingerprint == open_metrics(made / "m-web").fingerprint


def test_where_one_has_labels_all_deliver_them(made: Path) -> None:
    opened = open_dataset(files(made), metrics=metrics(made))
    assert opened["code"][1]["labels"].tolist() == CODE_LABELS[1]
    web = pickle.loads(pickle.dumps(opened["web"]))
    assert web[3]["labels"].tolist() == WEB[3]
    assert web.read_slice(3, 1, 3)["labels"].tolist() == [8, 9]
    assert set(open_dataset({"web": files(made)["web"]}, metrics={"web": made / "m-web"})["web"][0]) == {
        "input_ids"
    }


def test_a_plan_of_both_is_played_with_the_planned_loss_tokens(made: Path) -> None:
    plan = make_plan(metrics(made), PlanConfig(max_tokens=16, remainder="keep"))
    loader = PlanLoader(plan, open_dataset(files(made), metrics=metrics(made)), dp_rank=0, dp_size=1)
    found = 0
    for step in loader:
        found += step.num_loss_tokens
        assert sum(batch.num_loss_tokens for batch in step) == step.num_loss_tokens
    assert found == (2 + 1 + 0 + 3) + (1 + 1)


def test_a_source_that_was_measured_otherwise_is_refused_by_the_loader(made: Path) -> None:
    plan = make_plan(metrics(made), PlanConfig(max_tokens=16))
    analyze(files(made)["code"], out=made / "other", tokens_column="target")
    opened = open_dataset(files(made), metrics=metrics(made) | {"code": made / "other"})
    with pytest.raises(SourceChangedError, match="data set of code was opened with metrics"):
        PlanLoader(plan, opened, dp_rank=0, dp_size=1)


def test_options_are_one_for_all_or_by_name(made: Path) -> None:
    tokens = {name: np.arange(len(rows)) for name, rows in (("web", WEB), ("code", CODE))}
    for name, rows in (("web", WEB), ("code", CODE)):
        table = pa.table({"length": [len(row) for row in rows], "ids": rows, "kind": rows})
        pq.write_table(table, made / f"{name}-lengths.parquet")
        analyze(made / f"{name}-lengths.parquet", out=made / f"l-{name}", length_column="length")
    sources = {name: made / f"{name}-lengths.parquet" for name in tokens}
    measured = {name: made / f"l-{name}" for name in tokens}
    for fields in ({"input_ids": "ids"}, {name: {"input_ids": "ids"} for name in tokens}):
        opened = open_dataset(sources, metrics=measured, fields=fields)
        assert opened["code"][1]["input_ids"].tolist() == CODE[1]
    by_name = {"web": {"input_ids": "ids", "kind": "kind"}, "code": {"input_ids": "kind", "kind": "ids"}}
    assert set(open_dataset(sources, metrics=measured, fields=by_name)["code"][0]) == {"input_ids", "kind"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, m: (f, m["web"]), 'sources are measured one by one, .* metrics={"web": …, "code": …}'),
        (lambda f, m: (f, {"web": m["web"]}), "metrics has no entry 'code'"),
        (lambda f, m: (f, m | {"pages": m["web"]}), "metrics names 'pages', which is no source"),
        (lambda f, m: (f, None), "web: nothing says what the token ids are"),
        (lambda f, m: (f | {"web": f["code"]}, m), "web: .* is not the file that|web: the source"),
    ],
    ids=["one directory", "missing", "foreign", "none", "another file"],
)
def test_what_does_not_belong_together_is_refused_by_name(made: Path, change, message: str) -> None:
    given, measured = change(files(made), metrics(made))
    with pytest.raises((ConfigError, SourceChangedError), match=message):
        open_dataset(given, metrics=measured)
