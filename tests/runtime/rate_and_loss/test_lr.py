"""The learning rate: every update uses base rate × factor, and no schedule sees anything but base rates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers

from packer.errors import ConfigError
from packer.plan import Plan, plan_in_memory
from packer.runtime import PlanLoader, PlanLR, scaled_lr
from tests import plans
from tests.runtime.replays import Tokens, lengths, make_plan

SEQLENS = lengths(64)
STEPS = 6
EPOCHS = 2


def two_groups(lr: Any = 0.1) -> SGD:
    """Return an optimizer whose parameters move by exactly the rate, since their gradients are 1."""
    parameters = [torch.nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)]
    return SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": lr / 4}], lr=lr)


def update(optimizer: Optimizer) -> list[float]:
    """Take one update and return the rate that each group really used."""
    parameters = [group["params"][0] for group in optimizer.param_groups]
    before = [parameter.item() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [old - parameter.item() for old, parameter in zip(before, parameters, strict=True)]


def sequential(optimizer: Optimizer) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3),
        schedulers.CosineAnnealingLR(optimizer, T_max=9),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Optimizer) -> Any:
    parts = [
        schedulers.ConstantLR(optimizer, factor=0.1, total_iters=2),
        schedulers.ExponentialLR(optimizer, gamma=0.9),
    ]
    return schedulers.ChainedScheduler(parts, optimizer=optimizer)


def one_cycle(optimizer: Optimizer) -> Any:
    return schedulers.OneCycleLR(
        optimizer, max_lr=[0.1, 0.4], total_steps=STEPS * EPOCHS, cycle_momentum=False
    )


def plateau(optimizer: Optimizer) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def warm_up(optimizer: Optimizer) -> Any:
    return schedulers.LambdaLR(optimizer, [lambda step: min(1, (step + 1) / 4), lambda step: 0.9**step])


SCHEDULES = [sequential, chained, one_cycle, plateau, warm_up]


def base_rates(make: Callable[[Optimizer], Any], updates: int, skipped: set[int]) -> list[list[float]]:
    """Return what the schedule alone does, one entry an update."""
    optimizer = two_groups()
    scheduler = make(optimizer)
    rates = []
    for index in range(updates):
        rates.append([] if index in skipped else update(optimizer))
        scheduler.step(*[1.0] * (make is plateau))
    return rates


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning"
)  # torch 2.6 in itself
@pytest.mark.parametrize("make", SCHEDULES)
def test_any_schedule_keeps_the_base_rate_through_skips_resumes_and_epochs(make: Any) -> None:
    plan = make_plan(SEQLENS, steps=STEPS, epochs=EPOCHS)
    skipped, resumed = {1, 8}, {4, 6, 7}
    expected = base_rates(make, STEPS * EPOCHS, skipped)
    optimizer, loader = two_groups(), PlanLoader(plan, Tokens(SEQLENS))
    scheduler = PlanLR(make(optimizer), plan, loader)
    index = 0
    while loader.epoch < EPOCHS:
        for step in loader:
            list(step)
            if index not in skipped:
                used = update(optimizer)
                assert used == pytest.approx([rate * step.lr_scale for rate in expected[index]], abs=1e-12)
                assert scheduler.get_last_lr() == pytest.approx(used, abs=1e-12)
            scheduler.step(*[1.0] * (make is plateau))
            index += 1
            if index in resumed:
                states = optimizer.state_dict(), loader.state_dict(), scheduler.state_dict()
                optimizer, loader = two_groups(), PlanLoader(plan, Tokens(SEQLENS))
                last = scheduler.get_last_lr()
                scheduler = PlanLR(make(optimizer), plan, loader)
                optimizer.load_state_dict(states[0])
                loader.load_state_dict(states[1])
                scheduler.load_state_dict(states[2])
                assert scheduler.get_last_lr() == last
                break
    assert index == STEPS * EPOCHS


def lr_plan(batch_sizes: list[int], *, base: float) -> Plan:
    rows = []
    first = 0
    for size in batch_sizes:
        rows.append(plans.Row(pieces=[(i, 3) for i in range(first, first + size)]))
        first += size
    epoch = plans.epoch(rows, lr_scales=[size / base for size in batch_sizes])
    return plan_in_memory(plans.facts([3] * first, lr_scaling="linear"), [epoch], dropped=plans.drops())


def test_worked_example() -> None:
    plan = lr_plan([10, 4], base=2)
    for use_scheduler in (False, True):
        optimizer, loader = two_groups(lr=1e-3), PlanLoader(plan, Tokens([3] * 14))
        scheduler = PlanLR(optimizer, plan, loader) if use_scheduler else None
        used = []
        if scheduler is not None:
            assert scheduler.get_last_lr() == pytest.approx([5e-3, 1.25e-3])
        for step in loader:
            list(step)
            if scheduler is not None:
                used.append(update(optimizer)[0])
                assert scheduler.get_last_lr()[0] == pytest.approx(used[-1])
                scheduler.step()
            else:
                with scaled_lr(optimizer, step.lr_scale):
                    used.append(update(optimizer)[0])
        assert used == pytest.approx([5e-3, 2e-3], abs=1e-15)
        assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_the_inner_schedule_advances_with_what_was_consumed(by: Any) -> None:
    sizes = [12, 1, 1, 1, 1, 8]  # as long as six steps of four
    plan = lr_plan(sizes, base=4)
    optimizer, loader = two_groups(), PlanLoader(plan, Tokens([3] * 24))
    inner = schedulers.LambdaLR(optimizer, lambda step: 1 - step / 6)
    scheduler = PlanLR(inner, plan, loader, by=by)
    advanced = []
    for step in loader:
        list(step)
        update(optimizer)
        scheduler.step()
        advanced.append(inner.last_epoch)
    assert advanced == [3, 3, 3, 3, 4, 6]
    assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_schedule_over_tokens_goes_on_after_a_resume_on_another_topology(dp_size: int) -> None:
    plan = make_plan([2, 30, 4, 4, 9, 9, 20, 20, 1, 1, 5, 6], steps=3, dp_size=2)
    advanced = []
    state: Any = None
    for index in range(3):
        size = 2 if index == 0 else dp_size
        loader = PlanLoader(plan, Tokens([2, 30, 4, 4, 9, 9, 20, 20, 1, 1, 5, 6]), dp_rank=0, dp_size=size)
        optimizer = two_groups()
        scheduler = PlanLR(warm_up(optimizer), plan, loader, by="tokens")
        if state is not None:
            loader.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        list(next(iter(loader)))
        update(optimizer)
        scheduler.step()
        state = loader.state_dict(), scheduler.state_dict()
        advanced.append(scheduler.last_epoch)
    sizes = [plan.epoch(0).step(step).num_tokens for step in range(3)]
    assert advanced == [3 * sum(sizes[: step + 1]) // sum(sizes) for step in range(3)]
    assert len(loader) == advanced[-1] == 3


def test_rates_in_tensors_keep_their_identity() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = SGD([torch.nn.Parameter(torch.zeros((), dtype=torch.float64))], lr=rate)
    with scaled_lr(optimizer, 3.0):
        assert update(optimizer) == pytest.approx([0.3])
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_a_failed_update_leaves_the_base_rate_to_the_next() -> None:
    plan = make_plan(SEQLENS, steps=STEPS)
    optimizer, loader = two_groups(), PlanLoader(plan, Tokens(SEQLENS))
    PlanLR(optimizer, plan, loader)

    def fails() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fails)
    list(loader.microbatches())
    assert update(optimizer)[0] == pytest.approx(0.1 * plan.epoch(0).step(STEPS - 1).lr_scale)
    assert optimizer.param_groups[0]["lr"] == 0.1
    other = two_groups()
    with pytest.raises(RuntimeError, match="stop"), scaled_lr(other, 2.0):
        raise RuntimeError("stop")
    assert other.param_groups[0]["lr"] == 0.1


def test_nothing_is_scaled_twice() -> None:
    plan = make_plan(SEQLENS, steps=STEPS)
    optimizer, loader = two_groups(), PlanLoader(plan, Tokens(SEQLENS))
    PlanLR(optimizer, plan, loader)
    with pytest.raises(ConfigError, match="keep one"):
        PlanLR(optimizer, plan, loader)
    with pytest.raises(ConfigError, match="use either"), scaled_lr(optimizer, 2.0):
        pass
    with pytest.raises(ConfigError, match="by='epochs'"):
        PlanLR(two_groups(), plan, loader, by="epochs")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [two_groups, lambda: GroupAtATime(two_groups())], ids=["plain", "wrapped"])
def test_a_detached_optimizer_is_free(make: Callable[[], Any]) -> None:
    plan = lr_plan([10, 4], base=2)
    optimizer, loader = make(), PlanLoader(plan, Tokens([3] * 14))
    first = PlanLR(optimizer, plan, loader)
    list(next(iter(loader)))
    assert update(optimizer) == pytest.approx([0.5, 0.125])
    first.detach()
    first.detach()
    assert update(optimizer) == pytest.approx([0.1, 0.025])
    with scaled_lr(optimizer, 2.0):
        assert update(optimizer) == pytest.approx([0.2, 0.05])
    PlanLR(optimizer, plan, loader)
    assert update(optimizer) == pytest.approx([0.5, 0.125])


@pytest.mark.parametrize("wrong", [object(), None, [1]], ids=["object", "None", "list"])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    plan = make_plan(SEQLENS, steps=STEPS)
    with pytest.raises(ConfigError, match=f"a {type(wrong).__name__} is no optimizer"), scaled_lr(wrong, 2.0):
        pass
    with pytest.raises(ConfigError, match=f"a {type(wrong).__name__} is no optimizer"):
        PlanLR(wrong, plan, PlanLoader(plan, Tokens(SEQLENS)))


class GroupAtATime:
    """Steps a torch optimizer one parameter group at a time, as DeepSpeed's ZeRO does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups


def test_the_factor_reaches_the_optimizer_inside_a_wrapper() -> None:
    plan = lr_plan([10, 4], base=2)
    inner = two_groups(lr=1e-3)
    wrapper, loader = GroupAtATime(inner), PlanLoader(plan, Tokens([3] * 14))
    scheduler = PlanLR(wrapper, plan, loader)
    used = []
    for step in loader:
        list(step)
        used.append(update(wrapper))  # type: ignore[arg-type]
        assert scheduler.get_last_lr() == pytest.approx(used[-1])
    assert used == [pytest.approx([5e-3, 1.25e-3]), pytest.approx([2e-3, 5e-4])]


def test_frameworks_find_a_scheduler() -> None:
    plan = make_plan(SEQLENS, steps=STEPS)
    optimizer = two_groups()
    scheduler = PlanLR(warm_up(optimizer), plan, PlanLoader(plan, Tokens(SEQLENS)))
    assert isinstance(scheduler, schedulers.LRScheduler)
    assert scheduler.base_lrs == [0.1, 0.025]
    assert scheduler.last_epoch == 0
    assert scheduler.get_lr() == scheduler.get_last_lr()
