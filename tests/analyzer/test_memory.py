"""Anonymous memory is bounded by the unit of work, not by the data set."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

MEASURED_RUN = """
    import json, sys, threading, time
    import packer

    peak = 0

    def anonymous() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

    def watch() -> None:
        global peak
        while True:
            peak = max(peak, anonymous())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    source, out, options = sys.argv[1:]
    packer.analyze(source, out=out, **json.loads(options))
    print(max(peak, anonymous()))
"""


def peak_of(source: Path, out: Path, options: str) -> int:
    """Peak of anonymous bytes of an analysis in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURED_RUN), source, out, options]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def write_lists(path: Path, num_groups: int) -> Path:
    """Row groups of 20,000 rows and 10 M tokens each: 40 MB decoded."""
    values = pa.array(np.arange(10_000_000, dtype=np.int32) % 50_000)
    offsets = pa.array(np.arange(0, 10_000_001, 500, dtype=np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(num_groups):
            writer.write_table(table)
    return path


def test_eight_times_the_rows_take_the_same_memory(tmp_path):
    peaks = [
        peak_of(
            write_lists(tmp_path / f"{groups}.parquet", groups),
            tmp_path / f"m{groups}",
            '{"tokens_column": "input_ids", "labels_column": "input_ids"}',
        )
        for groups in (2, 16)
    ]
    assert peaks[1] < 1.3 * peaks[0], peaks


@pytest.mark.parametrize("curriculum_files", ["false", "true"])
def test_thirty_million_lengths(tmp_path, curriculum_files):
    lengths = np.random.default_rng(0).lognormal(6, 1, 30_000_000).astype(np.int32)
    pq.write_table(pa.table({"n": lengths}), tmp_path / "x.parquet", row_group_size=1_000_000)
    del lengths
    options = f'{{"length_column": "n", "curriculum_files": {curriculum_files}}}'
    peak = peak_of(tmp_path / "x.parquet", tmp_path / "m", options)
    assert peak < 1.5e9, peak


def test_tokenized_texts_are_not_kept(tmp_path, small_tokenizer):
    text = " ".join(f"w{n % 50}" for n in range(30_000))
    for documents in (100, 600):
        pq.write_table(
            pa.table({"text": [text] * documents}), tmp_path / f"{documents}.parquet", row_group_size=20
        )
    options = f'{{"text_column": "text", "tokenizer": "{small_tokenizer}"}}'
    # How far the chunks of two threads overlap is a matter of chance: the least of many, the most of few.
    few, many = (
        [peak_of(tmp_path / f"{n}.parquet", tmp_path / f"m{n}-{turn}", options) for turn in range(3)]
        for n in (100, 600)
    )
    assert min(many) - max(few) < 5 * (1 << 20), (few, many)
