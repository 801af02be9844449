"""Token files hold what was counted, in both readers, and appear whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import (
    ConfigError,
    SourceChangedError,
    SourceError,
    TargetBusyError,
    TargetExistsError,
    TargetWriteError,
)
from packer.metrics import open_metrics
from packer.mmididx import MEGATRON_DTYPES, read_index
from tests import naive

TEXTS = ["w2 w3 w4", "", None, "w5", "w7 " * 30, "unknown w2", None, "w49"]
IDS = [[0, 2, 3, 4], [0], [], [0, 5], [0, *[7] * 30], [0, 1, 2], [], [0, 49]]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr("packer.analyzer.work.TEXT_UNIT_BYTES", 1)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "x.parquet", row_group_size=2)
    return tmp_path / "x.parquet"


def analyze(tmp_path, texts, tokenizer, **options):
    return packer.analyze(
        texts,
        out=tmp_path / "m",
        text_column="text",
        tokenizer=tokenizer,
        write_tokens=tmp_path / "tok",
        **options,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_the_ones_that_were_counted(tmp_path, texts, small_tokenizer, workers):
    result = analyze(tmp_path, texts, small_tokenizer, workers=workers)
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == IDS
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [len(ids) for ids in IDS]
    assert result.manifest.num_nulls == 2
    assert result.manifest.num_empties == 1  # a text of special tokens alone
    assert read_index(tmp_path / "tok.idx").document_index.tolist() == list(range(9))
    assert names(tmp_path) == ["m", "tok.bin", "tok.idx", "x.parquet"]

    for dataset in (
        packer.open_dataset(texts, metrics=tmp_path / "m"),
        packer.open_dataset(tmp_path / "tok.bin", metrics=tmp_path / "m"),
        packer.open_dataset(tmp_path / "tok.bin"),
    ):
        assert [dataset[n]["input_ids"].tolist() for n in range(len(dataset))] == IDS


def test_other_token_files_are_not_those_of_the_metrics(tmp_path, texts, small_tokenizer):
    analyze(tmp_path, texts, small_tokenizer)
    (tmp_path / "m").rename(tmp_path / "first")
    analyze(tmp_path, texts, small_tokenizer, special_tokens=False, overwrite=True)
    with pytest.raises(SourceChangedError, match=r"tok\.(bin|idx) is not the file"):
        packer.open_dataset(tmp_path / "tok.bin", metrics=tmp_path / "first")


@pytest.mark.parametrize(("special", "extra"), [(True, 1), (False, 0)])
def test_special_tokens_count_as_they_are_written(tmp_path, texts, small_tokenizer, special, extra):
    analyze(tmp_path, texts, small_tokenizer, special_tokens=special)
    sizes = read_index(tmp_path / "tok.idx").sizes.tolist()
    assert sizes == open_metrics(tmp_path / "m").metric("seqlen").tolist()
    assert sizes[0] == 3 + extra


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_the_type_follows_the_vocabulary(tmp_path, texts, make_tokenizer, vocab_size, dtype):
    analyze(tmp_path, texts, make_tokenizer(vocab_size))
    assert MEGATRON_DTYPES[read_index(tmp_path / "tok.idx").dtype_code] == dtype
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == IDS


def test_a_prefix_is_named_as_it_was_typed(tmp_path, texts, small_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"text_column": "text", "tokenizer": small_tokenizer, "write_tokens": "tok"}
    packer.analyze(texts, out="m", **options)
    with pytest.raises(TargetExistsError, match=r"^tok\.bin exists already"):
        packer.analyze(texts, out="n", **options)


def test_existing_files_are_kept_unless_told(tmp_path, texts, small_tokenizer):
    analyze(tmp_path, texts, small_tokenizer)
    before = (tmp_path / "tok.bin").read_bytes()
    (tmp_path / "m").rename(tmp_path / "other")
    with pytest.raises(TargetExistsError, match=r"tok\.bin exists already; choose another --write-tokens"):
        analyze(tmp_path, texts, small_tokenizer)
    assert (tmp_path / "tok.bin").read_bytes() == before
    assert names(tmp_path) == ["other", "tok.bin", "tok.idx", "x.parquet"]

    analyze(tmp_path, texts, small_tokenizer, special_tokens=False, overwrite=True)
    assert len((tmp_path / "tok.bin").read_bytes()) < len(before)


def test_overwrite_replaces_token_files_only(tmp_path, texts, small_tokenizer):
    (tmp_path / "tok.idx").write_text("chapter one")
    with pytest.raises(TargetExistsError, match="is no MMIDIDX index"):
        analyze(tmp_path, texts, small_tokenizer, overwrite=True)
    assert (tmp_path / "tok.idx").read_text() == "chapter one"


def test_two_runs_into_the_same_token_files(tmp_path, texts, small_tokenizer):
    def run_another(_):
        with pytest.raises(TargetBusyError, match=r"writing .*tok"):
            packer.analyze(
                texts,
                out=tmp_path / "other",
                text_column="text",
                tokenizer=small_tokenizer,
                write_tokens=tmp_path / "tok",
            )

    analyze(tmp_path, texts, small_tokenizer, progress=run_another)
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == IDS
    assert names(tmp_path) == ["m", "tok.bin", "tok.idx", "x.parquet"]


def test_what_has_no_tokens_to_write(tmp_path, texts, small_tokenizer):
    pq.write_table(pa.table({"ids": [[1, 2]]}), tmp_path / "ids.parquet")
    with pytest.raises(ConfigError, match="--write-tokens keeps the tokens of a text"):
        packer.analyze(
            tmp_path / "ids.parquet", out=tmp_path / "m", tokens_column="ids", write_tokens=tmp_path / "tok"
        )
    with pytest.raises(ConfigError, match="is inside --out"):
        packer.analyze(
            texts,
            out=tmp_path / "m",
            text_column="text",
            tokenizer=small_tokenizer,
            write_tokens=tmp_path / "m" / "tok",
        )
    assert names(tmp_path) == ["ids.parquet", "x.parquet"]


def test_a_full_disk(tmp_path, texts, small_tokenizer, monkeypatch):
    def no_room(*_, **__):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("packer.analyzer.token_files.write_index", no_room)
        with pytest.raises(TargetWriteError, match=r"tok\.bin: No space left on device; make room"):
            analyze(tmp_path, texts, small_tokenizer)
    assert names(tmp_path) == [".m.partial", "x.parquet"]
    assert analyze(tmp_path, texts, small_tokenizer).num_units_reused == 4
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == IDS


def test_a_damaged_source_leaves_nothing(tmp_path, texts, small_tokenizer):
    content = texts.read_bytes()
    texts.write_bytes(content[:20] + bytes(100) + content[120:])
    with pytest.raises(SourceError):
        analyze(tmp_path, texts, small_tokenizer)
    assert names(tmp_path) == ["x.parquet"]


KILLED_RUN = """
    import os, signal, sys
    import packer
    import packer.publish
    from packer.analyzer.token_files import TokenFiles

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    data, folder, tokenizer, where = sys.argv[1:]
    if where == "before":
        TokenFiles.publish = die
    elif where == "between":
        replace = packer.analyzer.token_files.Path.replace
        packer.analyzer.token_files.Path.replace = lambda path, to: (replace(path, to), die())
    else:
        packer.publish._move_into_place = die
    out, prefix = folder + "/m", folder + "/tok"
    packer.analyze(data, out=out, text_column="text", tokenizer=tokenizer, write_tokens=prefix)
"""


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_kill_while_publishing_is_repaired_by_the_next_run(tmp_path, texts, small_tokenizer, where):
    (tmp_path / "run.py").write_text(textwrap.dedent(KILLED_RUN))
    command = [sys.executable, tmp_path / "run.py", texts, tmp_path, small_tokenizer, where]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "m").exists()

    analyze(tmp_path, texts, small_tokenizer)
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == IDS
    assert names(tmp_path) == ["m", "run.py", "tok.bin", "tok.idx", "x.parquet"]


@pytest.mark.frameworks
def test_tokens_of_chats(tmp_path, small_tokenizer, monkeypatch):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}w2 {% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}w3 {{ m.content }} {% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5 w6"}]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(small_tokenizer.read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    pq.write_table(pa.table({"chat": [chat, None, chat[:1]]}), tmp_path / "x.parquet")
    packer.analyze(
        tmp_path / "x.parquet",
        out=tmp_path / "m",
        messages_column="chat",
        tokenizer=tmp_path / "model",
        write_tokens=tmp_path / "tok",
    )
    assert naive.read_items(tmp_path / "tok", MEGATRON_DTYPES) == [[3, 4, 2, 5, 6], [], [3, 4]]
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [5, 0, 2]
    assert open_metrics(tmp_path / "m").metric("loss_tokens").tolist() == [2, 0, 0]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # megatron-core's imports
def test_megatron_opens_what_we_write(tmp_path, texts, make_tokenizer):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for vocab_size, dtype in ((50, np.uint16), (70_000, np.int32)):
        analyze(tmp_path, texts, make_tokenizer(vocab_size), overwrite=True)
        theirs = IndexedDataset(str(tmp_path / "tok"))
        assert [theirs[n].tolist() for n in range(len(theirs))] == IDS
        assert theirs.index.dtype is dtype
        assert theirs.document_indices.tolist() == list(range(len(IDS) + 1))
