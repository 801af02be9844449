"""How much does a loader decode for what it needs, over Parquet larger than its cache, by the plan's order?

python benchmarks/block_order.py --folder /tmp/blocks      (--groups 60 --rows 4000: 1.1 GB decoded)

Row groups of random token lists; the cache has 256 MiB. Micro-batches of 32,768 tokens are read in the
plan's order, from its middle on: 1,500 where what is open fits the cache, else 8, since each takes seconds.
Decoded bytes are those of the row groups that the source decodes.
"""

import argparse
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import packer
from packer.planner import PlanConfig, make_plan
from packer.sources.cache import CACHE_BYTES, BatchCache


def write_parquet(path: Path, num_groups: int, rows: int) -> None:
    random = np.random.default_rng(0)
    writer = None
    for _ in range(num_groups):
        lengths = np.clip(random.lognormal(6.4, 0.8, rows), 1, 8192).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = random.integers(0, 50_000, offsets[-1], dtype=np.int64)
        table = pa.table({"ids": pa.ListArray.from_arrays(offsets.astype(np.int32), ids)})
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=rows)
    if writer is not None:
        writer.close()


class CountingCache(BatchCache):
    """Counts the bytes of what is made."""

    num_decoded = 0

    def get(self, key: Hashable, make: Callable[[], list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        def made() -> list[pa.RecordBatch]:
            batches = make()
            self.num_decoded += sum(batch.get_total_buffer_size() for batch in batches)
            return batches

        return super().get(key, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--rows", type=int, default=4000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path, metrics = arguments.folder / "a.parquet", arguments.folder / "metrics"
    if not path.exists():
        write_parquet(path, arguments.groups, arguments.rows)
    packer.analyze(path, out=metrics, tokens_column="ids", overwrite=True)
    print("| --shuffle-blocks | open | their bytes, MB | decoded / needed | ms a micro-batch |")
    print("|---|---|---|---|---|")
    for at_a_time in (None, 16, 4, 2):
        config = PlanConfig(max_tokens=32_768, layout="packed", dp_size=4, shuffle_blocks=at_a_time)
        plan = make_plan(metrics, config)
        dataset = packer.open_dataset(path, metrics=metrics)
        decoded = dataset._source._cache = CountingCache()
        rows = [
            ids
            for table in plan.epoch(0).microbatches()
            for ids in np.split(table.sample_ids, table.offsets[1:-1])
        ]
        stated = plan.header["epochs"][0]["figures"].get("blocks")
        fits = stated is not None and stated["open_bytes"] <= CACHE_BYTES
        first, number = len(rows) // 2, 1500 if fits else 8
        needed, start = 0, time.perf_counter()
        for ids in rows[first : first + number]:
            needed += sum(sample["input_ids"].nbytes for sample in dataset.__getitems__(ids.tolist()))
        seconds = time.perf_counter() - start
        shown = f"{stated['open_blocks']} | {stated['open_bytes'] / 1e6:,.0f}" if stated else "all | –"
        took = f"{decoded.num_decoded / needed:.2f} | {seconds / number * 1e3:.1f}"
        print(f"| {at_a_time or 'none'} | {shown} | {took} |", flush=True)


if __name__ == "__main__":
    main()
