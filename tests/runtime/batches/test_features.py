"""Data without token ids: features of shape (frames, bins), their length stated, in both layouts."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import packer
from packer.errors import ConfigError, LengthMismatchError, PlanError, SourceError

LENGTHS = [3, 7, 1, 5, 4, 6, 2, 8]
FRAMES = [np.arange(n * 4, dtype=np.float32).reshape(n, 4) / 8 + 8 * n for n in LENGTHS]
LABELS = [[-100 if at % 3 == 0 else at for at in range(n)] for n in LENGTHS]
SCRIPTS = [list(range(10, 12 + n % 3)) for n in LENGTHS]


class Speech:
    """A map-style data set of features alone, or with labels."""

    def __init__(self, **more):
        self.fields = {"input_features": FRAMES} | more

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, row):
        return {name: values[row] for name, values in self.fields.items()}


def plan_for(tmp_path, layout, *, labels=None, **options):
    lengths = np.array(LENGTHS, np.int32)
    loss = None if labels is None else [sum(label != -100 for label in row) for row in labels]
    config = packer.PlanConfig(
        max_tokens=16, layout=layout, grad_accum=2, **({"remainder": "fill"} | options)
    )
    return packer.make_plan(lengths, config, loss_tokens=loss)


def cells(batch, field, layout):
    """Return what a batch holds of each sample, and what its padding holds."""
    values, seqlens = batch[field], batch.seqlens.tolist()
    if layout == "padded":
        whole = [values[row, :n] for row, n in enumerate(seqlens)]
        return whole, torch.cat([values[row, n:].flatten() for row, n in enumerate(seqlens)])
    edges = np.cumsum([0, *seqlens])
    return [values[0, a:b] for a, b in pairwise(edges)], values[0, edges[-1] :].flatten()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_features_need_no_ids_and_no_labels(tmp_path, layout, num_workers):
    plan = plan_for(tmp_path, layout)
    with packer.PlanLoader(
        plan,
        Speech(input_ids=SCRIPTS),
        dp_rank=0,
        dp_size=1,
        length_field="input_features",
        pad_values={"input_features": -1},
        num_workers=num_workers,
    ) as loader:
        seen = []
        for step in loader:
            with pytest.raises(PlanError, match=r"counted no labels of features; call packer.count_loss"):
                _ = step.num_loss_tokens
            for batch in step:
                assert batch["input_features"].dtype == torch.float32
                assert batch["input_features"].shape == (*batch.shape, 4)
                assert "labels" not in batch
                assert {"padded": "attention_mask", "packed": "cu_seqlens"}[layout] in batch
                found, padding = cells(batch, "input_features", layout)
                assert (padding == -1).all()
                for frames, sample_id, script in zip(
                    found, batch.sample_ids, batch["input_ids"], strict=True
                ):
                    assert np.array_equal(frames, FRAMES[sample_id])
                    assert script == SCRIPTS[sample_id]
                    seen.append(int(sample_id))
    assert set(seen) == set(range(8))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_labels_of_features_are_counted_and_not_shifted(tmp_path, layout):
    plan = plan_for(tmp_path, layout, labels=LABELS, remainder="keep")
    loader = packer.PlanLoader(
        plan, Speech(labels=LABELS), dp_rank=0, dp_size=1, length_field="input_features"
    )
    for step in loader:
        batches = list(step)
        assert step.num_loss_tokens == sum(batch.num_loss_tokens for batch in batches)
        for batch in batches:
            found, padding = cells(batch, "labels", layout)
            assert (padding == -100).all()
            expected = [[-100] * LENGTHS[at] if batch.is_filler else LABELS[at] for at in batch.sample_ids]
            assert [labels.tolist() for labels in found] == expected


def test_what_does_not_fit_is_named(tmp_path):
    def play(dataset, length_field="input_features", **options):
        plan = plan_for(tmp_path, "padded", **options)
        return [
            list(s) for s in packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1, length_field=length_field)
        ]

    with pytest.raises(
        SourceError, match=r"without input_ids; its fields are input_features.*length_field= must"
    ):
        play(Speech(), None)
    with pytest.raises(
        SourceError, match="without mel; its fields are input_features; the data set must return"
    ):
        play(Speech(), "mel")
    with pytest.raises(LengthMismatchError, match="sample 0 has 2 tokens and the plan was made for 3"):
        play(Speech(input_features=[FRAMES[0][:2], *FRAMES[1:]]))
    with pytest.raises(SourceError, match=r"input_features of sample 7 is float32 of shape \(8, 3\)"):
        play(Speech(input_features=[*FRAMES[:7], FRAMES[7][:, :3]]), order="sequential")
    # 7 micro-batches of one sample, 2 a step: a masked copy fills the last one.
    with pytest.raises(
        ConfigError, match="a filler, whose labels must all be -100, and the samples have none"
    ):
        play(Speech(), remainder="keep", max_samples=1, filter_min=2)
    with pytest.raises(ConfigError, match="the plan has one budget; name one field"):
        play(Speech(), {"source": "input_features"})
    with pytest.raises(ConfigError, match=r"slices of rows are of token ids.*sp_size=1"):
        plan = plan_for(tmp_path, "padded", sp_size=2)
        packer.PlanLoader(
            plan, Speech(), dp_rank=0, dp_size=1, sp_rank=0, sp_size=2, length_field="input_features"
        )


def write(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


FEATURES = pa.list_(pa.list_(pa.float32(), 4))


@pytest.mark.parametrize(
    "column_type", [FEATURES, pa.large_list(pa.list_(pa.float16())), pa.list_(pa.large_list(pa.float64()))]
)
def test_a_column_of_features_from_analysis_to_batches(tmp_path, column_type):
    source = write(
        tmp_path / "x.parquet",
        mel=pa.array([frames.tolist() for frames in FRAMES], column_type),
        labels=pa.array(LABELS),
        script=pa.array(SCRIPTS),
    )
    packer.analyze(source, out=tmp_path / "m", features_column="mel", labels_column="labels")
    metrics = packer.open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == LENGTHS
    assert metrics.metric("loss_tokens").tolist() == [sum(at % 3 != 0 for at in range(n)) for n in LENGTHS]
    dataset = packer.open_dataset(source, metrics=metrics, fields=["script"])
    assert dataset.length_field == "mel"
    assert [sample["script"].tolist() for sample in dataset] == SCRIPTS
    piece = dataset.read_slice(1, 2, 5)
    assert np.array_equal(piece["mel"], FRAMES[1][2:5])
    assert (piece["labels"].tolist(), piece["script"].tolist()) == (LABELS[1][2:5], SCRIPTS[1])
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=16, grad_accum=2, remainder="fill"))
    dtype = {4: torch.float32, 2: torch.float16, 8: torch.float64}[dataset[0]["mel"].itemsize]
    for step in packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1):
        for batch in step:
            assert batch["mel"].dtype == dtype
            for row, sample_id in enumerate(batch.sample_ids):
                assert np.array_equal(batch["mel"][row, : LENGTHS[sample_id]], FRAMES[sample_id])
        assert step.num_loss_tokens > 0


def test_features_in_json_and_a_length_column(tmp_path):
    rows = [
        {"mel": frames.tolist(), "n": len(frames), "script": script, "wave": [1, 2, 3][: len(frames)]}
        for frames, script in zip(FRAMES, SCRIPTS, strict=True)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packer.analyze(path, out=tmp_path / "f", features_column="mel")
    packer.analyze(path, out=tmp_path / "n", length_column="n")
    assert packer.open_metrics(tmp_path / "f").metric("seqlen").tolist() == LENGTHS
    by_features = packer.open_dataset(path, metrics=tmp_path / "f", fields=["script"])
    by_length = packer.open_dataset(
        path, metrics=tmp_path / "n", fields={"mel": "mel", "script": "script"}, length_field="mel"
    )
    for dataset in (by_features, by_length):
        assert dataset[3]["mel"].dtype == np.float32
        assert np.array_equal(dataset[3]["mel"], FRAMES[3])
        assert dataset[3]["script"].tolist() == SCRIPTS[3]
    with pytest.raises(ConfigError, match=r'give fields={"input_ids": COLUMN}, or length_field='):
        packer.open_dataset(path, metrics=tmp_path / "n", fields=["mel"])


def test_speech_to_text_is_a_pair_of_features_and_ids(tmp_path):
    source = write(
        tmp_path / "x.parquet",
        mel=pa.array([frames.tolist() for frames in FRAMES], FEATURES),
        num_frames=pa.array(LENGTHS),
        num_tokens=pa.array([len(script) for script in SCRIPTS]),
        script=pa.array(SCRIPTS),
    )
    packer.analyze(source, out=tmp_path / "m", length_column={"source": "num_frames", "target": "num_tokens"})
    metrics = packer.open_metrics(tmp_path / "m")
    config = packer.PlanConfig(max_tokens={"source": 16, "target": 12}, grad_accum=2, remainder="fill")
    dataset = packer.open_dataset(source, metrics=metrics, fields={"source": "mel", "target": "script"})
    loader = packer.PlanLoader(
        packer.make_plan(metrics, config),
        dataset,
        dp_rank=0,
        dp_size=1,
        length_field={"source": "input_features"},
    )
    for step in loader:
        for batch in step:
            for row, sample_id in enumerate(batch.sample_ids):
                heard, said = batch["source"]["input_features"], batch["target"]["input_ids"]
                assert np.array_equal(heard[row, : LENGTHS[sample_id]], FRAMES[sample_id])
                assert said[row, : len(SCRIPTS[sample_id])].tolist() == SCRIPTS[sample_id]
            assert "labels" not in batch["source"]
            assert batch.num_loss_tokens == sum(len(SCRIPTS[at]) for at in batch.sample_ids)


@pytest.mark.parametrize(
    ("mel", "message"),
    [
        ([[[1.0, 2.0], [3.0]]], "column 'mel' holds frames of 1 to 2 values; make them equal"),
        ([[[1.0, None]]], "column 'mel' holds a null among its features"),
        ([[None]], "column 'mel' holds a null among its features"),
    ],
)
def test_features_that_are_no_array_are_named(tmp_path, mel, message):
    source = write(tmp_path / "x.parquet", mel=pa.array(mel, pa.list_(pa.list_(pa.float32()))))
    packer.analyze(source, out=tmp_path / "m", features_column="mel")
    with pytest.raises(SourceError, match=rf"x\.parquet, row group 0, row 0: {message}"):
        packer.open_dataset(source, metrics=tmp_path / "m")[0]


def test_texts_are_no_features(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": [1]}\n{"a": "no"}\n')
    with pytest.raises(SourceError, match=r"x\.jsonl, row 1: column 'a' holds .*no list of numbers"):
        packer.analyze(tmp_path / "x.jsonl", out=tmp_path / "m", features_column="a")
    source = write(tmp_path / "x.parquet", a=pa.array([["x"]]))
    with pytest.raises(SourceError, match="name a list of numbers, or of lists of numbers"):
        packer.analyze(source, out=tmp_path / "m", features_column="a")
