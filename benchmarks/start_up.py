"""How long does ``packer plan`` take to start, with kernels to compile and with kernels from the cache?

A plan of 2,000 samples, so that nothing but the start counts; beside it ``import numba``, in turns.

    python benchmarks/start_up.py
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.turns import take_turns
from packer import analyze

PLAN = """
    import os, sys, tempfile
    {cache}
    from packer.cli.main import cli
    with tempfile.TemporaryDirectory() as folder:
        cli.main(["plan", {metrics!r}, "--out", folder + "/plan", "--max-tokens", "16384", *{options}],
                 standalone_mode=False)
"""
FRESH = 'os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 2000), 1, 8192).astype(np.int32)
        pq.write_table(pa.table({"length": lengths}), Path(folder, "data.parquet"))
        metrics = str(Path(folder, "metrics"))
        analyze(str(Path(folder, "data.parquet")), out=metrics, length_column="length")
        packed = ["--layout", "packed"]
        take_turns(
            {
                "import numba": "import numba",
                "windowed, kernels cached": PLAN.format(cache="", metrics=metrics, options=[]),
                "best-fit, kernels cached": PLAN.format(cache="", metrics=metrics, options=packed),
                "windowed, kernels compiled": PLAN.format(cache=FRESH, metrics=metrics, options=[]),
                "best-fit, kernels compiled": PLAN.format(cache=FRESH, metrics=metrics, options=packed),
            },
            turns=options.turns,
        )


if __name__ == "__main__":
    main()
