"""How samples come to stand in one optimizer step: the variants of ``fidelity_gpu.py``, and how far a step's
mix is from the data's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import packer

Steps = list[list[np.ndarray]]
"""For each step its micro-batches, each the int64 sample ids that it holds."""
NUM_CLASSES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What every variant is given."""

    seqlens: np.ndarray
    """(N,) int32 tokens of every sample."""
    train_ids: np.ndarray
    """(n,) sorted int64 ids of the samples to train on."""
    epochs: int
    step_tokens: int
    """Real tokens that a step is to hold, as near as whole micro-batches come."""
    microbatches_per_step: int
    """Micro-batches into which the memory for ``step_tokens`` is cut."""
    fixed_samples: int
    """Samples of a micro-batch where their number is fixed: as many of the longest as fit ``step_tokens``."""

    @property
    def max_tokens(self) -> int:
        return self.step_tokens // self.microbatches_per_step


class Composition(NamedTuple):
    """What a variant trains on."""

    layout: str
    epochs: list[Steps]
    planned_design_effects: list[float | None]
    """What the plan itself says, one an epoch; None where it says nothing."""


def planned(**options: Any) -> Callable[[Problem, int], Composition]:
    """Return a composition by a plan of ours."""

    def compose(problem: Problem, seed: int) -> Composition:
        def plan_of(grad_accum: int) -> packer.Plan:
            config = packer.PlanConfig(
                max_tokens=problem.max_tokens,
                sample_ids=problem.train_ids,
                pad_multiple=8,
                seed=seed,
                epochs=problem.epochs,
                grad_accum=grad_accum,
                **options,
            )
            return packer.make_plan(problem.seqlens, config)

        counts = plan_of(1).header["epochs"][0]
        mean_tokens = counts["num_tokens"] / counts["num_microbatches"]
        plan = plan_of(max(1, round(problem.step_tokens / mean_tokens)))
        return Composition(
            plan.layout,
            [_steps_of(plan, epoch) for epoch in range(plan.num_epochs)],
            [(entry.get("design_effect") or {}).get("seqlen") for entry in plan.header["epochs"]],
        )

    return compose


def not_dealt(**options: Any) -> Callable[[Problem, int], Composition]:
    """Return the same micro-batches, put into steps at random."""

    def compose(problem: Problem, seed: int) -> Composition:
        dealt = planned(**options)(problem, seed)
        epochs = []
        for epoch, steps in enumerate(dealt.epochs):
            rows = [row for step in steps for row in step]
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
            epochs.append(_in_steps([rows[i] for i in order], len(steps[0])))
        return Composition(dealt.layout, epochs, [None] * len(epochs))

    return compose


def fixed_size(problem: Problem, seed: int) -> Composition:
    """Shuffle; so many samples a micro-batch."""
    return _of_fixed_size(problem, seed, lambda ids, _size: ids)


def grouped_by_length(problem: Problem, seed: int) -> Composition:
    """Sort within shuffled megabatches of 50 steps, the longest first, as Hugging Face's Trainer does.

    ``transformers.trainer_pt_utils.get_length_grouped_indices``, whose batch is all that the steps of
    accumulation take together.
    """

    def group(ids: np.ndarray, size: int) -> np.ndarray:
        span = max(1, min(len(ids) // (size * 4), 50)) * size
        parts = [ids[start : start + span] for start in range(0, len(ids), span)]
        ordered = [part[np.argsort(-problem.seqlens[part], kind="stable")] for part in parts]
        longest = int(np.argmax([problem.seqlens[part[0]] for part in ordered]))
        ordered[0][0], ordered[longest][0] = ordered[longest][0], ordered[0][0]
        return np.concatenate(ordered)

    return _of_fixed_size(problem, seed, group)


def _of_fixed_size(
    problem: Problem, seed: int, arrange: Callable[[np.ndarray, int], np.ndarray]
) -> Composition:
    size = problem.fixed_samples
    mean_tokens = size * float(problem.seqlens[problem.train_ids].mean())
    accum = max(1, round(problem.step_tokens / mean_tokens))
    epochs = []
    for epoch in range(problem.epochs):
        shuffled = np.random.default_rng([seed, epoch]).permutation(problem.train_ids)
        ids = arrange(shuffled, size * accum)
        rows = [ids[start : start + size] for start in range(0, len(ids) // size * size, size)]
        epochs.append(_in_steps(rows, accum))
    return Composition("padded", epochs, [None] * problem.epochs)


def _steps_of(plan: packer.Plan, epoch: int) -> Steps:
    rows = plan.epoch(epoch)
    ids = [np.asarray(rows.microbatch(row).sample_ids, np.int64) for row in range(rows.num_microbatches)]
    return _in_steps(ids, plan.grad_accum)


def _in_steps(rows: list[np.ndarray], size: int) -> Steps:
    """Leave out what does not fill a step."""
    return [rows[first : first + size] for first in range(0, len(rows) // size * size, size)]


VARIANTS: dict[str, Callable[[Problem, int], Composition]] = {
    # A random order, a row closed when the next sample does not fit: what the others are held against.
    "packed, uniform": not_dealt(layout="packed", packing="next-fit"),
    "packed, mixed": planned(layout="packed", packing="mixed"),
    "packed, best-fit": planned(layout="packed", packing="best-fit"),
    "padded, windowed": planned(layout="padded", packing="windowed"),
    "padded, windowed, not dealt": not_dealt(layout="padded", packing="windowed"),
    "padded, grouped by length": grouped_by_length,
    "padded, fixed size": fixed_size,
}


def design_effect(seqlens: np.ndarray, steps: Steps) -> float | None:
    """How much more the steps of an epoch differ in their lengths than random samples would make them.

    The ratio of two variances of the share of a step's tokens in each of 16 classes of length: that over the
    steps, and that of as many samples drawn at random. Written from the definition, with no code of the
    planner.
    """
    of_step = [np.concatenate(step) for step in steps]
    step = np.repeat(np.arange(len(of_step)), [len(ids) for ids in of_step])
    tokens = seqlens[np.concatenate(of_step)].astype(np.int64)
    _, length = np.unique(tokens, return_inverse=True)
    of_length = np.bincount(length, weights=tokens).astype(np.int64)
    # ⌊16 · (tokens of shorter samples + half of those as long) / all⌋
    middle = 2 * (np.cumsum(of_length) - of_length) + of_length
    classes = (NUM_CLASSES * middle // (2 * of_length.sum()))[length]
    if len(of_step) < 2 or len(np.unique(classes)) < 2:
        return None
    # (steps, classes) tokens
    table = np.zeros((len(of_step), NUM_CLASSES))
    np.add.at(table, (step, classes), tokens)
    sizes, share = table.sum(axis=1), table.sum(axis=0) / tokens.sum()
    seen = (sizes[:, None] * (table / sizes[:, None] - share) ** 2).sum() / tokens.sum()
    squares = tokens.astype(float) ** 2
    is_class = classes[:, None] == np.arange(NUM_CLASSES)
    drawn = (squares[:, None] * (is_class - share) ** 2).mean(axis=0).sum()
    mean_samples = len(tokens) / len(of_step)
    expected = drawn / (mean_samples * tokens.mean() ** 2)
    return float(seen / expected * len(of_step) / (len(of_step) - 1))


def padded_tokens(seqlens: np.ndarray, layout: str, microbatch: np.ndarray) -> int:
    """Tokens of the micro-batch's tensor, rounded to multiples of 8: B · S, or T."""
    lengths = seqlens[microbatch].astype(np.int64)
    if layout == "packed":
        return math.ceil(int(lengths.sum()) / 8) * 8
    return len(lengths) * math.ceil(int(lengths.max()) / 8) * 8
