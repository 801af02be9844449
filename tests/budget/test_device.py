"""The pretended device: every tensor counts, once, until it is freed; at the limit there is an error."""

import pytest
import torch

from packer.budget import CudaDevice, HostDevice
from packer.budget.device import is_out_of_memory, open_device
from packer.errors import ConfigError


def test_tensors_count_until_they_are_freed_and_views_do_not() -> None:
    device = HostDevice()
    with device.capped(None):
        device.reset_peak()
        first = torch.ones(1000)
        view = first[10:].view(-1)
        second = first + 1
        assert device.peak().allocated == 8000
        del second
        device.reset_peak()
        assert device.peak().allocated == 4000
        del first
        assert device.peak().allocated == 4000
        del view
        device.reset_peak()
        assert device.peak().allocated == 0


def test_the_backward_counts_and_what_it_needs_is_freed_behind_it() -> None:
    device = HostDevice()
    weight = torch.nn.Parameter(torch.ones(100, 100))
    device.note([weight, weight])
    with device.capped(None):
        device.reset_peak()
        assert device.peak().allocated == 40_000
        (torch.ones(50, 100) @ weight).exp().sum().backward()
        device.release()
        assert device.peak().allocated >= 80_000 + 2 * 20_000  # and two activations
        device.reset_peak()
        assert device.peak().allocated == 80_000  # weight and gradient


def test_more_than_the_limit_is_torchs_own_error_and_can_be_survived() -> None:
    device = HostDevice(10_000)
    with device.capped(9000):
        kept = torch.ones(2000)
        with pytest.raises(torch.OutOfMemoryError, match=r"4,000 bytes, 8,000 of 9,000 are taken"):
            torch.ones(1000)
        del kept
        torch.ones(2000)
    with device.capped(20_000), pytest.raises(torch.OutOfMemoryError):
        torch.ones(3000)
    assert torch.ones(3000).sum() == 3000  # outside nothing is counted
    assert device.peak().allocated == 8000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    wrapped = ValueError("in a hook")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) is expected
    assert is_out_of_memory(wrapped) is expected


def test_devices_are_told_by_their_names() -> None:
    own = HostDevice(7)
    assert open_device(own) is own
    assert isinstance(open_device("cpu"), HostDevice)
    assert isinstance(open_device(torch.device("cuda", 1)), CudaDevice)
    with pytest.raises(ConfigError, match="choose cuda"):
        open_device("meta")
    with pytest.raises(ConfigError, match="not known to torch"):
        open_device("gpu")
