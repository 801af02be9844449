"""What packer and DeepSpeed's analyzer wrote beside the data, or among it: nothing to measure."""

import re
from collections.abc import Sequence

from packer.errors import SourceError
from packer.sources.location import Location

_MARKERS = ("manifest.json", "plan.json", "export.json")
_SHARDS = "shards.json"
_OURS = re.compile(rb'"format":\s*"packer-')
BLOCKS_FILE = "blocks.arrow"
_MARKER_BYTES = 1 << 10
"""The format is the first thing that a marker says."""
_METRIC_FILE = re.compile(r".+_(sample_to_metric|index_to_metric|index_to_sample(_percentile_merged)?)\.idx")


def without_outputs(files: Sequence[Location], root: Location) -> list[Location]:
    """Leave out metric files, and whatever is in a folder below ``root`` that packer wrote.

    Args:
        files: the files, the markers of outputs among them.
        root: the folder that was named; shards in it are a data set.
    """
    folders = {file.folder().path for file in files if file.name in (*_MARKERS, _SHARDS) and _is_ours(file)}
    outputs = tuple(f"{folder}/" for folder in folders - {root.path.rstrip("/")})
    metrics = [file for file in files if _METRIC_FILE.fullmatch(file.name)]
    # beside the folders of the metrics, whose manifest may be lost
    ours = {*metrics, *(file.folder().folder().joined(BLOCKS_FILE) for file in metrics)}
    return [file for file in files if file not in ours and not file.path.startswith(outputs)]


def refuse_output(folder: Location) -> None:
    """Refuse a folder that is no data set, but made of one.

    Raises:
        SourceError: it is a metrics directory, a plan, or an exported one.
    """
    if is_output(folder):
        raise SourceError(
            f"{folder.path} is a metrics directory or a plan of packer, no data set; name the data that it "
            "was made of"
        )


def is_output(folder: Location) -> bool:
    """Whether packer wrote a folder, other than as a data set."""
    markers = (folder.joined(name) for name in _MARKERS)
    return any(marker.is_file() and _is_ours(marker) for marker in markers)


def _is_ours(marker: Location) -> bool:
    return _OURS.search(marker.read(0, _MARKER_BYTES)) is not None
