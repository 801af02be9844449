"""Does a plan change what is learnt? One model, the same tokens, steps composed in different ways.

A decoder of 45 million parameters takes the same 12 million tokens of real samples, whose content goes with
their length, in steps of 32,768 tokens. What differs is which samples share a step: as one micro-batch of
32,768 tokens, or as about eight of 4,096. The loss is that of 800 samples held out, the design effect says
how much more the steps differ in their lengths than random ones would (1: as random samples).

    python benchmarks/fidelity_data.py --data DIR --out fidelity.npz
    python benchmarks/fidelity_gpu.py --samples fidelity.npz --out OUT           (one GPU; 10 minutes)
    python benchmarks/fidelity_gpu.py --samples fidelity.npz --out OUT --tiny    (CPU, two minutes)

OUT/runs.jsonl gets a line a run, the most telling runs first, OUT/table.md the table of what is there; runs
that are there already are not repeated, so a second call goes on where a first one ended. Same seed, same
device, same numbers: a seed sets the weights, the order and the plan. Speed is that of the variant's own
tensors, ready on the device.
"""

import argparse
import gc
import json
import multiprocessing
import os
import time
from collections import defaultdict
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import fidelity_training
import gpu_decoder
import numpy as np
import torch
from fidelity_data import Samples
from fidelity_steps import VARIANTS, Composition, Problem, Steps, design_effect, padded_tokens
from fidelity_training import Corpus, Learner, Recipe
from gpu_decoder import Shape

from packer.wording import counted

NUM_SEEDS = 3
MICROBATCHES = (8, 1)
"""Into how many micro-batches the memory of a step is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of a run."""

    recipe: Recipe
    num_samples: int | None
    """Take so many of the samples, at random; None: all."""
    max_seqlen: int
    num_held_out: int
    epochs: int
    step_tokens: int
    device: str


FULL = Setting(
    recipe=Recipe(
        # As many tokens as the samples have.
        shape=Shape(vocab_size=0, hidden_size=384, num_layers=6, num_heads=6, intermediate_size=1024),
        dtype=torch.bfloat16,
    ),
    num_samples=None,
    max_seqlen=4096,
    num_held_out=800,
    epochs=2,
    step_tokens=32_768,
    device="cuda",
)
TINY = Setting(
    recipe=Recipe(
        shape=Shape(vocab_size=2048, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48),
        dtype=torch.float32,
        timed_updates=8,
    ),
    num_samples=500,
    max_seqlen=512,
    num_held_out=50,
    epochs=2,
    step_tokens=4096,
    device="cpu",
)


class Run(NamedTuple):
    variant: str
    microbatches: int
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, {counted(self.microbatches, 'micro-batch')}, seed {self.seed}"


def ordered_runs() -> list[Run]:
    """Return the runs, so that a table cut short answers the most important questions."""
    eight, one = MICROBATCHES
    core = [("packed, uniform", eight), ("packed, mixed", eight), ("padded, windowed", eight)]
    core += [("packed, uniform", one), ("packed, mixed", one)]
    contrast = [("packed, best-fit", one), ("padded, windowed", one)]
    others = [(name, eight) for name in VARIANTS if (name, eight) not in core]
    return [
        *(Run(*variant, 0) for variant in core + contrast),
        *(Run(*variant, seed) for seed in range(1, NUM_SEEDS) for variant in core),
        *(Run(*variant, 0) for variant in others),
        *(Run("padded, windowed", one, seed) for seed in range(1, NUM_SEEDS)),
    ]


class Bench:
    """Data, and what every run does with it."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self.setting = setting
        self.samples, self.recipe = cut(Samples.load(path), setting)
        order = np.random.default_rng(0).permutation(len(self.samples.seqlens))
        self.held_out = np.sort(order[: setting.num_held_out])
        self.train_ids = np.sort(order[setting.num_held_out :])
        self.corpus = Corpus(self.samples, torch.device(setting.device))

    def problem(self, microbatches: int) -> Problem:
        return Problem(
            seqlens=self.samples.seqlens,
            train_ids=self.train_ids,
            epochs=self.setting.epochs,
            step_tokens=self.setting.step_tokens,
            microbatches_per_step=microbatches,
            fixed_samples=self.setting.step_tokens // self.setting.max_seqlen,
        )

    def run(self, run: Run, composition: Composition) -> dict[str, Any]:
        """Train, evaluate, and with the first seed take the time."""
        gc.collect()
        learner = Learner(self.recipe, self.corpus, run.seed)
        seconds = learner.train(composition)
        result = run._asdict() | self._facts(composition) | self._losses(learner)
        if run.seed == 0:
            result |= learner.time_updates(composition)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return result | {"training_seconds": seconds, "deterministic": deterministic}

    def _facts(self, composition: Composition) -> dict[str, Any]:
        seqlens = self.samples.seqlens
        rows = [row for steps in composition.epochs for step in steps for row in step]
        real = sum(int(seqlens[row].sum()) for row in rows)
        padded = sum(padded_tokens(seqlens, composition.layout, row) for row in rows)
        return {
            "updates": sum(len(steps) for steps in composition.epochs),
            "rows_per_step": len(composition.epochs[0][0]),
            "rows_per_epoch": len(rows) / len(composition.epochs),
            "tokens": real,
            "padded_per_real": padded / real,
            "design_effect": [design_effect(seqlens, steps) for steps in composition.epochs],
            "planned_design_effect": composition.planned_design_effects,
            "pairs_that_meet_again": pairs_that_meet_again(composition.epochs),
        }

    def _losses(self, learner: Learner) -> dict[str, Any]:
        kinds = self.samples.kinds[self.held_out]
        sums = {
            name: learner.evaluate(self.held_out[kinds == kind], self.setting.step_tokens)
            for kind, name in enumerate(self.samples.kind_names)
            if np.any(kinds == kind)
        }
        total, count = (sum(part) for part in zip(*sums.values(), strict=True))
        return {
            "held_out_loss": total / count,
            "held_out_loss_by_kind": {name: loss / tokens for name, (loss, tokens) in sums.items()},
        }


def cut(samples: Samples, setting: Setting) -> tuple[Samples, Recipe]:
    """Take the setting's share of the samples, and a model with a row for each of their tokens.

    Where the setting's model has fewer, all the rarer tokens are one.
    """
    count = setting.num_samples or len(samples.seqlens)
    chosen = np.sort(np.random.default_rng(1).permutation(len(samples.seqlens))[:count])
    starts, lengths = samples.edges[chosen], np.minimum(samples.seqlens[chosen], setting.max_seqlen)
    parts = [samples.tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    shape = setting.recipe.shape
    # Matrix products are fast on multiples of 64.
    vocab_size = shape.vocab_size or -(-samples.vocab_size // 64) * 64
    tokens = np.minimum(np.concatenate(parts), vocab_size - 1)
    recipe = replace(setting.recipe, shape=replace(shape, vocab_size=vocab_size))
    return Samples(tokens, lengths, samples.kinds[chosen], samples.kind_names, vocab_size), recipe


def pairs_that_meet_again(epochs: list[Steps]) -> float | None:
    """Share of the pairs in a micro-batch of the first epoch that share one in the second, too."""
    if len(epochs) < 2:
        return None
    first, second = (
        {
            int(sample): number
            for number, row in enumerate(row for step in steps for row in step)
            for sample in row
        }
        for steps in epochs[:2]
    )
    together: dict[int, list[int]] = defaultdict(list)
    for sample, row in first.items():
        if sample in second:
            together[row].append(second[sample])
    counts = [np.unique(rows, return_counts=True)[1] for rows in together.values()]
    pairs = sum(int(part.sum()) * (int(part.sum()) - 1) for part in counts)
    again = sum(int((part * (part - 1)).sum()) for part in counts)
    return again / pairs if pairs else None


def compose(problem: Problem, variant: str, seed: int) -> Composition:
    return VARIANTS[variant](problem, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=Path, required=True, help="what fidelity_data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.jsonl and table.md")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and a share of the data, on the CPU"
    )
    parser.add_argument("--no-fuse", action="store_true", help="run the pointwise functions uncompiled")
    parser.add_argument("--seconds", type=float, default=540, help="start no run after this")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fidelity_training.make_deterministic()
    gpu_decoder.FUSE = not (arguments.no_fuse or arguments.tiny)
    bench = Bench(TINY if arguments.tiny else FULL, arguments.samples)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "runs.jsonl"
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {Run(*(result[field] for field in Run._fields)) for result in results}
    print(describe(bench), flush=True)
    # Plans are made beside the training, in a process that never sees the GPU.
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    waiting = {
        run: pool.submit(compose, bench.problem(run.microbatches), run.variant, run.seed)
        for run in ordered_runs()
        if run not in done
    }
    try:
        for run, future in waiting.items():
            seconds = time.perf_counter() - begin
            if seconds > arguments.seconds:
                print(f"{run}: no time left", flush=True)
                continue
            result = attempt(bench, run, future)
            if result is None:
                continue
            results.append(result)
            with log.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            (arguments.out / "table.md").write_text(table(results))
            print(f"{seconds:4.0f} s  {run}: {brief(result)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    print("\n" + table(results))


def attempt(bench: Bench, run: Run, future: Future[Composition]) -> dict[str, Any] | None:
    """Return what a run gave, or None where memory did not suffice; the next one goes on in either case."""
    try:
        return bench.run(run, future.result())
    except torch.OutOfMemoryError:
        print(f"{run}: out of memory", flush=True)
    except RuntimeError as error:
        if "deterministic" not in str(error) or not torch.are_deterministic_algorithms_enabled():
            raise
        print(f"from here on not to the bit: {error}", flush=True)
        torch.use_deterministic_algorithms(False)
        return attempt(bench, run, future)
    return None


def describe(bench: Bench) -> str:
    with torch.device("meta"):
        model = gpu_decoder.Decoder(bench.recipe.shape, 8)
    parameters = sum(weight.numel() for weight in model.parameters())
    device = torch.cuda.get_device_name() if bench.setting.device == "cuda" else "cpu"
    return (
        f"{device}, torch {torch.__version__}: {parameters / 1e6:.1f}M parameters, "
        f"{len(bench.train_ids):,} samples of {bench.samples.seqlens[bench.train_ids].sum():,} tokens to "
        f"train on, {bench.setting.epochs} epochs, {len(bench.held_out):,} samples of "
        f"{bench.samples.seqlens[bench.held_out].sum():,} tokens held out"
    )


def brief(result: dict[str, Any]) -> str:
    speed = f", {result['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in result else ""
    found, planned = result["design_effect"], result["planned_design_effect"]
    differs = any(
        b is not None and (a is None or abs(a - b) > 1e-6) for a, b in zip(found, planned, strict=True)
    )
    says = f" (the plan says {planned}, and it is {found})" if differs else ""
    return (
        f"loss {result['held_out_loss']:.3f}, design effect {number(result['design_effect'])}{says}, "
        f"{result['updates']} updates of {result['rows_per_step']} rows{speed}; "
        f"{result['training_seconds']:.1f} s of training"
    )


def table(results: list[dict[str, Any]]) -> str:
    """Return two tables in Markdown: a line a variant, and its loss by kind of sample."""
    of_variant: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for result in sorted(results, key=lambda result: result["seed"]):
        of_variant[result["microbatches"], result["variant"]].append(result)
    order = [
        (count, name) for count in sorted(MICROBATCHES) for name in VARIANTS if (count, name) in of_variant
    ]
    kinds = list(results[0]["held_out_loss_by_kind"]) if results else []
    head = ["composition", "rows a step", "updates", "rows an epoch", "padding", "pairs again"]
    head += ["design effect", "tokens/s", "peak GB", "held-out loss, by seed"]
    lines = [row_of(head), row_of(["---"] * len(head))]
    for key in order:
        runs = of_variant[key]
        first = runs[0]
        again = first["pairs_that_meet_again"]
        lines.append(
            row_of(
                [
                    key[1],
                    str(first["rows_per_step"]),
                    str(first["updates"]),
                    f"{first['rows_per_epoch']:,.0f}",
                    f"{first['padded_per_real'] - 1:.1%}",
                    "" if again is None else f"{again:.1%}",
                    number([effect for result in runs for effect in result["design_effect"]]),
                    f"{first['tokens_per_second']:,.0f}" if "tokens_per_second" in first else "",
                    f"{first['peak_gigabytes']:.1f}" if "peak_gigabytes" in first else "",
                    " ".join(f"{result['held_out_loss']:.3f}" for result in runs),
                ]
            )
        )
    head = ["held-out loss, mean over seeds", "rows a step", *kinds]
    lines += ["", row_of(head), row_of(["---"] * len(head))]
    for key in order:
        runs = of_variant[key]
        means = [np.mean([result["held_out_loss_by_kind"][kind] for result in runs]) for kind in kinds]
        lines.append(row_of([key[1], str(runs[0]["rows_per_step"]), *(f"{mean:.3f}" for mean in means)]))
    return "\n".join(lines) + "\n"


def row_of(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(effects: list[float | None]) -> str:
    """Return the mean of those that are known."""
    known = [effect for effect in effects if effect is not None]
    return f"{np.mean(known):.2f}" if known else "–"


if __name__ == "__main__":
    main()
