"""The one place that owns compile flags.

``nogil`` lets plain Python threads run serial kernels side by side; numba's own threads are not used, because
their layers die in forked children or under several Python threads. ``error_model="numpy"`` drops the checks
for division by zero. No ``fastmath`` anywhere: the same plan on every machine.

A kernel kept on disk notices changes of its own file only. After editing a helper that kernels elsewhere
call, remove ``packer/kernels/__pycache__``.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

at = np.uint64
"""Wraps a position that is never negative: numba would test a signed one for it at every access."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` when it is first called; keep the result on disk where there is a place for it."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        _warn_once()
        return inline(function)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a helper that is called from kernels only."""
    return njit(nogil=True, error_model="numpy")(function)


@cache
def _warn_once() -> None:
    warnings.warn(
        "kernels are compiled anew in every run, because no cache folder can be written; set "
        "NUMBA_CACHE_DIR to a writable folder",
        stacklevel=1,
    )
