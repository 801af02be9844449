"""Metrics directories: ours, DeepSpeed's, and what is neither."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import MetricsError
from packer.metrics import Manifest, MetricSummary, open_metrics, write_items, write_sample_to_metric
from packer.metrics.manifest import manifest_hash
from packer.mmididx import DEEPSPEED_DTYPES
from tests import naive

SUMMARY = MetricSummary(min=0, median=0, p99=0, max=0, total=0)


def write_directory(folder: Path, **metrics: list[int]) -> Manifest:
    folder.mkdir()
    files = {}
    for name, values in metrics.items():
        dtype = np.dtype(np.int32 if max(values, default=0) < 2**31 else np.int64)
        pieces = [np.array(values, dtype=np.int64)]
        files |= write_sample_to_metric(folder, name, pieces, len(values), dtype)
    manifest = Manifest(
        num_samples=len(values),
        num_nulls=0,
        num_empties=0,
        sources=[{"rows": len(values)}],
        definition={"kind": "length"},
        metrics=dict.fromkeys(metrics, SUMMARY),
        files=files,
    )
    manifest.save(folder)
    return manifest


def write_foreign(folder: Path, name: str, values: list[int], dtype: type = np.uint8) -> None:
    (folder / name).mkdir(parents=True)
    num = len(values)
    write_items(
        folder / name / f"{name}_sample_to_metric",
        [np.array(values)],
        np.ones(num),
        np.dtype(dtype),
        np.array([0, num, num]),  # as DeepSpeed's merge leaves it
    )


@given(st.lists(st.integers(0, 2**40), max_size=30))
def test_values_come_back(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("values") / "metrics"
    manifest = write_directory(folder, seqlen=values, loss_tokens=values)
    metrics = open_metrics(folder)

    assert metrics.names == ("seqlen", "loss_tokens")
    assert metrics.num_samples == len(values)
    assert metrics.metric("seqlen").tolist() == values
    assert metrics.metric("seqlen").dtype == (np.int64 if max(values, default=0) > 2**31 - 1 else np.int32)
    assert metrics.manifest == manifest
    assert metrics.sources == [{"rows": len(values)}]
    assert metrics.definition == {"kind": "length"}
    assert metrics.warnings == ()
    metrics.check_files()
    prefix = folder / "seqlen" / "seqlen_sample_to_metric"
    assert naive.read_items(prefix, DEEPSPEED_DTYPES) == [[value] for value in values]


@given(st.lists(st.integers(0, 250), min_size=1, max_size=30), st.sampled_from(sorted(DEEPSPEED_DTYPES)))
def test_directories_of_deepspeed_open_with_a_warning(tmp_path_factory, values, code):
    folder = tmp_path_factory.mktemp("foreign")
    dtype = DEEPSPEED_DTYPES[code]
    values = [min(value, np.iinfo(dtype).max) for value in values]
    write_foreign(folder, "seqlen", values, dtype.type)
    (folder / "seqlen" / "worker0_thread0").mkdir()
    metrics = open_metrics(folder)

    assert metrics.metric("seqlen").tolist() == values
    assert metrics.manifest is None
    assert metrics.sources == []
    assert metrics.definition == {}
    (warning,) = metrics.warnings
    assert "no manifest.json" in warning
    metrics.check_files()  # nothing to compare with


def test_fingerprint_is_one_with_and_without_manifest(tmp_path):
    manifest = write_directory(tmp_path / "metrics", seqlen=[3, 1, 2])
    with_manifest = open_metrics(tmp_path / "metrics")
    (tmp_path / "metrics" / "manifest.json").unlink()
    without = open_metrics(tmp_path / "metrics")
    assert with_manifest.fingerprint == without.fingerprint == manifest.fingerprint


def test_fingerprint_follows_the_values_only(tmp_path):
    one = write_directory(tmp_path / "one", seqlen=[3, 1, 2])
    other = write_directory(tmp_path / "other", seqlen=[3, 1, 4])
    derived = replace(
        one,
        files=one.files
        | {"seqlen/seqlen_index_to_metric.bin": one.files["seqlen/seqlen_sample_to_metric.bin"]},
    )
    assert one.fingerprint != other.fingerprint
    assert derived.fingerprint == one.fingerprint


def test_metrics_in_a_line(tmp_path):
    write_directory(tmp_path / "ours", seqlen=[1], loss_tokens=[1])
    assert (
        repr(open_metrics(tmp_path / "ours"))
        == f"Metrics({tmp_path / 'ours'}, 1 sample, seqlen, loss_tokens)"
    )
    write_foreign(tmp_path / "theirs", "seqlen", [1, 2])
    theirs = repr(open_metrics(tmp_path / "theirs"))
    assert theirs == f"Metrics({tmp_path / 'theirs'}, 2 samples, seqlen, without a manifest)"


def test_metrics_pickle(tmp_path):
    write_directory(tmp_path / "metrics", seqlen=list(range(1000)))
    pickled = pickle.dumps(open_metrics(tmp_path / "metrics"))
    assert len(pickled) < 3000
    assert pickle.loads(pickled).metric("seqlen").tolist() == list(range(1000))


def test_a_metric_that_is_not_there(tmp_path):
    write_directory(tmp_path / "metrics", seqlen=[1])
    with pytest.raises(MetricsError, match="no metric 'loss_tokens'; it holds seqlen"):
        open_metrics(tmp_path / "metrics").metric("loss_tokens")


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content | {"manifest_sha256": manifest_hash(content)}))


def edit_manifest(folder, old, new):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_manifest(f, version=2), "format version 2, this packer reads version 1"),
        (lambda f: change_manifest(f, format="other"), "not the manifest of a metrics directory"),
        (lambda f: change_manifest(f, num_samples=4), "has 3 values, manifest.json says 4"),
        (lambda f: change_manifest(f, files={}), "was changed after it was written"),
        (lambda f: edit_manifest(f, '"num_nulls": 0', '"num_nulls": 1'), "was changed after it was written"),
        (lambda f: edit_manifest(f, '"min": 0', '"min": -1'), "was changed after it was written"),
        (
            lambda f: change_manifest(f, files={"../x": {"size": 1, "sha256": ""}}),
            "not a name in this folder",
        ),
        (lambda f: change_manifest(f, files={"/x": {"size": 1, "sha256": ""}}), "not a name in this folder"),
        (lambda f: change_manifest(f, metrics={"..": {}}), "not a name in this folder"),
        (lambda f: change_manifest(f, num_samples=True), "True is no count"),
        (lambda f: change_manifest(f, sources=[1]), "is damaged"),
        (lambda f: change_manifest(f, tokens={"bin": {"size": 1, "sha256": ""}}), "is damaged"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "is damaged"),
        (lambda f: change_manifest(f, metrics={"seqlen": {}}), "is damaged"),
        (lambda f: change_manifest(f, files={"x": {"size": 1}}), "is damaged"),
        (lambda f: change_manifest(f, metrics={"seqlen": {}, "other": {}}), "is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"format":'), "is damaged"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not the manifest"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "is damaged"),
        (
            lambda f: (f / "seqlen" / "seqlen_sample_to_metric.bin").write_bytes(b"123"),
            "is 3 bytes, the manifest says 12",
        ),
        (lambda f: (f / "seqlen" / "seqlen_sample_to_metric.idx").unlink(), "is missing"),
        (lambda f: shutil.rmtree(f / "seqlen"), "is missing"),
    ],
)
def test_damage_with_a_manifest_is_named(tmp_path, damage, message):
    folder = tmp_path / "metrics"
    write_directory(folder, seqlen=[3, 1, 2])
    damage(folder)
    with pytest.raises(MetricsError, match=message):
        open_metrics(folder)


def test_changed_values_are_found(tmp_path):
    folder = tmp_path / "metrics"
    write_directory(folder, seqlen=[3, 1, 2])
    np.array([3, 1, 4], dtype=np.int32).tofile(folder / "seqlen" / "seqlen_sample_to_metric.bin")
    with pytest.raises(MetricsError, match=r"seqlen_sample_to_metric\.bin is not the file that was written"):
        open_metrics(folder).check_files()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.with_suffix(".bin").unlink(), "has no readable seqlen_sample_to_metric.bin"),
        (
            lambda p: p.with_suffix(".bin").write_bytes(bytes(7)),
            "has 7 bytes, its index says 4 values of uint64: 32",
        ),
        (
            lambda p: p.with_suffix(".bin").write_bytes(bytes(8)),
            "Megatron's dialect, where code 8 means uint16",
        ),
        (lambda p: p.with_suffix(".idx").write_bytes(b"PAR1 and more"), "is no MMIDIDX index"),
    ],
)
def test_damage_without_a_manifest_is_named(tmp_path, damage, message):
    write_foreign(tmp_path, "seqlen", [1, 2, 3, 4], np.uint64)
    damage(tmp_path / "seqlen" / "seqlen_sample_to_metric")
    with pytest.raises(MetricsError, match=message):
        open_metrics(tmp_path)


def test_items_of_several_values_are_no_metric(tmp_path):
    (tmp_path / "seqlen").mkdir()
    prefix = tmp_path / "seqlen" / "seqlen_sample_to_metric"
    write_items(prefix, [np.arange(3)], np.array([1, 2, 0]), np.dtype(np.int32), np.array([0, 3]))
    with pytest.raises(MetricsError, match="item 1 has 2 values at byte 4"):
        open_metrics(tmp_path)


def test_metrics_of_different_data_sets(tmp_path):
    write_foreign(tmp_path, "seqlen", [1, 2, 3])
    write_foreign(tmp_path, "loss_tokens", [1, 2])
    with pytest.raises(MetricsError, match="loss_tokens 2, seqlen 3"):
        open_metrics(tmp_path)


def test_what_is_no_metrics_directory(tmp_path):
    with pytest.raises(MetricsError, match="is not a directory"):
        open_metrics(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match="is not a directory"):
        open_metrics(tmp_path / "file")
    with pytest.raises(MetricsError, match="holds no metrics"):
        open_metrics(tmp_path)


@given(st.data())
def test_any_change_of_an_index_gives_the_values_or_an_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("hostile")
    values = [200, 1, 0, 7]
    write_foreign(folder, "seqlen", values, np.uint16)
    path = folder / "seqlen" / "seqlen_sample_to_metric.idx"
    changed = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        changed[: data.draw(st.integers(0, len(changed)))] if data.draw(st.booleans()) else changed
    )
    try:
        metrics = open_metrics(folder)
    except MetricsError:
        return
    assert metrics.metric("seqlen").tolist() == values


@pytest.mark.frameworks
def test_deepspeed_opens_what_we_write(tmp_path, capsys):
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    values = [3, 1, 2**33, 0]
    write_directory(tmp_path / "metrics", seqlen=values)
    theirs = MMapIndexedDataset(
        str(tmp_path / "metrics" / "seqlen" / "seqlen_sample_to_metric"), skip_warmup=True
    )
    assert [theirs[n].tolist() for n in range(len(theirs))] == [[value] for value in values]
    assert theirs.doc_idx.tolist() == [0, 4]
    assert capsys.readouterr().err == ""
