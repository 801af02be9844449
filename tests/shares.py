"""What the sources of a plan give any stretch of its steps, from the rows of the plan alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True)
class Held:
    """What every step holds of every source."""

    tokens: np.ndarray
    """(T, S)"""
    samples: np.ndarray
    """(T, S)"""
    longest: np.ndarray
    """(S,) tokens of the longest piece."""
    most_samples: int
    """Of a micro-batch."""


def held(plan, epoch=0):
    """Return what the steps hold, fillers left out."""
    config, sources = plan.header["config"], plan.header["sources"]
    size = config["dp_size"] * config["grad_accum"]
    stops = [source["first_id"] + source["num_samples"] for source in sources]
    num_steps = plan.epoch(epoch).num_steps
    tokens, samples = (
        np.zeros((num_steps, len(sources)), np.int64),
        np.zeros((num_steps, len(sources)), np.int64),
    )
    longest = np.zeros(len(sources), np.int64)
    most_samples = 0
    for table in plan.epoch(epoch).microbatches():
        steps = np.repeat((table.first_row + np.arange(len(table.step))) // size, np.diff(table.offsets))
        trained = np.repeat(~table.is_filler, np.diff(table.offsets))
        ids, lengths, steps = table.sample_ids[trained], table.seqlens[trained], steps[trained]
        of = np.searchsorted(stops, ids, side="right")
        np.add.at(tokens, (steps, of), lengths)
        np.add.at(samples, (steps, of), 1)
        np.maximum.at(longest, of, lengths)
        most_samples = max(most_samples, int(table.num_samples.max()))
    return Held(tokens=tokens, samples=samples, longest=longest, most_samples=most_samples)


def widest(values, shares, num_steps):
    """Return (S,) the most that any ``num_steps`` steps in a row are off their shares.

    Args:
        values: (T, S) of each step.
        shares: (S,) of a stretch that has one mix.
        num_steps: of a stretch.
    """
    sums = np.concatenate([np.zeros((1, values.shape[1]), np.int64), np.cumsum(values, axis=0)])
    stretches = sums[num_steps:] - sums[:-num_steps]
    assert len(stretches) > 0, "a plan shorter than the stretch"
    return np.abs(stretches - stretches.sum(axis=1, keepdims=True) * np.asarray(shares)).max(axis=0)


def check_shares(plan, shares, *, num_microbatches=800, of="tokens", slack=1.0, steps=slice(None)):
    """Assert that over any stretch no source is off its share by more than a percentage point.

    Nor by more than the larger of 1% of its share and its longest sample; padded, one micro-batch.
    """
    config, counts = plan.header["config"], plan.header["epochs"][0]
    num_steps = -(-num_microbatches // (config["dp_size"] * config["grad_accum"]))
    found = held(plan)
    values = (found.tokens if of == "tokens" else found.samples)[steps]
    off = widest(values, shares, num_steps)
    mean = values.sum() / len(values) * num_steps
    one = found.longest.copy() if of == "tokens" else np.ones_like(found.longest)
    if config["layout"] == "padded":
        per_row = values.sum() // (len(values) * config["dp_size"] * config["grad_accum"])
        one = np.maximum(one, per_row if of == "tokens" else found.most_samples)
    allowed = np.maximum(0.01 * np.asarray(shares) * mean, one) * slack
    assert (off <= 0.01 * mean).all(), (off / mean, "percentage points")
    assert (off <= allowed).all(), (off, allowed)
    assert counts["num_steps"] >= num_steps
    return off / allowed
