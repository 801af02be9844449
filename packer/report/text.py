"""A summary as lines of text: what ``packer plan`` prints when it is done."""

from collections.abc import Iterator, Sequence

from packer.report.sources import SourceSummary
from packer.report.summary import BlockOrder, Distribution, PlanSummary, Shape, ratio
from packer.wording import counted, on_one_line

_LABEL_WIDTH = 21
_SHAPES = "shapes"
_SHAPES_TO_LIST = 8
_FEW_SHAPES = 6
"""So many are worth their table where nobody asked."""


def summary_lines(summary: PlanSummary) -> Iterator[str]:
    """Yield the lines for a person, without colour, at most 110 characters wide."""
    for label, text in facts(summary):
        yield f"  {label:<{_LABEL_WIDTH}}{text}"
        if label == _SHAPES:
            yield from _table_of_shapes(summary)
    for note in summary.notes:
        yield f"Note: {note}"


def facts(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    """Yield what a person wants to know: a label and a sentence."""
    yield "steps", _steps(summary)
    if summary.trained_before:
        yield "goes on from", _before(summary)
    for source in named_sources(summary):
        yield f"source {on_one_line(str(source.name))}", source_line(source)
    yield "samples planned", _share(summary.planned_samples, summary.offered_samples)
    if summary.cut_samples:
        yield "samples cut", _cut(summary)
    for reason, counts in by_tokens(summary.dropped):
        tokens = f", {amount(counts['num_tokens'])} tokens" if counts["num_tokens"] else ""
        yield f"dropped {reason}", f"{_share(counts['num_samples'], summary.offered_samples)}{tokens}"
    of_metric = "" if summary.length_metric == "seqlen" else f", {summary.length_metric}"
    yield f"padding{of_metric}", _padding(summary)
    if summary.tokens_per_step and summary.samples_per_step:
        yield f"tokens per step{of_metric}", _spread(summary.tokens_per_step)
        yield "samples per step", _spread(summary.samples_per_step)
    if any(effect is not None for effect in summary.design_effect.values()):
        yield "design effect", _mix(summary)
    if summary.blocks is not None:
        yield "blocks", _blocks(summary.blocks)
        if summary.blocks.design_effect_of_stretches is not None:
            yield "mix by stretch", _stretches(summary.blocks)
    if summary.num_fillers:
        yield "fillers", f"{counted(summary.num_fillers, 'masked micro-batch')} to make the last steps full"
    if summary.num_repeats:
        yield (
            "repeats",
            f"{counted(summary.num_repeats, 'micro-batch')} to train twice and fill the last steps",
        )
    if summary.lr_scale and summary.lr_scaling != "none":
        yield "LR factor", _lr(summary)
    if summary.asks_for_shapes or shows_shapes(summary, _FEW_SHAPES):
        yield _SHAPES, _shapes(summary)
    if summary.over_bound is not None:
        yield "packs", _packs(summary)
    if summary.dp_size > 1:
        yield "rank imbalance", _imbalance(summary)


def shows_shapes(summary: PlanSummary, most: int) -> bool:
    """Return whether the table of shapes is worth its place: it was asked for, or has few lines."""
    return bool(summary.shapes) and (summary.asks_for_shapes or len(summary.shapes or ()) <= most)


def shape_rows(summary: PlanSummary, most: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield the lines of the table of shapes: shape, micro-batches, their share, padding; the rest in one."""
    shapes = summary.shapes or ()
    if len(shapes) == most + 1:
        most += 1  # a line for the one that is left takes as much room
    for shape in shapes[:most]:
        yield f"{shape.num_rows:,} × {shape.padded_seqlen:,}", *_shape_figures(summary, [shape])
    if len(shapes) > most:
        yield f"… {len(shapes) - most:,} more", *_shape_figures(summary, shapes[most:])


def _shape_figures(summary: PlanSummary, shapes: Sequence[Shape]) -> tuple[str, str, str]:
    count = sum(shape.num_microbatches for shape in shapes)
    padded = sum(shape.num_rows * shape.padded_seqlen * shape.num_microbatches for shape in shapes)
    real = sum(shape.num_tokens for shape in shapes)
    padding = percent(padded / real - 1) if real else "–"
    return f"{count:,}", percent(count / summary.num_microbatches), padding


def _table_of_shapes(summary: PlanSummary) -> Iterator[str]:
    if not shows_shapes(summary, _FEW_SHAPES):
        return
    heads = ("B × S" if summary.layout == "padded" else "1 × T", "micro-batches", "share", "padding")
    for shape, *figures in [heads, *shape_rows(summary, _SHAPES_TO_LIST)]:
        count, share, padding = figures
        yield f"    {shape:>{_LABEL_WIDTH - 6}}{count:>17}{share:>9}{padding:>10}"


def _shapes(summary: PlanSummary) -> str:
    """Say how many there are."""
    lengths = "row length" if summary.layout == "packed" else "padded length"
    if summary.shapes is None:
        return f"too many to list (--num-shapes makes few {lengths}s)"
    seqlens = {shape.padded_seqlen for shape in summary.shapes}
    span = f"{min(seqlens):,}" if len(seqlens) == 1 else f"{min(seqlens):,} to {max(seqlens):,}"
    named = f"{counted(len(seqlens), lengths)}, {span}"
    return named if summary.layout == "packed" else f"{len(summary.shapes):,} of {named}"


def by_tokens(dropped: dict[str, dict[str, int]]) -> list[tuple[str, dict[str, int]]]:
    """Return drops by reason, those that lose most first."""
    return sorted(dropped.items(), key=lambda item: (-item[1]["num_tokens"], -item[1]["num_samples"]))


def _steps(summary: PlanSummary) -> str:
    epochs = f" in {counted(summary.num_epochs, 'epoch')}" if summary.num_epochs > 1 else ""
    return (
        f"{summary.num_steps:,}{epochs}, each of {counted(summary.dp_size, 'rank')} × "
        f"{counted(summary.grad_accum, 'micro-batch')} ({summary.layout}, {summary.packing})"
    )


def named_sources(summary: PlanSummary) -> tuple[SourceSummary, ...]:
    """Return the sources that have names: a plan of one data set is none of them."""
    return tuple(source for source in summary.sources if source.name is not None)


def source_line(source: SourceSummary) -> str:
    """Say what a plan takes of a source: its share beside the one asked for, passes, samples, tokens."""
    of = f"{counted(source.num_samples, 'sample')} of {amount(source.num_tokens)} tokens"
    if not source.planned_samples:
        return f"not reached: none of its {of}"
    asked = ", ".join(
        f"{percent(share)} asked" if not first_step else f"{percent(share)} from step {first_step:,} on"
        for first_step, share in source.asked
    )
    passes = f"{source.passes:.3g} pass{'' if source.passes == 1 else 'es'}"
    return f"{percent(source.share or 0.0)}{f' ({asked})' if asked else ''}; {passes} through {of}"


def _share(part: int, whole: int) -> str:
    if not whole:
        return f"{part:,}"
    return f"{part:,} of {whole:,} ({percent(part / whole)})"


def _before(summary: PlanSummary) -> str:
    """Say what was trained before the plan begins, and where the last of those plans was left."""
    last = summary.trained_before[-1]
    steps, samples, tokens = (
        sum(account[name] for account in summary.trained_before)
        for name in ("num_steps", "num_samples", "num_tokens")
    )
    place = f"epoch {last['epoch']}, step {last['step']:,} of plan {last['plan'][:12]}"
    return f"{place}: {counted(steps, 'step')}, {samples:,} samples, {amount(tokens)} tokens were before"


def _cut(summary: PlanSummary) -> str:
    """Say how many samples are in pieces, and what that costs."""
    text = _share(summary.cut_samples or 0, summary.offered_samples)
    if not summary.unpredicted_tokens:
        return text
    later = counted(summary.unpredicted_tokens, "later piece")
    return f"{text}; nothing predicts the first token of {later}"


def percent(share: float) -> str:
    """Return a share with the digits that tell it from 0 % and from 100 %."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    for digits in (1, 2, 3):
        text = f"{share:.{digits}%}"
        if float(text[:-1]) not in (0.0, 100.0):
            return text
    return "under 0.001%" if share < 0.5 else "over 99.999%"


def _padding(summary: PlanSummary) -> str:
    return (
        f"{percent(summary.padding)} over {amount(summary.real_tokens)} real tokens; the largest "
        f"micro-batch takes {summary.largest_microbatch:,}"
    )


def _spread(values: Distribution) -> str:
    if values.min == values.max:
        return f"{_number(values.min)} in every step"
    return (
        f"median {_number(values.median)}, 5–95% {_number(values.q05)} to {_number(values.q95)}, "
        f"all {_number(values.min)} to {_number(values.max)}"
    )


def _lr(summary: PlanSummary) -> str:
    scale = summary.lr_scale
    assert scale is not None
    return (
        f"{scale.min:.3g} to {scale.max:.3g}, mean {scale.mean:.3g} ({summary.lr_scaling} in "
        f"{summary.lr_by}, 1 at {summary.lr_base:,.6g})"
    )


def _mix(summary: PlanSummary) -> str:
    effects = [
        f"{ratio(effect)} in {'length' if name == 'seqlen' else name}"
        for name, effect in summary.design_effect.items()
        if effect is not None
    ]
    meaning = "by the order given" if summary.order_is_given else "1: steps differ as random ones would"
    return f"{', '.join(effects)} ({meaning})"


def _blocks(order: BlockOrder) -> str:
    size = amount(order.open_bytes)
    cache = f"{size}B" if size[-1].isalpha() else f"{size} bytes"
    return (
        f"{order.at_a_time:,} of {order.num_blocks:,} shuffled at a time; at most {order.open_blocks:,} are "
        f"open: a cache of {cache} a worker"
    )


def _stretches(order: BlockOrder) -> str:
    steps, stretches = order.design_effect_of_steps, order.design_effect_of_stretches
    assert steps is not None
    assert stretches is not None
    return (
        f"{ratio(steps)} of steps from their {counted(order.at_a_time, 'block')}, {ratio(stretches)} of "
        "these from the epoch (1: random)"
    )


def _packs(summary: PlanSummary) -> str:
    assert summary.over_bound is not None
    assert summary.lower_bound is not None
    text = f"{summary.num_packed:,}, {summary.over_bound:,} over the lower bound of {summary.lower_bound:,}"
    if summary.packing == "mixed" and summary.over_bound:
        return f"{text} ({percent(summary.over_bound / summary.lower_bound)}, the most that the mix costs)"
    return text


def _imbalance(summary: PlanSummary) -> str:
    after = percent(summary.rank_imbalance)
    if summary.rank_imbalance_before is not None:
        after = f"{after} after balancing, {percent(summary.rank_imbalance_before)} before"
    if summary.grad_accum > 1 and summary.rank_imbalance_by_step is not None:
        after += f"; {percent(summary.rank_imbalance_by_step)} where ranks wait once a step"
    cure = "" if summary.rank_imbalance_before is not None else "; --balance evens it out"
    return f"{after} (time lost, by cost{cure})"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def amount(value: float) -> str:
    """Return a large number in three digits: 9,412 · 183 k · 1.24 G."""
    if value < 100_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:,.0f} T"
