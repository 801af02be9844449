"""An independent check of a plan: reads its Arrow files with pyarrow and the metrics with NumPy, no more.

Written from the description of the format, in plain Python, one rule after the other; it shares no code with
packer. For small plans: it holds them as lists.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa

REASONS = {"filtered", "empty", "too_long", "truncated", "remainder", "min_samples", "trained", "unreached"}


def read(path):
    """Return a table of a plan as a list of rows, and its schema; check how it is cut into record batches."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        per_batch = int(reader.schema.metadata[b"rows_per_batch"])
        assert per_batch <= 65_536
        assert all(batch.num_rows == per_batch for batch in batches[:-1]), "record batches of unequal size"
        assert all(0 < batch.num_rows <= per_batch for batch in batches)
        return [row for batch in batches for row in batch.to_pylist()], reader.schema


def read_metric(path):
    """Return an MMIDIDX metric as an array, one value an item."""
    raw = Path(f"{path}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    code, count = raw[17], int.from_bytes(raw[18:26], "little")
    kind = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u8"}[code]
    return np.fromfile(f"{path}.bin", kind, count)


def check(folder, seqlens=None, loss_tokens=None):
    """Assert every invariant of the plan in ``folder``.

    ``seqlens`` and ``loss_tokens``: arrays, one entry a source sample; without them only what the plan itself
    tells is compared.
    """
    folder = Path(folder)
    header = json.loads((folder / "plan.json").read_text())
    assert header["format"] == "packer-plan"
    assert header["version"] == 2
    check_files(folder, header)
    config = header["config"]
    check_sources(header)
    dropped, _ = read(folder / "dropped.arrow")
    if seqlens is not None:
        assert len(seqlens) == header["num_samples"]
        assert int(np.sum(seqlens, dtype=np.int64)) == header["num_tokens"]
    shapes, steps_of_all = defaultdict(list), []
    samples_before = sum(account["num_samples"] for account in header["trained"])
    tokens_before = sum(account["num_tokens"] for account in header["trained"])
    for epoch in range(header["num_epochs"]):
        rows, _ = read(folder / f"epoch-{epoch:05d}" / "microbatches.arrow")
        steps, _ = read(folder / f"epoch-{epoch:05d}" / "steps.arrow")
        assert len(rows) == len(steps) * config["dp_size"] * config["grad_accum"], "E micro-batches a step"
        for at, row in enumerate(rows):
            check_row(at, row, config, max(source["num_passes"] for source in header["sources"]))
            height = 1 if config["layout"] == "packed" else row["num_samples"]
            real = 0 if row["is_filler"] else row["num_tokens"]
            shapes[height, row["padded_seqlen"]].append(real)
            if seqlens is not None:
                check_lengths(row, seqlens)
        by_step = defaultdict(list)
        for row in rows:
            by_step[row["step"]].append(row)
        for at, step in enumerate(steps):
            assert step["step"] == at
            check_step(step, by_step[at], config, header, loss_tokens)
            assert step["samples_before"] == samples_before
            assert step["tokens_before"] == tokens_before
            samples_before += step["num_samples"]
            tokens_before += step["num_tokens"]
            copies = any(row["is_filler"] or row["is_repeat"] for row in by_step[at])
            steps_of_all.append((step, not copies))
        mine = [row for row in dropped if row["epoch"] in (None, epoch)]
        check_coverage(rows, mine, header, seqlens)
        check_drops(mine, config)
        assert header["trained"] or not any(row["reason"] == "trained" for row in mine)
        check_kept(rows, mine, header)
        check_cuts(rows, mine, header, seqlens)
        check_counts(rows, mine, header["epochs"][epoch])
        check_mixture(steps, by_step, mine, header, header["epochs"][epoch])
        check_mix(steps, by_step, header, header["epochs"][epoch])
        check_imbalance(by_step, config, header["epochs"][epoch])
    if config.get("num_shapes") is not None:
        assert len({padded for _, padded in shapes}) <= config["num_shapes"]
    if header["shapes"] is None:
        assert len(shapes) > 256, "a table of shapes is missing"
    else:
        stated = {
            (s["num_rows"], s["padded_seqlen"]): (s["count"], s["num_tokens"]) for s in header["shapes"]
        }
        assert stated == {shape: (len(real), sum(real)) for shape, real in shapes.items()}
    check_learning_rates(steps_of_all, config, header)
    always = [row for row in dropped if row["epoch"] is None]
    assert header["dropped"] == drop_counts(always)
    if header["max_seqlen"] is not None and not isinstance(config["max_tokens"], dict):
        one = config | {"min_samples": None}
        assert surely_fits(header["max_seqlen"], one)
        assert (config.get("min_samples") or 1) > 1 or not surely_fits(header["max_seqlen"] + 1, one)
    return header


def check_files(folder, header):
    expected = {"dropped.arrow"} | {
        f"epoch-{epoch:05d}/{name}.arrow"
        for epoch in range(header["num_epochs"])
        for name in ("microbatches", "steps")
    }
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"plan.json"}
    assert found == expected == set(header["files"])
    for name, entry in header["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) == entry["size"]
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    text = (folder / "plan.json").read_text()
    assert str(folder.resolve().parent) not in text, "a path in plan.json"


def check_row(at, row, config, num_passes=1):
    ranks, accum = config["dp_size"], config["grad_accum"]
    assert at == (row["step"] * accum + row["accum"]) * ranks + row["dp_rank"]
    assert 0 <= row["accum"] < accum
    assert 0 <= row["dp_rank"] < ranks
    lengths = row["seqlens"]
    assert len(lengths) == len(row["sample_ids"]) == row["num_samples"] > 0
    assert len(row.get("starts", lengths)) == len(lengths)
    assert min(lengths) > 0, "an empty piece"
    assert sum(lengths) == row["num_tokens"]
    assert max(lengths) == row["max_seqlen"]
    if num_passes <= 1:
        assert len(set(row["sample_ids"])) == len(row["sample_ids"]), "a sample twice in one micro-batch"
    pieces = zip(row["sample_ids"], row.get("starts", row["sample_ids"]), strict=True)
    assert len(set(pieces)) == len(set(row["sample_ids"])), "two pieces of a sample in one micro-batch"
    flops = config.get("balance") == "flops"
    hidden = config.get("hidden_size")
    assert row["cost"] == sum(12 * hidden * n + n * n if flops else n for n in lengths)
    assert not (row["is_filler"] and row["is_repeat"])
    assert not row["is_filler"] or config["remainder"] == "keep"
    assert not row["is_repeat"] or config["remainder"] == "fill"
    padded = row["padded_seqlen"]
    assert padded % math.lcm(config.get("sp_size", 1), config.get("pad_multiple", 1)) == 0
    if config.get("fixed_seqlen") is not None:
        assert padded == config["fixed_seqlen"]
    if config["layout"] == "padded":
        area = len(lengths) * padded
        attention = len(lengths) * padded**2
        assert padded >= max(lengths)
    else:
        segment = config.get("pad_segments_to", 1)
        area = padded
        attention = sum(n * n for n in lengths)
        assert padded >= sum(-(-n // segment) * segment for n in lengths)
    budget = config["max_tokens"]
    if isinstance(budget, dict):
        for metric, most in budget.items():
            if config["count"] == "padded":
                assert len(lengths) * row[f"padded_seqlen_{metric}"] <= most
            elif metric == "seqlen":
                assert sum(lengths) <= most
    else:
        assert (area if config["count"] == "padded" else sum(lengths)) <= budget, "max_tokens"
    assert len(lengths) >= (config.get("min_samples") or 1)
    if config.get("max_samples") is not None:
        assert len(lengths) <= config["max_samples"]
    if config.get("max_attention") is not None:
        assert attention <= config["max_attention"]
    if config.get("max_seqlen") is not None:
        assert max(lengths) <= config["max_seqlen"]


def check_lengths(row, seqlens):
    starts = row.get("starts", [None] * row["num_samples"])
    for sample, length, start in zip(row["sample_ids"], row["seqlens"], starts, strict=True):
        assert 0 <= sample < len(seqlens)
        if start is None:
            assert length == seqlens[sample]
        else:
            assert 0 <= start < start + length <= seqlens[sample]


def check_step(step, rows, config, header, loss_tokens):
    counted = [row for row in rows if not row["is_filler"]]
    assert step["num_samples"] == sum(row["num_samples"] for row in counted)
    assert step["num_tokens"] == sum(row["num_tokens"] for row in counted)
    assert step["max_seqlen"] == max(row["max_seqlen"] for row in rows)
    cut = any("starts" in row for row in rows)
    if header["loss_tokens"] == "seqlen - 1":
        assert step["num_loss_tokens"] == sum(n - 1 for row in counted for n in row["seqlens"])
    elif header["loss_tokens"] == "labels" and not cut:
        assert step["num_loss_tokens"] == sum(row["num_loss_tokens"] for row in rows)
        assert all(row["num_loss_tokens"] == 0 for row in rows if row["is_filler"])
        if loss_tokens is not None:
            ids = [i for row in counted for i in row["sample_ids"]]
            assert step["num_loss_tokens"] == sum(int(loss_tokens[i]) for i in ids)
    else:
        assert step["num_loss_tokens"] is None
    if config.get("same_num_samples"):
        assert len({row["num_samples"] for row in rows}) == 1
    if config.get("same_seqlen"):
        assert len({row["padded_seqlen"] for row in rows}) == 1
    for row in rows:
        if row["is_filler"]:
            cheapest = min(other["cost"] for other in counted)
            assert row["cost"] == cheapest
            assert row["sample_ids"] in [other["sample_ids"] for other in counted]


def check_sources(header):
    """Sources have names of their own, and ids count through them."""
    sources, next_id = header["sources"], 0
    assert len({source["name"] for source in sources}) == len(sources)
    assert len(sources) == 1 or all(source["name"] for source in sources)
    for source in sources:
        assert source["first_id"] == next_id
        next_id += source["num_samples"]
        assert source["num_passes"] - 1 < source["passes"] <= source["num_passes"] or source["passes"] == 0
    assert next_id == header["num_samples"]
    assert sum(source["num_tokens"] for source in sources) == header["num_tokens"]
    fingerprints = [source["fingerprint"] for source in sources]
    joint = fingerprints[0]
    if len(sources) > 1:
        named = [[source["name"], source["fingerprint"]] for source in sources]
        text = json.dumps(named, separators=(",", ":")).encode()
        joint = None if None in fingerprints else hashlib.sha256(text).hexdigest()
    assert header["metrics_fingerprint"] == joint


def source_at(sample, header):
    """Return the place of a sample's source."""
    return max(at for at, source in enumerate(header["sources"]) if source["first_id"] <= sample)


def num_passes(sample, header):
    """Return how often a sample's source is passed through."""
    return header["sources"][source_at(sample, header)]["num_passes"]


def check_coverage(rows, dropped, header, seqlens):
    """Every sample planned once in every pass, or in pieces that tile what is not dropped, or dropped."""
    pieces, copied = defaultdict(list), []
    for row in rows:
        starts = row.get("starts", [0] * row["num_samples"])
        if row["is_filler"] or row["is_repeat"]:
            copied += row["sample_ids"]
            continue
        for sample, start, length in zip(row["sample_ids"], starts, row["seqlens"], strict=True):
            pieces[sample].append((start, start + length))
    assert set(copied) <= set(pieces), "a copy of what is planned nowhere"
    lost, unreached, lengths, reasons = Counter(), Counter(), {}, defaultdict(list)
    passes_of, starts_of_lost = {}, defaultdict(list)
    for source in header["sources"]:
        ids = range(source["first_id"], source["first_id"] + source["num_samples"])
        passes_of |= dict.fromkeys(ids, source["num_passes"])
    assert set(pieces) | {row["sample_id"] for row in dropped} <= set(passes_of)
    for row in dropped:
        times = passes_of[row["sample_id"]] if row["epoch"] is None else 1  # every epoch's is every pass's
        if "start" in row:
            stretch = (row["start"], row["start"] + row["num_tokens"])
            starts_of_lost[row["sample_id"]] += [stretch] * times
        lost[row["sample_id"]] += times * row["num_tokens"]
        assert lengths.setdefault(row["sample_id"], row["seqlen"]) == row["seqlen"]
        reasons[row["sample_id"]].append(row["reason"])
        unreached[row["sample_id"]] += row["num_tokens"] * (row["reason"] == "unreached")
    if seqlens is not None:
        assert all(length == seqlens[sample] for sample, length in lengths.items())
        lengths = dict(enumerate(map(int, seqlens)))
    total = 0
    for sample, passes in passes_of.items():
        mine = sorted(pieces[sample])
        assert mine or reasons[sample] or not passes, f"sample {sample} is neither planned nor dropped"
        if sample in lengths:
            # of wrapped rows, a piece that had to wait may be left of the pass before, too
            most = lengths[sample] * (2 if header["config"]["packing"] == "wrapped" else 1)
            assert unreached[sample] <= most, f"sample {sample} is unreached in two passes"
        for token in {start for start, _ in mine}:
            covered = sum(start <= token < end for start, end in mine)
            assert covered <= passes, f"sample {sample} overlaps"
        planned = sum(end - start for start, end in mine)
        if sample in lengths:
            assert planned + lost[sample] == passes * lengths[sample], f"tokens of sample {sample}"
            assert not mine or max(end for _, end in mine) <= lengths[sample]
        if starts_of_lost[sample]:
            covered = Counter(
                token for start, end in [*mine, *starts_of_lost[sample]] for token in range(start, end)
            )
            assert set(covered.values()) <= {passes}, f"gaps or overlaps in {sample}"
            assert len(covered) == max(covered, default=-1) + 1, f"gaps in {sample}"
        if mine and set(reasons[sample]) <= {"truncated"}:
            assert passes * max(end for _, end in mine) == planned, f"sample {sample} has a gap"
        if lengths.get(sample) == 0 and passes:
            assert reasons[sample] == ["empty"] or reasons[sample] == ["filtered"]
        total += planned + lost[sample]
    whole = sum(source["num_tokens"] * source["num_passes"] for source in header["sources"])
    assert total == whole, "tokens in = planned + dropped"


def check_mixture(steps, by_step, dropped, header, counts):
    """What is planned of each source; the total; shares; no sample twice in a step with room for others."""
    config, sources = header["config"], header["sources"]
    planned = [[0, 0] for _ in sources]
    lost, whole = Counter(), {}
    for row in dropped:
        passes = max(1, sources[source_at(row["sample_id"], header)]["num_passes"])
        if row["epoch"] is None or row["reason"] == "trained":  # of which there is a line for each pass
            lost[row["sample_id"]] += row["num_tokens"] * (1 if row["reason"] == "trained" else passes)
            whole[row["sample_id"]] = row["seqlen"] * passes
    gone = {sample for sample, tokens in lost.items() if tokens >= whole[sample]}
    for at in range(len(steps)):
        held = Counter()
        for row in by_step[at]:
            if row["is_filler"] or row["is_repeat"]:
                continue
            starts = row.get("starts", [0] * row["num_samples"])
            for sample, start, length in zip(row["sample_ids"], starts, row["seqlens"], strict=True):
                source = source_at(sample, header)
                planned[source][0] += start == 0
                planned[source][1] += length
                held[sample, start] += 1
        for number, source in enumerate(sources):
            ids = range(source["first_id"], source["first_id"] + source["num_samples"])
            if sum(held.values()) <= len(set(ids) - gone):  # a larger step may have to
                twice = [sample for (sample, _), times in held.items() if sample in ids and times > 1]
                assert not twice, f"a sample of source {number} twice in step {at}"
    for source in sources:
        ids = range(source["first_id"], source["first_id"] + source["num_samples"])
        rows = [row for row in dropped if row["reason"] == "unreached" and row["sample_id"] in ids]
        left = (source["num_passes"] - source["passes"]) * len(set(ids) - gone)
        if not any("starts" in row for at in by_step for row in by_step[at]):
            assert abs(left - len(rows)) <= 0.501, "passes"
        asked, most = (config.get("repeat") or {}).get(source["name"]), config.get("max_passes")
        one_piece = 1 / max(len(set(ids) - gone), 1)
        assert asked is None or abs(asked - source["passes"]) <= one_piece
        most = most.get(source["name"]) if isinstance(most, dict) else most
        assert most is None or source["passes"] <= most + one_piece
    assert counts["sources"] == [{"num_samples": n, "num_tokens": t} for n, t in planned]
    tokens = [step["num_tokens"] for step in steps]
    assert config.get("total_steps") in (None, len(steps))
    if config.get("total_tokens") is not None:
        assert sum(tokens[:-1]) < config["total_tokens"] <= sum(tokens)
    phases = header["phases"] or []
    ends = [phase["first_step"] for phase in [*phases[1:], {"first_step": len(steps)}][: len(phases)]]
    assert not phases or phases[0]["first_step"] == 0
    for phase, end in zip(phases, ends, strict=True):
        assert phase["first_step"] < end
        assert set(phase["shares"]) <= {source["name"] for source in sources}
        by_samples = config["mix_by"] == "samples"
        held, largest = Counter(), 0
        for at in range(phase["first_step"], end):
            before = sum(held.values())
            for row in by_step[at]:
                if not row["is_filler"] and not row["is_repeat"]:
                    for sample, length in zip(row["sample_ids"], row["seqlens"], strict=True):
                        held[source_at(sample, header)] += 1 if by_samples else length
            largest = max(largest, sum(held.values()) - before)
        whole = sum(held.values())
        for number, source in enumerate(sources):
            share = phase["shares"].get(source["name"], 0)
            assert abs(held[number] - share * whole) <= max(0.01 * whole, 2 * largest), "a source's share"


def check_drops(dropped, config):
    """Each reason only where its option is given, for samples that it applies to, and no more than it can."""
    least, most = config.get("filter_min"), config.get("filter_max")
    company = config.get("min_samples") or 1
    remainder = [row for row in dropped if row["reason"] == "remainder"]
    for row in dropped:
        reason, length, lost = row["reason"], row["seqlen"], row["num_tokens"]
        assert reason in REASONS
        assert 0 <= lost <= length
        assert lost > 0 or length == 0
        if reason == "empty":
            assert length == 0
        if reason == "truncated":
            assert 0 < lost < length
            assert config["too_long"] == "truncate"
            assert company > 1 or not surely_fits(length - lost + 1, config), "truncated below the limit"
        if reason == "too_long":
            assert config["too_long"] == "drop"
            assert not surely_fits(length, config)
        if reason == "filtered":
            outside = (least is not None and length < least) or (most is not None and length > most)
            assert outside or config.get("sample_ids") is not None or config.get("drop_untrainable")
        if reason == "min_samples":
            assert company > 1
            if row["epoch"] is None and config["layout"] == "padded" and config["count"] == "padded":
                assert isinstance(config["max_tokens"], dict) or not surely_fits(lost, config, company)
        if reason == "remainder":
            assert config["remainder"] == "drop"
        if reason == "unreached":
            assert any(config.get(name) for name in ("mix", "repeat", "total_tokens", "total_steps"))
        assert row["epoch"] is None or reason in ("remainder", "min_samples", "trained", "unreached")
        assert row["epoch"] is not None or reason not in ("remainder", "trained", "unreached")
        assert reason != "trained" or row["epoch"] == 0
    others = config["dp_size"] * config["grad_accum"] - 1
    budget = config["max_tokens"]
    if not isinstance(budget, dict):
        assert sum(row["num_tokens"] for row in remainder) <= others * budget
    largest = min(budget.values()) if isinstance(budget, dict) else budget
    assert len(remainder) <= others * min(largest, config.get("max_samples") or largest)


def check_kept(rows, dropped, header):
    """What is not filtered out is within the filters, and is what ``sample_ids`` names."""
    config = header["config"]
    least, most, ids = (config.get(name) for name in ("filter_min", "filter_max", "sample_ids"))
    for length in (n for row in rows if "starts" not in row for n in row["seqlens"]):
        assert least is None or length >= least
        assert most is None or length <= most
    if ids is not None:
        gone = {row["sample_id"] for row in dropped if row["reason"] == "filtered"}
        kept = [sample for sample in range(header["num_samples"]) if sample not in gone]
        assert len(kept) <= ids["count"]
        if (
            least is None
            and most is None
            and not config.get("drop_untrainable")
            and config["order"] != "sequential"
        ):
            assert hashlib.sha256(np.array(kept, "<i8").tobytes()).hexdigest() == ids["sha256"]


def check_cuts(rows, dropped, header, seqlens):
    """No piece of a cut sample trains nothing; wrapped rows are full, and cut samples at their ends only."""
    config = header["config"]
    for row in rows:
        for start, length in zip(row.get("starts", ()), row["seqlens"], strict=False):
            assert start == 0 or length > 1, "a later piece of one token"
    if config.get("packing") != "wrapped":
        return
    limit = config.get("max_seqlen")
    trained = {
        (row["sample_id"], row.get("start", 0) + edge)
        for row in dropped
        if row["reason"] == "trained"
        for edge in (0, row["num_tokens"])
    }

    def is_border(sample, token):
        """Whether a document begins or ends there: a sample, what is split from one, or what was trained."""
        is_split = config["too_long"] == "split" and limit and token % limit in (0, limit - 1)
        return token == 0 or is_split or (sample, token) in trained

    documents, short = [row["num_tokens"] for row in dropped if row["epoch"] is not None], []
    later = len(documents) if config["too_long"] == "split" or trained else 0
    for row in rows:
        pieces = list(zip(row["sample_ids"], row["starts"], row["seqlens"], strict=True))
        for sample, start, _ in pieces[1:]:
            assert is_border(sample, start), "a later piece that is not the first of its row"
        for sample, start, length in pieces[:-1]:
            end = start + length
            if seqlens is not None:
                assert end in (seqlens[sample], limit) or is_border(sample, end), (
                    "cut before the end of its row"
                )
        segment, room = row_room(config)
        missing = room - sum(-(-length // segment) * segment for length in row["seqlens"])
        assert missing >= 0
        if not row["is_filler"] and not row["is_repeat"]:
            short += [missing] * (missing > 1)
        documents += row["seqlens"]
        later += sum(
            bool(is_border(sample, start)) and (start > 0 or num_passes(sample, header) > 1)
            for sample, start, _ in pieces
        )
    # the last row; those for which nothing was left but pieces of samples in them, or documents of 3 tokens
    assert sum(missing > 2 for missing in short) <= 1 + later
    assert len(short) <= 1 + later + documents.count(3)


def row_room(config):
    """Return what a document is padded to a multiple of where it counts, and the room of a packed row."""
    budget, fixed = config["max_tokens"], config.get("fixed_seqlen")
    if config["count"] == "real" and fixed is None:
        return 1, budget
    multiple = math.lcm(config.get("sp_size", 1), config.get("pad_multiple", 1))
    if config["count"] == "padded":
        budget -= budget % multiple
    segment = config.get("pad_segments_to", 1)
    room = min(budget, fixed or budget)
    return segment, room - room % segment


def surely_fits(length, config, company=1):
    """Whether a sample fits, with ``company`` samples padded to it; False where nothing is known for sure."""
    if config.get("max_seqlen") is not None and length > config["max_seqlen"]:
        return False
    budget = config["max_tokens"]
    if isinstance(budget, dict) or ((config.get("min_samples") or 1) > 1 and company == 1):
        return False
    if config.get("packing") == "wrapped":
        return length <= 2**31 - 1
    packed, real, fixed = config["layout"] == "packed", config["count"] == "real", config.get("fixed_seqlen")
    segment = config.get("pad_segments_to", 1) if packed and (fixed is not None or not real) else 1
    room = -(-length // segment) * segment
    multiple = math.lcm(config.get("sp_size", 1), config.get("pad_multiple", 1))
    padded = -(-room // multiple) * multiple if fixed is None else fixed
    if room > padded:
        return False
    attention = length**2 if packed else company * padded**2
    if config.get("max_attention") is not None and attention > config["max_attention"]:
        return False
    return (length if real else company * padded) <= budget


def check_counts(rows, all_dropped, counts):
    dropped = [row for row in all_dropped if row["epoch"] is not None]
    planned = [row for row in rows if not row["is_filler"] and not row["is_repeat"]]
    assert counts["num_microbatches"] == len(rows)
    assert counts["num_fillers"] == sum(row["is_filler"] for row in rows)
    assert counts["num_repeats"] == sum(row["is_repeat"] for row in rows)
    assert counts["num_tokens"] == sum(row["num_tokens"] for row in planned)
    starts = [start for row in planned for start in row.get("starts", [0] * row["num_samples"])]
    assert counts["num_samples"] == starts.count(0)
    assert counts["num_pieces"] == len(starts)
    cut = any("starts" in row for row in rows)
    begun = {
        sample
        for row in planned
        for sample, start in zip(row["sample_ids"], row.get("starts", [0] * row["num_samples"]), strict=True)
        if start == 0
    }
    assert counts["dropped"] == drop_counts(dropped, begun if cut else ())
    in_pieces = {
        sample
        for row in rows
        for sample, start in zip(row["sample_ids"], row.get("starts", [0] * row["num_samples"]), strict=True)
        if start > 0
    }
    in_pieces |= {row["sample_id"] for row in all_dropped if row["num_tokens"] < row["seqlen"]}
    assert counts["num_cut"] == len(in_pieces)


def drop_counts(dropped, begun=()):
    """Samples and tokens by reason; a sample in pieces counts where its first one is."""
    first = {}
    for at, row in enumerate(dropped):
        first.setdefault(row["sample_id"], at)
    counted = [
        at
        for at, row in enumerate(dropped)
        if (first[row["sample_id"]] == at and row["sample_id"] not in begun)
        or row["num_tokens"] == row["seqlen"]
    ]
    return {
        reason: {
            "num_samples": sum(dropped[at]["reason"] == reason for at in counted),
            "num_tokens": sum(row["num_tokens"] for row in dropped if row["reason"] == reason),
        }
        for reason in {row["reason"] for row in dropped}
    }


def check_mix(steps, by_step, header, counts):
    of_source = [
        [
            (length, source_at(sample, header))
            for row in by_step[at]
            if not row["is_filler"]
            for sample, length in zip(row["sample_ids"], row["seqlens"], strict=True)
        ]
        for at in range(len(steps))
    ]
    lengths = [[length for length, _ in step] for step in of_source]
    first_steps = [phase["first_step"] for phase in header["phases"] or [{"first_step": 0}]]
    stated = counts["design_effect"]
    assert set(stated) == {"seqlen", "source"}
    for name, expected in (
        ("seqlen", design_effect(lengths, first_steps)),
        ("source", design_effect_of(of_source, first_steps)),
    ):
        assert (stated[name] is None) == (expected is None), f"design effect of {name}"
        assert expected is None or math.isclose(stated[name], expected, rel_tol=1e-6, abs_tol=1e-6), name


def design_effect(steps, first_steps=(0,)):
    """Return the design effect of steps, lists of lengths; as it is defined, in fractions."""
    everyone = sorted(length for step in steps for length in step)
    whole, class_of, below = sum(everyone), {}, 0
    for length, count in sorted(Counter(everyone).items()):
        class_of[length] = 16 * (2 * below + length * count) // (2 * whole)
        below += length * count
    return design_effect_of([[(length, class_of[length]) for length in step] for step in steps], first_steps)


def design_effect_of(steps, first_steps=(0,)):
    """Return the design effect of steps, lists of lengths and classes; each phase has a mix of its own."""
    found, expected, spare, num_classes = Fraction(0), Fraction(0), 0, 0
    for first, end in zip(first_steps, [*first_steps[1:], len(steps)], strict=True):
        mine = steps[first:end]
        pieces = [piece for step in mine for piece in step]
        whole, classes = sum(length for length, _ in pieces), {k for _, k in pieces}
        spare += max(len(mine) - 1, 0)
        num_classes = max(num_classes, len(classes))
        spread = Fraction(0)
        for k in classes:
            share = Fraction(sum(n for n, of in pieces if of == k), whole)
            for step in mine:
                own = sum(n for n, _ in step)
                if own:
                    inside = sum(n for n, of in step if of == k)
                    found += own * (Fraction(inside, own) - share) ** 2
            spread += sum(n * n * ((of == k) - share) ** 2 for n, of in pieces)
        if whole:
            expected += spread * len(mine) / whole  # W · mean(w² …) / (n · mean(w)²), n = N / T
    if num_classes < 2 or spare < 1:
        return None
    return float(found / expected * Fraction(len(steps), spare))


def check_imbalance(by_step, config, counts):
    ranks = range(config["dp_size"])
    slots, of_ranks = defaultdict(list), defaultdict(int)
    for step, rows in by_step.items():
        for row in rows:
            slots[step, row["accum"]].append(row["cost"])
            of_ranks[step, row["dp_rank"]] += row["cost"]
    mean = sum(map(sum, slots.values())) / len(ranks) or 1.0
    by_slots = sum(map(max, slots.values()))
    by_steps = sum(max(of_ranks[step, rank] for rank in ranks) for step in by_step)
    assert math.isclose(counts["rank_imbalance"], max(by_slots / mean - 1, 0), abs_tol=1e-9)
    assert math.isclose(counts["rank_imbalance_by_step"], max(by_steps / mean - 1, 0), abs_tol=1e-9)


def check_learning_rates(steps, config, header):
    column = {"samples": "num_samples", "tokens": "num_tokens", "loss-tokens": "num_loss_tokens"}[
        config["lr_by"]
    ]
    if config["lr_scaling"] == "none":
        assert all(step["lr_scale"] == 1.0 for step, _ in steps)
        return
    full = [step[column] for step, is_full in steps if is_full] or [step[column] for step, _ in steps]
    base = config.get("lr_base") or (sum(full) / len(full) if full else None)
    assert base is None or math.isclose(header["lr_base"], base, rel_tol=1e-12)
    for step, _ in steps:
        factor = step[column] / base
        if config["lr_scaling"] == "sqrt":
            factor = math.sqrt(factor)
        if config.get("lr_max_scale") is not None:
            factor = min(factor, config["lr_max_scale"])
        assert math.isclose(step["lr_scale"], factor, rel_tol=1e-12, abs_tol=0.0)
