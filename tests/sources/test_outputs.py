"""What packer wrote among the data is not measured the next time."""

import json

import numpy as np
import pytest

import packer
from packer.errors import ConfigError, SourceError
from packer.metrics import open_metrics
from packer.plan.export import export_plan
from packer.sources import open_source
from tests.sources.test_indexed import write_pair
from tests.word_tokenizer import write_tokenizer


def seqlens(folder):
    return open_metrics(folder).metric("seqlen").tolist()


def test_metrics_inside_their_own_folder_of_token_files(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_pair(data / "t", [[1, 2], [3]], 8, np.dtype(np.uint16))
    for overwrite in (False, True):
        packer.analyze(data, out=data / "metrics", curriculum_files=True, overwrite=overwrite)
        assert seqlens(data / "metrics") == [2, 1]
    assert open_source(data).files == [str(data / "t.idx")]
    assert open_source(f"{data}/*").files == [str(data / "t.idx")]
    assert open_source(f"{data}/**").files == [str(data / "t.idx")]
    assert len(packer.open_dataset(data, metrics=data / "metrics")) == 2


def test_metrics_of_another_tool_without_a_manifest(tmp_path):
    write_pair(tmp_path / "t", [[1, 2], [3]], 8, np.dtype(np.uint16))
    packer.analyze(tmp_path / "t", out=tmp_path / "metrics")
    (tmp_path / "metrics" / "manifest.json").unlink()
    assert open_source(tmp_path).files == [str(tmp_path / "t.idx")]


def test_plans_and_exports_inside_a_folder_of_their_own_format(tmp_path):
    rows = "".join(json.dumps({"ids": [1] * n}) + "\n" for n in range(1, 9))
    (tmp_path / "x.jsonl").write_text(rows)
    packer.analyze(tmp_path, out=tmp_path / "metrics", tokens_column="ids")
    plan = packer.make_plan(tmp_path / "metrics", packer.PlanConfig(max_tokens=16), out=tmp_path / "plan")
    export_plan(plan, to="parquet", out=tmp_path / "exported")
    assert open_source(tmp_path).files == [str(tmp_path / "x.jsonl")]
    for name in ("metrics", "plan", "exported"):
        with pytest.raises(SourceError, match=f"{name} is a metrics directory or a plan of packer"):
            open_source(tmp_path / name)


def test_a_manifest_of_another_tool_hides_nothing(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "manifest.json").write_text(json.dumps({"format": "theirs", "by": "packer-x"}))
    (tmp_path / "part" / "x.jsonl").write_text('{"n": 1}\n')
    assert open_source(tmp_path).num_rows == 1


def test_token_files_among_the_data_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jsonl").write_text('{"text": "a b"}\n')
    arguments = {"text_column": "text", "tokenizer": write_tokenizer(tmp_path, 9), "out": tmp_path / "m"}
    with pytest.raises(ConfigError, match=r"tok is inside the data set .*data, which would be another one"):
        packer.analyze(tmp_path / "data", write_tokens=tmp_path / "data" / "tok", **arguments)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["x.jsonl"]
    packer.analyze(tmp_path / "data", write_tokens=tmp_path / "tok", **arguments)
