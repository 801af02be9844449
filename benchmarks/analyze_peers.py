"""How does analyze compare with DeepSpeed's DataAnalyzer and with datasets.map(len) on the same samples?

python benchmarks/analyze_peers.py --rows 200000 --folder /tmp/bench
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from turns import take_turns

ANALYZE = """
    import packer
    if __name__ == "__main__":
        packer.analyze(
            {path!r}, out={out!r}, tokens_column="input_ids", curriculum_files={files}, overwrite=True
        )
"""

MAP = """
    import datasets
    datasets.disable_caching()
    samples = datasets.load_from_disk({path!r})
    samples.map(lambda ids: {{"length": len(ids)}}, input_columns="input_ids", remove_columns="input_ids")
"""

MAP_BATCHED = """
    import datasets
    datasets.disable_caching()
    samples = datasets.load_from_disk({path!r})
    count = lambda rows: {{"length": [len(ids) for ids in rows]}}
    samples.map(count, input_columns="input_ids", remove_columns="input_ids", batched=True)
"""

DATA_ANALYZER = """
    import logging, shutil
    import datasets, numpy, torch
    import deepspeed
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
    logging.disable(logging.INFO)
    shutil.rmtree({out!r}, ignore_errors=True)
    samples = datasets.load_from_disk({path!r}).with_format("numpy")
    analyzer = DataAnalyzer(
        samples,
        batch_size=1000,
        metric_names=["seqlen"],
        metric_functions=[lambda rows: numpy.array([len(row["input_ids"]) for row in rows])],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[numpy.int64],
        collate_fn=lambda rows: rows,
        save_path={out!r},
    )
    analyzer.run_map()
    analyzer.run_reduce()
"""


def write_samples(path: Path, num_rows: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.8, num_rows), 1, 8192).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    ids = pa.array(np.arange(int(lengths.sum()), dtype=np.int64).astype(np.int32))
    Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, ids)})).save_to_disk(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"samples-{options.rows}"
    if not path.exists():
        write_samples(path, options.rows)
    ours = {"path": str(path), "out": str(options.folder / "metrics")}
    take_turns(
        {
            "packer analyze": ANALYZE.format(**ours, files=False),
            "the same, curriculum files": ANALYZE.format(**ours, files=True),
            "datasets.map(len)": MAP.format(path=str(path)),
            "datasets.map(len), batched": MAP_BATCHED.format(path=str(path)),
            "DeepSpeed DataAnalyzer": DATA_ANALYZER.format(
                path=str(path), out=str(options.folder / "theirs")
            ),
        },
        turns=options.turns,
    )


if __name__ == "__main__":
    main()
