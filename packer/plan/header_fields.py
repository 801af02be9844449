"""What ``plan.json`` must hold, entry by entry: a header with a right hash may still be no work of ours."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from packer.plan import schema
from packer.plan.epoch import DROP_REASONS
from packer.plan.sources import PlanSource, joint_fingerprint
from packer.wording import counted

Fits = Callable[[Any], bool]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_EPOCHS = 10**6


def first_problem(header: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a header, or None."""
    return next(_problems(header), None)


def _problems(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems; after the first one the rest of the header cannot be relied on."""
    yield from _misfits(header, _HEADER, "")
    yield from _misfits(header, _HEADER_OF_VERSION_2 if header["version"] >= 2 else _HEADER_OF_VERSION_1, "")
    if header["version"] >= 2:
        for number, source in enumerate(header["sources"]):
            yield from _misfits(source, _SOURCE, f"sources[{number}].")
        for number, phase in enumerate(header["phases"] or []):
            yield from _misfits(phase, _PHASE, f"phases[{number}].")
        for number, account in enumerate(header["trained"]):
            yield from _misfits(account, _ACCOUNT, f"trained[{number}].")
            if set(account) != set(_ACCOUNT):
                yield f"trained[{number}] has more than its counts"
        yield from _problems_of_sources(header)
    yield from _misfits(header["config"], _CONFIG, "config.")
    yield from _misfits(header["config"], _OPTIONS, "config.", may_miss=True)
    if header["config"].get("sample_ids") is not None:
        yield from _misfits(header["config"]["sample_ids"], _SAMPLE_IDS, "config.sample_ids.")
    if len(header["epochs"]) != header["num_epochs"]:
        yield f"num_epochs is {header['num_epochs']}, epochs has {len(header['epochs'])} entries"
    for number, counts in enumerate(header["epochs"]):
        yield from _misfits(counts, _EPOCH, f"epochs[{number}].")
        if header["version"] >= 2:
            yield from _misfits(counts, _EPOCH_OF_VERSION_2, f"epochs[{number}].")
            yield from _misfits(counts["design_effect"], _DESIGN_EFFECT, f"epochs[{number}].design_effect.")
            for place, planned in enumerate(counts["sources"]):
                yield from _misfits(planned, _COUNTS, f"epochs[{number}].sources[{place}].")
            if len(counts["sources"]) != len(header["sources"]):
                yield f"epochs[{number}].sources has {len(counts['sources'])} entries"
        yield from _misfits(counts["figures"], _FIGURES, f"epochs[{number}].figures.", may_miss=True)
        if "blocks" in counts["figures"]:
            yield from _misfits(counts["figures"]["blocks"], _BLOCKS, f"epochs[{number}].figures.blocks.")
        for raised in counts["figures"].get("curriculum_raises", []):
            yield from _misfits(raised, _RAISE, f"epochs[{number}].figures.curriculum_raises.")
    for drops in [header["dropped"], *(counts["dropped"] for counts in header["epochs"])]:
        for reason, losses in drops.items():
            if reason not in DROP_REASONS:
                yield f"dropped has the reason {reason!r}"
            yield from _misfits(losses, _COUNTS, f"dropped.{reason}.")
            if set(losses) != set(_COUNTS):
                yield f"dropped.{reason} has more than its counts"
    for shape in header["shapes"] or []:
        yield from _misfits(shape, _SHAPE, "shapes.")
    yield from _problems_of_files(header["files"], header["num_epochs"])
    yield from _contradictions(header)


def _contradictions(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the parts of a header say differently."""
    config, files = header["config"], header["files"]
    if config["lr_scaling"] != "none" and header["lr_base"] is None:
        yield f"lr_base is null, with lr_scaling={config['lr_scaling']}"
    per_step = config["dp_size"] * config["grad_accum"]
    for number, counts in enumerate(header["epochs"]):
        rows = files[schema.microbatches_file(number)]["num_rows"]
        steps = files[schema.steps_file(number)]["num_rows"]
        if rows != steps * per_step:
            planned = f"{counted(steps, 'step')} of {per_step} planned"
            yield f"epoch {number} has {counted(rows, 'micro-batch')}, {planned}"
        if counts["num_steps"] != steps or counts["num_microbatches"] != rows:
            yield f"epochs[{number}] counts other steps and micro-batches than its files have rows"


def _problems_of_sources(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with ids that count through the sources, and with names that tell them apart."""
    sources, next_id = header["sources"], 0
    for number, source in enumerate(sources):
        if source["first_id"] != next_id:
            yield f"sources[{number}].first_id is {source['first_id']}, {next_id} samples are before it"
        next_id += source["num_samples"]
    if next_id != header["num_samples"]:
        yield f"num_samples is {header['num_samples']}, the sources have {next_id}"
    num_tokens = sum(source["num_tokens"] for source in sources)
    if num_tokens != header["num_tokens"]:
        yield f"num_tokens is {header['num_tokens']}, the sources have {num_tokens}"
    names = {source["name"] for source in sources}
    if len(names) < len(sources) or (None in names and len(sources) > 1):
        yield f"{len(sources)} sources have the names {sorted(map(str, names))}"
    joint = joint_fingerprint([PlanSource.from_json(source) for source in sources])
    if joint != header["metrics_fingerprint"]:
        yield f"metrics_fingerprint is {header['metrics_fingerprint']}, the sources give {joint}"
    for number, phase in enumerate(header["phases"] or []):
        if not set(phase["shares"]) <= names:
            yield f"phases[{number}].shares names other sources"


def _problems_of_files(entries: Mapping[str, Any], num_epochs: int) -> Iterator[str]:
    expected = schema.plan_files(num_epochs)
    if set(entries) != set(expected):
        odd = min(set(expected) ^ set(entries))
        yield f"files does not list those of {num_epochs} epochs ({odd})"
    for name in expected:
        entry = entries[name]
        yield from _misfits(entry, _FILE, f"files[{name}].")
        digests, num_batches = entry["batch_digests"], -(-entry["num_rows"] // entry["rows_per_batch"])
        if len(digests) != num_batches or not all(map(_is_hash, digests)):
            yield f"files[{name}].batch_digests are not {num_batches} hashes"


def _misfits(
    entries: Any, fields: Mapping[str, Fits], place: str, *, may_miss: bool = False
) -> Iterator[str]:
    """Yield the fields that are missing or not of their kind."""
    if not isinstance(entries, dict):
        yield f"{place.rstrip('.')} is {json.dumps(entries)[:60]}"
    for key, fits in fields.items():
        if key not in entries:
            if not may_miss:
                yield f"{place}{key} is missing"
        elif not fits(entries[key]):
            yield f"{place}{key} is {json.dumps(entries[key])[:60]}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_size(value: Any) -> bool:
    return _is_positive(value) and value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_budget(value: Any) -> bool:
    several = isinstance(value, dict) and len(value) > 0 and all(map(_is_positive, value.values()))
    return several or _is_positive(value)


def _is_a(kind: type) -> Fits:
    return lambda value: isinstance(value, kind)


def _are_all(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _one_of(*values: str) -> Fits:
    return lambda value: value in values


def _maybe(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


_HEADER: dict[str, Fits] = {
    "config": _is_a(dict),
    "num_samples": _is_count,
    "num_tokens": _is_count,
    "max_seqlen": _maybe(_is_positive),
    "metrics_fingerprint": _maybe(_is_a(str)),
    "lr_base": _maybe(lambda value: _is_number(value) and value > 0),
    "loss_tokens": _maybe(_is_a(str)),
    "num_epochs": lambda value: _is_count(value) and value <= _MOST_EPOCHS,
    "shapes": _maybe(_is_a(list)),
    "dropped": _is_a(dict),
    "epochs": _is_a(list),
    "files": _is_a(dict),
    "content_hash": _is_hash,
}
_HEADER_OF_VERSION_1: dict[str, Fits] = {
    "sources": _maybe(_are_all(_is_a(dict))),
    "definition": _maybe(_is_a(dict)),
}
_HEADER_OF_VERSION_2: dict[str, Fits] = {
    "sources": lambda value: _are_all(_is_a(dict))(value) and len(value) > 0,
    "phases": _maybe(_are_all(_is_a(dict))),
    "trained": _are_all(_is_a(dict)),
}
_SOURCE: dict[str, Fits] = {
    "name": _maybe(lambda value: isinstance(value, str) and len(value) > 0),
    "first_id": _is_count,
    "num_samples": _is_count,
    "num_tokens": _is_count,
    "passes": lambda value: _is_number(value) and value >= 0,
    "num_passes": _is_count,
    "fingerprint": _maybe(_is_a(str)),
    "definition": _maybe(_is_a(dict)),
    "files": _maybe(_are_all(_is_a(dict))),
}
_ACCOUNT: dict[str, Fits] = {
    "plan": _is_hash,
    "epoch": _is_count,
    "step": _is_count,
    "num_steps": _is_count,
    "num_samples": _is_count,
    "num_tokens": _is_count,
}
_PHASE: dict[str, Fits] = {
    "first_step": _is_count,
    "shares": lambda value: (
        isinstance(value, dict) and all(_is_number(share) and 0 <= share <= 1 for share in value.values())
    ),
}
_CONFIG: dict[str, Fits] = {
    "layout": _one_of("padded", "packed"),
    "count": _one_of("padded", "real"),
    "max_tokens": _is_budget,
    "dp_size": _is_size,
    "grad_accum": _is_size,
    "lr_scaling": _one_of("none", "linear", "sqrt"),
    "lr_by": _one_of("samples", "tokens", "loss-tokens"),
}
_OPTIONS: dict[str, Fits] = {
    "curriculum": _maybe(_is_a(dict)),
    "shuffle_blocks": _maybe(_is_positive),
    "no_repeat_key": _maybe(_is_a(str)),
    "sp_size": _is_size,
    "pad_multiple": _is_size,
    "pad_segments_to": _is_size,
    "hidden_size": _is_size,
    "min_samples": _maybe(_is_positive),
    "max_samples": _maybe(_is_positive),
    "fixed_seqlen": _maybe(_is_positive),
    "num_shapes": _maybe(_is_positive),
    "max_attention": _maybe(_is_positive),
    "max_seqlen": _maybe(_is_positive),
    "filter_min": _maybe(_is_count),
    "filter_max": _maybe(_is_count),
    "lr_base": _maybe(lambda value: _is_number(value) and value > 0),
    "lr_max_scale": _maybe(lambda value: _is_number(value) and value > 0),
}
_SAMPLE_IDS: dict[str, Fits] = {"count": _is_positive, "sha256": _is_hash}
_EPOCH: dict[str, Fits] = {
    "num_steps": _is_count,
    "num_microbatches": _is_count,
    "num_samples": _is_count,
    "num_tokens": _is_count,
    "num_padded_tokens": _is_count,
    "max_padded_tokens": _is_count,
    "num_fillers": _is_count,
    "num_repeats": _is_count,
    "rank_imbalance": _is_number,
    "dropped": _is_a(dict),
    "figures": _is_a(dict),
}
_EPOCH_OF_VERSION_2: dict[str, Fits] = {
    "num_pieces": _is_count,
    "num_cut": _is_count,
    "sources": _are_all(_is_a(dict)),
    "design_effect": _is_a(dict),
    "rank_imbalance_by_step": _is_number,
}
_DESIGN_EFFECT: dict[str, Fits] = {
    "seqlen": _maybe(lambda value: _is_number(value) and value >= 0),
    "source": _maybe(lambda value: _is_number(value) and value >= 0),
}
_FIGURES: dict[str, Fits] = {
    "lower_bound": _is_count,
    "num_packed": _is_count,
    "rank_imbalance_before": _is_number,
    "curriculum_raises": _is_a(list),
    "blocks": _is_a(dict),
    "key_max_count": _is_count,
}
_BLOCKS: dict[str, Fits] = {
    "num_blocks": _is_positive,
    "open_blocks": _is_count,
    "open_bytes": _is_count,
    "design_effect_of_steps": _maybe(lambda value: _is_number(value) and value >= 0),
    "design_effect_of_stretches": _maybe(lambda value: _is_number(value) and value >= 0),
}
_RAISE: dict[str, Fits] = {"step": _is_count, "as_of": _is_count, "beyond": _is_count}
_COUNTS: dict[str, Fits] = {"num_samples": _is_count, "num_tokens": _is_count}
_SHAPE: dict[str, Fits] = {
    "num_rows": _is_count,
    "padded_seqlen": _is_count,
    "count": _is_positive,
    "num_tokens": _is_count,
}
_FILE: dict[str, Fits] = {
    "size": _is_count,
    "sha256": _is_hash,
    "num_rows": _is_count,
    "rows_per_batch": lambda value: _is_positive(value) and value <= schema.MAX_ROWS_PER_BATCH,
    "batch_digests": _is_a(list),
}
