"""A plan behind a URL: copied to this node once, by its hash, and mapped there by every process."""

import hashlib
from pathlib import Path
from typing import Any

from packer.errors import PlanError, SourceError
from packer.node_cache import FOLDER_VARIABLE, LIMIT_VARIABLE, hold, key_of, node_cache
from packer.plan import schema
from packer.plan.digest import HEADER_HASH
from packer.plan.header import parse_header
from packer.sources.location import Location

COPIED_BYTES = 16 << 20
COPIED_AT_ONCE = 4


def copied_plan(url: str) -> Path:
    """Return a folder of this node that holds the plan at a URL.

    Only its header is read where the node has the plan already. A copy that was broken off is begun anew; one
    that is in use stays, and others give way to newer entries of the node's cache.

    Raises:
        PlanError: no plan, one of another version, one whose files are not what its header says, or no room.
    """
    root = Location(url.rstrip("/"))
    header_file = root.joined(schema.HEADER_FILE)
    try:
        if not header_file.is_file():
            raise PlanError(f"{url} holds no {schema.HEADER_FILE}, so it is no plan; check the path")
        text = header_file.read(0, header_file.size())
        header = parse_header(text, header_file.path)

        def copy(folder: Path) -> None:
            folder.mkdir()
            for name in schema.plan_files(header["num_epochs"]):
                _copy(root.joined(name), folder / name, header["files"][name])
            (folder / schema.HEADER_FILE).write_bytes(text)

        folder = node_cache().made(key_of(header[HEADER_HASH]), copy, suffix=".plan")
    except SourceError as error:  # whose message names the file and the cure
        raise PlanError(str(error)) from error
    if folder is None:
        num_bytes = sum(digest["size"] for digest in header["files"].values())
        raise PlanError(
            f"{url} cannot be copied to this node, which takes {num_bytes:,} bytes; set {FOLDER_VARIABLE} to "
            f"a folder of your own with room for twice that, and {LIMIT_VARIABLE}, where set, to more"
        )
    hold(folder)
    return folder


def _copy(file: Location, target: Path, expected: dict[str, Any]) -> None:
    """Copy one file, several ranges at a time, and check that it is what the header says."""
    size = file.size()
    digest = hashlib.sha256()
    target.parent.mkdir(exist_ok=True)
    with target.open("wb") as copy:
        for first in range(0, size, COPIED_AT_ONCE * COPIED_BYTES):
            stop = min(first + COPIED_AT_ONCE * COPIED_BYTES, size)
            starts = range(first, stop, COPIED_BYTES)
            for piece in file.fetch([(start, min(start + COPIED_BYTES, stop)) for start in starts]):
                digest.update(piece)
                copy.write(piece)
    if size != expected["size"] or digest.hexdigest() != expected["sha256"]:
        raise PlanError(
            f"{file.path} is not the file that {schema.HEADER_FILE} names; upload the whole plan again"
        )
