"""Tokenizers with a vocabulary of any size."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory) -> Callable[[int], Path]:
    """Word ``wN`` is token N; a text begins with token 0, and what is unknown is token 1."""

    def make(vocab_size: int) -> Path:
        words = ["[BOS]", "[UNK]", *(f"w{n}" for n in range(2, vocab_size))]
        model = WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
        tokenizer.enable_truncation(4)  # to be ignored
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return path

    return make


@pytest.fixture(scope="session")
def small_tokenizer(make_tokenizer) -> Path:
    return make_tokenizer(50)
