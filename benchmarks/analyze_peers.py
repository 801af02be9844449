"""How does analyze compare with DeepSpeed's DataAnalyzer and with datasets.map(len) on the same samples?

python benchmarks/analyze_peers.py --rows 200000 800000 3200000 --limit 120 --folder /tmp/bench

Each contender goes up to the largest size that it finishes within the limit; one that does not is left out of
the larger ones.
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
    """The same 100,000 samples again and again, so that any number of them fits into memory."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.8, 100_000), 1, 8192).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    ids = pa.array(np.arange(int(lengths.sum()), dtype=np.int32))
    block = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, ids)})
    Dataset(pa.concat_tables([block] * (num_rows // len(block)))).save_to_disk(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 800_000, 3_200_000])
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    finished = None
    for num_rows in sorted(options.rows):
        path = options.folder / f"samples-{num_rows}"
        if not path.exists():
            write_samples(path, num_rows)
        programs = make_programs(path, options.folder)
        print(f"{num_rows:,} samples")
        medians = take_turns(
            {name: code for name, code in programs.items() if finished is None or name in finished},
            turns=options.turns,
            limit=options.limit,
        )
        finished = set(medians)


def make_programs(path: Path, folder: Path) -> dict[str, str]:
    ours = {"path": str(path), "out": str(folder / "metrics")}
    return {
        "packer analyze": ANALYZE.format(**ours, files=False),
        "the same, curriculum files": ANALYZE.format(**ours, files=True),
        "datasets.map(len)": MAP.format(path=str(path)),
        "datasets.map(len), batched": MAP_BATCHED.format(path=str(path)),
        "DeepSpeed DataAnalyzer": DATA_ANALYZER.format(path=str(path), out=str(folder / "theirs")),
    }


if __name__ == "__main__":
    main()
