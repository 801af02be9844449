"""Tokenizers small enough to think about."""

import pytest

WORDS = ["[UNK]", "[BOS]", "[EOS]", "[PAD]", "a", "bb", "ccc", "if", "é", "漢"]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A ``tokenizer.json`` with special tokens, and with the truncation and padding that must be ignored."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(
        {word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=128, pad_token="[PAD]", pad_id=3)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
