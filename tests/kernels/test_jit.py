"""What happens where compiled kernels cannot be kept."""

import os
import subprocess
import sys

from tests import naive

SCRIPT = """
import warnings
from numba.core import caching

# no place to keep compiled code: neither beside the package, nor in the user's cache, nor anywhere else
caching.CompileResultCacheImpl._locator_classes = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy as np
    from packer.kernels import best_fit, rng, windows
    key = rng.derive_key(np.uint64(1), np.uint64(2), np.uint64(3))
    print(key, *(warning.message for warning in caught), sep="|")
"""


def test_a_read_only_install_without_home_works_with_one_warning():
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "NUMBA_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    key, *messages = done.stdout.strip().split("|")
    assert int(key) == naive.derive_key(1, 2, 3)
    assert len(messages) == 1
    assert "NUMBA_CACHE_DIR" in messages[0]
    assert done.stderr == ""
