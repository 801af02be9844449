"""Open damaged tokenizers and count with them: each gives what its library says, or a PackerError.

python -m tests.fuzz.fuzz_tokenizers --inputs 10000
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from packer.samples.chat import open_chat_tokenizer
from packer.samples.tokenizer import open_tokenizer
from tests.fuzz.children import WrongOutcomeError, main
from tests.fuzz.fuzz_sources import naming, write_chat_tokenizer
from tests.fuzz.mutations import mutate, mutate_json_text

TEXTS = ["w1 w2", "", None, "hello é world " * 20, "\x00 😀"]
CHATS = [[{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}], []]


class TokenizerFile:
    """A ``tokenizer.json`` of one of three models."""

    def prepare(self, place: Path) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        write_chat_tokenizer(place)
        (place / "tokenizer.json").rename(place / "good-0.json")
        pairs = Tokenizer(models.BPE(unk_token="[UNK]"))
        pairs.pre_tokenizer = pre_tokenizers.ByteLevel()
        pairs.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["[UNK]", "[BOS]"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        pairs.train_from_iterator(["w1 w2 w3 hello world"] * 20, trainer)
        pairs.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
        pairs.save(str(place / "good-1.json"))
        likely = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁w", -1.0), ("w1", -2.0), ("a", -3.0)], 0))
        likely.pre_tokenizer = pre_tokenizers.Metaspace()
        likely.save(str(place / "good-2.json"))

    def attempt(self, random: Random, place: Path) -> str:
        bad = place / "bad.json"
        _write_damaged(place / f"good-{random.randrange(3)}.json", bad, random)
        open_tokenizer.cache_clear()
        texts = pa.array(TEXTS)
        with naming(bad):
            tokenizer = open_tokenizer(str(bad), special_tokens=True)
            counts = tokenizer.count(texts).tolist()
            _, lengths = tokenizer.encode(texts)
        right = [0 if text is None else _length(bad, text) for text in TEXTS]
        if not counts == lengths.tolist() == right:
            raise WrongOutcomeError(f"counted {counts}, encoded {lengths}, where the library gives {right}")
        return "read"


class ChatTokenizerFolder:
    """A ``tokenizer.json``, or the settings with the template beside it."""

    def prepare(self, place: Path) -> None:
        (place / "good").mkdir()
        (place / "bad").mkdir()
        write_chat_tokenizer(place / "good")

    def attempt(self, random: Random, place: Path) -> str:
        names = ["tokenizer.json", "tokenizer_config.json"]
        victim = random.choice(names)
        for name in names:
            if name == victim:
                _write_damaged(place / "good" / name, place / "bad" / name, random)
            else:
                (place / "bad" / name).write_bytes((place / "good" / name).read_bytes())
        open_chat_tokenizer.cache_clear()
        with naming(place / "bad"):
            tokenizer = open_chat_tokenizer(str(place / "bad"))
        ids, counts, mask = tokenizer.encode(pa.array(CHATS), masks=random.choice((None, True, False)))
        if counts.sum() != len(ids) or counts[1] or (mask is not None and len(mask) != len(ids)):
            raise WrongOutcomeError(f"{counts} of {ids}, {mask}")
        return "read"


def _write_damaged(good: Path, bad: Path, random: Random) -> None:
    damage = mutate_json_text if random.random() < 0.6 else mutate
    bad.write_bytes(damage(json.dumps(json.loads(good.read_bytes())).encode(), random))


def _length(path: Path, text: str) -> int:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return len(tokenizer.encode(text).ids)


SUBJECTS = {"tokenizer.json": TokenizerFile(), "chat tokenizer": ChatTokenizerFolder()}

if __name__ == "__main__":
    main("tests.fuzz.fuzz_tokenizers", __doc__, SUBJECTS)
