"""What a plan says of its data set: which files it is, and what the length of a sample is."""

from collections.abc import Mapping, Sequence
from typing import Any

from packer.errors import ConfigError, SourceChangedError
from packer.samples.definition import LengthDefinition
from packer.sources import Source


def check_planned(source: Source, num_samples: int, files: Sequence[Mapping[str, Any]] | None) -> None:
    """Check that a source is the one that was planned.

    Args:
        source: the rows.
        num_samples: how many samples the plan has of it.
        files: their identities, as in the manifest; None, or none, where the metrics had no manifest.

    Raises:
        SourceChangedError: another number of files or rows, or another content; names the file.
    """
    if source.num_rows != num_samples:
        raise SourceChangedError(
            f"the source has {source.num_rows} rows, the plan is of {num_samples}; name the files that were "
            "analyzed, or analyze and plan again"
        )
    if not files:  # metrics without manifest: there is only the number of rows to go by
        return
    found = source.identity()
    if len(found) != len(files):
        raise SourceChangedError(
            f"the source has {len(found)} files, the plan is of {len(files)}; name those that were analyzed"
        )
    for file, now, then in zip(source.files, found, files, strict=True):
        if any(now[key] != then.get(key) for key in ("num_bytes", "sha256")):
            raise SourceChangedError(
                f"{file} is not the file that was planned (size or content differ); name the files in the "
                "same order, or analyze and plan again"
            )


def planned_definition(
    planned: Mapping[str, Any], measured: Mapping[str, Any], tokenizer: str | None
) -> LengthDefinition:
    """Return what the length of a sample is.

    Args:
        planned: the definition that the plan has; empty where it has none.
        measured: the definition in the manifest of the metrics, for what the plan does not say itself: where
            the tokenizer is; empty where there are none.
        tokenizer: where the tokenizer is on this machine.

    Raises:
        ConfigError: nothing says what the length is, or where the tokenizer is.
    """
    content = dict(planned) | dict(measured)
    if not content or content.get("kind") == "dataset":
        raise ConfigError(
            "the plan does not say what the length of a sample is (its metrics have no manifest, or come "
            "from a function); leave --source out"
        )
    if "tokenizer_sha256" in content:
        content["tokenizer"] = tokenizer or content.get("tokenizer")
        if content["tokenizer"] is None:
            raise ConfigError(
                "samples of text need the tokenizer to be measured; add --metrics, or --tokenizer"
            )
    return LengthDefinition.from_json(content)
