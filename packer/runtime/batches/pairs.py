"""Plans with a budget for each of several sequences, source and target say: a batch for each of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, LengthMismatchError, SourceError
from packer.plan import MicroBatch, Plan
from packer.runtime.batches.batch import Batch, BatchInfo
from packer.runtime.batches.collate import Collated, Collator, PlannedShape, collate_alike
from packer.runtime.batches.fields import Fields
from packer.runtime.batches.pieces import length_mismatch, num_tokens

SEQLEN = "seqlen"


def counted_member(plan: Plan) -> str | None:
    """Return the member whose lengths the plan holds: ``seqlen``, else the first that has a budget.

    None where the plan's ``seqlen`` is no member but the sum of all, or does not say what it counted.
    """
    budgets = plan.config["max_tokens"]
    if not isinstance(budgets, Mapping) or _completions(plan):
        return None
    if SEQLEN in budgets:
        return SEQLEN
    measured = plan.definition.get("columns") or {SEQLEN: ""}
    return None if SEQLEN in measured else next(iter(budgets))


def packed_members(plan: Plan) -> tuple[str, ...]:
    """Return the members of pairs that one budget bounds: they share packed rows, each a sample of its own.

    None for plans without pairs, and with a budget for each member.

    Raises:
        ConfigError: A layout that has no place for them.
    """
    members = _completions(plan)
    if not members or isinstance(plan.config["max_tokens"], Mapping):
        return ()
    if plan.layout != "packed":
        budgets = ",".join(f"{member}=N" for member in members)
        raise ConfigError(
            f"one --max-tokens for pairs packs {' and '.join(members)} into the same row; plan with --layout "
            f"packed, or give each a budget: --max-tokens {budgets}"
        )
    if int(plan.config.get("pad_segments_to") or 1) > 1:
        raise ConfigError("--pad-segments-to pads whole samples, not the members of pairs; plan without it")
    if plan.config.get("too_long") in ("truncate", "split"):
        raise ConfigError(
            f"--too-long {plan.config['too_long']} cannot cut a pair; plan with --too-long drop"
        )
    return members


def _completions(plan: Plan) -> tuple[str, ...]:
    """Return the names of the completions that share a prompt; one alone is no pair."""
    definition = plan.definition
    columns = tuple(definition.get("columns", ()))
    return columns if definition.get("kind") == "prompt" and len(columns) > 1 else ()


def collate_packed_members(
    samples: Sequence[Any],
    planned: MicroBatch,
    collator: Collator,
    fields: Fields,
    members: Sequence[str],
) -> Collated:
    """Make a packed batch of pairs: the members of a pair follow each other, and none sees another.

    ``cu_seqlens`` has an edge for each member; member m of the micro-batch's sample i is segment
    ``i · len(members) + m``.

    Args:
        samples: As for ``collate_members``.
        planned: The micro-batch; a sample's length is the sum of its members'.
        collator: Makes the tensors.
        fields: The fields of every member.
        members: Names, in their order.

    Raises:
        LengthMismatchError: The members have together another length than planned.
        SourceError: A sample lacks a member.
    """
    sample_ids = np.repeat(planned.sample_ids, len(members))
    pieces = [
        _member(sample, member, sample_id, fields.length_field)
        for sample, sample_id in zip(samples, planned.sample_ids.tolist(), strict=True)
        for member in members
    ]
    lengths = (
        num_tokens(piece, sample_id, fields.length_field)
        for piece, sample_id in zip(pieces, sample_ids.tolist(), strict=True)
    )
    seqlens = np.fromiter(lengths, np.int32, len(pieces))
    # (samples · members,) -> (samples, members)
    found = seqlens.reshape(-1, len(members)).sum(axis=1)
    if (wrong := np.flatnonzero(found != planned.seqlens)).size:
        at = int(wrong[0])
        raise LengthMismatchError(
            length_mismatch(int(planned.sample_ids[at]), int(found[at]), int(planned.seqlens[at]), None)
        )
    shape = PlannedShape("packed", seqlens, planned.padded_seqlen, 1, planned.is_filler)
    fields.hold(pieces, sample_ids, seqlens.tolist())
    return collate_alike(collator, pieces, sample_ids, shape, fields)


def collate_members(
    samples: Sequence[Any],
    planned: MicroBatch,
    collator: Collator,
    fields: Mapping[str, Fields],
    *,
    accum: int,
    counted: str | None,
    sources: NDArray[np.int64],
) -> Collated:
    """Make a padded batch of each member, by its metric's name; the last one, the target, has the loss.

    Labels follow the convention of encoder–decoder models: ``labels[i]`` is what the decoder predicts at
    position i, having been fed the labels before it, which the model shifts to the right for that. So every
    label of the target counts, the first one, too.

    A plan holds the lengths of one member. Of the others it holds only the padded length of each micro-batch,
    which rounding and shapes shared within a step may have raised, so that no more than this bound can be
    held against them.

    Args:
        samples: Each has under the name of a metric its token ids, or a mapping with ``input_ids`` and
            further fields.
        planned: The micro-batch.
        collator: Makes the tensors of one member.
        fields: Metric → the fields of that member.
        accum: The micro-batch's place in its step.
        counted: The member whose lengths the plan holds; see ``counted_member``.
        sources: (n,) which of the plan's sources each sample is of.

    Raises:
        LengthMismatchError: A member has another length than planned, or is longer than its tensor.
        SourceError: A sample lacks a member.
    """
    batches: dict[str, Any] = {}
    sample_ids = planned.sample_ids.tolist()
    for metric, padded_seqlen in planned.padded_seqlens.items():
        length_field = fields[metric].length_field
        members = [
            _member(sample, metric, sample_id, length_field)
            for sample, sample_id in zip(samples, sample_ids, strict=True)
        ]
        lengths = (
            num_tokens(member, sample_id, length_field)
            for member, sample_id in zip(members, sample_ids, strict=True)
        )
        seqlens = np.fromiter(lengths, np.int32, len(members))
        if metric == counted and (wrong := np.flatnonzero(seqlens != planned.seqlens)).size:
            at = int(wrong[0])
            sample_id, found, expected = sample_ids[at], int(seqlens[at]), int(planned.seqlens[at])
            raise LengthMismatchError(f"{metric} of " + length_mismatch(sample_id, found, expected, None))
        longest = int(seqlens.argmax())
        if seqlens[longest] > padded_seqlen:
            raise LengthMismatchError(
                f"{metric} of sample {planned.sample_ids[longest]} has {seqlens[longest]:,} tokens and the "
                f"plan made its micro-batch {padded_seqlen:,} long; the likely cause is another data set, "
                "another order of its files, or another tokenizer than was analyzed: analyze and plan again"
            )
        shape = PlannedShape("padded", seqlens, padded_seqlen, 1, planned.is_filler)
        fields[metric].hold(members, planned.sample_ids, seqlens.tolist())
        collated = collate_alike(collator, members, planned.sample_ids, shape, fields[metric])
        info = BatchInfo(
            accum=accum,
            sample_ids=planned.sample_ids,
            seqlens=seqlens,
            starts=None,
            num_samples=planned.num_samples,
            num_tokens=int(seqlens.sum()),
            num_loss_tokens=collated.num_loss_tokens,
            planned_loss_tokens=None,
            labels_from=collated.labels_from,
            padded_seqlen=padded_seqlen,
            shape=shape.size,
            is_filler=planned.is_filler,
            is_repeat=planned.is_repeat,
            sources=sources,
        )
        batches[metric] = Batch(collated.tensors, info)
    return Collated(batches, collated.num_loss_tokens, collated.labels_from)


def _member(sample: Any, metric: str, sample_id: int, length_field: str) -> Mapping[str, Any]:
    try:
        member = sample[metric]
    except (KeyError, TypeError, IndexError):
        raise SourceError(
            f"sample {sample_id} has no {metric}, which the plan has a budget for; the data set must return "
            f"a mapping with {metric}: {length_field}, or a mapping with {length_field}"
        ) from None
    return member if isinstance(member, Mapping) else {length_field: member}
