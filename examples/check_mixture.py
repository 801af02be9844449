"""Check the shares, the total and the passes of a plan of several sources, with pyarrow alone.

    python examples/check_mixture.py PLAN [STEPS]       STEPS: of each stretch whose shares are checked, 100

It shares no code with packer: it reads ``plan.json`` and the Arrow files beside it, as docs/formats.md
describes them, so that a plan can be held against what was asked for where packer is not installed.
"""

import json
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

TOLERANCE = 0.01
"""Of a stretch's tokens, and of a source's own; or its longest sample."""

Step = Counter[tuple[str, int, int, int]]
"""Pieces, as source, sample, start and length, and how often each is in a step."""


def main(folder: Path, stretch: int = 100) -> None:
    """Print what was checked; raise an AssertionError that says what does not hold."""
    header = json.loads((folder / "plan.json").read_text())
    config, sources = header["config"], header["sources"]
    steps = read_steps(folder, sources)
    tokens = [sum(length * times for (*_, length), times in step.items()) for step in steps]

    asked = config.get("total_tokens")
    assert asked is None or sum(tokens[:-1]) < asked <= sum(tokens), f"{sum(tokens)} tokens, asked {asked}"
    assert config.get("total_steps") in (None, len(steps)), f"{len(steps)} steps"
    print(f"{len(steps)} steps of {sum(tokens):,} tokens; the last one reaches the total")

    for source in sources:
        check_passes(source, steps)
    check_repeats(sources, steps)
    for phase, following in zip(header["phases"], [*header["phases"][1:], None], strict=True):
        end = following["first_step"] if following else len(steps)
        span = range(phase["first_step"], end)
        for name, share in phase["shares"].items():
            check_share(name, share, [steps[at] for at in span], [tokens[at] for at in span], stretch)


def read_steps(folder: Path, sources: list[dict[str, Any]]) -> list[Step]:
    """Return what each step trains."""
    with pa.memory_map(str(folder / "epoch-00000" / "microbatches.arrow")) as file:
        rows = pa.ipc.open_file(file).read_all().to_pylist()
    steps: list[Step] = [Counter() for _ in range(1 + max(row["step"] for row in rows))]
    for row in rows:
        if row["is_filler"]:  # masked
            continue
        starts = row.get("starts") or [0] * row["num_samples"]
        for sample, start, length in zip(row["sample_ids"], starts, row["seqlens"], strict=True):
            (name,) = [
                source["name"]
                for source in sources
                if source["first_id"] <= sample < source["first_id"] + source["num_samples"]
            ]
            steps[row["step"]][name, sample, start, length] += 1
    return steps


def check_passes(source: dict[str, Any], steps: list[Step]) -> None:
    """Nothing is used once more before all else of its source was used as often."""
    used: Step = Counter()
    for step in steps:
        used.update({piece: times for piece, times in step.items() if piece[0] == source["name"]})
    least, most = min(used.values()), max(used.values())
    begun = source["num_passes"]
    assert most <= begun, f"{source['name']}: used {most} times in {begun} passes"
    assert least >= most - 1, f"{source['name']}: some is used {most} times, some {least} times"
    missing = source["num_samples"] - len({sample for _, sample, _, _ in used})
    planned = sum(length * times for (*_, length), times in used.items())
    assert planned <= begun * source["num_tokens"], f"{source['name']}: {planned} tokens in {begun} passes"
    print(
        f"{source['name']}: {planned:,} tokens, {source['passes']:.3g} passes; {len(used):,} pieces, each "
        f"{least} or {most} times, {missing} samples never"
    )


def check_repeats(sources: list[dict[str, Any]], steps: list[Step]) -> None:
    """No step holds anything twice, unless it holds more samples than the source has."""
    sizes = {source["name"]: source["num_samples"] for source in sources}
    for number, step in enumerate(steps):
        twice = [piece for piece, times in step.items() if times > 1 and sizes[piece[0]] >= step.total()]
        assert not twice, f"step {number} holds {twice[0]} twice"
    print("nothing is twice in a step that is no larger than its source")


def check_share(name: str, share: float, steps: list[Step], tokens: list[int], stretch: int) -> None:
    """In every stretch of steps a source has its share of the tokens."""
    own = [sum(n * times for (of, _, _, n), times in step.items() if of == name) for step in steps]
    longest = max((n for step in steps for (of, _, _, n) in step if of == name), default=0)
    before, own_before = [0, *accumulate(tokens)], [0, *accumulate(own)]
    stretch, worst = min(stretch, len(steps)), 0.0
    for first in range(len(steps) - stretch + 1):
        whole = before[first + stretch] - before[first]
        found = own_before[first + stretch] - own_before[first]
        off = abs(found - share * whole)
        where = f"{name}: {found:,} of {whole:,} tokens from step {first} on, its share is {share:g}"
        assert off <= TOLERANCE * whole, where
        assert off <= max(TOLERANCE * share * whole, longest), where
        worst = max(worst, off / whole)
    print(f"{name}: {share:.0%} in every {stretch} steps, off by {100 * worst:.3f} points at most")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
