"""The stream of an epoch: the pieces of all sources, pass after pass, in the order in which they are due.

Every source is passed through in an order of its own, shuffled anew in every pass, and the sources are merged
by their shares, so that every stretch of the stream holds each of them as it should. What is packed keeps
that order but for a small neighbourhood.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, EmptyPlanError
from packer.kernels import streams as kernels
from packer.options.config import PlanConfig
from packer.plan.sources import PlanSource
from packer.planner.choose.pieces import Pieces
from packer.planner.order.orders import (
    IntArray,
    Purpose,
    id_dtype,
    key_for,
    permutation,
    shuffled_entries,
    subkey,
    take,
)
from packer.planner.order.threads import chunk_edges, run_chunks

_WHOLE = 1 << kernels.WEIGHT_BITS
_MOST_TOKENS = 2**60
_ENDLESS = 2**61
REACH = {"wrapped": 1 << 10, "next-fit": 1 << 10, "windowed": 1 << 10, "mixed": 1 << 14, "best-fit": 1 << 18}
"""Pieces of a stream, about, by which a packing may move one."""

_UPPER_HALF = int(sys.byteorder == "little")
_SMALL = 1 << 16
"""Pieces of a source whose passes are shuffled one swap after the other, in a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """P pieces that an epoch is packed from."""

    pieces: Pieces
    """Where the epoch is a stream, in the order in which they are due, a piece once in every pass that
    reaches it."""
    sources: NDArray[np.uint16] | None = None
    """(P,) the source of each; None where there is one."""
    places: IntArray | None = None
    """(P,) which of the chosen pieces each is; None where they are those, in any order."""
    pass_sizes: NDArray[np.int64] | None = None
    """(S,) pieces of one pass through each source, of a stream."""
    phase_starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """(H,) the first piece of every phase; 0 first."""

    cut_from: "CutFrom | None" = None
    """The stream that these are cut from; None where packing cut nothing."""

    @property
    def is_stream(self) -> bool:
        """Whether the pieces stand in the order in which they are due."""
        return self.places is not None


class CutFrom(NamedTuple):
    """What the packing cut into pieces."""

    stream: Draw
    documents: IntArray
    """(P,) the piece of the stream that each is of."""


class Shares(NamedTuple):
    """What each of S sources gives in each of H phases, in the kernel's units."""

    weights: NDArray[np.int64]
    """(H, S) in sum 2^30, about."""
    quotas: NDArray[np.int64]
    """(H, S) units of a source in a phase."""
    begins: NDArray[np.int64]
    """(H,) where the phases begin."""
    end: int
    """Where the stream ends."""


class Mixer:
    """Makes the streams of a plan: which pieces of each source, how often, and when."""

    def __init__(
        self,
        chosen: Pieces,
        sources: Sequence[PlanSource],
        config: PlanConfig,
        *,
        is_strict: bool = False,
    ) -> None:
        """Take stock of what was chosen of every source.

        Args:
            chosen: of all sources.
            sources: S of them.
            config: the options.
            is_strict: every pass has the order of the first, so that a piece is not used again before all
                others of its source are.

        Raises:
            ConfigError: a source that is to be used, and of which nothing is left.
        """
        self.chosen, self.sources, self.config, self.is_strict = chosen, sources, config, is_strict
        ids = chosen.ids
        firsts = np.array([source.first_id for source in sources] + [sources[-1].stop_id], np.int64)
        # (S + 1,) positions: the ids of pieces rise
        self.edges = firsts if ids is None else np.searchsorted(ids, firsts).astype(np.int64)
        self.num_pieces = np.diff(self.edges)
        self.tokens = [
            int(chosen.seqlens[start:stop].sum(dtype=np.int64))
            for start, stop in zip(self.edges[:-1], self.edges[1:], strict=True)
        ]
        for number, source in enumerate(sources):
            if not self.num_pieces[number] and self._is_wanted(source):
                raise ConfigError(
                    f"nothing is left of source {source.name!r}, which has a share; loosen the filters, or "
                    "leave the source out"
                )

    def _is_wanted(self, source: PlanSource) -> bool:
        if self.config.phases is None:
            return False
        return any(phase.shares.get(str(source.name), 0) > 0 for phase in self.config.phases)

    def tokens_of_passes(self) -> Fraction:
        """Return the tokens of an epoch that no total ends."""
        passes = self.repeats()
        return sum((times * tokens for times, tokens in zip(passes, self.tokens, strict=True)), Fraction(0))

    def repeats(self) -> list[Fraction]:
        """Return how often an epoch passes through each source."""
        repeat = self.config.repeat or {}
        return [Fraction(str(repeat.get(str(source.name), 1.0))) for source in self.sources]

    def shares(self, total: int, slack: int = 0) -> Shares:
        """Return what each source gives of ``total`` tokens, by phase; ``slack`` more follow in the last.

        Args:
            total: tokens of the plan.
            slack: tokens beyond it, to choose from.
        """
        spans = self._spans()
        weights = np.zeros((len(spans), len(self.sources)), np.int64)
        quotas = np.zeros_like(weights)
        begins, begin, exact = np.zeros(len(spans), np.int64), 0, Fraction(0)
        for number, (start, stop, parts) in enumerate(spans):
            weights[number] = [max(1, round(part * _WHOLE)) if part else 0 for part in parts]
            begins[number] = begin
            units = (stop - start) * total * self._units_per_token(parts)
            quotas[number] = [min(int(units * part), _ENDLESS) for part in parts]
            exact += units
            begin = min(int(exact), _ENDLESS)
        end = min(begin + int(slack * self._units_per_token(spans[-1][2])) + 1, _ENDLESS)
        return Shares(weights=weights, quotas=quotas, begins=begins, end=end)

    def fractions(self) -> list[list[Fraction]]:
        """Return the shares of the sources by phase, in sum 1 each."""
        if self.config.phases is None:
            passes = self.repeats()
            held = [times * tokens for times, tokens in zip(passes, self.tokens, strict=True)]
            whole = sum(held, Fraction(0))
            return [[part / whole for part in held]]
        shares = []
        for phase in self.config.phases:
            parts = [Fraction(str(phase.shares.get(str(source.name), 0.0))) for source in self.sources]
            whole = sum(parts, Fraction(0))
            shares.append([part / whole for part in parts])
        return shares

    def _units_per_token(self, parts: list[Fraction]) -> Fraction:
        """Return the units of the plan's position that a token takes, on average, where shares are these."""
        if self.config.mix_by == "tokens":
            return Fraction(1)
        tokens = sum(
            part * self.tokens[number] / int(self.num_pieces[number])
            for number, part in enumerate(parts)
            if part
        )
        return kernels.SAMPLE_UNITS / Fraction(tokens)

    def check_passes(self, total: int) -> None:
        """Refuse a plan of ``total`` tokens that passes through a source more often than it may.

        Raises:
            ConfigError: it does.
        """
        for number, source in enumerate(self.sources):
            most, passes = self.most_passes(source), self._passes_of(number, total)
            if most is not None and passes > most:
                self.refuse_passes(source, passes, int(total * min(self._leeways(total))))

    def refuse_passes(self, source: PlanSource, passes: Fraction, fits: int) -> NoReturn:
        """Refuse a plan that passes through a source more often than it may.

        Args:
            source: which.
            passes: how often the plan would.
            fits: tokens of a plan that would not.

        Raises:
            ConfigError: always.
        """
        most = self.most_passes(source)
        what = "" if self.config.total_tokens is not None else "the steps of "
        raise ConfigError(
            f"the plan would pass {float(passes):.4g} times through {source.label}, over --max-passes "
            f"{float(most or 0):g}; lower its share or the total (to {what}{fits:,} tokens), or raise "
            "--max-passes"
        )

    def most_passes(self, source: PlanSource) -> Fraction | None:
        """Return how often the plan may pass through a source; None without a bound."""
        most = self.config.max_passes
        if isinstance(most, Mapping):
            most = most.get(str(source.name))
        return None if most is None else Fraction(str(most))

    def _leeways(self, total: int) -> Iterator[Fraction]:
        """Yield what part of the total each source that has a bound is enough for."""
        for number, source in enumerate(self.sources):
            most, passes = self.most_passes(source), self._passes_of(number, total)
            if most is not None and passes:
                yield most / passes

    def _passes_of(self, number: int, total: int) -> Fraction:
        """Return how often a plan of ``total`` tokens passes through a source."""
        taken = Fraction(0)
        for start, stop, parts in self._spans():
            if parts[number]:
                taken += (stop - start) * total * self._units_per_token(parts) * parts[number]
        held = self.tokens[number]
        if self.config.mix_by == "samples":
            held = int(self.num_pieces[number]) * kernels.SAMPLE_UNITS
        return taken / held if held else Fraction(0)

    def _spans(self) -> list[tuple[Fraction, Fraction, list[Fraction]]]:
        """Return where each phase begins and ends, as parts of the total, and its shares."""
        starts = [Fraction(0)]
        if self.config.phases is not None:
            starts = [Fraction(str(phase.start)) for phase in self.config.phases]
        return list(zip(starts, [*starts[1:], Fraction(1)], self.fractions(), strict=True))

    def _kept_apart(
        self,
        ids: IntArray,
        places: IntArray,
        seqlens: NDArray[np.int32],
        starts: NDArray[np.int32] | None,
        sources: NDArray[np.uint16],
    ) -> IntArray | None:
        """Return what must not meet in a micro-batch: the pieces of a sample, and a piece of two passes.

        Two passes bring a piece no closer than half the source. It is kept apart from itself where packing
        moves pieces as far as that; not where micro-batches hold more of a source than it has.
        """
        count, num_pieces = len(places), self.num_pieces
        if not count:
            return None
        used = count_sources(sources, len(num_pieces))
        per_token = count / int(seqlens.sum(dtype=np.int64))
        in_microbatch = min(self.config.max_samples or count, max(self.config.budgets.values()) * per_token)
        reach = REACH[str(self.config.packing)] + 2 * self.config.window * in_microbatch
        is_enough = num_pieces >= 2 * in_microbatch * used / count
        if self.config.packing == "wrapped":
            self._refuse_small((used > num_pieces) & ~is_enough)
        if starts is not None and starts.any():
            assert self.chosen.ids is not None  # cut samples are several pieces each
            is_next = np.diff(self.chosen.ids, append=-1) == 0
            is_several = is_next | np.roll(is_next, 1)
            return np.where(is_enough[sources] | is_several[places], ids, -1)
        may_meet = is_enough & (used > num_pieces) & (num_pieces < 2 * reach * used / count)
        return np.where(may_meet[sources], places, -1) if may_meet.any() else None

    def _refuse_small(self, is_small: NDArray[np.bool_]) -> None:
        """Refuse to wrap a source that a row would hold twice: a sample could meet a part of itself."""
        for source in (source for source, small in zip(self.sources, is_small, strict=True) if small):
            raise ConfigError(
                f"--packing wrapped fills rows with whatever comes next, and {source.label} is so small that "
                "a row would hold a sample of it once more; choose --packing mixed, lower its share or "
                "passes, or lower --max-tokens"
            )

    def stream(self, epoch: int) -> Draw:
        """Return the stream of an epoch that passes through the sources as often as was asked."""
        total = self.tokens_of_passes()
        if total >= _MOST_TOKENS:
            raise ConfigError(f"the passes sum up to {int(total):,} tokens, over 2^60; lower --repeat")
        key = key_for(self.config.seed, epoch, Purpose.STREAMS)
        runs = []
        for number, times in enumerate(self.repeats()):
            pieces = round(times * int(self.num_pieces[number]))
            runs.append(self._run(number, subkey(key, number), pieces))
        if not any(map(len, runs)):
            raise EmptyPlanError("--repeat leaves no sample of any source; raise it")
        shares = self.shares(int(total))
        return self._merge(runs, shares._replace(end=int(kernels.NEVER)))

    def stream_to(self, total: int, slack: int) -> Draw:
        """Return the stream of a plan of ``total`` tokens, and ``slack`` more to choose from."""
        key = key_for(self.config.seed, 0, Purpose.STREAMS)
        shares = self.shares(total, slack)
        by_samples = self.config.mix_by == "samples"
        runs = []
        for number in range(len(self.sources)):
            # as much as is due by the end, and a sample more
            due = sum(int(quota) for quota in shares.quotas[:-1, number])
            due += (shares.end - int(shares.begins[-1])) * int(shares.weights[-1, number]) // _WHOLE + 1
            if not shares.weights[:, number].any():
                due = 0
            runs.append(self._run_of_units(number, subkey(key, number), due, by_samples))
        return self._merge(runs, shares)

    def _run_of_units(self, number: int, key: np.uint64, units: int, by_samples: bool) -> NDArray[np.int64]:
        """Return the entries of a source, pass after pass, until they hold ``units``, and one more."""
        count = int(self.num_pieces[number])
        if not units or not count:
            return np.empty(0, np.int64)
        if by_samples:
            return self._run(number, key, -(-units // kernels.SAMPLE_UNITS) + 1)
        whole, rest = divmod(units, self.tokens[number])
        return self._run(number, key, int(whole) * count, tokens=rest)

    def _run(
        self, number: int, key: np.uint64, num_pieces: int, tokens: int | None = None
    ) -> NDArray[np.int64]:
        """Return the entries of a source, pass after pass.

        Args:
            number: of the source.
            key: of the random choices.
            num_pieces: how many.
            tokens: beyond them pieces that hold so many, and one more.
        """
        start, count = int(self.edges[number]), int(self.num_pieces[number])
        if not count or not (num_pieces or tokens is not None):
            return np.empty(0, np.int64)
        whole, rest = divmod(num_pieces, count)
        id_dtype(num_pieces)
        entries = shuffled_entries(self.chosen.seqlens[start : start + count], subkey(key, 0))
        entries += start  # a place needs 32 bits
        num_passes = whole + (rest > 0 or tokens is not None)
        passes = [entries] * num_passes if self.is_strict else _passes(entries, num_passes, key)
        if rest:
            passes[-1] = passes[-1][:rest]
        elif tokens is not None:
            seqlens = passes[-1].view(np.int32)[_UPPER_HALF::2]
            passes[-1] = passes[-1][: int(kernels.count_within(seqlens, tokens)) + 2]
        return np.concatenate(passes) if len(passes) > 1 else passes[0]

    def passes_used(self, draw: Draw, count: int) -> list[Fraction]:
        """Return how often the first ``count`` pieces of a stream pass through each source."""
        assert draw.sources is not None
        used = count_sources(draw.sources[:count], len(self.sources)).tolist()
        return [
            Fraction(of_source, max(1, held))
            for of_source, held in zip(used, self.num_pieces.tolist(), strict=True)
        ]

    def newest_unused(self, draw: Draw, count: int, passes: Sequence[Fraction]) -> IntArray:
        """Return what the first ``count`` pieces of a stream leave of the newest pass of each source.

        Args:
            draw: the stream.
            count: pieces of it that the plan takes.
            passes: (S,) how often these pass through each source.

        Returns:
            The chosen pieces that they do not reach, rising. Those of a source that no pass begins are not
            among them.
        """
        assert draw.places is not None
        assert draw.sources is not None
        begun = np.array([ceil(times) for times in passes], np.int64)
        is_left = np.repeat(begun > 0, self.num_pieces)
        kernels.mark_newest(draw.places, draw.sources, count, (begun - 1) * self.num_pieces, is_left)
        left: IntArray = np.flatnonzero(is_left)
        return left

    def _merge(self, runs: list[NDArray[np.int64]], shares: Shares) -> Draw:
        edges = np.cumsum([0, *map(len, runs)], dtype=np.int64)
        # at a billion samples every copy counts: each run is let go as soon as it is taken over
        entries = np.empty(int(edges[-1]), np.int64)
        for start in edges[:-1]:
            run = runs.pop(0)
            entries[start : start + len(run)] = run
            del run
        size = len(entries)
        places, seqlens = np.empty(size, id_dtype(max(size, len(self.chosen)))), np.empty(size, np.int32)
        sources, phase_starts = np.empty(size, np.uint16), np.empty(len(shares.begins), np.int64)
        count = kernels.merge(
            entries,
            edges,
            shares.weights,
            shares.quotas,
            shares.begins,
            np.int64(shares.end),
            self.config.mix_by == "samples",
            places,
            seqlens,
            sources,
            phase_starts,
        )
        del entries
        places, seqlens, sources = places[:count], seqlens[:count], sources[:count]
        starts = None if self.chosen.starts is None else self.chosen.starts[places]
        ids = self.chosen.sample_ids(places)
        chosen = self.chosen
        lengths = seqlens[np.newaxis]
        if len(chosen.lengths) > 1:
            lengths = np.ascontiguousarray(chosen.lengths[:, places])
        return Draw(
            pieces=Pieces(
                lengths=lengths,
                seqlens=seqlens,
                ids=ids,
                starts=starts,
                source=chosen.source,
                keys=chosen.keys,
                kept_apart=self._kept_apart(ids, places, seqlens, starts, sources),
            ),
            pass_sizes=self.num_pieces,
            places=places,
            sources=sources,
            phase_starts=phase_starts,
        )


def count_sources(sources: NDArray[np.uint16], num_sources: int) -> NDArray[np.int64]:
    """Return (S,) how many pieces are of each source."""
    edges = chunk_edges(len(sources))
    counts = np.zeros((len(edges) - 1, num_sources), np.int64)
    run_chunks(lambda chunk, first, last: kernels.count_streams(sources, first, last, counts[chunk]), edges)
    total: NDArray[np.int64] = counts.sum(axis=0)
    return total


def mixer_of(
    chosen: Pieces, sources: Sequence[PlanSource], config: PlanConfig, *, is_strict: bool = False
) -> Mixer | None:
    """Return what makes the streams of a plan; None where every epoch passes once through one source.

    So it does where the order is the user's, or a curriculum's: then sources are one data set.
    """
    is_asked_for = config.repeat is not None or config.has_total
    is_spread = len(sources) > 1 and config.order == "random" and config.curriculum is None
    return Mixer(chosen, sources, config, is_strict=is_strict) if is_asked_for or is_spread else None


def _passes(entries: NDArray[np.int64], num_passes: int, key: np.uint64) -> list[NDArray[np.int64]]:
    """Return the order of every pass: that of the one before, shuffled inside its halves.

    So a piece is not used again before half the source is. Odd passes are shuffled inside the first and the
    second half, even ones inside the middle and the two quarters around it.
    """
    count = len(entries)
    if count <= _SMALL:
        orders = np.empty((num_passes, count), np.int64)
        orders[0] = entries
        kernels.shuffle_passes(orders, key)
        return list(orders)
    passes = [entries]
    for number in range(1, num_passes):
        cuts = [0, count // 2, count] if number % 2 else [0, count // 4, count - count // 4, count]
        mine = subkey(key, number)
        parts = [
            take(passes[-1][start:stop], permutation(stop - start, subkey(mine, index)))
            for index, (start, stop) in enumerate(pairwise(cuts))
        ]
        passes.append(np.concatenate(parts))
    return passes
