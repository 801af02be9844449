"""Which of the measured budgets to take, and what to say beside it."""

from collections.abc import Iterable, Iterator, Sequence

from packer.budget.device import Device
from packer.budget.findings import Measured, budget_text
from packer.budget.search import Search
from packer.budget.stage import gigabytes
from packer.budget.trial import Bench
from packer.wording import counted

WITHIN = 0.02
"""The recommended budget is the smallest whose speed is as near to the best."""
_MUCH_MEMORY = 0.2
"""Share of what grows in memory from which on attention gets a bound of its own."""
_MUCH_TIME = 0.5
"""Share of what grows in time from which on attention is worth a word."""
_CLEAR = 0.1
"""How far a law may be off what was measured, for anything to be said by it."""
_FRAGMENTED = 0.05
"""Share of the allocator's memory between tensors that is worth a word."""
_ENOUGH_MICROBATCHES = 16
"""A padded step of so many, or of a multiple, can be a mix of all lengths."""


def smallest_fast(speeds: Iterable[Measured]) -> Measured:
    """Return the smallest budget within 2% of the best speed; if it can be, one whose steps are a mix."""
    speeds = list(speeds)
    best = max(one.tokens_per_second for one in speeds)
    fast = [one for one in speeds if one.tokens_per_second >= best * (1 - WITHIN)]
    return min(fast, key=lambda one: (not one.is_mixed, one.budget))


def largest_mixed(speeds: Iterable[Measured], chosen: Measured) -> Measured | None:
    """Return the largest budget whose steps are a mix, where the chosen one's are not."""
    if chosen.is_mixed:
        return None
    return max((one for one in speeds if one.is_mixed), key=lambda one: one.budget, default=None)


def bound_of_attention(bench: Bench, chosen: Measured) -> int | None:
    """Return the ``max_attention`` that fits beside a full budget; None where memory hardly depends on it."""
    law, config = bench.memory, bench.candidates.config
    if law is None or not law.per_square or len(config.budgets) > 1:
        return None
    if law.misfit(bench.sizes, bench.peaks) > _CLEAR:
        return None
    if max(map(law.attention_share, bench.sizes)) < _MUCH_MEMORY:
        return None
    room = bench.usable - law.constant - law.per_token * chosen.budget
    # a sample alone must remain plannable
    tables = bench.candidates.microbatches(chosen.budget).epoch(0).microbatches()
    column = "max_seqlen" if config.layout == "packed" else "padded_seqlen"
    longest = max(int(getattr(table, column).max()) for table in tables)
    return max(int(room / law.per_square), config.min_samples * longest**2)


def notes(
    bench: Bench,
    search: Search,
    speeds: Sequence[Measured],
    chosen: Measured,
    max_attention: int | None,
    device: Device,
) -> Iterator[str]:
    """Yield what a table does not say by itself."""
    yield from _on_the_largest(search)
    if not chosen.is_mixed:
        yield _on_the_mix(bench, speeds, chosen)
    if max_attention is not None:
        yield (
            "attention takes memory by the square of lengths: --max-attention "
            f"{max_attention} keeps it in bounds"
        )
    law = bench.time
    if law is not None and law.misfit(bench.sizes, bench.seconds) < _CLEAR:
        slowest = max(bench.sizes, key=law.cost)
        if (share := law.attention_share(slowest)) > _MUCH_TIME:
            yield (
                f"attention takes {share:.0%} of the time of the slowest micro-batch ({slowest.shape}); "
                "--balance flops evens it out over ranks"
            )
    if search.largest is not None and (peak := search.largest.peak) is not None:
        between = peak.reserved - peak.allocated
        if between > _FRAGMENTED * peak.reserved and not device.is_expandable:
            yield (
                f"{gigabytes(between)} of the memory that the allocator holds lie between tensors; "
                "PYTORCH_ALLOC_CONF=expandable_segments:True, set before python starts, makes use of them"
            )


def _on_the_largest(search: Search) -> Iterator[str]:
    if search.next_budget() is not None:
        yield (
            "time ran out before the largest budget was reached, which is likely to be about "
            f"{int(search.expected or 0):,}; raise max_seconds to try it"
        )
    elif search.is_bounded_by_data:
        yield "larger budgets make no larger micro-batches: the data set, or another option, ends first"


def _on_the_mix(bench: Bench, speeds: Sequence[Measured], chosen: Measured) -> str:
    config = bench.candidates.config
    best = max(one.tokens_per_second for one in speeds)
    beside = ""
    if (mixed := largest_mixed(speeds, chosen)) is not None:
        beside = (
            f", and {mixed.design_effect or 0:.2f} with a budget of {budget_text(mixed.max_tokens)}, at "
            f"{mixed.tokens_per_second / best:.2f} of the best speed"
        )
    packed = ""
    if config.layout == "padded":
        packed = "--layout packed makes every row a mix, if the model's attention takes cu_seqlens; else "
    in_step = config.dp_size * chosen.grad_accum
    wanted = (in_step // _ENOUGH_MICROBATCHES + 1) * _ENOUGH_MICROBATCHES
    return (
        f"the design effect of a step is {chosen.design_effect or 0:.1f}{beside}; {packed}--step-tokens of "
        f"about {wanted * chosen.budget:,} makes steps of {counted(wanted, 'micro-batch')}, which can be a "
        "mix"
    )
