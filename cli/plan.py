"""``packer plan``."""

import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from packer.metrics import open_metrics
from packer.plan import Plan
from packer.plan.rereading import rereading_of
from packer.planner import PlanConfig, PlanProgress
from packer.report import summarize, summary_lines
from packer.rereading import Rereading

from .inputs import (
    AMOUNT,
    parse_max_tokens,
    parse_metrics,
    parse_mix,
    parse_passes,
    read_curriculum,
    read_sample_ids,
)
from .options import GroupedCommand, grouped
from .progress import ProgressDisplay, compact

LIMITS = "What a micro-batch may hold"
CHOICE = "Which samples, in which order"
MIXTURE = "Several sources, and how much of them"
STEPS = "Steps"
SHAPES = "Shapes"
RATE = "Learning rate"
OUTPUT = "Output"

FILE = click.Path(path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("metrics", nargs=-1, required=True, callback=parse_metrics, metavar="[NAME=]METRICS...")
@grouped(OUTPUT, "--out", required=True, type=click.Path(path_type=Path), help="Plan directory to make.")
@grouped(OUTPUT, "--overwrite", is_flag=True, help="Replace an existing plan.")
@grouped(OUTPUT, "--json", "as_json", is_flag=True, help="Print the summary for machines.")
@grouped(
    LIMITS,
    "--max-tokens",
    required=True,
    callback=parse_max_tokens,
    metavar="N|METRIC=N,...",
    help="Tokens of one micro-batch of one SP group (not of one GPU). For pairs of sequences a budget each: "
    "source=25000,target=25000.",
)
@grouped(
    LIMITS,
    "--layout",
    type=click.Choice(["padded", "packed"]),
    default="padded",
    help="padded: a B × S tensor, one sample a row. packed: one row of T tokens, samples end to end, told "
    "apart by position_ids (needs attention that knows them: FlashAttention varlen, flex).",
)
@grouped(
    LIMITS,
    "--count",
    type=click.Choice(["padded", "real"]),
    default="padded",
    help="What --max-tokens counts: the tensor with its padding, which is what memory sees, or the samples' "
    "tokens alone.",
)
@grouped(
    LIMITS, "--min-samples", type=int, metavar="N", default=1, help="Samples that a micro-batch must hold."
)
@grouped(LIMITS, "--max-samples", type=int, metavar="N", help="Samples that a micro-batch may hold.")
@grouped(
    LIMITS,
    "--max-attention",
    type=AMOUNT,
    metavar="N",
    help="Bound B·S² (packed: Σ len²) too, for attention that materialises the matrix.",
)
@grouped(
    LIMITS,
    "--max-seqlen",
    type=AMOUNT,
    metavar="N",
    help="A longer sample is too long.  [default: what fits alone, rounded]",
)
@grouped(
    LIMITS,
    "--too-long",
    type=click.Choice(["error", "drop", "truncate", "split"]),
    default="error",
    help="A sample that is too long: stop, leave it out, keep its beginning, or cut it into pieces that are "
    "planned apart.",
)
@grouped(
    CHOICE,
    "--order",
    type=click.Choice(["random", "sequential", "seqlen"]),
    default="random",
    help="random: another order every epoch. sequential: as in the data set. seqlen: short samples first.",
)
@grouped(CHOICE, "--seed", type=int, metavar="N", default=0, help="Of every random choice.")
@grouped(CHOICE, "--epochs", type=int, metavar="N", default=1, help="Epochs to plan, each in its own order.")
@grouped(
    CHOICE,
    "--packing",
    type=click.Choice(["windowed", "mixed", "next-fit", "best-fit", "wrapped"]),
    help="windowed: random, with little padding. mixed (packed): full rows, each a random draw of the data. "
    "next-fit: keeps the order. best-fit (packed): the fewest rows, each alike in length, which costs "
    "learning. wrapped (packed): documents end to end, cut where a row ends.  [default: windowed; mixed if "
    "packed; next-fit if the order is not random]",
)
@grouped(
    CHOICE,
    "--window",
    type=int,
    default=64,
    metavar="K",
    help="Micro-batches, about, that are sorted together: more of them, less padding, less randomness.",
)
@grouped(
    CHOICE,
    "--shuffle-blocks",
    type=int,
    metavar="K",
    help="Shuffle the blocks of the files (row groups, record batches, shards), then the samples of K of "
    "them at a time, so that each is read once.  [default: all samples at once]",
)
@grouped(CHOICE, "--filter-min", type=AMOUNT, metavar="N", help="Leave out shorter samples.")
@grouped(CHOICE, "--filter-max", type=AMOUNT, metavar="N", help="Leave out longer samples.")
@grouped(
    CHOICE,
    "--sample-ids",
    type=FILE,
    metavar="FILE",
    callback=read_sample_ids,
    help="Keep these samples only: a text file with one id a line, or a .npy array.",
)
@grouped(
    CHOICE,
    "--no-repeat-key",
    metavar="NAME",
    help="No micro-batch holds two samples of one value of this metric (analyze --key-column): contrastive "
    "training.",
)
@grouped(
    CHOICE,
    "--except",
    "trained",
    multiple=True,
    metavar="PLAN[@EPOCH:STEP]",
    help="Go on from that plan's run: leave out what the epoch trained before the step, or all that the plan "
    "did, and count samples and tokens from there. Repeatable.",
)
@grouped(
    CHOICE, "--drop-untrainable", is_flag=True, help="Leave out samples without a token that the loss counts."
)
@grouped(
    CHOICE,
    "--curriculum",
    type=FILE,
    metavar="FILE.json",
    callback=read_curriculum,
    help="Admit samples by difficulty as the steps go on; DeepSpeed's keys (schedule_type and so on).",
)
@grouped(
    MIXTURE,
    "--mix",
    multiple=True,
    callback=parse_mix,
    metavar="[@START:]NAME=SHARE,...",
    help="What share each source has of the plan, in every stretch of it; shares sum to 1. Again with "
    "@0.8: for other shares from that part of the total on.",
)
@grouped(
    MIXTURE,
    "--mix-by",
    type=click.Choice(["tokens", "samples"]),
    default="tokens",
    help="What the shares count.",
)
@grouped(
    MIXTURE,
    "--repeat",
    metavar="NAME=PASSES,...",
    callback=parse_passes,
    help="How often an epoch passes through a source. 2.5: every sample twice, a random half a third time.  "
    "[default: once]",
)
@grouped(
    MIXTURE,
    "--total-tokens",
    type=AMOUNT,
    metavar="N",
    help="End with the step that reaches N real tokens (20B, 1e9); sources are passed through as often as "
    "it takes.",
)
@grouped(MIXTURE, "--total-steps", type=AMOUNT, metavar="N", help="Plan N steps, likewise.")
@grouped(
    MIXTURE,
    "--max-passes",
    metavar="N|NAME=N,...",
    callback=parse_passes,
    help="Refuse a plan that passes through a source more often.",
)
@grouped(
    STEPS, "--dp-size", type=int, default=1, metavar="D", help="Data-parallel ranks: world / (tp·cp·sp·pp)."
)
@grouped(
    STEPS,
    "--grad-accum",
    type=int,
    metavar="A",
    help="Micro-batches that a rank works through in a step. Any D'·A' = D·A replays the same steps.  "
    "[default: 1]",
)
@grouped(
    STEPS,
    "--step-tokens",
    type=AMOUNT,
    metavar="N",
    help="Instead of --grad-accum: as many micro-batches a step as come nearest to N real tokens.",
)
@grouped(
    STEPS,
    "--accum-multiple",
    type=int,
    default=1,
    metavar="M",
    help="--grad-accum must be a multiple of it (interleaved pipeline stages).",
)
@grouped(
    STEPS,
    "--remainder",
    type=click.Choice(["drop", "keep", "fill"]),
    default="drop",
    help="Micro-batches that do not fill a step: leave them out, fill up with masked copies that train "
    "nothing, or with repeats that train.",
)
@grouped(
    STEPS,
    "--balance",
    type=click.Choice(["none", "tokens", "flops"]),
    default="none",
    help="Let the ranks of a step finish together: even out tokens, or 12·H·L + L² per sample.",
)
@grouped(STEPS, "--hidden-size", type=int, default=4096, metavar="H", help="H of --balance flops.")
@grouped(
    STEPS,
    "--balance-steps",
    type=int,
    default=64,
    metavar="K",
    help="Steps, about, over which micro-batches are exchanged to balance them, 64 at least. 1: inside a "
    "step only.",
)
@grouped(SHAPES, "--same-num-samples", is_flag=True, help="One B over all micro-batches of a step (padded).")
@grouped(
    SHAPES, "--same-seqlen", is_flag=True, help="One S (packed: one T) over all micro-batches of a step."
)
@grouped(SHAPES, "--pipeline", is_flag=True, help="Both: what pipeline stages need.")
@grouped(
    SHAPES,
    "--sp-size",
    type=int,
    default=1,
    metavar="P",
    help="Sequence-parallel ranks that share a row: S (packed: T) is a multiple of it.",
)
@grouped(
    SHAPES,
    "--pad-multiple",
    type=int,
    default=1,
    metavar="M",
    help="S (packed: T) is a multiple of it: 8 or 64 for tensor cores.",
)
@grouped(
    SHAPES,
    "--pad-segments-to",
    type=int,
    default=1,
    metavar="M",
    help="Packed: pad every sample on its own, for context parallelism (2·cp).",
)
@grouped(SHAPES, "--fixed-seqlen", type=int, metavar="S", help="One S (packed: T) for the whole plan.")
@grouped(
    SHAPES,
    "--num-shapes",
    type=int,
    metavar="N",
    help="At most N values of S (packed: T) over the plan, chosen for the least padding: compiled graphs.",
)
@grouped(
    RATE,
    "--lr-scaling",
    type=click.Choice(["none", "linear", "sqrt"]),
    default="none",
    help="How the rate follows the size of a step. linear: SGD (Goyal 2017). sqrt: Adam (Krizhevsky 2014, "
    "Malladi 2022).",
)
@grouped(
    RATE,
    "--lr-by",
    type=click.Choice(["samples", "tokens", "loss-tokens"]),
    default="samples",
    help="What the size of a step counts.",
)
@grouped(
    RATE,
    "--lr-base",
    type=float,
    metavar="N",
    help="The size at which the factor is 1.  [default: the mean over the full steps]",
)
@grouped(
    RATE,
    "--lr-max-scale",
    type=float,
    metavar="X",
    help="The factor never exceeds it.",
)
def plan(
    metrics: Path | dict[str, Path],
    out: Path,
    overwrite: bool,
    as_json: bool,
    pipeline: bool,
    trained: tuple[str, ...],
    **options: Any,
) -> None:
    """Pack the samples into micro-batches and steps.

    METRICS is the directory that `packer analyze` made, or DeepSpeed's DataAnalyzer; with a name each, there
    may be several. The plan says which samples every rank sees in every micro-batch of every step; training
    replays it.

    \b
    packer plan metrics --out plan --max-tokens 16384 --dp-size 8
    packer plan metrics --out plan --max-tokens 32768 --dp-size 8 --layout packed --balance flops
    packer plan web=m-web code=m-code --mix web=0.7,code=0.3 --total-tokens 20B --out plan --max-tokens 32768
    """  # noqa: D301 (the escape is click's)
    if pipeline:
        # packed rows agree in shape once they agree in T
        options |= {"same_num_samples": options["layout"] == "padded", "same_seqlen": True}
    config = PlanConfig(**options)
    from packer.planner import make_plan  # with the compiled kernels: help and wrong options go without

    start = time.perf_counter()
    with ProgressDisplay("opening") as display:
        made = make_plan(
            metrics,
            config,
            trained=trained,
            out=out,
            overwrite=overwrite,
            progress=partial(_show, display),
        )
    seconds = time.perf_counter() - start
    # of several sources, which are read side by side, nothing is told
    alone = metrics if isinstance(metrics, Path) else next(iter(metrics.values()))
    is_one = isinstance(metrics, Path) or len(metrics) == 1
    rereading = rereading_of(made, open_metrics(alone)) if is_one else None
    if as_json:
        click.echo(_for_machines(made, out, seconds, rereading))
    else:
        click.echo(_for_people(made, metrics, out, seconds, rereading))


def _show(display: ProgressDisplay, progress: PlanProgress) -> None:
    display.show(
        progress.fraction,
        stage=progress.stage,
        left=progress.seconds_left,
        detail=f"{compact(progress.num_samples)} samples",
    )


def _for_people(
    made: Plan, metrics: Path | dict[str, Path], out: Path, seconds: float, rereading: Rereading | None
) -> str:
    summary = summarize(made)
    where = shlex.quote(str(out))
    named = (
        [f"{name}={path}" for name, path in metrics.items()] if isinstance(metrics, dict) else [str(metrics)]
    )
    verified = " ".join(f"--metrics {shlex.quote(metric)}" for metric in named)
    done = (
        f"{summary.planned_tokens:,} tokens planned in {seconds:.1f} s, {summary.num_bytes:,} bytes written"
    )
    return "\n".join(
        [
            f"{out}: {done}",
            *summary_lines(summary),
            *([f"Note: {rereading.told()}"] if rereading is not None and rereading.is_dear else []),
            f"Next: packer verify {where} {verified}",
        ]
    )


def _for_machines(made: Plan, out: Path, seconds: float, rereading: Rereading | None) -> str:
    facts = {"plan_directory": str(out), "content_hash": made.fingerprint, "seconds": round(seconds, 3)}
    facts["bytes_read_per_byte_needed"] = None if rereading is None else round(rereading.factor, 3)
    return json.dumps(facts | summarize(made).as_json())
