"""Bounds for tests: what is not named does not bind."""

import numpy as np

from packer.kernels.limits import UNLIMITED, Limits


def limits(budget, **bounds):
    budgets = budget if isinstance(budget, list) else [budget]
    given = {
        "packed": False,
        "real": False,
        "min_samples": 1,
        "max_samples": UNLIMITED,
        "max_attention": UNLIMITED,
        "multiple": 1,
        "segment_multiple": 1,
        "shapes": [],
    } | bounds
    given["shapes"] = np.array(given["shapes"], np.int64)
    return Limits(budgets=np.array(budgets, np.int64), **given)
