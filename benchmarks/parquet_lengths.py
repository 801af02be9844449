"""Which way to the lengths of a Parquet list column is the fastest that somebody else maintains?

python benchmarks/parquet_lengths.py --groups 25 --folder /tmp/bench      (needs duckdb and polars)

What was looked for: a reader that takes the repetition levels and leaves the values. There is none; pyarrow,
DuckDB and Polars decode the values; pyarrow's `read_dictionary` is for strings only; the size statistics of
newer files count the levels of a page, not of a row; pages of version 2 would at least not have to be
decompressed for their levels, but no reader makes use of that. What differs:

- `iter_batches` over one row group at a time is as fast as `read_row_group`, and holds a batch instead of a
  group; over all row groups in one call it takes half as long again, with the same batch size.
- The size of a batch hardly matters from 512 rows of 450 tokens up.
- `page_checksum_verification` costs a CRC-32 of the pages, and nothing where the file has none.
- DuckDB's `len()` is a little faster than pyarrow, Polars' `list.len()` slower.

So packer stays with pyarrow, which it needs anyway, and reads row group by row group.
"""

import argparse
from pathlib import Path

from analyze_parquet import write_tokens
from turns import take_turns

CONTENDERS = {
    "pyarrow reads, group by group": """
        import pyarrow.parquet as pq
        file = pq.ParquetFile({path!r})
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=["input_ids"], use_threads=False)
    """,
    "pyarrow reads, batches of a group": """
        import pyarrow.parquet as pq
        file = pq.ParquetFile({path!r})
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(4096, [group], ["input_ids"], use_threads=False):
                pass
    """,
    "pyarrow reads, batches of the file": """
        import pyarrow.parquet as pq
        for batch in pq.ParquetFile({path!r}).iter_batches(4096, columns=["input_ids"], use_threads=False):
            pass
    """,
    "packer measures the units": """
        from packer.samples import LengthDefinition, measure_unit
        from packer.sources import open_source
        source, definition = open_source({path!r}), LengthDefinition.by_tokens("input_ids")
        for unit in source.units(["input_ids"]):
            for measurement in measure_unit(source, unit, definition):
                pass
    """,
    "duckdb, len()": """
        import duckdb
        connection = duckdb.connect()
        connection.execute("set threads = 1")
        connection.execute("select len(input_ids) from '" + {path!r} + "'").fetchnumpy()
    """,
    "polars, list.len()": """
        import os
        os.environ["POLARS_MAX_THREADS"] = "1"
        import polars
        polars.scan_parquet({path!r}).select(polars.col("input_ids").list.len()).collect()
    """,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"tokens-{options.groups}.parquet"
    if not path.exists():
        write_tokens(path, options.groups)
    take_turns({name: code.format(path=str(path)) for name, code in CONTENDERS.items()}, turns=options.turns)


if __name__ == "__main__":
    main()
