"""Further metrics: one function from a record batch to one integer per row.

    @sample_metric(columns=["score"])
    def difficulty(batch: pa.RecordBatch) -> np.ndarray:
        return np.rint(batch["score"].to_numpy() * 100).astype(np.int64)

    packer.analyze("data", out="metrics", tokens_column="input_ids", metrics=[difficulty])

On the command line the same is ``--metric package.module:difficulty``; ``vocab_rarity`` is shipped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from inspect import getsource
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import ConfigError, PackerError, SourceError
from packer.samples import LOSS_TOKENS, SEQLEN, LengthDefinition

MetricFunction = Callable[..., Any]
F = TypeVar("F", bound=MetricFunction)

TOKEN_IDS = "token_ids"
"""The column that is added to the batch of a function that asks for token ids."""

_NEEDS = "__packer_needs__"
_FRACTION_BITS = 20


@dataclass(frozen=True, slots=True)
class Needs:
    """What a function is given."""

    columns: tuple[str, ...] = ()
    token_ids: bool = False
    vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class SampleMetric:
    """A named function with what it needs; it pickles as the function's place."""

    name: str
    function: MetricFunction
    needs: Needs

    def __call__(self, batch: pa.RecordBatch, vocabulary: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Apply the function to a batch.

        Raises:
            SourceError: it failed, or returned something other than one integer per row.
        """
        arguments = (batch, vocabulary) if self.needs.vocabulary else (batch,)
        try:
            values = np.asarray(self.function(*arguments))
        except PackerError:
            raise
        except Exception as error:
            raise SourceError(f"metric {self.place} failed: {type(error).__name__}: {error}") from error
        return check_integers(values, batch.num_rows, self.place)

    @property
    def place(self) -> str:
        """Where the function is defined."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.function.__module__}:{name}"

    @property
    def identity(self) -> tuple[str, str]:
        """What tells this function from another, or from itself before an edit."""
        try:
            source = getsource(self.function)
        except (OSError, TypeError):  # typed into an interpreter, or compiled
            source = ""
        return self.place, sha256(source.encode()).hexdigest()


def check_integers(values: NDArray[Any], num_rows: int, place: str) -> NDArray[np.int64]:
    """Return what a user's function returned as int64, if it is one integer per row.

    Raises:
        SourceError: it is not.
    """
    if values.shape != (num_rows,):
        raise SourceError(
            f"{place} returned an array of shape {values.shape} for {num_rows} samples; "
            "it has to return one integer per sample"
        )
    if values.dtype.kind not in "iu":
        raise SourceError(f"{place} returned {values.dtype}; it has to return integers")
    if values.dtype.kind == "u" and num_rows and int(values.max()) > np.iinfo(np.int64).max:
        raise SourceError(f"{place} returned {values.max()}; it has to return integers below 2^63")
    return values.astype(np.int64)


def sample_metric(
    *, columns: Sequence[str] = (), token_ids: bool = False, vocabulary: bool = False
) -> Callable[[F], F]:
    """Declare what a metric function needs beyond the columns of the length definition.

    Args:
        columns: columns to read for it.
        token_ids: add the list column ``token_ids`` to its batch: the ids of the main metric's tokens.
        vocabulary: hand it a second argument: (ids,) int64, how often each token id occurs in the whole data
            set. It takes a pass over the data of its own, and implies ``token_ids``.
    """

    def declare(function: F) -> F:
        setattr(function, _NEEDS, Needs(tuple(columns), token_ids or vocabulary, vocabulary))
        return function

    return declare


def resolve_metrics(
    metrics: Iterable[str | MetricFunction], definition: LengthDefinition
) -> tuple[SampleMetric, ...]:
    """Return further metrics, given by name, as ``module:function``, or as functions.

    Names of metrics that the length definition yields anyway are passed over.

    Raises:
        ConfigError: no such metric, a name that is taken, or tokens asked of lengths alone.
    """
    taken = [*definition.metrics]
    resolved: list[SampleMetric] = []
    for metric in metrics:
        if isinstance(metric, str) and metric in definition.metrics:
            continue
        if metric == LOSS_TOKENS:
            raise ConfigError(f"--metric {LOSS_TOKENS} needs --labels-column, which says what the labels are")
        if metric == SEQLEN:
            raise ConfigError(f"--metric {SEQLEN}: the columns have metrics of their own, {', '.join(taken)}")
        function = _import_function(metric) if isinstance(metric, str) else metric
        name = getattr(function, "__name__", "")
        if not name.isidentifier():
            raise ConfigError(f"a metric is named by its function, which {function!r} is not; use a def")
        if name in taken:
            raise ConfigError(f"there is a metric {name!r} already; rename the function")
        needs: Needs = getattr(function, _NEEDS, Needs())
        if needs.token_ids and definition.kind in ("length", "features"):
            raise ConfigError(
                f"metric {name!r} needs token ids, and --{definition.kind}-column has none; name the tokens"
            )
        taken.append(name)
        resolved.append(SampleMetric(name, function, needs))
    return tuple(resolved)


def _import_function(metric: str) -> MetricFunction:
    if metric in _SHIPPED:
        return _SHIPPED[metric]
    module, colon, name = metric.partition(":")
    if not colon:
        raise ConfigError(
            f"no metric is named {metric!r}; there are {SEQLEN}, {LOSS_TOKENS} and {', '.join(_SHIPPED)}, "
            "and yours as package.module:function"
        )
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--metric {metric}: {error}; check the name, and that Python finds the module"
        ) from error
    if not callable(function):
        raise ConfigError(f"--metric {metric} is no function but {type(function).__name__}")
    found: MetricFunction = function
    return found


@sample_metric(vocabulary=True)
def vocab_rarity(batch: pa.RecordBatch, vocabulary: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of −ln(p) over a sample's tokens, p the token's share of all; as in DeepSpeed's curriculum.

    In fixed point of 20 binary digits, so that the order of summation changes nothing; the fraction is cut.
    """
    seen = np.maximum(vocabulary, 1)
    rarity = np.rint(-np.log(seen / vocabulary.sum()) * (1 << _FRACTION_BITS)).astype(np.int64)
    ids = batch[TOKEN_IDS]
    # (tokens + 1,) rarity of all tokens before each
    before = np.concatenate([[0], np.cumsum(rarity[to_numpy(ids.values)])])
    ends: NDArray[np.int64] = before[to_numpy(ids.offsets)]
    return np.diff(ends) >> _FRACTION_BITS


_SHIPPED: dict[str, MetricFunction] = {"vocab_rarity": vocab_rarity}
