"""Run a script on several processes, as a launcher would, and collect what each rank reports."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]

_ENVIRONMENT = {
    # One thread a process: two busy processes share two cores.
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    # No hub, no progress bars, no telemetry.
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
    # These import a package by its path, which the installed one shadows.
    "PYTHONPATH": str(REPOSITORY),
}
_GRACE_S = 5
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(
    script: Path,
    *arguments: str | Path,
    processes: int = 2,
    environment: Mapping[str, str] | None = None,
    launcher: bool = True,
    timeout_s: float = 240,
) -> list[Any]:
    """Run ``script`` on each rank and return what the ranks reported, in their order.

    A script reports with ``report(value)``; a rank that reported nothing gives None. ``launcher=False``
    runs one process without a launcher's variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"report.{rank}.json" for rank in range(processes)]
        logs = [Path(folder) / f"log.{rank}" for rank in range(processes)]
        shared = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
        shared |= _ENVIRONMENT | {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions"} | dict(environment or {})
        port = _free_port()
        children = []
        for rank in range(processes):
            own = shared | {"PACKER_TEST_REPORT": str(reports[rank])}
            if launcher:
                own |= _launched(rank, processes, port)
            with logs[rank].open("wb") as log:
                children.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *map(str, arguments)],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=own,
                        cwd=REPOSITORY,
                    )
                )
        _wait(children, timeout_s)
        # A rank that has reported has done its work, however its interpreter came to an end.
        failed = [
            rank for rank, child in enumerate(children) if child.returncode and not reports[rank].exists()
        ]
        if failed:
            tails = [f"--- rank {rank}\n{logs[rank].read_text(errors='replace')[-6000:]}" for rank in failed]
            raise AssertionError("\n".join([f"ranks {failed} failed", *tails]))
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]


def report(value: Any) -> None:
    """Hand a JSON-able value to the test that runs this script."""
    Path(os.environ["PACKER_TEST_REPORT"]).write_text(json.dumps(value))


def _launched(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all have ended; soon after the first failure end the others, which would wait for ever."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            if any(child.poll() for child in children):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
