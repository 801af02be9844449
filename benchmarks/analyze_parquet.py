"""How does measuring a Parquet list column compare with reading it, and what does a second worker bring?

python benchmarks/analyze_parquet.py --groups 24 --times 8 --folder /tmp/bench

The data set is one file of 24 row groups, named 8 times: half a minute of work or more, and yet small enough
to stay in the disk cache, into which it is read before the first turn. Every contender reads it 8 times.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from turns import take_turns


def write_tokens(path: Path, num_groups: int) -> None:
    """Row groups of 100,000 samples, lengths lognormal to 8,192, ids as skewed as words are."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(num_groups):
            lengths = np.clip(rng.lognormal(5.8, 0.8, 100_000), 1, 8192).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = (129_280 * rng.random(offsets[-1], dtype=np.float32) ** 4).astype(np.int32)
            writer.write_table(pa.table([pa.ListArray.from_arrays(offsets, ids)], schema=schema))


def warm(path: Path) -> None:
    """Read a file into the disk cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


READ = """
    import pyarrow.parquet as pq
    for path in {paths!r}:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=["input_ids"], use_threads=False)
"""

ANALYZE = """
    import packer
    if __name__ == "__main__":
        packer.analyze({paths!r}, out={out!r}, tokens_column="input_ids", workers={workers}, overwrite=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"tokens-{options.groups}.parquet"
    if not path.exists():
        write_tokens(path, options.groups)
    metadata = pq.read_metadata(path)
    print(
        f"{options.times} times {metadata.num_rows:,} rows in {metadata.num_row_groups} groups, "
        f"{path.stat().st_size / 1e9:.1f} GB"
    )
    warm(path)
    paths = [str(path)] * options.times
    out = str(options.folder / "metrics")
    medians = take_turns(
        {
            "pyarrow reads the column": READ.format(paths=paths),
            "packer analyze, 1 worker": ANALYZE.format(paths=paths, out=out, workers=1),
            "packer analyze, 2 workers": ANALYZE.format(paths=paths, out=out, workers=2),
        },
        turns=options.turns,
    )
    one, two = medians["packer analyze, 1 worker"], medians["packer analyze, 2 workers"]
    print(f"2 workers over 1: {one / two:.2f}× faster")


if __name__ == "__main__":
    main()
