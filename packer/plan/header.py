"""``plan.json``: read it, and refuse what is not a plan of a version that is read, by name."""

import json
from pathlib import Path
from typing import Any

from packer.errors import PlanError
from packer.plan import schema
from packer.plan.digest import HEADER_HASH, header_hash
from packer.plan.header_fields import first_problem


def read_header(folder: Path) -> dict[str, Any]:
    """Return the header of the plan in ``folder``.

    Raises:
        PlanError: no plan, a plan of another version, or a header that was changed after it was written.
    """
    path = folder / schema.HEADER_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if (folder / "manifest.json").is_file():
            raise PlanError(
                f"{folder} is a metrics directory, not a plan; give the --out of `packer plan {folder}`"
            ) from None
        what = "holds no plan.json, so it is no plan" if folder.is_dir() else "does not exist"
        raise PlanError(f"{folder} {what}; make one with `packer plan METRICS --out {folder}`") from None
    except NotADirectoryError:
        raise PlanError(f"{folder} is a file; give the directory that `packer plan --out` wrote") from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    return parse_header(text, str(path))


def parse_header(text: bytes, path: str) -> dict[str, Any]:
    """Return the header that stands in a ``plan.json``, which messages call ``path``.

    Raises:
        PlanError: no plan of ours, of another version, or changed after it was written.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON ({error}); restore it or plan again") from None
    _check_header(header, path)
    return dict(header)


def _check_header(header: Any, path: str) -> None:
    """Refuse a header of another format or version, or one that does not match its own hash."""
    if not isinstance(header, dict) or header.get("format") != schema.FORMAT:
        raise PlanError(f'{path} does not say format "{schema.FORMAT}", so it is no plan of ours')
    version = header.get("version")
    if version not in schema.READABLE_VERSIONS or isinstance(version, bool):
        readable = " and ".join(map(str, schema.READABLE_VERSIONS))
        raise PlanError(
            f"{path} has format version {version!r}, this packer reads versions {readable}; "
            "plan again, or install the packer that wrote it"
        )
    try:
        actual = header_hash(header)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is damaged ({error}); restore it or plan again") from None
    if actual != header.get(HEADER_HASH):
        raise PlanError(f"{path} was changed after it was written ({HEADER_HASH} differs); plan again")
    problem = first_problem(header)
    if problem is not None:
        raise PlanError(f"{path} is not as packer writes it: {problem}; plan again")
