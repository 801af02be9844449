"""How does measuring a mapped Arrow file compare with NumPy's difference over the same offsets?

python benchmarks/analyze_arrow.py --rows 20000000 --folder /tmp/bench
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import packer
from packer.analyzer.tasks import MeasureUnit, UnitLengths
from packer.samples import LengthDefinition
from packer.sources import open_source

BATCH_ROWS = 100_000


def write_tokens(path: Path, num_rows: int) -> None:
    """Batches of 100,000 samples of 0 to 31 tokens: many rows, little else."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for _ in range(num_rows // BATCH_ROWS):
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 32, BATCH_ROWS))]).astype(np.int32)
            ids = pa.array(np.zeros(offsets[-1], dtype=np.int32))
            writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, ids)], schema=schema))


def numpy_difference(path: Path) -> int:
    total = 0
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column("input_ids")
            offsets = np.frombuffer(column.buffers()[1], dtype=np.int32, count=len(column) + 1)
            total += int(np.diff(offsets).sum())
    return total


def measured(path: Path) -> int:
    source = open_source(path)
    task = MeasureUnit(source, LengthDefinition.by_tokens("input_ids"))
    payloads = (memoryview(task(unit, lambda *_: None)) for unit in source.units(["input_ids"]))
    return sum(UnitLengths.unpack(payload).totals[1] for payload in payloads)


def analyzed(path: Path) -> int:
    out = path.with_name("metrics")
    return packer.analyze(path, out=out, tokens_column="input_ids", overwrite=True).main.total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"tokens-{options.rows}.arrow"
    if not path.exists():
        write_tokens(path, options.rows)
    contenders: dict[str, Callable[[Path], int]] = {
        "numpy.diff of the offsets": numpy_difference,
        "packer measures the units": measured,
        "packer.analyze, files included": analyzed,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    totals = set()
    for _ in range(options.turns):
        for name, contender in contenders.items():
            start = time.perf_counter()
            totals.add(contender(path))
            seconds[name].append(time.perf_counter() - start)
    assert len(totals) == 1, totals
    first = statistics.median(seconds["numpy.diff of the offsets"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:32} {median:8.3f} s  {median / first:6.2f}×")


if __name__ == "__main__":
    main()
