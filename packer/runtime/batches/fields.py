"""What the samples of a micro-batch must have in common to become tensors, and what to say if they do not."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import SourceError

Sample = Mapping[str, Any]

IGNORE_INDEX = -100
"""The label that no loss looks at."""


def num_values(values: Any) -> int | None:
    """Return the first dimension of an array, a tensor or a list of numbers; None for anything else."""
    if isinstance(values, np.ndarray):
        return len(values) if values.ndim and values.dtype.kind in "biufc" else None
    if isinstance(values, torch.Tensor):
        return len(values) if values.ndim else None
    if isinstance(values, list | tuple):
        numbers = (int, float, list, tuple, np.number, np.ndarray)
        return len(values) if not values or isinstance(values[0], numbers) else None
    return None


def copy_into(out: Any, values: Any) -> None:
    """Copy values into a part of an array or of a tensor.

    Raises:
        TypeError: They are of a kind that it cannot hold: floats where it has integers.
        ValueError: They are of another shape.
    """
    if not isinstance(out, torch.Tensor):
        np.copyto(out, np.asarray(values))
        return
    values = torch.as_tensor(values)
    if not torch.can_cast(values.dtype, out.dtype):
        raise TypeError(f"{values.dtype} does not fit {out.dtype}")
    out[...] = values


def require_same_fields(
    samples: Sequence[Sample],
    sample_ids: NDArray[np.integer],
    seqlens: NDArray[np.integer],
    token_fields: Collection[str] | None,
) -> None:
    """Refuse samples with other fields than the first one's, or with labels that are not one a token.

    Args:
        samples: (n,)
        sample_ids: (n,)
        seqlens: (n,) planned tokens of each.
        token_fields: Fields besides ``labels`` that the user said have one value a token.

    Raises:
        SourceError: Names the sample.
    """
    if sum(map(len, samples)) == len(samples):
        return  # nothing but input_ids
    fields = samples[0].keys()
    if any(sample.keys() != fields for sample in samples):
        first, *others = zip(sample_ids, samples, strict=True)
        sample_id, odd = next((i, sample) for i, sample in others if sample.keys() != fields)
        raise SourceError(
            f"sample {sample_id} has the fields {', '.join(odd)} and sample {first[0]}, in the same "
            f"micro-batch, {', '.join(fields)}; the data set must return the same fields for every sample"
        )
    for name in ("labels", *(token_fields or ())):
        if name in fields:
            for sample_id, sample, seqlen in zip(sample_ids.tolist(), samples, seqlens.tolist(), strict=True):
                require_aligned(name, sample[name], sample_id, seqlen)


def require_aligned(name: str, values: Any, sample_id: int, seqlen: int) -> None:
    """Refuse values of a field that are not one a token.

    Raises:
        SourceError: Names the sample.
    """
    found = num_values(values)
    if found != seqlen:
        have = f"{name} that are no numbers" if found is None else f"{found:,} {name}"
        raise SourceError(
            f"sample {sample_id} has {have} for {seqlen:,} tokens; the data set must return one a token"
            + (", −100 where there is nothing to learn" if name == "labels" else "")
        )


def put(out: Any, values: Any, *, name: str, sample_id: int) -> None:
    """Copy values of one sample's field into a part of a buffer.

    Raises:
        SourceError: They do not go into it.
    """
    try:
        copy_into(out, values)
    except (TypeError, ValueError, RuntimeError):
        raise SourceError(
            f"{name} of sample {sample_id} is {_described(values)}, which does not go where {out.dtype} of "
            f"shape {tuple(out.shape)} is expected; the data set must return integers as input_ids and "
            "labels, and the same type and trailing shape of any other field for every sample"
        ) from None


def difference(samples: Sequence[Sample], sample_ids: NDArray[np.integer]) -> str | None:
    """Say which sample has a field that does not go into one tensor with the first sample's."""
    for name, first in samples[0].items():
        if num_values(first) is None and name not in ("input_ids", "labels"):
            continue
        expected, shape = _kind(first)
        for sample_id, sample in zip(sample_ids, samples, strict=True):
            kind, trailing = _kind(sample[name])
            if name in ("input_ids", "labels") and (kind not in "iu" or trailing):
                return (
                    f"{name} of sample {sample_id} are {_described(sample[name])}; the data set must return "
                    "one integer a token"
                )
            if (kind, trailing) != (expected, shape):
                return (
                    f"{name} of sample {sample_id} is {_described(sample[name])} and of sample "
                    f"{sample_ids[0]}, in the same micro-batch, {_described(first)}; the data set must "
                    "return the same type and trailing shape for every sample"
                )
    return None


def _kind(values: Any) -> tuple[str, tuple[int, ...]]:
    array = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    return array.dtype.kind, array.shape[1:]


def _described(values: Any) -> str:
    array = values if isinstance(values, torch.Tensor) else np.asarray(values)
    return f"{array.dtype} of shape {tuple(array.shape)}"
