"""A tokenizer with a vocabulary of any size."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Word ``wN`` is token N; a text begins with token 0, and what is unknown is token 1."""
    words = ["[BOS]", "[UNK]", *(f"w{n}" for n in range(2, vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    tokenizer.enable_truncation(4)  # to be ignored
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
