"""How fast does a GPU train on batches of different making? One run, one model, one length distribution.

Real tokens per second, peak memory, loss after equal tokens and the share of time that the GPU waits for
data, for

- rows: equal rows without padding, as long as the average token's sample: what the model can do at best;
- packed, padded: plans of ours, 32,768 tokens a micro-batch;
- grouped, fixed: batches of a fixed number of samples, sorted by length within megabatches as Hugging Face's
  Trainer does, or just shuffled, at the largest number that surely fits; and fixed at 4 and 8 samples.

Every update takes about 32,768 real tokens, and all loaders use the same workers and the same copies to the
GPU. A variant that runs out of memory says so in its row.

    python benchmarks/train_gpu.py --out results.json            (one GPU; 8 minutes)
    python benchmarks/train_gpu.py --tiny --out results.json     (CPU, half a minute)
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_decoder
import torch
from gpu_decoder import Decoder
from train_gpu_setting import FULL, TINY
from train_gpu_variants import Bench


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
            bench.results[name] = attempt(run)
            print(
                f"{name}: {json.dumps(bench.results[name])} at {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            write(arguments.out, bench, time.perf_counter() - begin)
    print_table(bench.results)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a variant measured, or that it ran out of memory; the next one goes on."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}


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
    speeds = (r["teraflops"] for name, r in results.items() if name.startswith("rows") and "teraflops" in r)
    best = next(speeds, float("nan"))
    columns = ("tokens/s", "TFLOP/s", "of rows", "waits", "peak GB", "early loss", "loss")
    print(f"\n{'':22}" + "".join(f"{column:>11}" for column in columns))
    for name, result in results.items():
        if "out_of_memory" in result:
            print(f"{name:22}  out of memory")
            continue
        if "teraflops" not in result:
            print(f"{name:22}{result['tokens_per_second']:11,.0f}")
            continue
        numbers = [
            f"{result['tokens_per_second']:,.0f}",
            f"{result['teraflops']:.1f}",
            f"{result['teraflops'] / best:.3f}",
            f"{result['wait_share']:.3%}",
            f"{result['peak_gigabytes']:.1f}",
            *(f"{result[loss]:.3f}" if loss in result else "" for loss in ("early_loss", "loss")),
        ]
        print(f"{name:22}" + "".join(f"{number:>11}" for number in numbers))


if __name__ == "__main__":
    main()
