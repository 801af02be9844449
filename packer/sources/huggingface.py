"""Folders of Hugging Face datasets: which ``.arrow`` files are the data, and in which order."""

import json

from packer.errors import SourceError
from packer.sources.location import Location, reading


def saved_files(folder: Location) -> list[Location] | None:
    """Return the files of a ``save_to_disk`` folder in its order; None for any other folder.

    Raises:
        SourceError: a folder of several splits, one with an indices mapping, or a damaged ``state.json``.
    """
    if folder.joined("dataset_dict.json").is_file():
        splits = _load(folder.joined("dataset_dict.json")).get("splits")
        raise SourceError(f"{folder.path} holds several splits ({splits}); name the folder of one of them")
    state_file = folder.joined("state.json")
    if not (state_file.is_file() and folder.joined("dataset_info.json").is_file()):
        return None
    state = _load(state_file)
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        raise SourceError(
            f"{folder.path} holds an indices mapping, so its files are not its rows in order; "
            "save it again after flatten_indices()"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
    ):
        raise SourceError(f"{state_file.path} lists no data files; save the data set again")
    return [folder.joined(entry["filename"]) for entry in listed]


def refuse_mixed_cache(folder: Location, files: list[Location]) -> None:
    """Refuse a cache folder that holds results of ``datasets.map`` or ``shuffle`` beside the data itself."""
    cached = [file for file in files if file.name.startswith("cache-") and file.name.endswith(".arrow")]
    if cached and len(cached) < len(files):
        raise SourceError(
            f"{folder.path} holds cache files of datasets ({cached[0].name} ...) beside the data itself; "
            "name the files by a pattern, or the folder of save_to_disk(...)"
        )


def _load(location: Location) -> dict[str, object]:
    with reading(location, cure="save the data set again"):
        content = json.loads(location.read(0, location.size()))
    if not isinstance(content, dict):
        raise SourceError(f"{location.path} is no JSON object; save the data set again")
    return content
