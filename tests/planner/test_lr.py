"""Learning-rate factors."""

import numpy as np
import pytest

from packer.errors import ConfigError
from packer.planner import PlanConfig, make_plan
from packer.planner.rate import lr_scales, mean_size


def config(**options):
    return PlanConfig(max_tokens=100, **options)


def test_rules():
    sizes = np.array([2, 8, 32])
    assert lr_scales(sizes, None, config()).tolist() == [1, 1, 1]
    assert lr_scales(sizes, 8, config(lr_scaling="linear")).tolist() == [0.25, 1, 4]
    assert lr_scales(sizes, 8, config(lr_scaling="sqrt")).tolist() == [0.5, 1, 2]
    assert lr_scales(sizes, 8, config(lr_scaling="linear", lr_max_scale=1.5)).tolist() == [0.25, 1, 1.5]
    with pytest.raises(ConfigError, match="--lr-base"):
        lr_scales(sizes, 0.0, config(lr_scaling="linear"))


def test_base_is_the_mean_over_full_steps_of_all_epochs():
    full, tail = np.array([True, True]), np.array([True, False])
    assert mean_size([(np.array([4, 6]), full), (np.array([8, 1]), tail)]) == 6
    assert mean_size([(np.array([3]), ~full[:1])]) == 3


def test_base_covers_epochs_that_are_planned_one_at_a_time():
    seqlens = np.random.default_rng(0).integers(1, 50, 300)
    plan = make_plan(seqlens, config(packing="next-fit", lr_scaling="linear", epochs=3))
    epochs = [plan.epoch(number) for number in range(3)]
    sizes = [epoch.step(step).num_samples for epoch in epochs for step in range(epoch.num_steps)]
    assert plan.header["lr_base"] == sum(sizes) / len(sizes)
    assert epochs[2].step(0).lr_scale == epochs[2].step(0).num_samples / plan.header["lr_base"]


def test_loss_tokens_of_cut_samples_cannot_be_counted():
    cut = config(lr_scaling="linear", lr_by="loss-tokens", too_long="split", max_seqlen=5)
    with pytest.raises(ConfigError, match="--lr-by tokens"):
        make_plan([9, 9], cut, loss_tokens=[1, 1])
    assert make_plan([9, 9], cut).num_epochs == 1
