"""Numbers with their nouns."""

import pytest

from packer.wording import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "sample", "0 samples"),
        (1, "sample", "1 sample"),
        (5011, "sample", "5,011 samples"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (40, "epoch", "40 epochs"),
    ],
)
def test_one_and_many(number, noun, text):
    assert counted(number, noun) == text
