"""The fields of a run's samples: settled once, by the first micro-batch, and the same for all that follow.

What a field is, its type, whether it has one value a token, who makes it, must not depend on which samples
happen to come together. So it is decided in one place, for whole rows and slices alike.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import ConfigError, SourceError

Sample = Mapping[str, Any]

IGNORE_INDEX = -100
"""The label that no loss looks at."""

INPUT_IDS = "input_ids"
LABELS = "labels"

_REPLACED = ("attention_mask", "position_ids")
"""What the plan's shape decides, unless the user names the data set's own in ``token_fields``."""
_MADE_HERE = frozenset({"cu_seqlens", "max_seqlen", "shift_labels"})
"""What nobody else can know, or what would be taken for the loader's own."""


class Field(NamedTuple):
    """A field besides ``input_ids``."""

    name: str
    dtype: np.dtype[Any] | torch.dtype | None
    """None: one item a sample, whatever it is; a list of them is delivered."""
    trailing: tuple[int, ...]
    """Shape of one token's value."""

    @property
    def is_aligned(self) -> bool:
        """There is one value a token."""
        return self.dtype is not None


class Fields:
    """The fields of a run.

    The length field is what a sample's length is counted of: ``input_ids``, or what the user says instead,
    such as features of shape ``(frames, bins)``, beside which labels may be of another length.
    ``input_ids`` and ``labels`` are integers, one a token, and are delivered as int64. A further field is
    aligned if it was named so, or, where nothing was named, if it has one value a token in every sample of
    the first micro-batch. It then has the type and trailing shape of the first sample. Values of a smaller
    type are taken; others are refused, as is a field that is no longer aligned.
    """

    def __init__(
        self,
        *,
        length_field: str = INPUT_IDS,
        token_fields: Collection[str] | None = None,
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        """Note what the user says of them.

        Args:
            length_field: The one whose first dimension is the sample's length.
            token_fields: Those besides ``labels`` with one value a token; None: to be found out.
            pad_values: Field → what padding holds; 0 where not named.
        """
        self.length_field = length_field
        self._token_fields = None if token_fields is None else frozenset(token_fields)
        self._pad_values = dict(pad_values or {})
        if not float(self.pad_value(INPUT_IDS)).is_integer():
            raise ConfigError(
                f"pad_values['input_ids']={self.pad_value(INPUT_IDS)} is no token id; give a whole number"
            )
        self._names: frozenset[str] | None = None
        self._first_sample = 0
        self.has_labels = False
        """The data set gives labels, one a token."""
        self.signature: tuple[Any, ...] | None = None
        """What the fields are, to be compared between processes; None: only ``input_ids``."""
        self.aligned: tuple[Field, ...] = ()
        """Those with one value a token, in the data set's order; neither ids that are counted nor labels."""
        self.listed: tuple[str, ...] = ()
        """Those with one item a sample."""
        self._checked: tuple[str, ...] = ()
        """Those of the data set that must be what the loader makes in their stead."""

    @property
    def are_settled(self) -> bool:
        """A micro-batch has told what they are."""
        return self._names is not None

    @property
    def cut(self) -> frozenset[str]:
        """What is cut where a sample is."""
        labels = (LABELS,) if self.counts_ids or self.has_labels else ()
        return frozenset(
            [self.length_field, *labels, *self._checked, *(field.name for field in self.aligned)]
        )

    @property
    def counts_ids(self) -> bool:
        """Samples are token ids, as long as there are of them."""
        return self.length_field == INPUT_IDS

    def anew(self, length_field: str) -> "Fields":
        """Return fields that are to be settled, of another length field and else the same."""
        return Fields(length_field=length_field, token_fields=self._token_fields, pad_values=self._pad_values)

    def pad_value(self, name: str) -> float:
        """Return what padding of a field holds."""
        return self._pad_values.get(name, 0)

    def hold(
        self, samples: Sequence[Sample], sample_ids: NDArray[np.integer], seqlens: Sequence[int]
    ) -> None:
        """Settle the fields by the first micro-batch, or hold another one's samples against them.

        Args:
            samples: (n,) whole, or cut where all their fields are cut.
            sample_ids: (n,)
            seqlens: (n,) tokens of each.

        Raises:
            SourceError: Names the sample that has other fields, or not one value a token.
            ConfigError: What padding is to hold does not fit a field.
        """
        if self._names is not None and len(self._names) == 1 and sum(map(len, samples)) == len(samples):
            return  # nothing but input_ids
        if self._names is None:
            self._names = self._settle(samples, int(sample_ids[0]), seqlens)
        for sample_id, sample, seqlen in zip(sample_ids.tolist(), samples, seqlens, strict=True):
            if set(sample) != self._names:
                first = ", ".join(sorted(self._names))
                raise SourceError(
                    f"sample {sample_id} has the fields {', '.join(sample)}, and sample "
                    f"{self._first_sample}, the first of this run, {first}; the data set must return the "
                    "same fields for every sample"
                )
            if self.has_labels:
                require_aligned(LABELS, sample[LABELS], sample_id, seqlen)
            for field in self.aligned:
                require_aligned(field.name, sample[field.name], sample_id, seqlen)
            for name in self._checked:
                _require_as_made(name, sample[name], sample_id, seqlen)

    def _settle(self, samples: Sequence[Sample], sample_id: int, seqlens: Sequence[int]) -> frozenset[str]:
        first = samples[0]
        foreign = sorted(_MADE_HERE.intersection(first))
        if foreign:
            raise SourceError(
                f"sample {sample_id} has a field {foreign[0]}, which the loader makes itself; return labels "
                "(analyzed with --no-shift, if they are shifted), or rename it"
            )
        aligned, listed, checked = [], [], []
        self.has_labels = LABELS in first and (self.counts_ids or self._are_aligned(LABELS, samples, seqlens))
        for name in first:
            if name == LABELS and self.has_labels:
                continue
            if name == self.length_field:
                if not self.counts_ids:
                    aligned.append(self._field(name, first[name]))
                continue
            if self._token_fields is not None:
                is_aligned = name in self._token_fields
            else:
                is_aligned = name not in _REPLACED and self._are_aligned(name, samples, seqlens)
            if is_aligned:
                require_aligned(name, first[name], sample_id, seqlens[0])
                aligned.append(self._field(name, first[name]))
            elif name in _REPLACED:
                checked.append(name)
            else:
                listed.append(name)
        self.aligned, self.listed, self._checked = tuple(aligned), tuple(listed), tuple(checked)
        self._first_sample = sample_id
        if len(first) > 1 or not self.counts_ids:
            kinds = ((field.name, str(field.dtype), field.trailing) for field in self.aligned)
            self.signature = (*sorted(first), *kinds)
        return frozenset(first)

    @staticmethod
    def _are_aligned(name: str, samples: Sequence[Sample], seqlens: Sequence[int]) -> bool:
        return all(
            num_values(sample.get(name)) == seqlen for sample, seqlen in zip(samples, seqlens, strict=True)
        )

    def _field(self, name: str, values: Any) -> Field:
        dtype = values.dtype if isinstance(values, torch.Tensor) else np.asarray(values).dtype
        shape = values.shape if isinstance(values, torch.Tensor) else np.asarray(values).shape
        pad = self.pad_value(name)
        if isinstance(dtype, torch.dtype):
            held = torch.tensor(pad, dtype=torch.float64).to(dtype).double().item()
        else:
            with np.errstate(all="ignore"):
                held = float(np.asarray(pad, np.float64).astype(dtype).real)
        fits = held == pad or pad != pad or (_is_floating(dtype) and abs(held) != float("inf"))
        if not fits:
            raise ConfigError(
                f"pad_values[{name!r}]={pad} does not fit into {dtype}, the type of {name}; choose a value "
                "that does, or let the data set return another type"
            )
        return Field(name, dtype, tuple(shape[1:]))


def num_values(values: Any) -> int | None:
    """Return the first dimension of an array, a tensor or a list of numbers; None for anything else."""
    if isinstance(values, np.ndarray):
        return len(values) if values.ndim and values.dtype.kind in "biufc" else None
    if isinstance(values, torch.Tensor):
        return len(values) if values.ndim else None
    if isinstance(values, list | tuple | range):
        numbers = (int, float, list, tuple, np.number, np.ndarray)
        return len(values) if not values or isinstance(values[0], numbers) else None
    return None


def empty(size: tuple[int, int], field: Field) -> Any:
    """Return a buffer for a field: an array, or a tensor where the samples have tensors."""
    shape = (*size, *field.trailing)
    if isinstance(field.dtype, torch.dtype):
        return torch.empty(shape, dtype=field.dtype)
    return np.empty(shape, field.dtype)


def copy_into(out: Any, values: Any) -> None:
    """Copy values into a part of an array or of a tensor, if each of them can be held as it is.

    Raises:
        TypeError: They are of a type that it cannot hold: floats where it has integers, or larger numbers.
        ValueError: They are of another shape.
    """
    if isinstance(out, torch.Tensor):
        values = torch.as_tensor(values)
        if not _fits(values.dtype, out.dtype):
            raise TypeError(f"{values.dtype} does not fit {out.dtype}")
        if values.shape != out.shape:
            raise ValueError(f"shape {tuple(values.shape)} where {tuple(out.shape)} is expected")
        out[...] = values
        return
    values = np.asarray(values)
    if values.shape != out.shape:
        raise ValueError(f"shape {values.shape} where {out.shape} is expected")
    if values.dtype == np.uint64 and out.dtype == np.int64 and int(values.max(initial=0)) < 2**63:
        values = values.astype(np.int64)
    np.copyto(out, values, casting="safe")


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


def require_aligned(name: str, values: Any, sample_id: int, seqlen: int) -> None:
    """Refuse values of a field that are not one a token.

    Raises:
        SourceError: Names the sample.
    """
    found = num_values(values)
    if found == seqlen:
        return
    have = f"{name} that are no numbers" if found is None else f"{found:,} {name}"
    cure = "the data set must return one a token"
    if name == LABELS:
        cure += ", −100 where there is nothing to learn"
    else:
        cure += ", or token_fields= must name those fields that have one, and not this"
    raise SourceError(f"sample {sample_id} has {have} for {seqlen:,} tokens; {cure}")


def first_that_does_not_fit(
    samples: Sequence[Sample], sample_ids: NDArray[np.integer], fields: Fields
) -> str | None:
    """Say which sample has a field that does not go into one tensor with the others'."""
    for sample_id, sample in zip(sample_ids.tolist(), samples, strict=True):
        for name in (*([INPUT_IDS] if fields.counts_ids else []), *([LABELS] if fields.has_labels else [])):
            kind, trailing = _kind(sample[name])
            if kind not in "iu" or trailing:
                return (
                    f"{name} of sample {sample_id} are {_described(sample[name])}; the data set must return "
                    "one integer a token"
                )
            if kind == "u" and int(np.asarray(sample[name]).max(initial=0)) >= 2**63:
                return f"{name} of sample {sample_id} reach 2^63, which no int64 holds; return token ids"
        for field in fields.aligned:
            try:
                copy_into(empty((1, len(sample[field.name])), field)[0], sample[field.name])
            except (TypeError, ValueError, RuntimeError):
                return (
                    f"{field.name} of sample {sample_id} is {_described(sample[field.name])}, and this run's "
                    f"first sample had {field.dtype} with the trailing shape {field.trailing}; the data set "
                    "must return the same type and trailing shape for every sample"
                )
    return None


def _require_as_made(name: str, values: Any, sample_id: int, seqlen: int) -> None:
    """Refuse the data set's own mask or positions where replacing them would change them."""
    array = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.shape == (seqlen,):
        expected = np.ones(1, np.int64) if name == "attention_mask" else array[:1] + np.arange(seqlen)
        if (array == expected).all():
            return
    what = "is not all ones" if name == "attention_mask" else "does not count up by one"
    raise SourceError(
        f"{name} of sample {sample_id} {what} ({_described(values)}), and the loader would put its own "
        f"in its place; name {name} in token_fields to have the data set's delivered (first dimension: "
        "tokens), or leave it out of the samples"
    )


def _fits(given: torch.dtype, held: torch.dtype) -> bool:
    """Return whether a type of torch holds every value of another one."""
    if given == held:
        return True
    if given.is_floating_point != held.is_floating_point or given.is_complex != held.is_complex:
        return False
    return torch.promote_types(given, held) == held


def _is_floating(dtype: np.dtype[Any] | torch.dtype) -> bool:
    return dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind in "fc"


def _kind(values: Any) -> tuple[str, tuple[int, ...]]:
    array = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    return array.dtype.kind, array.shape[1:]


def _described(values: Any) -> str:
    array = values if isinstance(values, torch.Tensor) else np.asarray(values)
    return f"{array.dtype} of shape {tuple(array.shape)}"
