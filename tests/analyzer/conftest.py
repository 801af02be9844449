"""Tokenizers with a vocabulary of any size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.word_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory) -> Callable[[int], Path]:
    return lambda vocab_size: write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size)


@pytest.fixture(scope="session")
def small_tokenizer(make_tokenizer) -> Path:
    return make_tokenizer(50)
