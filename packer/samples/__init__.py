"""What a row means: its length, its token ids and the fields beside them.

A `LengthDefinition` says it once; `measure` applies it to record batches, and the data set of `open_dataset`
delivers exactly as many ids as `measure` counted, for every row.
"""

from packer.samples.dataset import Dataset
from packer.samples.definition import (
    LOSS_TOKENS,
    SEQLEN,
    LengthDefinition,
    check_definition,
    default_definition,
    samples_of,
)
from packer.samples.encoded import Encoded
from packer.samples.measure import Measurement, measure, measure_unit
from packer.samples.opening import check_unchanged, open_dataset
from packer.samples.tokens import encode

__all__ = [
    "LOSS_TOKENS",
    "SEQLEN",
    "Dataset",
    "Encoded",
    "LengthDefinition",
    "Measurement",
    "check_definition",
    "check_unchanged",
    "default_definition",
    "encode",
    "measure",
    "measure_unit",
    "open_dataset",
    "samples_of",
]
