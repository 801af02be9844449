"""What a plan does, in numbers: read from its header and from its steps, never from every micro-batch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.plan import Plan, main_metric
from packer.plan.design_effect import NUM_CLASSES
from packer.plan.trained import accounts_of
from packer.report.sources import SourceSummary, source_summaries
from packer.report.sources import as_json as source_as_json
from packer.wording import counted

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

STEPS_FOR_QUANTILES = 1 << 22
"""Of a longer plan every n-th step is taken; the smallest and the largest value stay exact."""

SHAPE_OPTIONS = ("num_shapes", "fixed_seqlen", "same_num_samples", "same_seqlen")

LARGE_REMAINDER = 0.05
"""Share of the samples from which on a dropped remainder is worth a word."""
WIDE_LR_RANGE = 4.0
"""A factor that spans more than this is worth a warning."""

STEPS_TO_DEAL = 8
"""Fewer steps in an epoch leave dealing no choice."""
MIXED_STEPS = 1.1
"""A design effect up to this is that of random steps."""

KEY_SHARE = 0.9
"""A key in more of the micro-batches than this decides how many there are."""

EVEN_TOKENS = 1.25
"""Steps whose tokens spread less than this, from 5% to 95%, count as even."""


class Distribution(NamedTuple):
    """Of one quantity over the steps."""

    min: float
    q05: float
    q25: float
    median: float
    q75: float
    q95: float
    max: float
    mean: float


class Shape(NamedTuple):
    """Micro-batches of one shape."""

    num_rows: int
    """B; 1 in the packed layout."""
    padded_seqlen: int
    """S, or T."""
    num_microbatches: int
    """Over all epochs."""
    num_tokens: int
    """Real tokens in all of them; those of fillers are not."""

    @property
    def padding(self) -> float:
        """Padded over real tokens, less one."""
        padded = self.num_rows * self.padded_seqlen * self.num_microbatches
        return padded / self.num_tokens - 1 if self.num_tokens else 0.0


class BlockOrder(NamedTuple):
    """What an order by blocks asks of the loader, and what it gives up; see ``PlannedEpoch.figures``."""

    at_a_time: int
    """Blocks whose samples are shuffled together."""
    num_blocks: int
    """Of the source."""
    open_blocks: int
    """The most at a step of any epoch: what a process has to keep so that it reads every block once."""
    open_bytes: int
    """The most of them, decoded."""
    design_effect_of_steps: float | None
    """How much more than random ones the steps differ from their stretch of the epoch, a mean over epochs."""
    design_effect_of_stretches: float | None
    """How much more than random ones the stretches differ from the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """A plan in numbers; sums are over all epochs, copies of micro-batches included where it says so."""

    layout: str
    packing: str
    order: str
    num_epochs: int
    num_steps: int
    dp_size: int
    grad_accum: int
    num_microbatches: int
    source_samples: int
    """Samples of all sources."""
    source_tokens: int
    offered_samples: int
    """What the epochs pass through: each sample once in every pass of its source, planned or dropped."""
    sources: tuple[SourceSummary, ...]
    """What is taken of each source, in order."""
    planned_samples: int
    """Without fillers and repeats."""
    planned_tokens: int
    cut_samples: int | None
    """In pieces, or planned in part; None for plans of format version 1."""
    unpredicted_tokens: int | None
    """First tokens of later pieces, which nothing predicts; None for plans of format version 1."""
    trained_before: tuple[dict[str, Any], ...]
    """Plans that this one goes on from, each with ``plan`` (its hash), ``epoch``, ``step``, and the steps,
    samples and tokens of it before that."""
    dropped: dict[str, dict[str, int]]
    """Reason → num_samples and num_tokens; a sample in pieces counts where its first one is, and what no pass
    takes counts once an epoch."""
    real_tokens: int
    """Tokens that train: repeats included, fillers not."""
    padded_tokens: int
    """Tokens of all tensors, fillers included."""
    largest_microbatch: int
    """Tokens of the largest tensor."""
    num_fillers: int
    num_repeats: int
    tokens_per_step: Distribution | None
    """None where the plan has no step."""
    samples_per_step: Distribution | None
    lr_scaling: str
    lr_by: str
    lr_base: float | None
    lr_scale: Distribution | None
    lower_bound: int | None
    """Micro-batches that no packing can go below; None where the planner did not compute it."""
    num_packed: int | None
    """Micro-batches that were packed, before some were dropped or copied to make the last step full."""
    design_effect: dict[str, float | None]
    """By ``seqlen`` and by ``source``: how much more the steps differ in their mix than random ones, a mean
    over the epochs. None for one class, one step, or plans of format version 1."""
    blocks: BlockOrder | None
    """Of an order by blocks; None where all samples are shuffled at once."""
    order_is_given: bool
    """Whether the user chose the order of the samples, and with it what a step holds."""
    length_metric: str
    """The metric that padding and tokens are of; of pairs of sequences the first member."""
    rank_imbalance: float
    """Share of time that the ranks lose where they wait for each other in every slot, by cost."""
    rank_imbalance_by_step: float | None
    """The same where they wait once a step; None for plans of format version 1."""
    rank_imbalance_before: float | None
    """``rank_imbalance`` before balancing; None without."""
    shapes: tuple[Shape, ...] | None
    """The shapes of micro-batches, the most frequent first; None where there are too many to list."""
    asks_for_shapes: bool
    """Whether an option is about the shapes of micro-batches."""
    num_bytes: int
    """Size of the plan's tables."""
    notes: tuple[str, ...]
    """What a person should know before training on it."""

    @property
    def padding(self) -> float:
        """Padded over real tokens, less one."""
        return self.padded_tokens / self.real_tokens - 1 if self.real_tokens else 0.0

    @property
    def over_bound(self) -> int | None:
        """Micro-batches over the lower bound."""
        if self.lower_bound is None or self.num_packed is None:
            return None
        return self.num_packed - self.lower_bound

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        entries = asdict(self)
        for name, value in entries.items():
            if isinstance(value, Distribution | BlockOrder):
                entries[name] = value._asdict()
        entries["sources"] = list(map(source_as_json, self.sources))
        if self.shapes is not None:
            entries["shapes"] = [shape._asdict() | {"padding": shape.padding} for shape in self.shapes]
        return entries | {"padding": self.padding, "over_bound": self.over_bound}


def summarize(plan: Plan) -> PlanSummary:
    """Return a plan in numbers; the time grows with the number of steps, not of samples."""
    header, config = plan.header, plan.config
    epochs = header["epochs"]
    totals = {
        name: sum(counts[name] for counts in epochs)
        for name in (
            "num_steps",
            "num_microbatches",
            "num_samples",
            "num_tokens",
            "num_padded_tokens",
            "num_fillers",
            "num_repeats",
        )
    }
    lr_scale, tokens = _over_steps(plan, "lr_scale"), _over_steps(plan, "num_tokens")
    before = _mean_figure(epochs, "rank_imbalance_before")
    return PlanSummary(
        layout=plan.layout,
        packing=str(config.get("packing")),
        order=str(config.get("order")),
        num_epochs=plan.num_epochs,
        num_steps=totals["num_steps"],
        dp_size=plan.dp_size,
        grad_accum=plan.grad_accum,
        num_microbatches=totals["num_microbatches"],
        source_samples=plan.num_samples,
        source_tokens=header["num_tokens"],
        offered_samples=sum(each.num_samples * each.num_passes for each in plan.sources) * plan.num_epochs,
        sources=source_summaries(plan),
        planned_samples=totals["num_samples"],
        planned_tokens=totals["num_tokens"],
        cut_samples=sum(counts["num_cut"] for counts in epochs) if header["version"] >= 2 else None,
        unpredicted_tokens=(
            sum(counts["num_pieces"] - counts["num_samples"] for counts in epochs)
            if header["version"] >= 2
            else None
        ),
        trained_before=tuple(account.to_json() for account in accounts_of(plan)),
        dropped=_dropped(plan),
        real_tokens=sum(int(table.num_tokens.sum()) for table in _steps(plan)),
        padded_tokens=totals["num_padded_tokens"],
        largest_microbatch=max((counts["max_padded_tokens"] for counts in epochs), default=0),
        num_fillers=totals["num_fillers"],
        num_repeats=totals["num_repeats"],
        tokens_per_step=tokens,
        samples_per_step=_over_steps(plan, "num_samples"),
        lr_scaling=config["lr_scaling"],
        lr_by=config["lr_by"],
        lr_base=header["lr_base"],
        lr_scale=lr_scale,
        lower_bound=_sum_figure(epochs, "lower_bound"),
        num_packed=_sum_figure(epochs, "num_packed"),
        design_effect={name: _mean_effect(epochs, name) for name in ("seqlen", "source")},
        blocks=_block_order(plan),
        order_is_given=_order_is_given(plan),
        length_metric=_length_metric(plan),
        rank_imbalance=_mean([counts["rank_imbalance"] for counts in epochs]),
        rank_imbalance_by_step=(
            _mean([counts["rank_imbalance_by_step"] for counts in epochs]) if header["version"] >= 2 else None
        ),
        rank_imbalance_before=before,
        shapes=_shapes(header["shapes"]),
        asks_for_shapes=any(config.get(option) for option in SHAPE_OPTIONS),
        num_bytes=sum(entry["size"] for entry in header["files"].values()),
        notes=tuple(_notes(plan, lr_scale, tokens)),
    )


def _steps(plan: Plan) -> Iterator[Any]:
    for epoch in range(plan.num_epochs):
        yield from plan.epoch(epoch).steps()


def _shapes(listed: list[dict[str, int]] | None) -> tuple[Shape, ...] | None:
    if listed is None:
        return None
    return tuple(
        Shape(entry["num_rows"], entry["padded_seqlen"], entry["count"], entry["num_tokens"])
        for entry in listed
    )


def _dropped(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the drops of all epochs by reason: what every epoch drops counts once an epoch."""
    header = plan.header
    total: dict[str, dict[str, int]] = {}
    for drops in [
        *[header["dropped"]] * plan.num_epochs,
        *(counts["dropped"] for counts in header["epochs"]),
    ]:
        for reason, counts in drops.items():
            sums = total.setdefault(reason, {"num_samples": 0, "num_tokens": 0})
            for name, count in counts.items():
                sums[name] += count
    return total


def _over_steps(plan: Plan, column: str) -> Distribution | None:
    """Return how a column of the steps is distributed."""
    num_steps = sum(counts["num_steps"] for counts in plan.header["epochs"])
    if not num_steps:
        return None
    stride = -(-num_steps // STEPS_FOR_QUANTILES)
    parts: list[NDArray[Any]] = []
    low, high, total = np.inf, -np.inf, 0.0
    for table in _steps(plan):
        values = getattr(table, column)
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        total += float(values.sum())
        parts.append(values[::stride].copy())
    q05, q25, median, q75, q95 = np.quantile(np.concatenate(parts), QUANTILES, method="nearest").tolist()
    return Distribution(low, q05, q25, median, q75, q95, high, total / num_steps)


def _sum_figure(epochs: list[dict[str, Any]], name: str) -> int | None:
    figures = [counts["figures"].get(name) for counts in epochs]
    return None if not figures or None in figures else sum(figures)


def _mean_figure(epochs: list[dict[str, Any]], name: str) -> float | None:
    figures = [counts["figures"].get(name) for counts in epochs]
    return None if not figures or None in figures else _mean(figures)


def _mean_effect(epochs: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean design effect of the epochs that have one."""
    stated = [counts.get("design_effect", {}).get(name) for counts in epochs]
    known = [effect for effect in stated if effect is not None]
    return _mean(known) if known else None


def _block_order(plan: Plan) -> BlockOrder | None:
    at_a_time = plan.config.get("shuffle_blocks")
    stated = [counts["figures"].get("blocks") for counts in plan.header["epochs"]]
    if at_a_time is None or not stated or None in stated:
        return None

    def mean(name: str) -> float | None:
        known = [figures[name] for figures in stated if figures[name] is not None]
        return _mean(known) if known else None

    return BlockOrder(
        at_a_time=at_a_time,
        num_blocks=stated[0]["num_blocks"],
        open_blocks=max(figures["open_blocks"] for figures in stated),
        open_bytes=max(figures["open_bytes"] for figures in stated),
        design_effect_of_steps=mean("design_effect_of_steps"),
        design_effect_of_stretches=mean("design_effect_of_stretches"),
    )


def _order_is_given(plan: Plan) -> bool:
    return plan.config.get("order") != "random" or plan.config.get("curriculum") is not None


def _length_metric(plan: Plan) -> str:
    """Return the name of the metric that the plan's lengths are of."""
    budget = plan.config["max_tokens"]
    measured = plan.definition.get("columns", {})
    names = {*measured, *budget} if isinstance(budget, dict) else {"seqlen"}
    return main_metric(plan, names)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _notes(plan: Plan, lr_scale: Distribution | None, tokens: Distribution | None) -> Iterator[str]:
    """Yield what a person should know."""
    unknown = [each for each in plan.sources if each.fingerprint is not None and not each.files]
    if unknown:
        of = ", ".join(f" of {each.name}" for each in unknown if each.name is not None)
        yield (
            f"the metrics{of} have no manifest (another tool made them): nothing tells whether a data set is "
            "the one that they, and this plan, were made of"
        )
    for number, counts in enumerate(plan.header["epochs"]):
        raises = counts["figures"].get("curriculum_raises")
        if raises:
            yield (
                f"the curriculum's pool ran dry in epoch {number}, first before step {raises[0]['step']}: at "
                f"{counted(len(raises), 'step')} the difficulty was raised early to the next value"
            )
    yield from _key_notes(plan)
    unfilled = _dropped(plan).get("remainder", {"num_samples": 0})["num_samples"]
    offered = sum(each.num_samples * each.num_passes for each in plan.sources) * plan.num_epochs
    if offered and unfilled > LARGE_REMAINDER * offered:
        share = unfilled / offered
        yield (
            f"{share:.0%} of the samples fill no step and are dropped; --remainder keep or fill keeps them, "
            "smaller steps more"
        )
    effect = _mean_effect(plan.header["epochs"], "seqlen")
    if tokens is not None and effect is not None and effect > MIXED_STEPS and not _order_is_given(plan):
        yield _mix_note(plan, effect, tokens)
    if lr_scale is None:
        yield "the plan has no step"
    elif lr_scale.max > WIDE_LR_RANGE * lr_scale.min:
        yield f"the learning-rate factor spans {_times(lr_scale)} over the steps; {_lr_cure(tokens)}"


def _key_notes(plan: Plan) -> Iterator[str]:
    """Tell of a key so frequent that it decides how many micro-batches there are."""
    for number, counts in enumerate(plan.header["epochs"]):
        most, rows = counts["figures"].get("key_max_count", 0), counts["num_microbatches"]
        if most > KEY_SHARE * rows:
            yield (
                f"one value of {plan.config['no_repeat_key']} is in {most:,} of the {rows:,} micro-batches "
                f"of epoch {number}, so that it decides how many there are, and how full; leave some of its "
                "samples out (--sample-ids), or choose a finer key"
            )
            return


def _mix_note(plan: Plan, effect: float, tokens: Distribution) -> str:
    """Say what a step is worth whose samples are no random ones, and what cures it, in the plan's numbers."""
    config = plan.config
    worth = f"a step tells as much as a random one of 1/{ratio(effect)} its size, since"
    if plan.layout == "packed" and config.get("packing") not in ("mixed", "wrapped"):
        return f"{worth} samples of a row are alike in length; --packing mixed makes every row a mix"
    if config.get("same_num_samples") or config.get("same_seqlen"):
        return f"{worth} its micro-batches have one shape; --layout packed gives them one shape and a mix"
    accum = _accum_that_mixes(plan, effect)
    more = f"--grad-accum {accum}, or --step-tokens {_rounded(tokens.mean * accum / plan.grad_accum)}"
    if plan.layout == "packed":
        return f"{worth} a row holds few samples; more rows a step mix it ({more})"
    worth = f"{worth} samples of a micro-batch are alike in length"
    if (
        max(counts["num_microbatches"] for counts in plan.header["epochs"])
        < STEPS_TO_DEAL * accum * plan.dp_size
    ):
        return f"{worth}; --layout packed mixes them (the data set is too small to deal them to steps)"
    return f"{worth}; {accum * plan.dp_size:,} micro-batches a step mix it ({more}), or --layout packed"


def _accum_that_mixes(plan: Plan, effect: float) -> int:
    """Return the micro-batches a rank with which dealing makes steps alike.

    Mixed rows need a few to even out what chance leaves. Where each micro-batch is of one class of lengths, E
    of them in a step leave a design effect of about e · (1 − E/16), e that of single ones; one of each of the
    16 classes leaves a tenth of e, two a 25th.
    """
    step_size = plan.dp_size * plan.grad_accum
    single = effect / max(1 - step_size / NUM_CLASSES, 1 / NUM_CLASSES)
    wanted = NUM_CLASSES if single <= 10 else 2 * NUM_CLASSES
    if step_size >= NUM_CLASSES:
        wanted = (step_size // NUM_CLASSES + 1) * NUM_CLASSES
    if plan.layout == "packed":
        wanted = max(4, 2 * step_size)
    multiple = int(plan.config.get("accum_multiple", 1))
    return -(-wanted // (multiple * plan.dp_size)) * multiple


def ratio(value: float) -> str:
    """Return a design effect in the digits that matter: 0.05, 0.93, 4.6, 18."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _rounded(number: float) -> int:
    """Return a number in two digits."""
    return int(float(f"{number:.1e}"))


def _lr_cure(tokens: Distribution | None) -> str:
    if tokens is not None and tokens.q95 <= EVEN_TOKENS * tokens.q05:
        return (
            "the steps have even tokens, so that no scaling is right (--lr-scaling none, or --lr-by tokens)"
        )
    return "steps of even tokens need no scaling (--layout packed); --lr-max-scale bounds it"


def _times(values: Distribution) -> str:
    return f"{values.max / values.min:.1f}×" if values.min > 0 else "from 0 upwards"
