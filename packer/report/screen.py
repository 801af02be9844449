"""``packer inspect``: a plan on one screen, and one step as a picture of bars."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from packer.plan import MicroBatch, Plan, StepRow
from packer.report.series import over_steps
from packer.report.summary import Distribution, PlanSummary, ratio, summarize
from packer.report.survey import microbatches_of
from packer.report.text import amount, by_tokens, facts, named_sources, percent, shape_rows, shows_shapes
from packer.wording import counted, on_one_line

SPARK_WIDTH = 36
BAR_WIDTH = 56
LEAST_WIDTH = 12
"""Columns of either on a narrow screen."""
_SPARKS = "▁▂▃▄▅▆▇█"
_SHOWN_SHAPES = 12
# What the table below the facts, or a table of its own, says at length.
_IN_TABLES = ("tokens per step", "samples per step", "LR factor", "dropped", "source ")


def overview(plan: Plan) -> RenderableType:
    """Return the whole plan, to be grasped in ten seconds."""
    summary = summarize(plan)
    parts: list[RenderableType] = [_headline(plan, summary)]
    if summary.tokens_per_step is not None:
        parts.append(_per_step(plan, summary))
    if named_sources(summary):
        parts.append(_sources(summary))
    tables = [table for table in (_drops(summary), _shapes(summary)) if table is not None]
    if tables:
        parts.append(Columns(tables, padding=(0, 4)))
    parts += [Text(f"Note: {note}", style="yellow") for note in summary.notes]
    return Group(*parts)


def step_picture(plan: Plan, epoch: int, step: int) -> RenderableType:
    """Return one step rank by rank: bars of real and padding tokens.

    Raises:
        PlanError: there is no such epoch or step.
    """
    rows = microbatches_of(plan, epoch, step)
    facts_of_step = plan.epoch(epoch).step(step)
    widest = max(_padded_tokens(plan, row) for row in rows)
    title = Text.assemble(
        (f"step {step}", "bold"),
        f" of epoch {epoch}: {counted(facts_of_step.num_samples, 'sample')}, "
        f"{counted(facts_of_step.num_tokens, 'token')}, ",
        f"learning-rate factor {facts_of_step.lr_scale:.4g}",
    )
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("rank", "accum", "shape", "samples", "real", "padding"):
        table.add_column(name, justify="right")
    table.add_column(f"█ real, ░ padding of {widest:,}")
    room_for_kinds = max(len(f" {_kind(row)}".rstrip()) for row in rows)
    for row in sorted(rows, key=lambda row: (row.dp_rank, row.accum)):
        padded = _padded_tokens(plan, row)
        table.add_row(
            str(row.dp_rank) if row.accum == 0 else "",
            str(row.accum),
            f"{row.num_samples if plan.layout == 'padded' else 1} × {row.padded_seqlen:,}",
            f"{row.num_samples:,}",
            f"{row.num_tokens:,}",
            percent(padded / row.num_tokens - 1),
            _Bar(
                padded=padded,
                real=row.num_tokens,
                widest=widest,
                kind=_kind(row),
                is_masked=row.is_filler,
                room_for_kinds=room_for_kinds,
            ),
        )
    return Group(title, *_mix_of_step(plan, epoch, facts_of_step), table)


def _mix_of_step(plan: Plan, epoch: int, step: StepRow) -> Iterator[Text]:
    """Yield a line on a step's mix beside that of its epoch, where there are steps to compare."""
    counts = plan.header["epochs"][epoch]
    if not step.num_samples or counts["num_steps"] < 2:
        return
    tokens = samples = 0
    for table in plan.epoch(epoch).steps():
        tokens += int(table.num_tokens.sum())
        samples += int(table.num_samples.sum())
    line = f"mean length {step.num_tokens / step.num_samples:,.0f}, the epoch's {tokens / samples:,.0f}"
    effect = counts.get("design_effect", {}).get("seqlen")
    yield Text(line if effect is None else f"{line}; design effect of its steps {ratio(effect)}")


def _headline(plan: Plan, summary: PlanSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    budget = plan.config["max_tokens"]
    named = (
        ", ".join(f"{metric} {limit:,}" for metric, limit in budget.items())
        if isinstance(budget, dict)
        else f"{budget:,}"
    )
    counted_tokens = "padding counted" if plan.config["count"] == "padded" else "padding not counted"
    grid.add_row("budget", f"{named} tokens a micro-batch, {counted_tokens}; order {summary.order}")
    for label, text in facts(summary):
        if not label.startswith(_IN_TABLES):
            grid.add_row(label, text)
    grid.add_row("content hash", plan.fingerprint[:16])
    name = plan.path.name if plan.path is not None else "in memory"
    return Panel(grid, title=f"plan {name}", title_align="left", border_style="cyan", expand=False)


def _per_step(plan: Plan, summary: PlanSummary) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("per step", style="bold")
    table.add_column("from first to last step", style="cyan")
    for name in ("min", "5%", "median", "95%", "max"):
        table.add_column(name, justify="right")
    for label, column, values in (
        ("tokens", "num_tokens", summary.tokens_per_step),
        ("samples", "num_samples", summary.samples_per_step),
        ("LR factor", "lr_scale", summary.lr_scale),
    ):
        if values is not None and (column != "lr_scale" or summary.lr_scaling != "none"):
            line = _Sparkline(plan=plan, column=column)
            table.add_row(label, line, *_quantiles(values, "{:.3f}" if column == "lr_scale" else "{:,.0f}"))
    return table


def _quantiles(values: Distribution, form: str) -> Iterator[str]:
    for value in (values.min, values.q05, values.median, values.q95, values.max):
        yield form.format(value)


def _sources(summary: PlanSummary) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("source", style="bold", overflow="fold")
    for name in ("share", "asked", "passes", "planned", "tokens", "of samples", "of tokens"):
        table.add_column(name, justify="right")
    for source in named_sources(summary):
        asked = " → ".join(percent(share) for _, share in source.asked)
        table.add_row(
            on_one_line(str(source.name)),
            percent(source.share or 0.0),
            asked or "–",
            f"{source.passes:.3g}",
            f"{source.planned_samples or 0:,}",
            amount(source.planned_tokens or 0),
            f"{source.num_samples:,}",
            amount(source.num_tokens),
        )
    return table


def _drops(summary: PlanSummary) -> Table | None:
    if not summary.dropped:
        return None
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("dropped", style="bold")
    for name in ("samples", "share", "tokens"):
        table.add_column(name, justify="right")
    whole = summary.offered_samples
    for reason, counts in by_tokens(summary.dropped):
        samples = counts["num_samples"]
        share = percent(samples / whole) if whole else ""
        table.add_row(reason, f"{samples:,}", share, amount(counts["num_tokens"]))
    return table


def _shapes(summary: PlanSummary) -> Table | None:
    if not shows_shapes(summary, _SHOWN_SHAPES):
        return None
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column(
        "shape B × S" if summary.layout == "padded" else "shape 1 × T", justify="right", style="bold"
    )
    for name in ("micro-batches", "share", "padding"):
        table.add_column(name, justify="right")
    for row in shape_rows(summary, _SHOWN_SHAPES):
        table.add_row(*row)
    return table


def sparkline(values: Iterable[float]) -> str:
    """Return one character a value, from the smallest to the largest; a flat line where all are equal."""
    values = list(values)
    low, high = min(values), max(values)
    if high - low <= 1e-9 * abs(high):
        return _SPARKS[3] * len(values)
    steps = len(_SPARKS) - 1
    return "".join(_SPARKS[round((value - low) / (high - low) * steps)] for value in values)


def _padded_tokens(plan: Plan, row: MicroBatch) -> int:
    return row.padded_seqlen * (row.num_samples if plan.layout == "padded" else 1)


def _kind(row: MicroBatch) -> str:
    return "filler, masked" if row.is_filler else "repeat" if row.is_repeat else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """A micro-batch as a bar, as long as its tensor and filled with what is real, where there is room."""

    padded: int
    real: int
    widest: int
    """Tokens of the longest bar."""
    kind: str
    is_masked: bool
    room_for_kinds: int
    """Columns that all bars leave free, so that they are drawn to one scale."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST_WIDTH + self.room_for_kinds, BAR_WIDTH + self.room_for_kinds)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(min(BAR_WIDTH, options.max_width - self.room_for_kinds), 2)
        width = max(round(room * self.padded / self.widest), 1)
        real = min(round(room * self.real / self.widest), width)
        if self.padded > self.real and width > 1:
            real = min(real, width - 1)  # padding that is there shows
        yield Text.assemble(
            ("█" * real, "dim" if self.is_masked else "green"),
            ("░" * (width - real), "yellow"),
            f" {self.kind}".rstrip(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sparkline:
    """A column of the steps along the plan, as wide as there is room."""

    plan: Plan
    column: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST_WIDTH, SPARK_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(over_steps(self.plan, self.column, min(SPARK_WIDTH, options.max_width)).mean))
