"""How fast does a GPU train on batches of different making? One run, one model, one length distribution.

Real tokens per second, peak memory, loss after equal tokens and the share of time that the GPU waits for
data, for

- rows: equal rows without padding, as long as the average token's sample: what the model can do at best;
- packed, padded: plans of ours, 32,768 tokens a micro-batch;
- grouped, fixed: batches of a fixed number of samples, sorted by length within megabatches as Hugging Face's
Trainer does, or
  just shuffled, at the largest number that surely fits; and fixed at 4 and 8 samples.

Every update takes about 32,768 real tokens, and all loaders use the same workers and the same copies to the
GPU.

    python benchmarks/train_gpu.py --out results.json            (one GPU; 8 minutes)
    python benchmarks/train_gpu.py --tiny --out results.json     (CPU, half a minute)
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gpu_decoder
import numpy as np
import pyarrow.parquet as pq
import torch
from gpu_decoder import Decoder, Shape
from torch.utils.data import DataLoader

import packer
from packer.runtime.batch import Batch
from packer.runtime.collate import Collator, PlannedShape
from packer.runtime.device import to_device

LENGTHS = Path(__file__).parent / "data" / "azure_llm_2023_lengths.parquet"
NUM_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of a run."""

    shape: Shape
    max_tokens: int
    length_divisor: int
    target_tokens: int
    sizes: tuple[int, ...]
    """Numbers of samples to try for the largest that fits."""
    short_sizes: tuple[int, ...]
    warm_up_updates: int
    device: str
    dtype: torch.dtype
    num_workers: int


FULL = Setting(
    shape=Shape(),
    max_tokens=32_768,
    length_divisor=1,
    target_tokens=6_500_000,
    sizes=(8, 10, 12, 16, 20, 24),
    short_sizes=(4, 8),
    warm_up_updates=8,
    device="cuda",
    dtype=torch.bfloat16,
    num_workers=4,
)
TINY = Setting(
    shape=Shape(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48),
    max_tokens=512,
    length_divisor=64,
    target_tokens=12_000,
    sizes=(2, 3),
    short_sizes=(2,),
    warm_up_updates=2,
    device="cpu",
    dtype=torch.float32,
    num_workers=1,
)


class Update(NamedTuple):
    """The micro-batches of one optimizer update."""

    num_tokens: int
    num_loss_tokens: int
    squared_seqlens: int
    """Sum of the samples' squared lengths: what attention costs."""
    batches: Iterable[Batch]


class ChainTokens:
    """Samples of given lengths from a random chain: each token has eight likely successors, so there is much
    to learn."""

    def __init__(self, seqlens: np.ndarray, vocab_size: int, path: Path) -> None:
        self.edges = np.concatenate([[0], np.cumsum(seqlens, dtype=np.int64)])
        self.path = path
        generator = np.random.default_rng(0)
        successors = generator.integers(0, vocab_size, (vocab_size, 8))
        likely = np.array([0] * 6 + [1] * 4 + [2] * 2 + [3, 4, 5, 6])  # of 16: how often each successor comes
        # (chains, steps): many chains at once, laid end to end
        steps = -(-int(self.edges[-1]) // 4096)
        tokens = np.empty((4096, steps), np.int32)
        state = generator.integers(0, vocab_size, 4096)
        for step in range(steps):
            state = successors[state, likely[generator.integers(0, 16, 4096)]]
            tokens[:, step] = state
        np.save(path, tokens.ravel())
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, sample_id: int) -> dict[str, np.ndarray]:
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        return {"input_ids": self._tokens[self.edges[sample_id] : self.edges[sample_id + 1]]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


class Collate:
    """Pads a list of samples to the longest, into the tensors that our loader makes."""

    def __init__(self) -> None:
        self._collator = Collator(pad_values={})

    def __call__(self, samples: Sequence[dict[str, np.ndarray]]) -> Batch:
        seqlens = np.array([len(sample["input_ids"]) for sample in samples], np.int32)
        shape = PlannedShape("padded", seqlens, -(-int(seqlens.max()) // 8) * 8, 1, False)
        return Batch(self._collator(samples, shape).tensors)


def updates_of_plan(loader: packer.PlanLoader) -> Iterator[Update]:
    """Play a plan, one micro-batch an update."""
    rows = loader.plan.epoch(0)
    for step in loader:
        seqlens = rows.microbatch(step.index).seqlens.astype(np.int64)
        yield Update(step.num_tokens, step.num_loss_tokens, int((seqlens**2).sum()), step)


def updates_of_lists(
    dataset: Any, seqlens: np.ndarray, batches: Sequence[np.ndarray], setting: Setting
) -> Iterator[Update]:
    """Play ready lists of ids through torch's loader; as many batches an update as hold its tokens."""
    loader = DataLoader(
        dataset,
        batch_sampler=[ids.tolist() for ids in batches],
        collate_fn=Collate(),
        num_workers=setting.num_workers,
        pin_memory=setting.device == "cuda",
    )
    delivered = to_device(iter(loader), torch.device(setting.device))
    first = 0
    while first < len(batches):
        last, tokens = first, 0
        while last < len(batches) and tokens < setting.max_tokens * 0.97:
            tokens += int(seqlens[batches[last]].sum())
            last += 1
        lengths = np.concatenate([seqlens[ids] for ids in batches[first:last]]).astype(np.int64)
        yield Update(
            int(lengths.sum()),
            int((lengths - 1).sum()),
            int((lengths**2).sum()),
            (next(delivered) for _ in range(last - first)),  # type: ignore[misc]
        )
        first = last


def fixed_batches(ids: np.ndarray, size: int) -> list[np.ndarray]:
    order = np.random.default_rng(1).permutation(ids)
    return list(order[: len(order) // size * size].reshape(-1, size))


def grouped_batches(ids: np.ndarray, seqlens: np.ndarray, size: int) -> list[np.ndarray]:
    """Shuffle, sort within megabatches of 50 batches, as Hugging Face's LengthGroupedSampler does."""
    order = np.random.default_rng(1).permutation(ids)
    span = max(1, min(len(order) // (size * 4), 50)) * size
    parts = [order[start : start + span] for start in range(0, len(order), span)]
    ordered = np.concatenate([part[np.argsort(-seqlens[part], kind="stable")] for part in parts])
    return list(ordered[: len(ordered) // size * size].reshape(-1, size))


class Trainer:
    """One model, trained on one kind of batches."""

    def __init__(self, setting: Setting, longest: int) -> None:
        self.setting = setting
        self.on_gpu = setting.device == "cuda"
        torch.manual_seed(0)
        with torch.device(setting.device):
            self.model = Decoder(setting.shape, longest).to(setting.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=self.on_gpu or None
        )
        self.waits: list[tuple[Any, Any]] = []
        self.done: list[Any] = []

    def train(self, updates: Iterable[Update], target_tokens: int, limit_s: float) -> dict[str, Any]:
        """Train until so many tokens or seconds; speed is that after the warm-up."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seen = counted = squared = number = 0
        losses = []
        start = time.perf_counter()
        for number, update in enumerate(updates, start=1):
            for group in self.optimizer.param_groups:
                group["lr"] = 6e-4 * min(1.0, number / 20)
            losses.append(self._update(update) / update.num_loss_tokens)
            seen += update.num_tokens
            counted += update.num_tokens
            squared += update.squared_seqlens
            if number == self.setting.warm_up_updates:
                self._wait()
                self.waits.clear()
                counted = squared = 0
                start = time.perf_counter()
            is_late = number > self.setting.warm_up_updates and time.perf_counter() - start > limit_s
            if seen >= target_tokens or is_late:
                break
        self._wait()
        seconds = time.perf_counter() - start
        shape = self.setting.shape
        flops = shape.dense_flops(counted) + shape.attention_flops(squared)
        waited = sum(asked.elapsed_time(got) for asked, got in self.waits) / 1000 if self.on_gpu else 0.0
        return {
            "updates": number,
            "tokens": seen,
            "tokens_per_second": counted / seconds,
            "teraflops": flops / seconds / 1e12,
            "attention_share_of_flops": shape.attention_flops(squared) / flops,
            "wait_share": waited / seconds,
            "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if self.on_gpu else 0.0,
            "reserved_gigabytes": torch.cuda.max_memory_reserved() / 1e9 if self.on_gpu else 0.0,
            "train_loss": float(torch.stack(losses[-20:]).mean()),
        }

    def _update(self, update: Update) -> torch.Tensor:
        total = torch.zeros((), device=self.setting.device)
        for batch in self._timed(update.batches):
            loss = self.model(batch)
            (loss / update.num_loss_tokens).backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.on_gpu:  # the host runs two updates ahead, not more
            self.done.append(torch.cuda.current_stream().record_event())
            if len(self.done) > 2:
                self.done.pop(0).synchronize()
        return total

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Note, on the GPU's own clock, how long it stood between the last kernel before a batch and the
        batch."""
        iterator = iter(batches)
        while True:
            asked, got = (
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                if self.on_gpu
                else (None, None)
            )
            if asked is not None:
                asked.record()
            batch = next(iterator, None)
            if batch is None:
                return
            if got is not None:
                got.record()
                self.waits.append((asked, got))
            yield batch

    @torch.no_grad()
    def evaluate(self, loader: packer.PlanLoader) -> float:
        """Mean loss per token of held-out samples."""
        sums = [(self.model(batch), batch.num_loss_tokens) for batch in loader.microbatches()]
        return float(torch.stack([loss for loss, _ in sums]).sum()) / sum(count for _, count in sums)

    def fits(self, size: int, longest: int) -> bool:
        """Whether a batch of so many of the longest samples trains without running out of memory."""
        ids = torch.zeros((size, longest), dtype=torch.long, device=self.setting.device)
        positions = torch.arange(longest, device=self.setting.device).repeat(size, 1)
        try:
            self.model({"input_ids": ids, "labels": ids, "position_ids": positions}).backward()
            self.optimizer.step()
            self._wait()
        except torch.OutOfMemoryError:
            return False
        return True

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-fuse", action="store_true", help="run the pointwise functions uncompiled")
    parser.add_argument("--seconds", type=float, default=500, help="start no variant after this")
    arguments = parser.parse_args()
    setting = TINY if arguments.tiny else FULL
    gpu_decoder.FUSE = not (arguments.no_fuse or arguments.tiny)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(setting, Path(folder))
        print(f"data and plans: {time.perf_counter() - begin:.0f} s", flush=True)
        for name, run in bench.variants().items():
            if time.perf_counter() - begin > arguments.seconds:
                print(f"{name}: no time left")
                continue
            bench.results[name] = run()
            print(
                f"{name}: {json.dumps(bench.results[name])} at {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            write(arguments.out, bench, time.perf_counter() - begin)
    print_table(bench.results)


class Bench:
    """Data, plans and variants of one run."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        seqlens = pq.read_table(LENGTHS)["length"].to_numpy().astype(np.int64)
        seqlens = np.maximum(seqlens // setting.length_divisor, 2)
        if setting.device == "cpu":
            seqlens = seqlens[:2000]
        self.seqlens = seqlens
        self.longest = -(-int(seqlens.max()) // 8) * 8
        self.dataset = ChainTokens(seqlens, setting.shape.vocab_size, folder / "tokens.npy")
        order = np.random.default_rng(0).permutation(len(seqlens))
        self.held_out, self.train = np.sort(order[:NUM_HELD_OUT]), np.sort(order[NUM_HELD_OUT:])
        self.plans = {
            "padded": self._plan(self.train, layout="padded", window=256),
            "packed": self._plan(self.train, layout="packed"),
            "held out": self._plan(self.held_out, layout="packed", remainder="keep"),
        }
        # Equal rows as long as the sample of the average token: the same attention per token.
        self.row = max(8, round(float((seqlens**2).sum() / seqlens.sum()) / 8) * 8)
        self.results: dict[str, dict[str, Any]] = {}
        self.largest = 0

    def _plan(self, ids: np.ndarray, **options: Any) -> packer.Plan:
        config = packer.PlanConfig(
            max_tokens=self.setting.max_tokens, pad_multiple=8, sample_ids=ids, **options
        )
        return packer.make_plan(self.seqlens, config)

    def variants(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return what is measured, in order; the largest batch that fits is found on the way."""
        short = self.setting.target_tokens // 5
        return {
            f"rows of {self.row}": lambda: self._run(self._rows(), short, limit_s=40, held_out=False),
            "packed": lambda: self._run(self._planned("packed"), self.setting.target_tokens),
            "padded": lambda: self._run(self._planned("padded"), self.setting.target_tokens),
            "loader alone, packed": lambda: self._loader_alone("packed"),
            "loader alone, padded": lambda: self._loader_alone("padded"),
            "grouped, largest": lambda: self._sized("grouped", self._largest(), self.setting.target_tokens),
            "fixed, largest": lambda: self._sized("fixed", self._largest(), self.setting.target_tokens),
        } | {
            f"fixed, {size}": lambda size=size: self._sized("fixed", size, short, held_out=False)
            for size in self.setting.short_sizes
        }

    def _run(
        self, updates: Iterable[Update], target_tokens: int, *, limit_s: float = 130, held_out: bool = True
    ) -> dict[str, Any]:
        trainer = self._trainer()
        result = trainer.train(updates, target_tokens, limit_s)
        if held_out:
            result["held_out_loss"] = trainer.evaluate(self._loader("held out"))
        return result

    def _trainer(self) -> Trainer:
        gc.collect()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        return Trainer(self.setting, self.longest)

    def _loader(self, name: str) -> packer.PlanLoader:
        return packer.PlanLoader(
            self.plans[name], self.dataset, device=self.setting.device, num_workers=self.setting.num_workers
        )

    def _planned(self, name: str) -> Iterator[Update]:
        return updates_of_plan(self._loader(name))

    def _sized(self, kind: str, size: int, target_tokens: int, *, held_out: bool = True) -> dict[str, Any]:
        make = {
            "fixed": fixed_batches,
            "grouped": lambda ids, size: grouped_batches(ids, self.seqlens, size),
        }[kind]
        batches = make(self.train, size)
        padded = sum(size * int(self.seqlens[ids].max()) for ids in batches)
        updates = updates_of_lists(self.dataset, self.seqlens, batches, self.setting)
        result = self._run(updates, target_tokens, held_out=held_out, limit_s=130 if held_out else 25)
        real = sum(int(self.seqlens[ids].sum()) for ids in batches)
        return result | {"samples": size, "padded_per_real": padded / real}

    def _largest(self) -> int:
        """Return the largest batch of which every one surely fits."""
        for size in self.setting.sizes if not self.largest else ():
            if not self._trainer().fits(size, self.longest):
                break
            self.largest = size
        return self.largest

    def _rows(self) -> Iterator[Update]:
        """Endless equal rows, already on the device."""
        count = self.setting.max_tokens // self.row
        tokens = np.load(self.dataset.path, mmap_mode="r")
        positions = torch.arange(self.row, device=self.setting.device).repeat(count, 1)
        for index in range(len(tokens) // (count * self.row)):
            part = tokens[index * count * self.row : (index + 1) * count * self.row]
            ids = torch.from_numpy(part.reshape(count, self.row).astype(np.int64)).to(self.setting.device)
            batch = Batch({"input_ids": ids, "labels": ids, "position_ids": positions})
            yield Update(count * self.row, count * (self.row - 1), count * self.row**2, [batch])

    def _loader_alone(self, name: str) -> dict[str, Any]:
        """Tokens per second onto the device where nothing is computed."""
        synchronize = torch.cuda.synchronize if self.setting.device == "cuda" else nullcontext
        tokens = 0
        start = None
        for number, batch in enumerate(self._loader(name).microbatches()):
            if number == 20:  # the workers have started
                synchronize()
                start = time.perf_counter()
            tokens += batch.num_tokens if start is not None else 0
            if number == 320:
                break
        synchronize()
        assert start is not None
        seconds = time.perf_counter() - start
        return {
            "tokens_per_second": tokens / seconds,
            "milliseconds_per_microbatch": seconds / (number - 19) * 1e3,
        }


def write(path: Path, bench: Bench, seconds: float) -> None:
    """Keep what is known so far."""
    on_gpu = bench.setting.device == "cuda"
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "parameters": sum(
            parameter.numel() for parameter in Decoder(bench.setting.shape, 8).to("meta").parameters()
        ),
        "setting": {name: str(value) for name, value in asdict(bench.setting).items()},
        "plans": {
            name: {
                "microbatches": plan.header["epochs"][0]["num_microbatches"],
                "padded_per_real": plan.header["epochs"][0]["num_padded_tokens"]
                / plan.header["epochs"][0]["num_tokens"],
            }
            for name, plan in bench.plans.items()
        },
        "seconds": seconds,
        "results": bench.results,
    }
    path.write_text(json.dumps(report, indent=1))


def print_table(results: dict[str, dict[str, Any]]) -> None:
    best = next((r["teraflops"] for name, r in results.items() if name.startswith("rows")), float("nan"))
    print(f"\n{'':22}{'tokens/s':>10}{'TFLOP/s':>9}{'of rows':>9}{'waits':>8}{'peak GB':>9}{'loss':>8}")
    for name, result in results.items():
        if "teraflops" in result:
            print(
                f"{name:22}{result['tokens_per_second']:10,.0f}{result['teraflops']:9.1f}"
                f"{result['teraflops'] / best:9.3f}{result['wait_share']:8.2%}{result['peak_gigabytes']:9.1f}"
                f"{result.get('held_out_loss', float('nan')):8.3f}"
            )
        else:
            print(f"{name:22}{result['tokens_per_second']:10,.0f}")


if __name__ == "__main__":
    main()
