"""How long does one sample take, at random, out of each format, and how does Hugging Face datasets compare?

python benchmarks/random_access.py --rows 20000 --folder /tmp/bench      (needs datasets for the last line)

The same samples in every format; 2,000 single rows and 2,000 rows in batches of 32, microseconds a row. Of
Parquet, decoded row groups stay in a bounded cache: its figure is that of a data set that fits there.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer.mmididx import write_index
from packer.samples import LengthDefinition, open_dataset


def write_all(folder: Path, num_rows: int) -> dict[str, Path]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.8, 0.8, num_rows), 1, 8192).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 50_000, offsets[-1], dtype=np.int32)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, ids)})
    paths = {name: folder / name for name in ("a.arrow", "a.arrows", "a.parquet", "a.jsonl", "a.idx")}
    pq.write_table(table, paths["a.parquet"], row_group_size=2000)
    for name, writer_of in [("a.arrow", pa.ipc.new_file), ("a.arrows", pa.ipc.new_stream)]:
        with pa.OSFile(str(paths[name]), "wb") as file, writer_of(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    with paths["a.jsonl"].open("w") as lines:
        for start, stop in pairwise(offsets):
            lines.write(f'{{"input_ids": {ids[start:stop].tolist()}}}\n')
    ids.tofile(paths["a.idx"].with_suffix(".bin"))
    write_idx(paths["a.idx"], lengths)
    return paths


def write_idx(path: Path, lengths: np.ndarray) -> None:
    with path.open("wb") as file:
        write_index(file.write, lengths, dtype_code=4, item_bytes=4, document_index=None)


def microseconds(
    read_one: Callable[[int], Any], read_many: Callable[[Sequence[int]], Any], rows: list[int]
) -> str:
    singles, batches = [], []
    for _ in range(5):
        start = time.perf_counter()
        for row in rows:
            read_one(row)
        singles.append((time.perf_counter() - start) / len(rows) * 1e6)
        start = time.perf_counter()
        for first in range(0, len(rows), 32):
            read_many(rows[first : first + 32])
        batches.append((time.perf_counter() - start) / len(rows) * 1e6)
    return f"{statistics.median(singles):8.0f} µs {statistics.median(batches):8.0f} µs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = write_all(options.folder, options.rows)
    rows = np.random.default_rng(1).integers(0, options.rows, 2000).tolist()
    print(f"{'':24} {'one row':>11} {'rows of 32':>11}")
    for name, path in paths.items():
        definition = None if name == "a.idx" else LengthDefinition.by_tokens("input_ids")
        dataset = open_dataset(path, definition=definition)
        print(f"{name:24} {microseconds(dataset.__getitem__, dataset.__getitems__, rows)}", flush=True)
    try:
        from datasets import Dataset
    except ImportError:
        return
    mapped = Dataset.from_file(str(paths["a.arrows"])).with_format("numpy")
    print(f"{'datasets, a.arrows':24} {microseconds(mapped.__getitem__, mapped.__getitems__, rows)}")


if __name__ == "__main__":
    main()
