"""What is dropped: each reason only where its option is given, and only for samples that it applies to."""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.options import PlanConfig
from packer.options.bounds import Company, longest_sample, most_samples
from packer.plan.epoch import DROP_REASONS
from packer.plan.reader import Plan
from packer.plan.rows import Dropped
from packer.plan.trained import accounts_of

EVERY_EPOCH = -1

_FILTERS = ("filter_min", "filter_max", "drop_untrainable")

# reason -> the options that drop samples for it
_ASKED_BY = {
    "filtered": "filter_min, filter_max, drop_untrainable or sample_ids",
    "too_long": "too_long=drop",
    "truncated": "too_long=truncate",
    "remainder": "remainder=drop and several micro-batches a step",
    "min_samples": "min_samples over 1",
    "trained": "a plan that trained them before",
    "unreached": "mix, repeat, total_tokens or total_steps",
}


class DropRules:
    """The rules of one configuration for the list of drops."""

    def __init__(
        self,
        plan: Plan,
        seqlens: NDArray[np.integer] | None,
        budgeted: Mapping[str, NDArray[np.integer]],
    ) -> None:
        """Take the options.

        Args:
            plan: the plan.
            seqlens: (num_samples,) the metric that the plan calls seqlen; None where it is unknown.
            budgeted: (num_samples,) of each metric that has a budget of its own, where known.
        """
        self._plan = plan
        self._config = plan.config
        self._options = PlanConfig.from_json(plan.config)
        self._metric = seqlens
        self._budgeted = budgeted
        self._limit = int(plan.header["max_seqlen"] or longest_sample(self._options))
        self._step_size = plan.dp_size * plan.grad_accum
        self._is_asked = _asked(plan, self._step_size)
        # epoch -> pieces and tokens that fill no step
        self._remainders = np.zeros((plan.num_epochs, 2), np.int64)
        self._totals: dict[str, dict[str, int]] = {}
        self._kept = np.ones(plan.num_samples if plan.config.get("sample_ids") else 0, np.bool_)

    def check(self) -> None:
        """Check every line on its own.

        Raises:
            InvariantError: the first drop that no option asks for, or that does not apply to its sample.
        """
        for part in self._plan.dropped():
            self._check_part(part)

    def _check_part(self, part: Dropped) -> None:
        lines = _Lines(part.epoch, part.sample_id, part.seqlen, part.num_tokens)
        unknown = (lines.ids < 0) | (lines.ids >= self._plan.num_samples)
        self._refuse(unknown, lines, "is not in the source")
        epochs = (lines.epoch < EVERY_EPOCH) | (lines.epoch >= self._plan.num_epochs)
        self._refuse(epochs, lines, "is dropped in an epoch that is not planned")
        self._refuse(
            (lines.lost < 0) | (lines.lost > lines.lengths), lines, "is dropped with more tokens than it has"
        )
        if self._metric is not None:
            other = self._metric[lines.ids] != lines.lengths
            self._refuse(other, lines, "is dropped with another length than in the metrics", lines.lengths)
        for code, reason in enumerate(DROP_REASONS):
            mine = lines.only(part.reason == code)
            if len(mine.ids):
                self._check_reason(reason, mine)
        if part.start is not None:
            beyond = (part.start < 0) | (part.start + lines.lost > lines.lengths)
            self._refuse(beyond, lines, "is dropped beyond its end", lines.lengths)

    def _check_reason(self, reason: str, lines: "_Lines") -> None:
        everyone = np.ones(len(lines.ids), np.bool_)
        if not self._is_asked.get(reason, True):
            self._refuse(
                everyone, lines, f"is dropped as {reason}, which takes {_ASKED_BY[reason]}", lines.lengths
            )
        in_every = lines.epoch == EVERY_EPOCH
        if reason in ("remainder", "unreached"):
            self._refuse(in_every, lines, f"is dropped as {reason} in every epoch")
        if reason == "remainder":
            np.add.at(self._remainders, lines.epoch, np.stack([everyone, lines.lost], axis=1))
        elif reason == "trained":
            self._refuse(lines.epoch != 0, lines, "is dropped as trained in another epoch than the first")
        elif reason not in ("min_samples", "unreached"):
            self._refuse(~in_every, lines, f"is dropped as {reason} in one epoch only")
        applies = getattr(self, f"_is_{reason}")(lines)
        self._refuse(~applies, lines, f"is dropped as {reason}, which it is not", lines.lengths)
        if in_every.any():
            totals = self._totals.setdefault(reason, {"num_samples": 0, "num_tokens": 0})
            totals["num_samples"] += int(np.count_nonzero(in_every))
            totals["num_tokens"] += int(lines.lost[in_every].sum())

    def _is_filtered(self, lines: "_Lines") -> NDArray[np.bool_]:
        least, most = int(self._config.get("filter_min") or 0), self._config.get("filter_max")
        if len(self._kept):
            self._kept[lines.ids] = False
        if len(self._kept) or self._config.get("drop_untrainable"):
            return np.ones(len(lines.ids), np.bool_)
        outside = lines.lengths < least
        return outside if most is None else outside | (lines.lengths > int(most))

    def _is_empty(self, lines: "_Lines") -> NDArray[np.bool_]:
        is_empty: NDArray[np.bool_] = lines.lengths == 0
        return is_empty

    def _is_too_long(self, lines: "_Lines") -> NDArray[np.bool_]:
        config, budget = self._config, self._config["max_tokens"]
        if not isinstance(budget, dict):
            return np.greater(lines.lengths, self._limit)
        company = config.get("min_samples") or 1
        if not set(budget) <= set(self._budgeted) or (company > 1 and config["count"] == "real"):
            return np.ones(len(lines.ids), np.bool_)  # any member may be the one that is too long
        others = Company(num_samples=company - 1)
        too_long: NDArray[np.bool_] = lines.lengths > longest_sample(self._options, company=others)
        for metric in budget:
            longest = longest_sample(self._options, metric, others)
            too_long |= self._budgeted[metric][lines.ids] > longest
        return too_long

    def _is_truncated(self, lines: "_Lines") -> NDArray[np.bool_]:
        is_cut_there: NDArray[np.bool_] = lines.lengths - lines.lost == self._limit
        return is_cut_there & (lines.lost > 0)

    def _is_remainder(self, lines: "_Lines") -> NDArray[np.bool_]:
        return lines.lost > 0

    def _is_trained(self, lines: "_Lines") -> NDArray[np.bool_]:
        return lines.lost > 0

    def _is_unreached(self, lines: "_Lines") -> NDArray[np.bool_]:
        return lines.lost > 0

    def _is_min_samples(self, lines: "_Lines") -> NDArray[np.bool_]:
        config = self._config
        if (
            isinstance(config["max_tokens"], dict)
            or config["layout"] == "packed"
            or config["count"] == "real"
        ):
            return np.greater(lines.lost, 0)
        # padded to it, its companions do not fit: only then format version 1 leaves it out of every epoch
        longest = longest_sample(self._options, company=Company(num_samples=config["min_samples"] - 1))
        has_reason: NDArray[np.bool_] = (lines.epoch != EVERY_EPOCH) | (lines.lost > longest)
        return has_reason & (lines.lost > 0)

    def check_counts(self) -> None:
        """Check how much each reason takes, once all else holds.

        Raises:
            InvariantError: plan.json counts otherwise, or more is dropped than the options can take.
        """
        if self._plan.header["dropped"] != self._totals:
            raise InvariantError(
                f"dropped is {self._plan.header['dropped']} in plan.json, the rows give {self._totals}"
            )
        self._check_remainders()
        self._check_sample_ids()

    def _check_remainders(self) -> None:
        """What fills no step is fewer than E micro-batches, each within its bounds."""
        config, left = self._config, self._step_size - 1
        budget = config["max_tokens"]
        tokens = budget.get("seqlen") if isinstance(budget, dict) else budget
        for epoch, (num_pieces, num_tokens) in enumerate(self._remainders.tolist()):
            for found, most, unit in (
                (num_pieces, left * most_samples(self._options), "samples"),
                (num_tokens, num_tokens if tokens is None else left * tokens, "tokens"),
            ):
                if found > most:
                    raise InvariantError(
                        f"epoch {epoch}: {found} {unit} are dropped as remainder; at most {most} fit fewer "
                        f"micro-batches than the {self._step_size} of a step"
                    )

    def _check_sample_ids(self) -> None:
        """Without other filters, what is not filtered out are the samples that were asked for."""
        stated = self._config.get("sample_ids")
        if not stated:
            return
        kept = np.flatnonzero(self._kept).astype("<i8")
        is_narrower = any(self._config.get(name) for name in _FILTERS)
        has_order = self._config.get("order") == "sequential"  # then the hash is over them as they were given
        is_other = (
            not is_narrower
            and not has_order
            and hashlib.sha256(kept.tobytes()).hexdigest() != stated["sha256"]
        )
        if len(kept) > stated["count"] or is_other:
            raise InvariantError(
                f"{len(kept)} samples are not filtered out, they are not the {stated['count']} of sample_ids"
            )

    def _refuse(
        self,
        wrong: NDArray[np.bool_],
        lines: "_Lines",
        why: str,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Raise for the first line that is wrong."""
        if wrong.any():
            at = int(np.argmax(wrong))
            place = "" if lines.epoch[at] == EVERY_EPOCH else f"epoch {lines.epoch[at]}: "
            length = "" if lengths is None else f" (seqlen {lengths[at]})"
            raise InvariantError(f"{place}sample {lines.ids[at]}{length} {why}")


class _Lines(NamedTuple):
    """Lines of ``dropped.arrow``."""

    epoch: NDArray[np.int32]
    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    lost: NDArray[np.int64]

    def only(self, wanted: NDArray[np.bool_]) -> "_Lines":
        """Return some of the lines."""
        return _Lines(self.epoch[wanted], self.ids[wanted], self.lengths[wanted], self.lost[wanted])


def _asked(plan: Plan, step_size: int) -> dict[str, bool]:
    """Return which reasons the options allow; ``empty`` needs none."""
    config = plan.config
    return {
        "trained": len(accounts_of(plan)) > 0,
        "filtered": any(config.get(name) for name in (*_FILTERS, "sample_ids")),
        "too_long": config.get("too_long") == "drop",
        "truncated": config.get("too_long") == "truncate",
        "remainder": config.get("remainder") == "drop" and step_size > 1,
        "min_samples": (config.get("min_samples") or 1) > 1,
        "unreached": any(config.get(name) for name in ("mix", "repeat", "total_tokens", "total_steps")),
    }
