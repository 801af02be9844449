"""What an analysis found, and what looks wrong about it."""

from dataclasses import dataclass
from pathlib import Path

from packer.analyzer.suggestion import LONGEST_PLANNED
from packer.metrics import Manifest, MetricSummary
from packer.samples import LOSS_TOKENS, SEQLEN
from packer.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyzeResult:
    """What an analysis found."""

    path: Path
    """The metrics directory."""
    manifest: Manifest
    warnings: tuple[str, ...]
    """What looks wrong about the lengths."""
    seconds: float
    num_units_reused: int = 0
    """Units of work that an interrupted run had finished before."""

    @property
    def main(self) -> MetricSummary:
        """Summary of the metric that a plan packs by: ``seqlen``, or the first of several columns."""
        return next(iter(self.manifest.metrics.values()))

    @property
    def trained_part(self) -> str | None:
        """What the loss is on: ``assistant``, ``completion``, ``labels`` or ``all``.

        None where samples are several sequences, of which a model's loss is not the tokens', or unknown.
        """
        definition = self.manifest.definition
        if LOSS_TOKENS in self.manifest.metrics:
            return str(definition.get("train_on") or "labels")
        return "all" if len(definition.get("columns", (SEQLEN,))) == 1 else None

    @property
    def num_loss_tokens(self) -> int | None:
        """Tokens that are predicted and train; None where ``trained_part`` is."""
        if self.trained_part is None:
            return None
        if LOSS_TOKENS in self.manifest.metrics:
            return self.manifest.metrics[LOSS_TOKENS].total
        manifest = self.manifest
        # nothing comes before the first token of a sample to predict it from
        return self.main.total - (manifest.num_samples - manifest.num_nulls - manifest.num_empties)


def suspicions(manifest: Manifest) -> tuple[str, ...]:
    """Return warnings about lengths that are possible, but hardly ever meant."""
    warnings = []
    if manifest.num_skipped:
        number = manifest.num_skipped
        warnings.append(
            f"{counted(number, 'sample')} could not be read and {'is' if number == 1 else 'are'} skipped, of "
            f"length 0; the first is sample {manifest.skipped_samples[0]}"
        )
    lengths = manifest.definition.get("columns", (SEQLEN,))
    for name, summary in manifest.metrics.items():
        if name in manifest.keys:
            if manifest.keys[name].num_values <= 1:
                warnings.append(f"key {name} has one value or none in all samples; is it the right column?")
        elif summary.max == 0:
            warnings.append(f"{name} is 0 for all {manifest.num_samples} samples; is it the right column?")
        elif name in lengths and summary.max > LONGEST_PLANNED:
            warnings.append(
                f"{name} is up to {summary.max:,}, and a plan takes lengths up to {LONGEST_PLANNED:,}; does "
                "it count tokens?"
            )
        elif name in lengths and summary.min == summary.max and manifest.num_samples > 1:
            warnings.append(
                f"{name} is {summary.max} for all {manifest.num_samples} samples; if they were padded or "
                "truncated, analyze them as they were before"
            )
    return tuple(warnings)
