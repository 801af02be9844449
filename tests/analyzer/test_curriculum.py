"""Curriculum files against a naive twin, against DeepSpeed's analyzer, and in DeepSpeed's sampler."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.analyzer.curriculum import write_curriculum_files
from packer.metrics import open_metrics
from packer.mmididx import DEEPSPEED_DTYPES, read_index
from tests import naive
from tests.ranks import run_ranks

KINDS = ("index_to_metric", "index_to_sample", "index_to_sample_percentile_merged")


def written(folder: Path, values: list[int]) -> dict[str, list[list[int]]]:
    (folder / "m").mkdir()
    files = write_curriculum_files(folder, "m", np.array(values))
    assert set(files) == {f"m/m_{kind}.{suffix}" for kind in KINDS for suffix in ("bin", "idx")}
    return {kind: naive.read_items(folder / "m" / f"m_{kind}", DEEPSPEED_DTYPES) for kind in KINDS}


few_values = st.lists(st.integers(0, 5), min_size=1, max_size=30)
wide_values = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=30)


@given(st.one_of(few_values, wide_values))
def test_files_are_those_of_the_naive_twin(tmp_path_factory, values):
    assert written(tmp_path_factory.mktemp("m"), values) == naive.curriculum_items(values)


@pytest.mark.parametrize("num_values", [99, 100, 199, 200, 250, 1000])
def test_hundredths_of_many_values(tmp_path, num_values):
    values = np.random.default_rng(0).permutation(np.arange(2 * num_values) // 2).tolist()
    assert written(tmp_path, values) == naive.curriculum_items(values)


@pytest.mark.parametrize(
    ("values", "metric_code", "sample_code"),
    [([0, 255], 1, 1), ([0, 256], 6, 1), ([0, 65_536], 7, 1), ([-1, 127], 2, 1), ([7] * 257, 1, 6)],
)
def test_types_are_the_smallest_that_fit(tmp_path, values, metric_code, sample_code):
    written(tmp_path, values)
    assert read_index(tmp_path / "m" / "m_index_to_metric.idx").dtype_code == metric_code
    assert read_index(tmp_path / "m" / "m_index_to_sample.idx").dtype_code == sample_code


def seqlens(batch: list[torch.Tensor]) -> list[int]:
    return [len(sample) for sample in batch]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same samples, measured by DeepSpeed's analyzer and by ours."""
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    folder = tmp_path_factory.mktemp("both")
    lengths = np.random.default_rng(0).lognormal(5, 1, 1000).astype(np.int64)
    samples = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    theirs = DataAnalyzer(
        samples,
        metric_names=["seqlen"],
        metric_functions=[lambda batch: torch.tensor([batch.shape[1]])],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=str(folder / "theirs"),
    )
    theirs.run_map()
    theirs.run_reduce()
    packer.analyze_dataset(samples, seqlens, out=folder / "ours", curriculum_files=True)
    return folder, lengths


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's own
def test_all_files_are_those_of_deepspeeds_analyzer(both):
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    folder, lengths = both
    for kind in ("sample_to_metric", *KINDS):
        prefixes = [str(folder / side / "seqlen" / f"seqlen_{kind}") for side in ("ours", "theirs")]
        ours, theirs = (MMapIndexedDataset(prefix, skip_warmup=True) for prefix in prefixes)
        assert len(ours) == len(theirs) > 0
        assert all(ours[n].tolist() == theirs[n].tolist() for n in range(len(ours))), kind
        if kind != "sample_to_metric":  # in these the types agree, too
            assert Path(f"{prefixes[0]}.bin").read_bytes() == Path(f"{prefixes[1]}.bin").read_bytes()
    assert open_metrics(folder / "theirs").metric("seqlen").tolist() == lengths.tolist()


def sample_by_difficulty(device: torch.device, files: str, clusters: str, kind: str) -> list[list[int]]:
    """Batches of DeepSpeed's curriculum sampler, up to the full difficulty."""
    import deepspeed
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    metric = {
        "index_to_sample_path": f"{files}_index_to_sample"
        + ("_percentile_merged" if kind == "percentile" else ""),
        "index_to_metric_path": f"{files}_index_to_metric",
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": 80 if kind == "value" else 10,
        "max_difficulty": 5000 if kind == "value" else 100,
        "schedule_type": "fixed_discrete",
        "schedule_config": {
            "difficulty": [80, 400, 5000] if kind == "value" else [10, 50, 100],
            "max_step": [5, 10],
        },
    }
    config = {
        "seed": 7,
        "data_sampling": {
            "num_epochs": 1,
            "curriculum_learning": {
                "enabled": True,
                "data_cluster_path": clusters,
                "curriculum_metrics": {"seqlen": metric},
            },
        },
    }
    sampler = DeepSpeedDataSampler(config, 1000, 8, 0, 1, dist.group.WORLD, 1, 0)
    return [list(map(int, batch)) for batch, _ in zip(sampler, range(15), strict=False)]


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["value", "percentile"])
def test_deepspeeds_curriculum_sampler_takes_ours_as_its_own(both, tmp_path, kind):
    folder, lengths = both
    ours, theirs = (
        run_ranks(
            sample_by_difficulty, 1, str(folder / side / "seqlen" / "seqlen"), str(tmp_path / side), kind
        )[0]
        for side in ("ours", "theirs")
    )
    assert ours == theirs
    assert len(ours) == 15
    if kind == "value":
        assert max(lengths[sample] for batch in ours[:5] for sample in batch) <= 80
        assert 80 < max(lengths[sample] for batch in ours[5:10] for sample in batch) <= 400
