"""A micro-batch's samples: read from the data set, held against the plan, cut where the plan cuts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packer.errors import LengthMismatchError, PackerError, SourceError
from packer.plan import MicroBatch
from packer.runtime.batches.fields import INPUT_IDS, Fields, Sample


def read_samples(dataset: Any, sample_ids: Sequence[int], noun: str = "sample") -> Sequence[Any]:
    """Read whole samples, all at once where the data set offers ``__getitems__``.

    Args:
        dataset: Map-style.
        sample_ids: What to ask it for.
        noun: What messages call that; a data set that is one source of a plan counts rows of its own.

    Raises:
        SourceError: The data set raised an error, or returned another number of samples.
    """
    read_many = getattr(dataset, "__getitems__", None)
    samples: Sequence[Any] = []
    try:
        if read_many is None:
            for sample_id in sample_ids:
                samples.append(dataset[sample_id])  # type: ignore[attr-defined]
        else:
            samples = read_many(sample_ids)
    except PackerError:
        raise
    except Exception as error:
        culprits = sample_ids if read_many is not None else sample_ids[len(samples) : len(samples) + 1]
        raise _reading_failed(culprits, error, noun) from error
    if len(samples) != len(sample_ids):
        raise SourceError(
            f"the data set's __getitems__ returned {len(samples)} samples for the {len(sample_ids)} ids "
            f"{_listed(sample_ids)}; let it return one for each"
        )
    return samples


def read_slice(dataset: Any, sample_id: int, start: int, stop: int, noun: str = "sample") -> Any:
    """Read a part of a sample from a data set that offers it; ``noun`` as for ``read_samples``.

    Raises:
        SourceError: The data set raised an error.
    """
    try:
        return dataset.read_slice(sample_id, start, stop)
    except PackerError:
        raise
    except Exception as error:
        raise _reading_failed([sample_id], error, noun) from error


def _reading_failed(sample_ids: Sequence[int], error: Exception, noun: str) -> SourceError:
    what = f"{noun} {sample_ids[0]}" if len(sample_ids) == 1 else f"{noun}s {_listed(sample_ids)}"
    return SourceError(
        f"the data set raised {type(error).__name__} when asked for {what}: {error}; repair it, or plan "
        "again without what it cannot read (--sample-ids)"
    )


def _listed(sample_ids: Sequence[int]) -> str:
    return ", ".join(map(str, sample_ids[:4])) + (" …" if len(sample_ids) > 4 else "")


def read_pieces(dataset: Any, planned: MicroBatch, fields: Fields) -> Sequence[Sample]:
    """Read a micro-batch's samples, each exactly as long as planned, with the fields of the run.

    Raises:
        LengthMismatchError: A sample has another length than the plan was made for.
        SourceError: A sample is no mapping with ``input_ids``, or has other fields.
    """
    sample_ids, seqlens = planned.sample_ids.tolist(), planned.seqlens.tolist()
    if planned.starts is None:
        samples = read_samples(dataset, sample_ids)
        try:
            found = [len(sample[fields.length_field]) for sample in samples]
        except (KeyError, TypeError, IndexError):
            found = [
                num_tokens(sample, sample_id, fields.length_field)
                for sample, sample_id in zip(samples, sample_ids, strict=True)
            ]
        if found != seqlens:
            wrong = next(index for index, seqlen in enumerate(seqlens) if found[index] != seqlen)
            if fields.counts_ids:
                require_one_dimension(samples[wrong], sample_ids[wrong])
            raise LengthMismatchError(length_mismatch(sample_ids[wrong], found[wrong], seqlens[wrong], None))
        fields.hold(samples, planned.sample_ids, seqlens)
        return samples
    starts = planned.starts.tolist()
    if not hasattr(dataset, "read_slice"):
        samples = read_samples(dataset, sample_ids)
        whole = [
            num_tokens(sample, sample_id, fields.length_field)
            for sample, sample_id in zip(samples, sample_ids, strict=True)
        ]
        for sample, sample_id, found_tokens, start, seqlen in zip(
            samples, sample_ids, whole, starts, seqlens, strict=True
        ):
            if found_tokens < start + seqlen:
                if fields.counts_ids:
                    require_one_dimension(sample, sample_id)
                raise LengthMismatchError(length_mismatch(sample_id, found_tokens, seqlen, start))
        fields.hold(samples, planned.sample_ids, whole)
        cut = fields.cut
        return [
            {name: value[start : start + seqlen] if name in cut else value for name, value in sample.items()}
            for sample, start, seqlen in zip(samples, starts, seqlens, strict=True)
        ]
    pieces = []
    for sample_id, start, seqlen in zip(sample_ids, starts, seqlens, strict=True):
        piece = read_slice(dataset, sample_id, start, start + seqlen)
        num_found = num_tokens(piece, sample_id, fields.length_field)
        if num_found != seqlen:
            if fields.counts_ids:
                require_one_dimension(piece, sample_id)
            raise LengthMismatchError(length_mismatch(sample_id, start + num_found, seqlen, start))
        pieces.append(piece)
    fields.hold(pieces, planned.sample_ids, seqlens)
    return pieces


def require_one_dimension(sample: Sample, sample_id: int) -> None:
    """Refuse ids with an axis too many, whose length is not the sample's.

    Raises:
        SourceError: Names the shape.
    """
    shape = np.shape(sample["input_ids"])
    if len(shape) > 1:
        raise SourceError(
            f"input_ids of sample {sample_id} have the shape {shape}; the data set must return one integer a "
            f"token, of shape ({int(np.prod(shape))},): drop the other axis, which a tokenizer adds with "
            "return_tensors"
        )


def num_tokens(sample: Any, sample_id: int, length_field: str = INPUT_IDS) -> int:
    """Return a sample's length.

    Raises:
        SourceError: It is no mapping with the field that is counted.
    """
    try:
        return len(sample[length_field])
    except (KeyError, TypeError, IndexError):
        one = "one integer a token" if length_field == INPUT_IDS else "an array, its first axis the length"
        if isinstance(sample, Mapping) and length_field in sample:
            raise SourceError(
                f"{length_field} of sample {sample_id} is a {type(sample[length_field]).__name__}; the data "
                f"set must return {one}"
            ) from None
        fields = f"its fields are {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else ""
        raise SourceError(
            f"sample {sample_id} is a {type(sample).__name__} without "
            f"{length_field}{'; ' if fields else ''}{fields}; the data set must return a mapping with "
            f"{length_field}"
            + ("" if length_field != INPUT_IDS else ", or length_field= must name what is counted instead")
        ) from None


def length_mismatch(sample_id: int, found: int, planned: int, start: int | None) -> str:
    """Return what to say of a sample that is not as long as planned; ``start`` is where a cut one begins."""
    asked = f"{planned:,}" if start is None else f"{planned:,} from token {start:,} on"
    if start is None and abs(found - planned) <= 2:
        cause = "a tokenizer that adds other special tokens than the one it was analyzed with"
    else:
        cause = "another data set, another order of its files, or another tokenizer than was analyzed"
    return (
        f"sample {sample_id} has {found:,} tokens and the plan was made for {asked}; the likely cause is "
        f"{cause}: analyze and plan again, or give the data set that was analyzed"
    )
