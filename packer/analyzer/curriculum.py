"""The index files that DeepSpeed's curriculum sampler reads beside ``sample_to_metric``.

``index_to_metric``: every value that occurs, ascending, one an item. ``index_to_sample``: the samples of each
value, ascending. ``index_to_sample_percentile_merged``: the same samples, a hundredth of the values an item.
All as DeepSpeed's ``DataAnalyzer`` writes them, down to the smallest type that holds the numbers.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.metrics import FileDigest, write_items

_PERCENTILES = 100


def write_curriculum_files(folder: Path, name: str, values: NDArray[np.integer]) -> dict[str, FileDigest]:
    """Write the three index files of one metric.

    Takes about 16 bytes of memory a sample.

    Args:
        folder: the metrics directory.
        name: the metric; its folder exists.
        values: (samples,) at least one.

    Returns:
        the digest of each file, by its path inside ``folder``.
    """
    samples = _sorted_samples(values)
    boundaries = np.flatnonzero(np.diff(values[samples], prepend=values[samples[0]] - 1))
    unique = values[samples[boundaries]]
    # (unique,) samples of each value
    sizes = np.diff(boundaries, append=len(samples))
    values_a_percentile = max(1, len(unique) // _PERCENTILES)
    merged_sizes = np.add.reduceat(sizes, np.arange(0, len(sizes), values_a_percentile))

    sample_dtype = _smallest_dtype(0, len(values) - 1)
    files: dict[str, FileDigest] = {}
    for kind, items, item_sizes, dtype in (
        (
            "index_to_metric",
            unique,
            np.broadcast_to(1, len(unique)),
            _smallest_dtype(int(unique[0]), int(unique[-1])),
        ),
        ("index_to_sample", samples, sizes, sample_dtype),
        ("index_to_sample_percentile_merged", samples, merged_sizes, sample_dtype),
    ):
        documents = np.array([0, len(item_sizes)], dtype=np.int64)
        files |= write_items(folder / name / f"{name}_{kind}", [items], item_sizes, dtype, documents)
    return {f"{name}/{file_name}": digest for file_name, digest in files.items()}


def _sorted_samples(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """(samples,) sample ids by value, ascending within a value."""
    smallest = int(values.min())
    if int(values.max()) - smallest < 1 << 16:  # NumPy sorts 16 bits by counting
        return np.argsort((values - smallest).astype(np.uint16), kind="stable")
    return np.argsort(values, kind="stable")


def _smallest_dtype(smallest: int, largest: int) -> np.dtype[np.integer]:
    """Return the smallest type for a range, unsigned where nothing is negative."""
    kinds = (
        (np.uint8, np.uint16, np.uint32, np.uint64)
        if smallest >= 0
        else (np.int8, np.int16, np.int32, np.int64)
    )
    return next(
        np.dtype(kind) for kind in kinds if np.iinfo(kind).min <= smallest and largest <= np.iinfo(kind).max
    )
