"""What a rehearsal asks of a device: its limit, how much memory was taken at most, and to give back the rest.

Two kinds. ``CudaDevice`` asks torch's caching allocator. ``HostDevice`` counts the bytes of the tensors that
torch makes, and raises torch's own out-of-memory error at a limit: so that a rehearsal, and every way in
which it can end, also runs where there is no GPU.
"""

import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from packer.errors import ConfigError


class Peak(NamedTuple):
    """Memory of a device at its highest since ``Device.reset_peak``, in bytes."""

    allocated: int
    """Taken by tensors."""
    reserved: int
    """Taken from the device: fragments between tensors, and blocks kept for later ones, included."""
    num_retries: int = 0
    """How often the allocator had to give its free blocks back before a request could be served."""


class Device(Protocol):
    """A device under a rehearsal."""

    @property
    def torch_device(self) -> torch.device:
        """Where batches go."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def is_expandable(self) -> bool:
        """Segments grow (``expandable_segments``), so that fragments between tensors can be used."""

    def available(self) -> int:
        """Return the bytes that this process may take in all: what it holds, and what is free."""

    @contextmanager
    def capped(self, num_bytes: int | None) -> Iterator[None]:
        """Raise ``torch.OutOfMemoryError`` where more is asked for; None: at the device's own limit."""

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Hear of tensors that were there before."""

    def synchronize(self) -> None:
        """Wait for what was launched."""

    def reset_peak(self) -> None:
        """Let ``peak`` count from now on."""

    def peak(self) -> Peak:
        """Return the highest since ``reset_peak``."""

    def release(self) -> None:
        """Give back what no tensor needs any more."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a device's memory did not do."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


_SIGNS = ("CUDA out of memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""How libraries behind torch say it: cuBLAS and cuDNN, and the driver."""


def open_device(device: "torch.device | str | int | Device | None") -> Device:
    """Return the device that was meant; None: the GPU, or the host where there is none.

    Raises:
        ConfigError: Neither a GPU nor the host.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, torch.device | str | int):
        return device
    try:
        meant = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not known to torch: {error}") from None
    if meant.type == "cuda":
        return CudaDevice(meant)
    if meant.type == "cpu":
        return HostDevice()
    raise ConfigError(
        f"device={str(meant)!r} does not tell how much memory it has; choose cuda, or give a Device of your "
        "own"
    )


class CudaDevice:
    """A GPU, through torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device

    @property
    def torch_device(self) -> torch.device:
        """Where batches go."""
        return self._device

    @property
    def name(self) -> str:
        """What reports call it."""
        return torch.cuda.get_device_name(self._device)

    @property
    def is_expandable(self) -> bool:
        """Segments grow, by the environment."""
        settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
        return "expandable_segments:true" in ",".join(settings).replace(" ", "").lower()

    def available(self) -> int:
        """Return the bytes that this process may take in all: what it holds, and what is free."""
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        return min(int(free) + torch.cuda.memory_reserved(self._device), allowed)

    @contextmanager
    def capped(self, num_bytes: int | None) -> Iterator[None]:
        """Raise ``torch.OutOfMemoryError`` where more is asked for."""
        if num_bytes is None:
            yield
            return
        _, total = torch.cuda.mem_get_info(self._device)
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(min(num_bytes / total, before), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._device)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """The allocator knows them."""

    def synchronize(self) -> None:
        """Wait for what was launched."""
        torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        """Let ``peak`` count from now on."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries = self._num_retries()

    def peak(self) -> Peak:
        """Return the highest since ``reset_peak``."""
        torch.cuda.synchronize(self._device)
        return Peak(
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
            self._num_retries() - self._retries,
        )

    def release(self) -> None:
        """Give back what no tensor needs any more."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    _retries = 0

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


class HostDevice:
    """The host, or a pretended device on it: counts the bytes of every tensor that torch makes meanwhile.

    What an operation takes for itself and gives back before it returns is not seen. ``limit`` bytes are what
    the device is said to have; it is the host's own memory where none is given.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Stand at the tensors that ``note`` will name.

        Args:
            limit: Bytes at which ``torch.OutOfMemoryError`` is raised.
        """
        self._limit = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._cap = self._limit
        self._sizes: dict[int, int] = {}
        """Key of a storage's weak reference → its bytes."""
        self._alive: dict[int, Any] = {}
        self._taken = 0
        self._highest = 0

    @property
    def torch_device(self) -> torch.device:
        """Where batches go."""
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"host, {self._limit:,} bytes"

    @property
    def is_expandable(self) -> bool:
        """Segments grow, by the environment."""
        return True

    def available(self) -> int:
        """Return the bytes that this process may take in all: what it holds, and what is free."""
        return self._limit

    @contextmanager
    def capped(self, num_bytes: int | None) -> Iterator[None]:
        """Raise ``torch.OutOfMemoryError`` where more is asked for."""
        before, self._cap = self._cap, min(self._limit, num_bytes or self._limit)
        try:
            with _Counting(self):
                yield
        finally:
            self._cap = before

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self.count(tensor)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed.

        Raises:
            torch.OutOfMemoryError: The limit is passed.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        num_bytes = storage.nbytes()
        if tensor.device.type != "cpu" or not num_bytes or key in self._sizes:
            return
        if self._taken + num_bytes > self._cap:
            raise torch.OutOfMemoryError(
                f"host out of memory: tried to allocate {num_bytes:,} bytes, {self._taken:,} of "
                f"{self._cap:,} are taken"
            )
        self._sizes[key] = num_bytes
        self._alive[key] = weakref.finalize(storage, self._freed, key)
        self._taken += num_bytes
        self._highest = max(self._highest, self._taken)

    def _freed(self, key: int) -> None:
        self._taken -= self._sizes.pop(key, 0)
        self._alive.pop(key, None)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def reset_peak(self) -> None:
        """Let ``peak`` count from now on."""
        self._highest = self._taken

    def peak(self) -> Peak:
        """Return the highest since ``reset_peak``."""
        return Peak(self._highest, self._highest)

    def release(self) -> None:
        """Give back what no tensor needs any more."""
        gc.collect(1)  # frames of an error are young


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a device every tensor that an operation returns, in the backward as well."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._device.count(value)
        return result
