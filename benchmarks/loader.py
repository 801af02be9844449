"""What does the loader cost? Opening, resuming, and each micro-batch beside torch's own loader.

    python benchmarks/loader.py --out loader.json           (5 minutes, 4 GB of disk in $TMPDIR)

- open: ``load_plan``, ``PlanLoader`` and the first batch, of a plan of 1,000 and of 100,000,000 samples;
- resume: the same with a state at 90% of 1,000,000 micro-batches, beside a start at 0, and the samples read
  for it;
- overhead: time per micro-batch of 8,192 tokens, beside torch's ``DataLoader`` with a ready-made list of ids
  and the same collation, read in this process and by one worker; processor time is that of both processes;
- collate: a packed micro-batch from a memory-mapped token file, beside ``np.copyto`` of the same bytes:
  sample by sample out of the file, and the other tensors whole; and beside ``np.copyto`` of all tensors
  whole, out of memory.

Contenders take turns in one run. Processor time is told throughout, which a busy machine changes less.
"""

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from packer.plan import DroppedSamples, Plan, PlanFacts, PlannedEpoch, load_plan, write_plan
from packer.plan.sources import PlanSource
from packer.planner import PlanConfig
from packer.runtime import PlanLoader
from packer.runtime.batches.collate import Collator, PlannedShape
from packer.runtime.batches.fields import Fields

TOKENS = 8192
SEQLEN = 512
PER_MICROBATCH = TOKENS // SEQLEN


class MappedTokens:
    """Samples of one length in a memory-mapped token file; counts what is read."""

    def __init__(self, path: Path, num_samples: int) -> None:
        self._path = path
        self._num_samples = num_samples
        self._tokens: np.ndarray | None = None
        self.num_read = 0

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample_id: int) -> dict[str, np.ndarray]:
        if self._tokens is None:
            self._tokens = np.memmap(self._path, np.int32, mode="r")
        self.num_read += 1
        start = sample_id * SEQLEN % (len(self._tokens) - SEQLEN)
        return {"input_ids": self._tokens[start : start + SEQLEN]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


class CollateList:
    """The same tensors as the loader's, from a list of samples."""

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._collator = Collator()
        self._fields = Fields()

    def __call__(self, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        seqlens = np.array([len(sample["input_ids"]) for sample in samples], np.int32)
        length = int(seqlens.sum()) if self._layout == "packed" else int(seqlens.max())
        return self._collator(
            samples, PlannedShape(self._layout, seqlens, length, 1, False), self._fields
        ).tensors


def write_synthetic_plan(path: Path, num_samples: int, layout: str) -> Plan:
    """Write a plan of equal samples in a shuffled order of stretches; big ones in seconds."""
    rows = num_samples // PER_MICROBATCH
    ids = np.arange(rows * PER_MICROBATCH, dtype=np.int32).reshape(-1, PER_MICROBATCH)
    np.random.default_rng(0).shuffle(ids)
    size = TOKENS if layout == "packed" else SEQLEN
    epoch = PlannedEpoch(
        sample_ids=ids.ravel(),
        seqlens=np.full(ids.size, SEQLEN, np.int32),
        starts=None,
        offsets=np.arange(0, ids.size + 1, PER_MICROBATCH),
        padded_seqlens=np.full(rows, size, np.int32),
        costs=np.full(rows, TOKENS),
        is_filler=np.zeros(rows, np.bool_),
        is_repeat=np.zeros(rows, np.bool_),
        step_num_samples=np.full(rows, PER_MICROBATCH),
        step_num_tokens=np.full(rows, TOKENS),
        step_num_loss_tokens=np.full(rows, TOKENS - PER_MICROBATCH),
        step_max_seqlen=np.full(rows, SEQLEN, np.int32),
        lr_scales=np.ones(rows),
        dropped=_nothing(),
    )
    facts = PlanFacts(
        config=PlanConfig(max_tokens=TOKENS, layout=layout).to_json(),
        sources=[PlanSource(num_samples=num_samples, num_tokens=num_samples * SEQLEN)],
        loss_tokens="seqlen - 1",
    )
    return write_plan(path, facts, [epoch], dropped=_nothing())


def _nothing() -> DroppedSamples:
    empty = np.empty(0, np.int64)
    return DroppedSamples(sample_ids=empty, seqlens=empty, num_tokens=empty, reasons=np.empty(0, np.uint8))


def median_of_turns(functions: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, Any]:
    """Call each in turn, so that whatever else the machine does hits all alike; medians in seconds.

    A function that returns several times has the median of each.
    """
    times: dict[str, list[Any]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            seconds = function()
            if turn:  # the first turn warms up
                times[name].append(seconds)
    return {name: np.median(values, axis=0).tolist() for name, values in times.items()}


def first_batch(path: Path, dataset: MappedTokens, state: dict[str, Any] | None = None) -> float:
    """Seconds from nothing to the first batch."""
    start = time.process_time()
    loader = PlanLoader(load_plan(path), dataset)
    if state is not None:
        loader.load_state_dict(state)
    next(iter(loader.microbatches()))
    return time.process_time() - start


def open_and_resume(folder: Path, tokens: Path, *, big: int, long: int) -> dict[str, Any]:
    plans = {1_000: folder / "small", big: folder / "big", long * PER_MICROBATCH: folder / "long"}
    for num_samples, path in plans.items():
        write_synthetic_plan(path, num_samples, "packed")
    datasets = {num_samples: MappedTokens(tokens, num_samples) for num_samples in plans}
    turns = {
        f"open {num_samples:,}": lambda n=num_samples: first_batch(plans[n], datasets[n])
        for num_samples in (1_000, big)
    }
    path, dataset = plans[long * PER_MICROBATCH], datasets[long * PER_MICROBATCH]
    state = PlanLoader(load_plan(path), dataset).state_dict() | {"step": long * 9 // 10}
    turns["start at 0"] = lambda: first_batch(path, dataset)
    turns["resume at 90%"] = lambda: first_batch(path, dataset, state)
    medians = median_of_turns(turns, 15)
    dataset.num_read = 0
    first_batch(path, dataset, state)
    return {
        **{f"{name} (ms)": seconds * 1e3 for name, seconds in medians.items()},
        "open ratio": medians[f"open {big:,}"] / medians["open 1,000"],
        "resume ratio": medians["resume at 90%"] / medians["start at 0"],
        "skipped samples read at resume": dataset.num_read - PER_MICROBATCH,
    }


def overhead(folder: Path, tokens: Path, *, microbatches: int) -> dict[str, Any]:
    results = {}
    num_samples = microbatches * PER_MICROBATCH
    for layout in ("padded", "packed"):
        plan = write_synthetic_plan(folder / f"overhead-{layout}", num_samples, layout)
        dataset = MappedTokens(tokens, num_samples)
        rows = plan.epoch(0)
        ids = [rows.microbatch(row).sample_ids.tolist() for row in range(microbatches)]
        for workers in (0, 1):
            # Both keep their workers, so that starting them is in neither time.
            theirs = DataLoader(
                dataset,
                batch_sampler=ids,
                collate_fn=CollateList(layout),
                num_workers=workers,
                persistent_workers=workers > 0,
            )
            ours = PlanLoader(plan, dataset, num_workers=workers)

            def play_ours(ours: PlanLoader = ours) -> None:
                ours.set_epoch(0)
                drain(ours.microbatches())

            def play_theirs(theirs: Any = theirs) -> None:
                drain(theirs)

            medians = median_of_turns({"torch": Timed(play_theirs), "ours": Timed(play_ours)}, 15)
            name = f"{layout}, {workers} workers"
            for at, clock in enumerate(("wall", "processor")):
                for who, seconds in medians.items():
                    results[f"{name}, {who}, {clock} (µs)"] = seconds[at] / microbatches * 1e6
                results[f"{name}, {clock} ratio"] = medians["ours"][at] / medians["torch"][at]
    return results


class Timed:
    """Plays a loader: wall seconds, and processor seconds of this process and of the workers it keeps."""

    def __init__(self, play: Callable[[], None]) -> None:
        self._play = play
        others = {process.pid for process in multiprocessing.active_children()}
        play()  # starts them
        started = [process.pid for process in multiprocessing.active_children() if process.pid not in others]
        # Linux's number of a process's processor-time clock: what clock_getcpuclockid(3) returns.
        self._clocks = [(~pid << 3) | 2 for pid in started if pid is not None]

    def __call__(self) -> tuple[float, float]:
        wall, processor = time.perf_counter(), self._processor_time()
        self._play()
        return time.perf_counter() - wall, self._processor_time() - processor

    def _processor_time(self) -> float:
        return time.process_time() + sum(map(time.clock_gettime, self._clocks))


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def collate(tokens: Path) -> dict[str, Any]:
    """Packed rows of several sizes: what we make of a token file, and plain copies of as many bytes."""
    results = {}
    mapped = np.memmap(tokens, np.int32, mode="r").view(np.ndarray)
    collator, fields = Collator(), Fields()
    for length in (8_192, 32_768, 131_072):
        starts = np.random.default_rng(0).integers(0, len(mapped) - SEQLEN, length // SEQLEN).tolist()
        samples = [{"input_ids": mapped[start : start + SEQLEN]} for start in starts]
        shape = PlannedShape("packed", np.full(len(samples), SEQLEN, np.int32), length, 1, False)
        made = collator(samples, shape, fields).tensors
        sources = [value.numpy().copy() for value in made.values() if isinstance(value, torch.Tensor)]

        def ours(samples: Any = samples, shape: PlannedShape = shape) -> None:
            collator(samples, shape, fields)

        def by_sample(starts: list[int] = starts, sources: list[np.ndarray] = sources) -> list[np.ndarray]:
            targets = [np.empty_like(source) for source in sources]
            for index, start in enumerate(starts):
                place = slice(index * SEQLEN, (index + 1) * SEQLEN)
                np.copyto(targets[0][0, place], mapped[start : start + SEQLEN])
            for target, source in zip(targets[1:], sources[1:], strict=True):
                np.copyto(target, source)
            return targets

        def whole(sources: list[np.ndarray] = sources) -> list[np.ndarray]:
            targets = [np.empty_like(source) for source in sources]
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target, source)
            return targets

        ways = {"collate": ours, "copyto by sample": by_sample, "copyto whole": whole}
        medians = median_of_turns({name: lambda way=way: repeated(way) for name, way in ways.items()}, 25)
        results |= {f"{length:,} tokens, {name} (µs)": seconds * 1e6 for name, seconds in medians.items()}
        for name in ("copyto by sample", "copyto whole"):
            results[f"{length:,} tokens, collate / {name}"] = medians["collate"] / medians[name]
    return results


def repeated(function: Callable[[], Any], times: int = 100) -> float:
    start = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="a hundredth of the sizes, to try the script")
    arguments = parser.parse_args()
    divisor = 100 if arguments.small else 1
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": f"{platform.machine()}, torch {torch.__version__}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = folder / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 1 << 24, dtype=np.int32).tofile(tokens)
        report["collate"] = collate(tokens)
        report["overhead"] = overhead(folder, tokens, microbatches=500 if arguments.small else 1_000)
        report["open and resume"] = open_and_resume(
            folder, tokens, big=100_000_000 // divisor, long=1_000_000 // divisor
        )
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
