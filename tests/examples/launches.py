"""Run an example as its user would, on two processes where it is one for several."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    # What a rank printed before another one's abort arrives.
    "PYTHONUNBUFFERED": "1",
}
_GLOO_ABORT = "terminate called without an active exception"


def run(*command: object, **environment: str) -> str:
    """Run Python with ``command`` as its arguments; return what it prints.

    A thread of gloo that lets go of a tensor while the interpreter ends aborts a process that is done: torch
    2.13 takes the interpreter's lock there. Frameworks keep their groups, and so these threads, alive to the
    end; no script can join them. Such an end is not the example's, and what it printed has to be complete.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | _ENVIRONMENT | environment,
    )
    assert done.returncode == 0 or _GLOO_ABORT in done.stderr, done.stderr[-4000:]
    return done.stdout
