"""A micro-batch's samples: read from the data set, held against the plan, cut where the plan cuts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from packer.errors import ConfigError, LengthMismatchError, PackerError, SourceChangedError, SourceError
from packer.plan import MicroBatch, Plan
from packer.runtime.batches.fields import Sample, num_values


def require_dataset(dataset: Any, plan: Plan) -> None:
    """Refuse what is no map-style data set, or has another number of samples than the plan was made for.

    Raises:
        ConfigError: Samples cannot be asked for by their ids.
        SourceChangedError: The numbers differ.
    """
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a {type(dataset).__name__} cannot be asked for a sample by its id; give a data set with "
            "dataset[sample_id], such as packer.open_dataset's"
        )
    if not hasattr(dataset, "__len__"):
        return
    if len(dataset) != plan.num_samples:
        raise SourceChangedError(
            f"the data set has {len(dataset):,} samples and the plan was made for {plan.num_samples:,}; "
            "give the data set that was analyzed, or analyze and plan again"
        )


def read_samples(dataset: Any, sample_ids: Sequence[int]) -> Sequence[Any]:
    """Read whole samples, all at once where the data set offers ``__getitems__``.

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
        raise _reading_failed(culprits, error) from error
    if len(samples) != len(sample_ids):
        raise SourceError(
            f"the data set's __getitems__ returned {len(samples)} samples for the {len(sample_ids)} ids "
            f"{_listed(sample_ids)}; let it return one for each"
        )
    return samples


def read_slice(dataset: Any, sample_id: int, start: int, stop: int) -> Any:
    """Read a part of a sample from a data set that offers it.

    Raises:
        SourceError: The data set raised an error.
    """
    try:
        return dataset.read_slice(sample_id, start, stop)
    except PackerError:
        raise
    except Exception as error:
        raise _reading_failed([sample_id], error) from error


def _reading_failed(sample_ids: Sequence[int], error: Exception) -> SourceError:
    what = f"sample {sample_ids[0]}" if len(sample_ids) == 1 else f"samples {_listed(sample_ids)}"
    return SourceError(
        f"the data set raised {type(error).__name__} when asked for {what}: {error}; repair it, or plan "
        "again without what it cannot read (--sample-ids)"
    )


def _listed(sample_ids: Sequence[int]) -> str:
    return ", ".join(map(str, sample_ids[:4])) + (" …" if len(sample_ids) > 4 else "")


def read_pieces(
    dataset: Any, planned: MicroBatch, token_fields: Collection[str] | None = None
) -> Sequence[Sample]:
    """Read a micro-batch's samples, each exactly as long as planned.

    Raises:
        LengthMismatchError: A sample has another length than the plan was made for.
        SourceError: A sample is no mapping with ``input_ids``.
    """
    sample_ids, seqlens = planned.sample_ids.tolist(), planned.seqlens.tolist()
    if planned.starts is None:
        samples = read_samples(dataset, sample_ids)
        try:
            found = [len(sample["input_ids"]) for sample in samples]
        except (KeyError, TypeError, IndexError):
            found = [
                num_tokens(sample, sample_id) for sample, sample_id in zip(samples, sample_ids, strict=True)
            ]
        if found != seqlens:
            wrong = next(index for index, seqlen in enumerate(seqlens) if found[index] != seqlen)
            raise LengthMismatchError(length_mismatch(sample_ids[wrong], found[wrong], seqlens[wrong], None))
        return samples
    starts = planned.starts.tolist()
    if not hasattr(dataset, "read_slice"):
        samples = read_samples(dataset, sample_ids)
        return [
            _cut(sample, sample_id, start, seqlen, token_fields)
            for sample, sample_id, start, seqlen in zip(samples, sample_ids, starts, seqlens, strict=True)
        ]
    pieces = []
    for sample_id, start, seqlen in zip(sample_ids, starts, seqlens, strict=True):
        piece = read_slice(dataset, sample_id, start, start + seqlen)
        num_found = num_tokens(piece, sample_id)
        if num_found != seqlen:
            raise LengthMismatchError(length_mismatch(sample_id, start + num_found, seqlen, start))
        pieces.append(piece)
    return pieces


def num_tokens(sample: Any, sample_id: int) -> int:
    """Return a sample's length.

    Raises:
        SourceError: It is no mapping with ``input_ids``.
    """
    try:
        return len(sample["input_ids"])
    except (KeyError, TypeError, IndexError):
        if isinstance(sample, Mapping) and "input_ids" in sample:
            raise SourceError(
                f"input_ids of sample {sample_id} is a {type(sample['input_ids']).__name__}; the data set "
                "must return one integer a token"
            ) from None
        fields = f"its fields are {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else ""
        raise SourceError(
            f"sample {sample_id} is a {type(sample).__name__} without "
            f"input_ids{'; ' if fields else ''}{fields}; the data set must return a mapping with input_ids"
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


def _cut(
    sample: Sample, sample_id: int, start: int, seqlen: int, token_fields: Collection[str] | None
) -> Sample:
    """Return the planned piece of a sample: its token-aligned fields cut, the others as they are."""
    found = num_tokens(sample, sample_id)
    if found < start + seqlen:
        raise LengthMismatchError(length_mismatch(sample_id, found, seqlen, start))
    return {
        name: value[start : start + seqlen]
        if (num_values(value) == found if token_fields is None else name in token_fields)
        or name == "input_ids"
        else value
        for name, value in sample.items()
    }
