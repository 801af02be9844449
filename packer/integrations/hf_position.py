"""Where the plan stands, in a file beside the Trainer's own ones in a checkpoint."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer.errors import StateError

POSITION_FILE = "packer_position.json"


def write_position(checkpoint: Path, position: Mapping[str, Any]) -> None:
    """Write a loader's state into a checkpoint; a reader sees the whole of it or nothing."""
    # A name of its own: one process a node may write, onto one disk.
    partial = checkpoint / f".{POSITION_FILE}.{socket.gethostname()}.{os.getpid()}"
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(position, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(checkpoint / POSITION_FILE)


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Read a loader's state from a checkpoint.

    Raises:
        StateError: There is none, or it is damaged.
    """
    path = checkpoint / POSITION_FILE
    try:
        position = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(
            f"cannot read {path}, which says where the plan stood ({error}); resume from a checkpoint that a "
            "PlanTrainer has written to its end, or start anew without resume_from_checkpoint"
        ) from error
    if not isinstance(position, dict):
        raise StateError(f"{path} does not hold a loader's state; resume from another checkpoint")
    return position
