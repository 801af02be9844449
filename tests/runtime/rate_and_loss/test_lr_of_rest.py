"""``PlanLR`` on a plan that goes on from another: its schedule is the whole run's."""

import numpy as np
import pytest
import torch

from packer.plan.trained import Trained
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader, PlanLR


class Tokens:
    def __getitem__(self, sample):
        return {"input_ids": np.arange(10)}


@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_the_schedule_goes_on_where_the_old_plan_was_left_and_ends_with_the_new_one(by):
    lengths = [10] * 40
    before = make_plan(lengths, PlanConfig(max_tokens=20))  # 20 steps of 20 tokens
    rest = make_plan(lengths, PlanConfig(max_tokens=20), trained=[Trained(plan=before, epoch=0, step=8)])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    loader = PlanLoader(rest, Tokens(), dp_rank=0, dp_size=1)
    rates = PlanLR(schedule, rest, loader, by=by)
    advanced = []
    for step in loader:
        for _ in step:
            pass
        optimizer.step()
        rates.step()
        advanced.append(schedule.last_epoch)
    assert advanced == list(range(9, 21))
