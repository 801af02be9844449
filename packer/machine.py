"""What the machine offers, asked in ways that Linux, macOS and Windows all answer."""

import os


def num_cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer than the machine has, in a container or a job
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
