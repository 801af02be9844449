"""Misuse: an error that names the culprit, never a wrong number or a hang."""

import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from packer.errors import ConfigError, PackerError, PlanError, SourceError, StateError, WorkerLostError
from packer.runtime import PlanLoader, count_loss_tokens
from tests.runtime.replays import Tokens, lengths, make_plan

SEQLENS = [seqlen + 2 for seqlen in lengths(64)]


def make_loader(**options: Any) -> PlanLoader:
    return PlanLoader(make_plan(SEQLENS, steps=4, grad_accum=3, epochs=2), Tokens(SEQLENS), **options)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("use", [count_loss_tokens, next, iter, list])
def test_a_step_that_was_left_hands_out_nothing_of_the_next_one(use: Any, num_workers: int) -> None:
    loader = make_loader(num_workers=num_workers)
    steps = iter(loader)
    left, current = next(steps), next(steps)
    next(current)
    for step in (left, *list(make_loader())):
        with pytest.raises(PlanError, match="before its end, because the next step was asked for"):
            use(step)
    assert [batch.accum for batch in current] == [1, 2]


def test_loss_tokens_of_a_step_are_all_of_its_own_whenever_they_are_counted() -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    expected = plan.epoch(0).step(0).num_loss_tokens
    step = next(iter(make_loader()))
    assert count_loss_tokens(step) == expected
    next(step)
    assert count_loss_tokens(step) == expected
    assert len(list(step)) == 2
    assert count_loss_tokens(step) == expected


def test_loss_tokens_of_a_step_resumed_within_are_not_guessed() -> None:
    loader = make_loader()
    next(next(iter(loader)))
    state = loader.state_dict()
    loader.load_state_dict(state, resume="microbatch")
    with pytest.raises(PlanError, match="goes on after 1 micro-batches of an earlier run"):
        count_loss_tokens(next(iter(loader)))
    loader.load_state_dict(state)
    assert count_loss_tokens(next(iter(loader))) > 0


def test_a_step_outlives_its_loop_but_not_the_next_one() -> None:
    loader = make_loader()
    step = next(iter(loader))
    assert [batch.accum for batch in step] == [0, 1, 2]
    assert loader.state_dict()["step"] == 1
    loader.set_epoch(0)
    with pytest.raises(PlanError, match="another one was begun"):
        next(zip(loader, loader, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 5},
        {"epoch": 3},
        {"step": -1},
        {"microbatch": 4},
        {"step": "two"},
        {"epoch": 2, "step": 1},
    ],
    ids=str,
)
def test_a_state_that_is_no_place_is_refused(changes: dict[str, Any]) -> None:
    loader = make_loader()
    with pytest.raises(StateError, match=r"load what PlanLoader\.state_dict\(\) gave"):
        loader.load_state_dict(loader.state_dict() | changes, resume="microbatch")
    assert len(list(loader)) == 4


def test_a_state_is_a_mapping_whose_numbers_may_be_tensors() -> None:
    loader = make_loader()
    with pytest.raises(StateError, match="is a NoneType"):
        loader.load_state_dict(None)  # type: ignore[arg-type]
    state = loader.state_dict() | {"step": 2}
    loader.load_state_dict(
        {name: torch.tensor(value) if isinstance(value, int) else value for name, value in state.items()}
    )
    assert [step.index for step in loader] == [2, 3]


def test_a_state_may_hold_what_others_put_beside_ours_and_an_old_one_has_no_seed() -> None:
    loader = make_loader()
    state = loader.state_dict() | {"step": 2, "consumed": 12, "version": 1}
    del state["seed"]
    loader.load_state_dict(state)
    assert [step.index for step in loader] == [2, 3]
    with pytest.raises(StateError, match="has version 2 and fields"):
        loader.load_state_dict(state | {"version": 2})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_closed_loader_has_no_workers_and_knows_where_it_stood(num_workers: int) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with make_loader(num_workers=num_workers) as loader:
        steps = iter(loader)
        step = next(steps)
        next(step)
        assert len({child.pid for child in psutil.Process().children()} - before) == num_workers
    assert {child.pid for child in psutil.Process().children()} <= before
    state = loader.state_dict()
    assert (state["step"], state["microbatch"], len(loader)) == (0, 1, 4)
    for use in (lambda: next(step), lambda: next(steps)):
        with pytest.raises(PlanError, match="or close called"):
            use()
    with pytest.raises(PlanError, match="was closed; make another one"):
        iter(loader)
    loader.close()
    again = make_loader()
    again.load_state_dict(state, resume="microbatch")
    assert [batch.accum for batch in next(iter(again))] == [1, 2]


def test_a_step_is_true_before_and_after_its_loop() -> None:
    for step in make_loader():
        assert step
        list(step)
        assert step
        assert len(step) == 0


class Changed(Tokens):
    """Tokens of which one sample, or all, are changed on delivery."""

    def __init__(self, change: Callable[[int, dict[str, Any]], Any]) -> None:
        super().__init__(SEQLENS)
        self.change = change

    def __getitem__(self, sample_id: int) -> Any:
        return self.change(sample_id, super().__getitem__(sample_id))


def odd_sample() -> int:
    return int(make_plan(SEQLENS, steps=4, grad_accum=3).epoch(0).microbatch(4).sample_ids[1])


ODD = odd_sample()


def first_complaint(dataset: Any, **options: Any) -> PackerError:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3, **options)
    with pytest.raises(PackerError) as error:
        list(PlanLoader(plan, dataset).microbatches())
    assert "\n" not in str(error.value)
    return error.value


def weights(seqlen: int, **options: Any) -> Any:
    return np.ones(seqlen, **options)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("odd", "others", "complaint"),
    [
        (lambda n: {"input_ids": np.ones(n)}, {}, r"input_ids of sample {odd} are float64 of shape \({n},\)"),
        (lambda n: {"input_ids": ["a"] * n}, {}, "input_ids of sample {odd} are <U1"),
        (lambda n: {"input_ids": np.ones((n, 1), int)}, {}, r"input_ids of sample {odd} are int64 of shape"),
        (lambda n: {"input_ids": 5}, {}, "input_ids of sample {odd} is a int"),
        (
            lambda n: {"w": np.ones(n)},
            {},
            "sample {odd} has the fields input_ids, w, and sample .*, the first of this run, input_ids;",
        ),
        (
            lambda n: {},
            {"w": weights},
            "sample {odd} has the fields input_ids, and sample .* of this run, input_ids, w;",
        ),
        (
            lambda n: {"labels": np.ones(n - 1, int)},
            {"labels": np.arange},
            "sample {odd} has .* labels for {n}",
        ),
        (lambda n: {"labels": None}, {"labels": np.arange}, "sample {odd} has labels that are no numbers"),
        (lambda n: {"labels": np.ones(n)}, {"labels": np.arange}, "labels of sample {odd} are float64"),
        (
            lambda n: {"w": np.ones(n)},
            {"w": np.arange},
            "w of sample {odd} is float64 .* had int64",
        ),
        (lambda n: {"w": torch.ones(n)}, {"w": torch.arange}, "w of sample {odd} is torch.float32"),
        (lambda n: {"w": np.ones((n, 3))}, {"w": weights}, "w of sample {odd} is float64"),
    ],
    ids=range(12),
)
def test_a_sample_unlike_the_others_is_named(
    layout: str, odd: Callable[[int], Any], others: Mapping[str, Any], complaint: str
) -> None:
    def change(sample_id: int, sample: dict[str, Any]) -> dict[str, Any]:
        n = SEQLENS[sample_id]
        return sample | (odd(n) if sample_id == ODD else {name: make(n) for name, make in others.items()})

    error = first_complaint(Changed(change), layout=layout)
    assert isinstance(error, SourceError)
    pattern = complaint.replace("{odd}", str(ODD)).replace("{n}", str(SEQLENS[ODD]))
    assert re.search(pattern, str(error)), str(error)


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        (lambda n: {"input_ids": np.ones(n), "labels": np.ones(n)}, "input_ids of sample {odd} is float64"),
        (lambda n: {"labels": np.ones(n)}, "labels of sample {odd} is float64"),
        (lambda n: {"labels": np.ones(n + 1, int)}, "sample {odd} has .* labels for {n} tokens"),
    ],
    ids=range(3),
)
def test_a_slice_of_a_sample_unlike_the_others_is_refused_too(
    odd: Callable[[int], Any], complaint: str
) -> None:
    def change(sample_id: int, sample: dict[str, Any]) -> dict[str, Any]:
        labels = {"labels": np.arange(SEQLENS[sample_id])}
        return sample | (odd(SEQLENS[sample_id]) if sample_id == ODD else labels)

    plan = make_plan(SEQLENS, steps=4, grad_accum=3, layout="packed")
    loader = PlanLoader(plan, Changed(change), dp_rank=0, dp_size=1, sp_rank=1, sp_size=2, ragged=True)
    pattern = complaint.replace("{odd}", str(ODD)).replace("{n}", str(SEQLENS[ODD]))
    with pytest.raises(SourceError, match=pattern):
        list(loader.microbatches())


def test_a_field_that_is_said_to_be_token_aligned_is() -> None:
    def change(sample_id: int, sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"w": np.ones(SEQLENS[sample_id] - (sample_id == ODD))}

    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    for places in ({}, {"dp_rank": 0, "dp_size": 1, "sp_rank": 0, "sp_size": 2, "ragged": True}):
        loader = PlanLoader(plan, Changed(change), token_fields=["w"], **places)
        with pytest.raises(SourceError, match=f"sample {ODD} has .* w for {SEQLENS[ODD]} tokens"):
            list(loader.microbatches())


class Broken(Tokens):
    """A shard is missing."""

    def __getitem__(self, sample_id: int) -> Any:
        if sample_id == ODD:
            raise KeyError("shard 7")
        return super().__getitem__(sample_id)


class BrokenTogether(Broken):
    def __getitems__(self, sample_ids: list[int]) -> list[Any]:
        return [self[sample_id] for sample_id in sample_ids]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Broken, BrokenTogether])
def test_an_error_of_the_data_set_names_the_sample_and_keeps_its_trace(
    kind: type[Broken], num_workers: int
) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    batches = iter(PlanLoader(plan, kind(SEQLENS), num_workers=num_workers).microbatches())
    for _ in range(4):
        next(batches)
    trace, message = "", ""
    try:
        next(batches)
    except SourceError as error:  # let go of at once, since its trace holds the loader
        trace = "".join(traceback.format_exception(error))
        message = str(pickle.loads(pickle.dumps(error)))
    assert re.match(rf"the data set raised KeyError when asked for samples? .*{ODD}.*shard 7", message)
    assert 'raise KeyError("shard 7")' in trace


def test_a_data_set_that_answers_with_too_few_samples_is_refused() -> None:
    class Few(Tokens):
        def __getitems__(self, sample_ids: list[int]) -> list[Any]:
            return [self[sample_id] for sample_id in sample_ids[1:]]

    assert "returned 1 samples for the 2 ids" in str(first_complaint(Few(SEQLENS)))


class Stream(torch.utils.data.IterableDataset[Any]):
    """It inherits ``__getitem__``, and has a length."""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return len(SEQLENS)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dataset": (sample for sample in ())}, "a generator cannot be asked for a sample by its id"),
        ({"dataset": Stream()}, "a Stream cannot be asked for a sample by its id"),
        ({"num_workers": -1}, "num_workers=-1 is negative"),
        ({"device": "gpuu"}, "device='gpuu' is not known to torch"),
        ({"collate": lambda samples, shape: [1]}, "collate returned a list"),
        ({"sample_padding_fn": lambda sample, n: None}, "sample_padding_fn returned NoneType where"),
        ({"sample_padding_fn": lambda sample, n: sample}, "sample_padding_fn returned .* input_ids where"),
    ],
    ids=range(7),
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    with pytest.raises(ConfigError, match=complaint):
        list(PlanLoader(plan, options.pop("dataset", Tokens(SEQLENS)), **options).microbatches())


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_sent_to_a_worker_is_told_before_it_is_missed() -> None:
    loader = make_loader(
        num_workers=1, multiprocessing_context="spawn", collate=lambda samples, shape: {"n": len(samples)}
    )
    with pytest.raises(ConfigError, match="in a module, not within a function"):
        iter(loader)


class Deadly(Tokens):
    """Ends its process, once."""

    def __init__(self, marker: Path) -> None:
        super().__init__(SEQLENS)
        self.marker = marker

    def __getitem__(self, sample_id: int) -> Any:
        if sample_id == ODD and not self.marker.exists():
            self.marker.touch()
            os._exit(3)
        return super().__getitem__(sample_id)


def test_a_run_goes_on_after_a_worker_was_lost(tmp_path: Path) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    loader = PlanLoader(plan, Deadly(tmp_path / "died"), num_workers=1)
    seen = []
    with pytest.raises(WorkerLostError, match=r"exited unexpectedly \(pid \d+, exit code 3\)"):
        for batch in loader.microbatches():
            seen.append(batch.sample_ids.tolist())
    loader.load_state_dict(loader.state_dict(), resume="microbatch")
    seen += [batch.sample_ids.tolist() for batch in loader.microbatches()]
    assert seen == [plan.epoch(0).microbatch(row).sample_ids.tolist() for row in range(12)]


class DeadlyWithALock(Deadly):
    """Ends its process as one that is killed while it asks whether it shall end."""

    def __getitem__(self, sample_id: int) -> Any:
        if sample_id == ODD and not self.marker.exists():
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
        return super().__getitem__(sample_id)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_nobody_waits_for_a_lock_that_a_worker_died_with(tmp_path: Path, num_workers: int) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    loader = PlanLoader(plan, DeadlyWithALock(tmp_path / "died"), num_workers=num_workers)
    with pytest.raises(WorkerLostError, match=r"exited unexpectedly \(pid \d+, exit code 3\)"):
        list(loader.microbatches())
    loader.load_state_dict(loader.state_dict())
    assert list(loader.microbatches())


def test_workers_are_not_shared_with_a_forked_process() -> None:
    loader = make_loader(num_workers=1)
    batches = iter(loader.microbatches())
    next(batches)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except ConfigError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"make a PlanLoader in each process" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)
    assert len(list(batches)) == 11


READS_SLOWLY = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has switched off
from packer.runtime import PlanLoader
from tests.runtime.replays import Tokens, make_plan

SEQLENS = [5000] * 64  # too long to go through a pipe

class Slow(Tokens):
    def __getitem__(self, sample_id):
        time.sleep(0.1)
        return super().__getitem__(sample_id)

batches = PlanLoader(make_plan(SEQLENS, steps=20), Slow(SEQLENS), num_workers=2).microbatches()
for batch in batches:
    print(flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_process_that_they_read_for(number: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", READS_SLOWLY],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert run.stdout is not None
    with run.stdout:
        run.stdout.readline()
        run.send_signal(number)
        run.stdout.read()  # until the workers, which hold the other end too, are gone
    assert run.wait(timeout=60) == -number
