"""What does a row at random cost over a network: bytes fetched for each byte needed, and requests, by format?

python benchmarks/remote_reads.py [--rows 20000] [--microbatches 20]

The files lie in memory behind a file system that counts, and reads ahead as fsspec's clients do. The bytes
needed are those of the tokens as the format stores them. The second epoch is another process's first one:
what the node keeps by then is not fetched again.
"""

import argparse
import gzip
import io
import json
import os
import tempfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import packer
from packer.samples import LengthDefinition

ROWS_AT_ONCE = 16


class Counted(MemoryFileSystem):
    protocol = "counted"
    fetched: list[int] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("counted://", "memory://"))

    def _open(self, path, mode="rb", **options):
        return CountedFile(self, path, mode, **options)

    def cat_file(self, path, start=None, end=None, **options):
        with super()._open(path, "rb") as file:
            piece = file.getvalue()[start:end]
        self.fetched.append(len(piece))
        return piece


class CountedFile(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        return self.fs.cat_file(self.path, start, end)


def write_files(rows):
    """Put the rows into memory in every format; return the bytes that a token takes, by URL."""
    memory = fsspec.filesystem("memory")
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32())), "text": ["beside the tokens"] * len(rows)})
    lines = "".join(json.dumps({"ids": row}) + "\n" for row in rows).encode()
    num_tokens = sum(map(len, rows))
    contents = {"x.jsonl": lines, "x.jsonl.gz": gzip.compress(lines, 1)}
    for name, opened in (("x.arrow", pa.ipc.new_file), ("x.arrows", pa.ipc.new_stream)):
        sink = pa.BufferOutputStream()
        with opened(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        contents[name] = sink.getvalue().to_pybytes()
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2000)
    contents["x.parquet"] = sink.getvalue()
    for name, content in contents.items():
        memory.pipe(f"/data/{name}", content)
    return {name: (len(lines) / num_tokens if "jsonl" in name else 4.0) for name in contents}


def measure(name, rows, microbatches, bytes_per_token):
    """Return (bytes fetched per byte needed, requests a micro-batch), opening left out."""
    dataset = packer.open_dataset(f"counted://data/{name}", definition=LengthDefinition.by_tokens("ids"))
    dataset[0]
    opening = sum(Counted.fetched)
    Counted.fetched.clear()
    needed = 0.0
    for ids in microbatches:
        for row, sample in zip(ids, dataset.__getitems__(ids), strict=True):
            assert sample["input_ids"].tolist() == rows[row]
            needed += bytes_per_token * len(rows[row])
    fetched, requests = sum(Counted.fetched), len(Counted.fetched)
    Counted.fetched.clear()
    return fetched / needed, requests / len(microbatches), opening


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--microbatches", type=int, default=20)
    options = parser.parse_args()
    fsspec.register_implementation("counted", Counted)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50_000, n).tolist() for n in rng.integers(100, 1000, options.rows)]
    order = rng.permutation(options.rows)[: options.microbatches * ROWS_AT_ONCE]
    microbatches = order.reshape(-1, ROWS_AT_ONCE).tolist()
    print(f"{'':12} {'opening':>10} {'fetched per needed':>19} {'requests':>9} {'second process':>15}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PACKER_CACHE"] = cache
        for name, bytes_per_token in write_files(rows).items():
            factor, requests, opening = measure(name, rows, microbatches, bytes_per_token)
            again, _, _ = measure(name, rows, microbatches, bytes_per_token)
            print(
                f"{name:12} {opening / 1e6:7.1f} MB {factor:19.2f} {requests:9.1f} {again:15.2f}", flush=True
            )


if __name__ == "__main__":
    main()
