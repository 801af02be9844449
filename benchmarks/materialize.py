"""What does materialising a plan cost, and what does the loader gain by it?

    python benchmarks/materialize.py --gigabytes 2 --out materialize.json   (4 minutes, 5 × that on the disk)

- copy: pyarrow reads token lists in Parquet and writes them once, in order, as Arrow and as Parquet: the
  least that any rewriting takes;
- materialize: the same lists into a shuffled plan's order, with two workers: seconds, beside the copy; peak
  memory of all its processes; at half the size, too, for the slope;
- load: a loader from the shards, beside one from a token file (``.bin/.idx``) of the same samples; bare, two
  workers, and in this process; tokens a second.

Everything is flushed to the disk within the time, and the system's cache is as the step before left it.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import packer
from packer.mmididx import write_index
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader

TOKENS = 8192
VOCABULARY = 50_000
GROUP_ROWS = 20_000


def write_source(path: Path, num_bytes: int) -> np.ndarray[Any, Any]:
    """Write lists of int32 of lognormal length; return the lengths."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("ids", pa.list_(pa.int32()))])
    lengths = []
    written = 0
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while written < num_bytes:
            seqlens = np.clip(rng.lognormal(6, 1, GROUP_ROWS), 1, TOKENS).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(seqlens)]).astype(np.int32)
            values = rng.integers(0, VOCABULARY, int(offsets[-1]), dtype=np.int32)
            writer.write_table(pa.table([pa.ListArray.from_arrays(offsets, values)], schema=schema))
            lengths.append(seqlens)
            written += values.nbytes
    return np.concatenate(lengths)


def copy_in_order(source: Path, target: Path) -> None:
    """Read and write once, with pyarrow alone and its own threads."""
    file = pq.ParquetFile(source)
    if target.suffix == ".arrow":
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, file.schema_arrow) as writer:
            for batch in file.iter_batches():
                writer.write_batch(batch)
    else:
        with pq.ParquetWriter(target, file.schema_arrow, compression="none", use_dictionary=False) as writer:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group))
    flush(target)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Peak:
    """Memory of a process and its children, the highest sum that was seen."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._over = threading.Event()
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
            self.num_bytes = max(self.num_bytes, total)

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.num_bytes


def materialize(plan: Path, source: Path, out: Path, workers: int) -> tuple[float, int]:
    """Run the command; return seconds and the peak of its processes' memory, shared pages counted once."""
    command = [sys.executable, "-m", "packer", "materialize", str(plan), str(source), "--out", str(out)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    peak = Peak(process.pid)
    if process.wait():
        raise RuntimeError(f"{command} failed")
    return time.perf_counter() - start, peak.stop()


def write_token_file(source: Path, prefix: Path) -> None:
    """Write the same samples as a ``.bin/.idx`` pair."""
    lengths = []
    with open(f"{prefix}.bin", "wb") as file:
        for batch in pq.ParquetFile(source).iter_batches():
            lists = batch.column(0)
            file.write(np.asarray(lists.flatten()).data)
            lengths.append(np.diff(np.asarray(lists.offsets)))
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file.write, np.concatenate(lengths), dtype_code=4, item_bytes=4, document_index=None)


def play(plan: Path, dataset: Any, workers: int, most: int) -> float:
    """Return real tokens a second of one loader over its first micro-batches."""
    loader = PlanLoader(str(plan), dataset, num_workers=workers)
    num_tokens = 0
    start = 0.0
    for number, batch in enumerate(loader.microbatches()):
        if number == 32:  # workers are started, and what is opened once is open
            start = time.perf_counter()
        elif number > 32:
            num_tokens += batch.num_tokens
        if number == most:
            break
    seconds = time.perf_counter() - start
    loader.close()
    return num_tokens / seconds


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "sizes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for share in (0.5, 1.0):
            size = int(arguments.gigabytes * share * 1e9)
            report["sizes"][f"{size / 1e9:g} GB"] = one_size(folder, size, arguments)
            if share < 1:
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        report["load (tokens/s)"] = load(folder, arguments.turns)
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1))


def one_size(folder: Path, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    source = folder / "tokens.parquet"
    seqlens = write_source(source, size)
    packer.analyze(source, out=folder / "metrics", tokens_column="ids")
    config = PlanConfig(max_tokens=TOKENS, layout="packed")
    make_plan(str(folder / "metrics"), config, out=folder / "plan")
    copies: dict[str, list[float]] = {"copy to Arrow": [], "copy to Parquet": []}
    seconds: list[float] = []
    peaks: list[int] = []
    for _ in range(arguments.turns):
        for kind in copies:
            target = folder / f"copy.{kind.rsplit(' ', 1)[-1].lower()}"
            copies[kind].append(timed(lambda target=target: copy_in_order(source, target)))
            target.unlink()
        shutil.rmtree(folder / "shards", ignore_errors=True)
        took, peak = materialize(folder / "plan", source, folder / "shards", arguments.workers)
        seconds.append(took)
        peaks.append(peak)
    medians = {kind: float(np.median(times)) for kind, times in copies.items()}
    took = float(np.median(seconds))
    return {
        "samples": len(seqlens),
        **{f"{kind} (s)": round(value, 2) for kind, value in medians.items()},
        "materialize (s)": round(took, 2),
        "of copy to Arrow": round(took / medians["copy to Arrow"], 2),
        "of copy to Parquet": round(took / medians["copy to Parquet"], 2),
        "seconds per GB": round(took / size * 1e9, 2),
        "µs per sample": round(took / len(seqlens) * 1e6, 2),
        "peak (GB)": round(max(peaks) / 1e9, 2),
    }


def load(folder: Path, turns: int) -> dict[str, Any]:
    write_token_file(folder / "tokens.parquet", folder / "tokens")
    datasets = {
        "shards": packer.open_dataset(folder / "shards"),
        "token file": packer.open_dataset(folder / "tokens"),
    }
    rates: dict[str, Any] = {}
    for workers in (0, 2):
        found: dict[str, list[float]] = {name: [] for name in datasets}
        for turn in range(turns + 1):
            for name, dataset in datasets.items():
                rate = play(folder / "plan", dataset, workers, most=4000)
                if turn:
                    found[name].append(rate)
        medians = {name: float(np.median(values)) for name, values in found.items()}
        rates |= {f"{name}, {workers} workers": round(rate) for name, rate in medians.items()}
        rates[f"ratio, {workers} workers"] = round(medians["shards"] / medians["token file"], 2)
    return rates


if __name__ == "__main__":
    main()
