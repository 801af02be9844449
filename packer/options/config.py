"""What a plan depends on besides the sequence lengths, checked once, where it is born."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packer.curriculum import parse_curriculum
from packer.errors import ConfigError
from packer.options.mixture import Phase, most_passes_of, passes_of, phases_of

Layout = Literal["padded", "packed"]
Count = Literal["padded", "real"]
Order = Literal["random", "sequential", "seqlen"]
Packing = Literal["next-fit", "windowed", "mixed", "best-fit", "wrapped"]
TooLong = Literal["error", "drop", "truncate", "split"]
Remainder = Literal["drop", "keep", "fill"]
Balance = Literal["none", "tokens", "flops"]
LrScaling = Literal["none", "linear", "sqrt"]
LrBy = Literal["samples", "tokens", "loss-tokens"]
MixBy = Literal["tokens", "samples"]

MAX_SEQLEN = 2**31 - 1
"""Lengths and shapes are stored in 32 bits; sums in 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """All that a plan depends on besides the sequence lengths: one field a command-line option.

    Raises:
        ConfigError: an option out of its range, or a combination that has no meaning.
    """

    max_tokens: int | Mapping[str, int]
    """Tokens that one micro-batch of one SP group may hold; or a budget for each of several metrics."""
    layout: Layout = "padded"
    """``padded``: B × S, one sample a row; ``packed``: 1 × T, samples end to end."""
    count: Count = "padded"
    """What ``max_tokens`` counts: the tensor, padding included, or the tokens of the samples."""
    order: Order = "random"
    """The order in which samples are taken."""
    seed: int = 0
    """Of every random choice, together with the epoch."""
    epochs: int = 1
    """Each has its own order and its own drops."""
    packing: Packing | None = None
    """How samples become micro-batches. Default: ``next-fit`` where the order is not random, else
    ``mixed`` where the layout is packed, else ``windowed``."""
    window: int = 64
    """Micro-batches, about, that ``windowed`` sorts together."""
    shuffle_blocks: int | None = None
    """Shuffle the blocks of the data set (row groups, record batches, shards), then the samples of so many of
    them at a time. Default: all samples at once."""
    dp_size: int = 1
    """Data-parallel ranks: world / (tp · cp · sp · pp)."""
    grad_accum: int | None = None
    """Micro-batches that a rank works through in a step. Default: 1, or what ``step_tokens`` asks for, which
    is known once the samples are packed."""
    step_tokens: int | None = None
    """Real tokens of a step, about: ``grad_accum`` becomes what comes nearest, a multiple of
    ``accum_multiple``."""
    accum_multiple: int = 1
    """``grad_accum`` must be a multiple of it (interleaved pipeline stages)."""
    same_num_samples: bool = False
    """One number of samples, B, over all micro-batches of a step (padded layout)."""
    same_seqlen: bool = False
    """One padded length, S or T, over all micro-batches of a step."""
    min_samples: int = 1
    """Samples that a micro-batch must hold."""
    max_samples: int | None = None
    """Samples that a micro-batch may hold."""
    sp_size: int = 1
    """Sequence-parallel ranks: they share every row, so S or T is a multiple of it."""
    pad_multiple: int = 1
    """S, or T, is a multiple of it."""
    pad_segments_to: int = 1
    """Packed layout: every sample on its own is padded to a multiple of it (context parallelism)."""
    fixed_seqlen: int | None = None
    """S, or T, of every micro-batch of the plan."""
    num_shapes: int | None = None
    """S, or T, takes at most so many values over the whole plan."""
    max_attention: int | None = None
    """Bounds B·S² (padded) or Σ len² (packed)."""
    max_seqlen: int | None = None
    """A sample over it is too long. Default: what fits alone, after rounding."""
    too_long: TooLong = "error"
    """What becomes of a sample that is too long."""
    filter_min: int | None = None
    """Leave shorter samples out."""
    filter_max: int | None = None
    """Leave longer samples out."""
    no_repeat_key: str | None = None
    """Metric of which no micro-batch may hold a value twice; values below 0 may come together."""
    sample_ids: ArrayLike | None = field(default=None, compare=False, repr=False)
    """Leave all other samples out; none twice. Kept as int64, sorted unless the order is ``sequential``: it
    is then theirs."""
    drop_untrainable: bool = False
    """Leave out samples without a token that the loss counts."""
    mix: Mapping[str, float] | Iterable[tuple[float, Mapping[str, float]]] | None = None
    """Each source's share of the plan, in sum 1; or phases, as ``(start, shares)``: from that share of the
    total on. Kept as phases. Default: what the sources hold, each passed through as often."""
    mix_by: MixBy = "tokens"
    """What the shares count; a piece of a sample that is cut counts as one."""
    repeat: Mapping[str, float] | None = None
    """How often an epoch passes through each source: 2.5 means every sample twice, a random half of them a
    third time. Default: once."""
    total_tokens: int | None = None
    """The plan ends with the step that reaches so many real tokens; sources are passed through as often as
    that takes."""
    total_steps: int | None = None
    """The plan has so many steps; sources are passed through as often as that takes."""
    max_passes: float | Mapping[str, float] | None = None
    """How often the plan may pass through a source, all of them or each by name. Default: no bound."""
    remainder: Remainder = "drop"
    """What becomes of micro-batches that do not fill a step."""
    balance: Balance = "none"
    """Even out this cost over the data-parallel ranks."""
    hidden_size: int = 4096
    """H in the cost of a sample of L tokens, 12·H·L + L²."""
    balance_steps: int = 64
    """Steps, about, over which micro-batches are exchanged to balance them; 64 at least. 1: inside a step."""
    lr_scaling: LrScaling = "none"
    """How the learning rate follows the size of a step."""
    lr_by: LrBy = "samples"
    """What the size of a step counts."""
    lr_base: float | None = None
    """The size at which the factor is 1. Default: the mean over the full steps."""
    lr_max_scale: float | None = None
    """The factor never exceeds it."""
    curriculum: Mapping[str, Any] | None = None
    """Which samples are admitted at which step: DeepSpeed's keys, as parsed from JSON."""

    def __post_init__(self) -> None:
        """Fill the defaults that depend on other options, then refuse what has no meaning."""
        self._set("max_tokens", _budgets(self.max_tokens))
        _check_ranges(self)
        self._set("sample_ids", _sample_ids(self.sample_ids, keep_order=self.order == "sequential"))
        self._set("mix", phases_of(self.mix))
        self._set("repeat", passes_of("--repeat", self.repeat))
        self._set("max_passes", most_passes_of(self.max_passes))
        if self.step_tokens is None and self.grad_accum is None:
            self._set("grad_accum", 1)
        if self.packing is None:
            self._set("packing", _default_packing(self))
        _check_packing(self)
        _check_mixture(self)
        _check_shapes(self)
        if self.step_tokens is not None and self.grad_accum is not None:
            raise ConfigError(
                f"--step-tokens {self.step_tokens} chooses the accumulation, and so does --grad-accum "
                f"{self.grad_accum}; give one of them"
            )
        _check_steps(self)
        if isinstance(self.max_tokens, Mapping):
            _check_pairs(self)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def padded_multiple(self) -> int:
        """What S, or T, is a multiple of: lcm(sp_size, pad_multiple)."""
        return math.lcm(self.sp_size, self.pad_multiple)

    def with_grad_accum(self, grad_accum: int) -> "PlanConfig":
        """Return the configuration with the ``grad_accum`` that ``step_tokens`` was found to ask for."""
        found = copy(self)
        found._set("grad_accum", grad_accum)
        _check_steps(found)
        return found

    @property
    def microbatches_per_step(self) -> int:
        """E: micro-batches of a step, all ranks together."""
        return self.dp_size * self.accum

    @property
    def accum(self) -> int:
        """A: micro-batches of a rank in a step; 1 while ``step_tokens`` has not been turned into it."""
        return self.grad_accum or 1

    @property
    def has_shape_rule(self) -> bool:
        """Whether the micro-batches of a step must agree in shape."""
        return self.same_num_samples or self.same_seqlen

    @property
    def phases(self) -> tuple[Phase, ...] | None:
        """The phases of ``mix``; None where each source gives what it holds."""
        return cast("tuple[Phase, ...] | None", self.mix)

    @property
    def has_total(self) -> bool:
        """Whether the plan ends with a number of tokens or steps, not with the samples."""
        return self.total_tokens is not None or self.total_steps is not None

    @property
    def budgets(self) -> dict[str, int]:
        """Tokens that a micro-batch may hold, per metric."""
        return dict(self.max_tokens) if isinstance(self.max_tokens, Mapping) else {"seqlen": self.max_tokens}

    @property
    def further_metrics(self) -> set[str]:
        """Metrics besides ``seqlen`` that budgets, curriculum and the key need."""
        names = set(self.budgets)
        if self.no_repeat_key is not None:
            names.add(self.no_repeat_key)
        if self.curriculum is not None:
            names |= {schedule.metric for schedule in parse_curriculum(self.curriculum)}
        return names - {"seqlen"}

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> "PlanConfig":
        """Return the configuration that ``to_json`` wrote; the samples of ``sample_ids`` are not in it."""
        names = {option.name for option in fields(cls)} - {"sample_ids"}
        options = {name: value for name, value in entries.items() if name in names}
        if options.get("step_tokens") is None:
            return cls(**options)
        return cls(**options | {"grad_accum": None}).with_grad_accum(options["grad_accum"])

    def to_json(self) -> dict[str, Any]:
        """Return one entry an option, in plain JSON; of ``sample_ids`` the count and a hash."""
        entries = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.sample_ids is not None:
            ids = np.asarray(self.sample_ids, "<i8")
            entries["sample_ids"] = {"count": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
        if isinstance(self.max_tokens, Mapping):
            entries["max_tokens"] = dict(self.max_tokens)
        if self.curriculum is not None:
            entries["curriculum"] = dict(self.curriculum)
        if self.phases is not None:
            entries["mix"] = [phase._asdict() for phase in self.phases]
        return entries


_CHOICES = {
    "layout": get_args(Layout),
    "count": get_args(Count),
    "order": get_args(Order),
    "packing": (None, *get_args(Packing)),
    "too_long": get_args(TooLong),
    "remainder": get_args(Remainder),
    "balance": get_args(Balance),
    "lr_scaling": get_args(LrScaling),
    "lr_by": get_args(LrBy),
    "mix_by": get_args(MixBy),
}
# option -> (smallest, largest, may be left out)
_RANGES = {
    "seed": (0, 2**63 - 1, False),
    "epochs": (1, 99_999, False),
    "window": (1, MAX_SEQLEN, False),
    "shuffle_blocks": (1, MAX_SEQLEN, True),
    "dp_size": (1, MAX_SEQLEN, False),
    "grad_accum": (1, MAX_SEQLEN, True),
    "step_tokens": (1, 2**62, True),
    "total_tokens": (1, 2**60, True),
    "total_steps": (1, 2**40, True),
    "accum_multiple": (1, MAX_SEQLEN, False),
    "min_samples": (1, MAX_SEQLEN, False),
    "max_samples": (1, MAX_SEQLEN, True),
    "sp_size": (1, MAX_SEQLEN, False),
    "pad_multiple": (1, MAX_SEQLEN, False),
    "pad_segments_to": (1, MAX_SEQLEN, False),
    "fixed_seqlen": (1, MAX_SEQLEN, True),
    "num_shapes": (1, MAX_SEQLEN, True),
    "max_attention": (1, 2**63 - 1, True),
    "max_seqlen": (1, MAX_SEQLEN, True),
    "filter_min": (0, 2**63 - 1, True),
    "filter_max": (0, 2**63 - 1, True),
    "hidden_size": (1, 2**24, False),
    "balance_steps": (1, MAX_SEQLEN, False),
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _budgets(max_tokens: Any) -> int | dict[str, int]:
    """Return the one budget, or several by metric, each an int in range."""
    named = dict(max_tokens) if isinstance(max_tokens, Mapping) else {"": max_tokens}
    if not named:
        raise ConfigError("--max-tokens names no metric; give a number, or METRIC=N for each metric")
    for metric, budget in named.items():
        if not _is_int(budget) or not 1 <= budget <= MAX_SEQLEN:
            name = f"--max-tokens {metric}={budget}" if metric else f"--max-tokens {budget}"
            raise ConfigError(f"{name} is not an integer from 1 to {MAX_SEQLEN}")
    if "" in named:
        return int(named[""])
    if list(named) == ["seqlen"]:
        return int(named["seqlen"])
    return {str(metric): int(budget) for metric, budget in named.items()}


def _sample_ids(sample_ids: Any, *, keep_order: bool) -> NDArray[np.int64] | None:
    """Return the samples to keep, sorted unless their order counts."""
    if sample_ids is None:
        return None
    if not isinstance(sample_ids, Iterable):
        raise ConfigError(f"--sample-ids {sample_ids} must be a list of integers, one a sample")
    given = sample_ids if isinstance(sample_ids, np.ndarray) else np.asarray(list(sample_ids))
    if given.size == 0:
        raise ConfigError("--sample-ids names no sample; leave the option out to keep them all")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ConfigError("--sample-ids must hold integers, one a sample")
    least, most = int(given.min()), int(given.max())
    if least < 0 or most >= 2**63:
        raise ConfigError(
            f"--sample-ids holds {least if least < 0 else most}; ids count from 0, and end below 2^63"
        )
    given = given.astype(np.int64)
    ids = np.sort(given)
    repeated = np.flatnonzero(ids[1:] == ids[:-1])
    if len(repeated):
        raise ConfigError(
            f"--sample-ids names sample {ids[repeated[0]]} twice, and an epoch has every sample once; take "
            "the repeats out"
        )
    return given if keep_order else ids


def _check_ranges(config: PlanConfig) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            known = ", ".join(str(choice) for choice in choices if choice is not None)
            raise ConfigError(f"{_flag(name)} {value} is unknown; choose one of {known}")
    for name, (least, most, optional) in _RANGES.items():
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not _is_int(value) or not least <= value <= most:
            raise ConfigError(f"{_flag(name)} {value} is not an integer from {least} to {most}")
        config._set(name, int(value))
    for name in ("lr_base", "lr_max_scale"):
        value = getattr(config, name)
        if value is not None and not (
            isinstance(value, int | float | np.number) and value > 0 and math.isfinite(value)
        ):
            raise ConfigError(f"{_flag(name)} {value} is not a number above 0")
        if isinstance(value, np.number):
            config._set(name, value.item())
    if config.no_repeat_key is not None and (
        not isinstance(config.no_repeat_key, str) or config.no_repeat_key in ("", "seqlen", *config.budgets)
    ):
        raise ConfigError(
            f"--no-repeat-key {config.no_repeat_key} is no key; name what `packer analyze --key-column` made"
        )
    for name in ("same_num_samples", "same_seqlen", "drop_untrainable"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{_flag(name)} is on or off, not {getattr(config, name)}")


def _default_packing(config: PlanConfig) -> Packing:
    if config.order != "random":
        return "next-fit"
    return "mixed" if config.layout == "packed" else "windowed"


def _check_packing(config: PlanConfig) -> None:
    if config.packing in ("mixed", "best-fit", "wrapped") and config.layout != "packed":
        raise ConfigError(
            f"--packing {config.packing} fills packed rows; add --layout packed, or choose --packing windowed"
        )
    if config.packing != "next-fit" and config.order != "random":
        raise ConfigError(
            f"--packing {config.packing} makes its own random order; choose --packing next-fit to keep "
            f"--order {config.order}"
        )
    if config.shuffle_blocks is not None and (config.order != "random" or config.curriculum is not None):
        asked = "--curriculum" if config.curriculum is not None else f"--order {config.order}"
        raise ConfigError(
            f"--shuffle-blocks {config.shuffle_blocks} makes a random order, block by block, and {asked} "
            "another one; leave one of them out"
        )
    if config.packing == "wrapped":
        _check_wrapped(config)
    if config.max_samples is not None and config.min_samples > config.max_samples:
        raise ConfigError(
            f"--min-samples {config.min_samples} is over --max-samples {config.max_samples}; lower the one "
            "or raise the other"
        )
    if (
        config.filter_min is not None
        and config.filter_max is not None
        and config.filter_min > config.filter_max
    ):
        raise ConfigError(
            f"--filter-min {config.filter_min} is over --filter-max {config.filter_max}; no sample is left"
        )
    if config.curriculum is not None:
        if not isinstance(config.curriculum, Mapping):
            raise ConfigError("--curriculum must be a JSON object")
        parse_curriculum(config.curriculum)
        if config.order != "random":
            raise ConfigError(
                f"--curriculum draws from a pool at random, which --order {config.order} forbids; "
                "choose --order random, or leave --curriculum out"
            )


def _check_wrapped(config: PlanConfig) -> None:
    """Refuse what bounds the samples of a row, or chooses among them: they are cut where a row ends."""
    given = {
        "min_samples": config.min_samples > 1,
        "max_samples": config.max_samples is not None,
        "max_attention": config.max_attention is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{_flag(name)} {getattr(config, name)} bounds the samples of a row, and wrapped rows are filled "
            "with whatever comes next; leave it out, or choose --packing mixed"
        )
    if config.curriculum is not None:
        raise ConfigError(
            "--curriculum admits whole samples, and wrapped rows hold parts of them; leave it out, or choose "
            "--packing mixed"
        )
    if config.shuffle_blocks is not None:
        raise ConfigError(
            f"--shuffle-blocks {config.shuffle_blocks} reads samples whole, block by block, and wrapped rows "
            "cut them where a row ends; leave it out, or choose --packing mixed"
        )
    if config.no_repeat_key is not None:
        raise ConfigError(
            f"--no-repeat-key {config.no_repeat_key} chooses among the samples of a row, and wrapped rows "
            "are filled with whatever comes next; leave it out, or choose --packing mixed"
        )


def _check_mixture(config: PlanConfig) -> None:
    """Refuse what has no meaning where sources are mixed, or the plan ends with a total."""
    total = next(
        (name for name in ("total_tokens", "total_steps") if getattr(config, name) is not None), None
    )
    asked = "mix" if config.mix is not None else "repeat" if config.repeat is not None else total
    if config.total_tokens is not None and config.total_steps is not None:
        raise ConfigError(
            f"--total-tokens {config.total_tokens} ends the plan, and so does --total-steps "
            f"{config.total_steps}; give one of them"
        )
    if config.mix is not None and total is None:
        raise ConfigError(
            "--mix says what share each source has, but not of how much; add --total-tokens or --total-steps"
        )
    if config.repeat is not None and total is not None:
        raise ConfigError(
            f"--repeat says how often a source is passed through, but {_flag(total)} decides that; leave one "
            "of them out"
        )
    if config.max_passes is not None and total is None:
        raise ConfigError(
            "--max-passes bounds what --total-tokens or --total-steps asks for; add one, or leave it out"
        )
    if config.mix is None and config.mix_by != "tokens":
        raise ConfigError(f"--mix-by {config.mix_by} says what the shares of --mix count; add --mix")
    if asked is None:
        return
    if config.order != "random":
        raise ConfigError(
            f"{_flag(asked)} spreads the sources evenly over a random order, which --order {config.order} "
            "forbids; choose --order random"
        )
    if config.curriculum is not None:
        raise ConfigError(
            f"{_flag(asked)} decides when samples are used, and so does --curriculum; leave one of them out"
        )
    if config.shuffle_blocks is not None:
        raise ConfigError(
            f"{_flag(asked)} spreads the sources' passes evenly over the plan, and --shuffle-blocks "
            f"{config.shuffle_blocks} reads block by block; leave one of them out"
        )
    if total is not None and config.epochs > 1:
        raise ConfigError(
            f"{_flag(total)} {getattr(config, total)} is the whole run, in which sources are passed through "
            f"as often as it takes; leave --epochs {config.epochs} out"
        )


def _check_shapes(config: PlanConfig) -> None:
    multiple = config.padded_multiple
    if config.same_num_samples and config.layout == "packed":
        raise ConfigError(
            "--same-num-samples gives every micro-batch B rows, but --layout packed has one; choose "
            "--layout padded, or --same-seqlen alone"
        )
    if config.pad_segments_to != 1 and config.layout == "padded":
        raise ConfigError(
            "--pad-segments-to pads samples inside a packed row; add --layout packed, or use --pad-multiple"
        )
    if config.fixed_seqlen is not None:
        if config.num_shapes is not None:
            raise ConfigError("--fixed-seqlen is one shape already; leave --num-shapes out")
        if config.fixed_seqlen % multiple:
            raise ConfigError(
                f"--fixed-seqlen {config.fixed_seqlen} is not a multiple of {multiple}, which --sp-size and "
                f"--pad-multiple ask for; choose {-(-config.fixed_seqlen // multiple) * multiple}"
            )
    if not isinstance(config.max_tokens, int):
        return
    if config.count == "real":
        _check_fixed_row_of_real_tokens(config)
        return
    least = config.fixed_seqlen or multiple
    if config.layout == "padded":
        least *= config.min_samples
    else:
        least = max(least, config.min_samples * config.pad_segments_to)
    if least > config.max_tokens:
        raise ConfigError(
            f"--max-tokens {config.max_tokens} holds no micro-batch: the smallest takes {least} tokens after "
            "rounding; raise --max-tokens, or lower --min-samples, --fixed-seqlen, --pad-multiple, "
            "--pad-segments-to or --sp-size"
        )


def _check_fixed_row_of_real_tokens(config: PlanConfig) -> None:
    """Refuse a row with two bounds that count differently; from T on, the one follows from the other."""
    if config.layout == "padded" or config.fixed_seqlen is None or config.pad_segments_to == 1:
        return
    if config.budgets["seqlen"] < config.fixed_seqlen:
        raise ConfigError(
            f"--max-tokens {config.max_tokens} counts the tokens of the samples (--count real), "
            f"--fixed-seqlen {config.fixed_seqlen} also what --pad-segments-to {config.pad_segments_to} adds "
            f"to them; choose --max-tokens {config.fixed_seqlen}, what a row of that length can hold"
        )


def _check_steps(config: PlanConfig) -> None:
    if config.accum % config.accum_multiple and config.grad_accum is not None:
        up = -(-config.accum // config.accum_multiple) * config.accum_multiple
        raise ConfigError(
            f"--grad-accum {config.grad_accum} is not a multiple of --accum-multiple "
            f"{config.accum_multiple}; choose --grad-accum {up}"
        )
    if config.microbatches_per_step > MAX_SEQLEN:
        raise ConfigError(
            f"--dp-size {config.dp_size} × --grad-accum {config.grad_accum} micro-batches a step are over "
            f"{MAX_SEQLEN}; lower one of them"
        )
    if config.lr_scaling == "none":
        for name in ("lr_base", "lr_max_scale"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{_flag(name)} has no effect without --lr-scaling linear or sqrt")


def _check_pairs(config: PlanConfig) -> None:
    """Refuse what has no meaning where a sample has several lengths."""
    if config.layout == "packed":
        raise ConfigError("--max-tokens with several metrics bounds padded tensors; choose --layout padded")
    if config.too_long in ("truncate", "split"):
        raise ConfigError(
            f"--too-long {config.too_long} cannot cut several metrics alike; choose --too-long drop"
        )
    for name in ("fixed_seqlen", "num_shapes", "max_attention"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{_flag(name)} is about one length; leave it out, or give one --max-tokens")
