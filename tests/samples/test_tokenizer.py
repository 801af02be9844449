"""Texts of every Arrow kind through a tokenizer, counted and encoded alike; what is bad is named."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ConfigError
from packer.samples import LengthDefinition, encode, fast_count, measure, tokenizer
from packer.samples.ragged import RowError
from packer.samples.tokenizer import open_tokenizer

TEXTS = st.lists(st.none() | st.text(alphabet="ab é漢\n", max_size=30))
KINDS = {
    "string": lambda array: array,
    "large_string": lambda array: array.cast(pa.large_string()),
    "string_view": lambda array: pa.array(array.to_pylist(), pa.string_view()),
    "dictionary": lambda array: array.dictionary_encode(),
    "large dictionary": lambda array: array.cast(pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(texts=TEXTS, start=st.integers(0, 5))
def test_counts_equal_the_tokenizer_itself(tokenizer_json, kind, special_tokens, texts, start):
    own = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_json))
    own.no_truncation()
    own.no_padding()
    expected = [
        [] if text is None else own.encode(text, add_special_tokens=special_tokens).ids
        for text in texts[start:]
    ]
    batch = pa.record_batch({"text": KINDS[kind](pa.array(texts, pa.string())).slice(start)})
    definition = LengthDefinition.by_text(
        "text", tokenizer=str(tokenizer_json), special_tokens=special_tokens
    )
    assert measure(batch, definition).lengths["seqlen"].tolist() == [len(ids) for ids in expected]
    ids, lengths, _ = encode(batch, definition)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == expected


@given(st.lists(st.none() | st.text(alphabet="a é", max_size=30)), st.integers(1, 40))
def test_chunks_hold_every_text_once(texts, size):
    array = pa.array(texts, pa.string())
    chunks = tokenizer._cut(array, size)
    strings = [tokenizer._strings(array, rows) for rows in chunks]
    assert [row for rows in chunks for row in rows] == [
        row for row, text in enumerate(texts) if text is not None
    ]
    assert [text for chunk in strings for text in chunk] == [text for text in texts if text is not None]
    assert all(strings)
    # the middles of a chunk's texts are less than a chunk apart, so whole texts between first and last fit
    assert all(sum(len(text.encode()) for text in chunk[1:-1]) < size for chunk in strings)


def test_a_dictionary_may_hold_a_null(tokenizer_json):
    texts = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), pa.array(["a b", None]))
    opened = open_tokenizer(str(tokenizer_json), special_tokens=True)
    assert opened.count(texts).tolist() == [0, 4, 0, 0]
    assert opened.encode(texts)[1].tolist() == [0, 4, 0, 0]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_any_number_of_threads_counts_the_same(tokenizer_json, monkeypatch, threads):
    monkeypatch.setenv("RAYON_NUM_THREADS", threads)
    monkeypatch.setattr(tokenizer, "CHUNK_BYTES", 20)
    texts = pa.array(["a " * (n % 13) for n in range(200)])
    opened = open_tokenizer(str(tokenizer_json), special_tokens=True)
    assert opened.count(texts).tolist() == [n % 13 + 2 for n in range(200)]
    assert opened.encode(texts)[1].tolist() == [n % 13 + 2 for n in range(200)]


def test_a_text_that_is_not_unicode_names_its_row(tokenizer_json):
    texts = pa.array([b"a", None, b"\xff"], pa.binary()).cast(pa.string(), safe=False)
    with pytest.raises(RowError, match="not UTF-8") as caught:
        open_tokenizer(str(tokenizer_json), special_tokens=True).count(texts)
    assert caught.value.row == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "no tokenizer that tokenizers can read"),
        ("tokenizer.json", "not json", "no tokenizer that tokenizers can read"),
        ("other.txt", "", "holds no tokenizer.json"),
    ],
)
def test_a_bad_tokenizer_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        LengthDefinition.by_text("text", tokenizer=str(tmp_path))


def test_an_id_that_is_none_is_a_damaged_tokenizer(tmp_path, tokenizer_json):
    content = json.loads(tokenizer_json.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = dict.fromkeys(vocabulary, 2**31)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"damaged\.json cannot encode a text .*2147483648"):
        open_tokenizer(str(damaged), special_tokens=False).encode(pa.array(["ab"]))


def test_a_tokenizer_that_is_not_there():
    with pytest.raises(ConfigError, match=r"\./none\.json: no such file"):
        LengthDefinition.by_text("text", tokenizer="./none.json")


OFFLINE = """
import sys, pyarrow as pa
from packer.samples import LengthDefinition, encode, measure
definition = LengthDefinition.by_text("text", tokenizer="some/words")
batch = pa.record_batch({"text": ["a bb ccc if é"]})
print(measure(batch, definition).lengths["seqlen"].tolist(), encode(batch, definition).ids.tolist())
"""


@pytest.mark.frameworks
def test_a_name_that_transformers_knows_offline(tmp_path, tokenizer_json):
    snapshot = tmp_path / "models--some--words" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--words" / "refs").mkdir()
    (tmp_path / "models--some--words" / "refs" / "main").write_text("0" * 40)
    shutil.copy(tokenizer_json, snapshot / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[7] [1, 4, 5, 6, 7, 8, 2]\n"


@pytest.fixture(scope="module")
def byte_level_json(tmp_path_factory):
    """A byte-level BPE tokenizer, the kind that gigatoken reads."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("gigatoken")
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(["the cat sat on the mat", "abc abc ab é漢"] * 10, trainer)
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", own.token_to_id("<s>"))]
    )
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    own.save(str(path))
    return path


@pytest.mark.frameworks
@pytest.mark.parametrize("special_tokens", [True, False])
@given(texts=st.lists(st.none() | st.text(max_size=40)))
def test_the_fast_counter_counts_the_same(byte_level_json, special_tokens, texts):
    batch = pa.record_batch({"text": pa.array(texts, pa.string())})
    fast, exact = (
        LengthDefinition.by_text(
            "text", tokenizer=str(byte_level_json), special_tokens=special_tokens, counter=counter
        )
        for counter in ("gigatoken", "tokenizers")
    )
    assert measure(batch, fast).lengths["seqlen"].tolist() == measure(batch, exact).lengths["seqlen"].tolist()


@pytest.mark.frameworks
def test_a_fast_counter_that_disagrees_ends_the_run(byte_level_json):
    counter = open_tokenizer(str(byte_level_json), special_tokens=False, counter="gigatoken")
    counter._counter._num_added = 1  # as if it counted a token too many
    with pytest.raises(RowError, match="gigatoken counts 6 tokens where tokenizers counts 5"):
        counter.count(pa.array(["zzzzz"]))


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_the_proven_part_is_spread_evenly(sizes):
    proven = fast_count._spread(sizes)
    assert proven == sorted(set(proven))
    assert 0 <= proven[0] <= proven[-1] < len(sizes)
    if set(sizes) == {100}:
        assert len(proven) == max(len(sizes) // 16, 1)
