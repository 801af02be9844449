"""Play random plans and hold every tensor against a plain reimplementation, written value by value.

    python -m tests.soak.random_plans --plans 500

A plan has either layout, any rounding, cut samples, fillers, several ranks and micro-batches; the data set
has labels or none, further fields of any type; ranks hold whole rows, or slices of them, of every kind. The
plain side knows lists of Python numbers and nothing of the runtime.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import torch

from packer.plan import Plan, plan_in_memory
from packer.runtime import PlanLoader
from tests import plans

SHARDS = ["contiguous", "zigzag", "zigzag-samples"]
DTYPES = [np.uint8, np.int16, np.int64, np.float16, np.float32, np.bool_, torch.bfloat16, torch.int32]
NOTHING = -100


@dataclass(frozen=True)
class World:
    """A plan, the data set that it is of, and how it is played."""

    plan: Plan
    samples: list[dict[str, Any]]
    rows: list[plans.Row]
    layout: str
    segment: int
    """Packed: what each sample's room is a multiple of."""
    pads: dict[str, float]
    aligned: list[str]
    listed: list[str]
    dp_size: int
    sp_size: int
    shard: str


class Samples:
    """The data set; some read slices, some read many at once."""

    def __init__(self, samples: list[dict[str, Any]], aligned: list[str], kind: str) -> None:
        self._samples = samples
        self._cut = {"input_ids", "labels", *aligned}
        if kind == "slices":
            self.read_slice = self._read_slice
        elif kind == "many":
            self.__class__ = ManySamples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return dict(self._samples[sample_id])

    def _read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        return {
            name: value[start:stop] if name in self._cut else value
            for name, value in self._samples[sample_id].items()
        }


class ManySamples(Samples):
    """The same, read many at a time."""

    def __getitems__(self, sample_ids: list[int]) -> list[dict[str, Any]]:
        return [self[sample_id] for sample_id in sample_ids]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    played = sum(play(arguments.seed + number) for number in range(arguments.plans))
    print(f"{arguments.plans} plans, {played} batches, all as expected")  # noqa: T201


def play(seed: int) -> int:
    """Play one random plan on all its ranks; return how many batches were held against the plain ones.

    Raises:
        AssertionError: one is not what it should be.
    """
    random = Random(seed)
    world = random_world(random)
    kind = random.choice(["whole", "slices", "many"])
    per_step = world.plan.dp_size * world.plan.grad_accum
    played = 0
    counted = [0] * (len(world.rows) // per_step)
    for dp_rank in range(world.dp_size):
        for sp_rank in range(world.sp_size):
            loader = PlanLoader(
                world.plan,
                Samples(world.samples, world.aligned, kind),
                dp_rank=dp_rank,
                dp_size=world.dp_size,
                sp_rank=sp_rank,
                sp_size=world.sp_size,
                shard=world.shard,
                pad_values=world.pads,
                token_fields=world.aligned if random.random() < 0.5 else None,
                num_workers=2 if random.random() < 0.02 else 0,
            )
            for step in loader:
                for accum, batch in enumerate(step):
                    index = step.index * per_step + accum * world.dp_size + dp_rank
                    expected = plain_batch(world, world.rows[index], sp_rank)
                    place = f"seed {seed}, row {index}, sp_rank {sp_rank}"
                    assert batch.sample_ids.tolist() == [p[0] for p in world.rows[index].pieces], place
                    require_equal(batch, expected, place)
                    labels = expected.get("shift_labels", expected.get("labels"))
                    assert batch.num_loss_tokens == count(labels), place
                    counted[step.index] += batch.num_loss_tokens
                    played += 1
    assert counted == [world.plan.epoch(0).step(step).num_loss_tokens for step in range(len(counted))], seed
    assert played == len(world.rows) * world.sp_size
    return played


def require_equal(batch: Mapping[str, Any], expected: dict[str, Any], place: str) -> None:
    assert set(batch) == set(expected), place
    for name, value in expected.items():
        found = batch[name]
        if isinstance(found, torch.Tensor):
            assert found.double().tolist() == value, (place, name, found, value)
        else:
            assert found == value, (place, name, found, value)


def count(labels: Any) -> int:
    return sum(label != NOTHING for row in labels for label in row)


def random_world(random: Random) -> World:
    layout = random.choice(["padded", "packed"])
    sp_size = random.choice([1, 1, 1, 2, 3])
    shard = random.choice(SHARDS if layout == "packed" else SHARDS[:2]) if sp_size > 1 else "contiguous"
    segment = 1
    if layout == "packed":
        segment = 2 * sp_size if shard == "zigzag-samples" else random.choice([1, 1, 3, 4])
    multiple = math.lcm(
        segment if layout == "packed" else 1, sp_size if shard == "contiguous" else 2 * sp_size
    )
    dp_size, grad_accum, steps = random.randint(1, 3), random.randint(1, 3), random.randint(1, 2)
    is_cut = random.random() < 0.3
    has_labels = random.random() < 0.5
    aligned = [f"field_{number}" for number in range(random.choice([0, 0, 1, 2]))]
    listed = ["names"] if random.random() < 0.3 else []
    fields = {name: (random.choice(DTYPES), random.choice([(), (2,), (2, 1)])) for name in aligned}
    pads = {"input_ids": 7} if random.random() < 0.5 else {}
    pads |= {name: 1 for name in aligned if random.random() < 0.3}
    samples, rows = [], []
    for _ in range(steps * dp_size * grad_accum):
        pieces = []
        for _ in range(random.randint(1, 4)):
            begin, after = (random.randint(0, 3), random.randint(0, 3)) if is_cut else (0, 0)
            seqlen = random.randint(1, 12)
            pieces.append((len(samples), seqlen, begin) if is_cut else (len(samples), seqlen))
            samples.append(
                random_sample(random, len(samples), begin + seqlen + after, has_labels, fields, listed)
            )
        room = [-(-piece[1] // segment) * segment for piece in pieces]
        used = sum(room) if layout == "packed" else max(piece[1] for piece in pieces)
        length = -(-used // multiple) * multiple + multiple * random.choice([0, 0, 1, 4])
        rows.append(
            plans.Row(pieces=pieces, padded_seqlen=length, is_filler=random.random() < 0.1 and len(rows) > 0)
        )
    facts = plans.facts(
        [len(sample["input_ids"]) for sample in samples],
        layout=layout,
        dp_size=dp_size,
        grad_accum=grad_accum,
        pad_segments_to=segment if layout == "packed" else None,
        pad_multiple=multiple,
    )
    epoch = plans.epoch(rows, dp_size=dp_size, grad_accum=grad_accum, layout=layout, cut=is_cut)
    topologies = [d for d in range(1, dp_size * grad_accum + 1) if dp_size * grad_accum % d == 0]
    world = World(
        plan=plan_in_memory(facts, [epoch], dropped=plans.drops()),
        samples=samples,
        rows=rows,
        layout=layout,
        segment=segment,
        pads=pads,
        aligned=aligned,
        listed=listed,
        dp_size=random.choice(topologies),
        sp_size=sp_size,
        shard=shard,
    )
    if not has_labels:
        return world
    # The plan of data that was analyzed with labels: its steps hold what the plain rows count.
    per_step = dp_size * grad_accum
    counted = [
        sum(count(whole_rows(world, row)["labels"]) for row in rows[first : first + per_step])
        for first in range(0, len(rows), per_step)
    ]
    facts = replace(facts, loss_tokens="labels")
    epoch = replace(epoch, step_num_loss_tokens=np.array(counted, np.int64))
    return replace(world, plan=plan_in_memory(facts, [epoch], dropped=plans.drops()))


def random_sample(
    random: Random,
    number: int,
    length: int,
    has_labels: bool,
    fields: dict[str, tuple[Any, tuple[int, ...]]],
    listed: list[str],
) -> dict[str, Any]:
    ids = [random.randrange(1, 1000) for _ in range(length)]
    sample: dict[str, Any] = {
        "input_ids": random.choice(
            [ids, np.array(ids, np.int32), np.array(ids, np.uint16), torch.tensor(ids)]
        )
    }
    if has_labels:
        labels = [NOTHING if random.random() < 0.4 else random.randrange(1000) for _ in ids]
        sample["labels"] = random.choice([labels, np.array(labels, np.int16), torch.tensor(labels)])
    for name, (dtype, trailing) in fields.items():
        # Small whole numbers, which every type holds.
        values = np.array([random.randrange(2) for _ in range(length * math.prod(trailing))])
        values = values.reshape(length, *trailing)
        is_torch = isinstance(dtype, torch.dtype)
        sample[name] = torch.from_numpy(values).to(dtype) if is_torch else values.astype(dtype)
    return sample | dict.fromkeys(listed, f"sample {number}")


def plain_batch(world: World, row: plans.Row, sp_rank: int) -> dict[str, Any]:
    """What one rank is to get, as lists."""
    whole = whole_rows(world, row)
    if world.sp_size == 1:
        del whole["segments"]
        return whole
    held = plain_positions(world, whole, sp_rank)
    labels = [[*line[1:], NOTHING] for line in whole["labels"]]
    sliced = {"shift_labels": [[line[position] for position in held] for line in labels]}
    for name in ("input_ids", "position_ids", *world.aligned):
        sliced[name] = [[line[position] for position in held] for line in whole[name]]
    return sliced | {name: whole[name] for name in ("cu_seqlens", "max_seqlen") if name in whole}


def plain_positions(world: World, whole: dict[str, Any], sp_rank: int) -> list[int]:
    """Which positions of a row one rank holds, in its order."""
    length, size = len(whole["input_ids"][0]), world.sp_size
    if world.shard == "contiguous":
        return list(range(sp_rank * length // size, (sp_rank + 1) * length // size))
    segments = [(0, length)] if world.shard == "zigzag" else whole["segments"]
    held = []
    for first, last in segments:
        chunk = (last - first) // (2 * size)
        for place in (sp_rank, 2 * size - 1 - sp_rank):
            held += range(first + place * chunk, first + (place + 1) * chunk)
    return held


def whole_rows(world: World, row: plans.Row) -> dict[str, Any]:
    """All rows of a micro-batch, as lists of numbers."""
    pieces = []
    for sample_id, seqlen, *begin in row.pieces:
        start = begin[0] if begin else 0
        sample = world.samples[sample_id]
        values = {name: numbers(sample[name]) for name in ("input_ids", *world.aligned)}
        values["labels"] = numbers(sample["labels"]) if "labels" in sample else values["input_ids"]
        piece = {name: items[start : start + seqlen] for name, items in values.items()}
        # Nothing comes before a piece's first token to predict it from.
        piece["labels"] = [NOTHING] * seqlen if row.is_filler else [NOTHING, *piece["labels"][1:]]
        pieces.append(piece)
    lines = [[piece] for piece in pieces] if world.layout == "padded" else [pieces]
    room = world.segment if world.layout == "packed" else row.padded_seqlen
    names = ("input_ids", "labels", *world.aligned)
    built: dict[str, Any] = {name: [] for name in (*names, "position_ids", "attention_mask")}
    edges = [0]
    for line in lines:
        made: dict[str, list[Any]] = {name: [] for name in built}
        for piece in line:
            seqlen = len(piece["input_ids"])
            padding = -(-seqlen // room) * room - seqlen
            for name in names:
                made[name] += piece[name] + [padding_of(world, name, piece[name][0])] * padding
            made["position_ids"] += range(seqlen + padding)
            made["attention_mask"] += [1] * seqlen + [0] * padding
            edges.append(len(made["input_ids"]))
        rest = row.padded_seqlen - len(made["input_ids"])
        for name in names:
            made[name] += [padding_of(world, name, line[0][name][0])] * rest
        made["position_ids"] += range(rest)
        if rest and world.layout == "packed":
            edges.append(row.padded_seqlen)
        for name, values in built.items():
            values.append(made[name])
    if world.layout == "packed":
        del built["attention_mask"]
        built["cu_seqlens"] = edges
        built["max_seqlen"] = max(last - first for first, last in pairwise(edges))
    built["segments"] = list(pairwise(edges))
    return built | {name: [world.samples[piece[0]][name] for piece in row.pieces] for name in world.listed}


def padding_of(world: World, name: str, like: Any) -> Any:
    """What padding holds, in the shape of one token's value."""
    if name == "labels":
        return NOTHING
    pad = world.pads.get(name, 0)
    return [padding_of(world, name, item) for item in like] if isinstance(like, list) else pad


def numbers(values: Any) -> list[Any]:
    """Values of any kind as lists of Python numbers."""
    if isinstance(values, torch.Tensor):
        return values.double().tolist()
    return np.asarray(values, np.float64).tolist()


if __name__ == "__main__":
    main()
