"""Damaged tokenizers: a share of what the script runs."""

import pytest

from tests.fuzz.children import fuzz

MODULE = "tests.fuzz.fuzz_tokenizers"
ABORT_OF_TOKENIZERS = "memory allocation of"
"""A damaged id makes the library take memory for all ids below it, 8 GiB for 2³¹, and end the process where
there is none."""


@pytest.mark.slow
def test_hundreds_of_tokenizer_files():
    failures, outcomes = fuzz(MODULE, "tokenizer.json", 1000, seed=100_000)
    assert not failures
    assert outcomes["ConfigError"] > 0
    assert outcomes["read"] > 0


@pytest.mark.frameworks
def test_chat_tokenizers():
    failures, _ = fuzz(MODULE, "chat tokenizer", 40, seed=100_000)
    assert not [failure for failure in failures if ABORT_OF_TOKENIZERS not in failure]
