"""What people report of other tools, tried here: the kind of data, and of trouble, is in each name.

Of speech (lhotse, NeMo, ESPnet, SpeechBrain), translation (fairseq, OpenNMT, CTranslate2, tensor2tensor),
proteins (ESM, BioNeMo), recommendation (Merlin), time series (GluonTS, Chronos), pre-training (Megatron,
streaming, webdataset, datasets).
"""

import bz2
import datetime
import gzip
import json
import lzma
import zipfile
from decimal import Decimal
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import ConfigError, EmptyPlanError, SampleTooLongError, SourceError
from packer.metrics import open_metrics
from tests import invariants
from tests.sources.test_arrow import write as write_arrow
from tests.sources.test_indexed import write_pair
from tests.sources.test_mds import ROWS, write_folder
from tests.word_tokenizer import write_tokenizer


def measured(source, **options):
    """Return the lengths of a data set."""
    out = (source if source.is_dir() else source.parent) / "measured"
    packer.analyze(source, out=out, **options)
    metrics = open_metrics(out)
    return metrics.metric(metrics.names[0]).tolist()


def planned(folder, seqlens, **options):
    """Return the samples of every micro-batch, fillers aside, and what is dropped; check the invariants."""
    pq.write_table(pa.table({"n": pa.array(seqlens, pa.int64())}), folder / "lengths.parquet")
    packer.analyze(folder / "lengths.parquet", out=folder / "metrics", length_column="n")
    plan = packer.make_plan(folder / "metrics", packer.PlanConfig(**options), out=folder / "plan")
    invariants.check(folder / "plan", seqlens)
    epoch = plan.epoch(0)
    rows = [epoch.microbatch(row) for row in range(epoch.num_microbatches)]
    kept = [row.sample_ids.tolist() for row in rows if not row.is_filler]
    with pa.memory_map(str(folder / "plan" / "dropped.arrow")) as file:
        dropped = pa.ipc.open_file(file).read_all().to_pylist()
    return kept, [(drop["sample_id"], drop["reason"]) for drop in dropped]


def samples_of(microbatches):
    return sorted(chain.from_iterable(microbatches))


def lines(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


class TestSpeech:
    @pytest.mark.parametrize("order", ["random", "sequential"])
    def test_a_long_cut_after_short_ones_keeps_the_padded_budget(self, tmp_path, order):
        kept, dropped = planned(tmp_path, [100] * 5 + [2000], max_tokens=5000, order=order)
        assert samples_of(kept) == list(range(6))
        assert not dropped

    @pytest.mark.parametrize("number", [1, 2, 999, 1000])
    def test_no_cut_is_lost_to_a_bucket(self, tmp_path, number):
        seqlens = [1 + n % 97 for n in range(number)]
        kept, dropped = planned(tmp_path, seqlens, max_tokens=500)
        assert samples_of(kept) == list(range(number))
        assert not dropped

    def test_a_tail_of_long_durations_is_bounded_by_its_longest(self, tmp_path):
        seqlens = [*range(730, 1140, 10)]
        kept, _ = planned(tmp_path, seqlens, max_tokens=30_000)
        assert all(len(ids) * max(seqlens[n] for n in ids) <= 30_000 for ids in kept)

    def test_short_utterances_are_bounded_by_number_too(self, tmp_path):
        kept, _ = planned(tmp_path, [1] * 300 + [90] * 10, max_tokens=1000, max_samples=16)
        assert max(map(len, kept)) == 16

    def test_cuts_over_the_budget_are_dropped_by_name(self, tmp_path):
        kept, dropped = planned(tmp_path, [10, 10, 999, 10], max_tokens=100, too_long="drop")
        assert dropped == [(2, "too_long")]
        assert samples_of(kept) == [0, 1, 3]

    def test_one_recording_far_over_the_budget_is_named_before_training(self, tmp_path):
        with pytest.raises(SampleTooLongError, match=r"sample 1 .*4751360"):
            planned(tmp_path, [100_000, 4_751_360], max_tokens=300_000)

    def test_audio_and_text_have_a_budget_each(self, tmp_path):
        data = table(tmp_path / "x.parquet", frames=[100, 50, 50, 10], letters=[1, 60, 1, 90])
        packer.analyze(data, out=tmp_path / "m", length_column={"audio": "frames", "text": "letters"})
        config = packer.PlanConfig(max_tokens={"audio": 200, "text": 100})
        plan = packer.make_plan(tmp_path / "m", config, out=tmp_path / "plan")
        epoch = plan.epoch(0)
        rows = [epoch.microbatch(row).sample_ids.tolist() for row in range(epoch.num_microbatches)]
        assert samples_of(rows) == [0, 1, 2, 3]
        for ids in rows:
            assert len(ids) * max([100, 50, 50, 10][n] for n in ids) <= 200
            assert len(ids) * max([1, 60, 1, 90][n] for n in ids) <= 100

    def test_a_manifest_with_blank_lines_and_spaces(self, tmp_path):
        rows = [{"duration": 3}, "\n", "   \n", {"duration": 4}, "\n"]
        assert measured(lines(tmp_path / "manifest.json", rows), length_column="duration") == [3, 4]

    def test_a_manifest_in_brackets(self, tmp_path):
        path = lines(tmp_path / "manifest.json", ["[\n", '{"duration": 3},\n', '{"duration": 4}\n', "]\n"])
        with pytest.raises(SourceError, match=r"manifest\.json, row 0: .*jq -c '\.\[\]'"):
            measured(path, length_column="duration")

    def test_two_objects_on_one_line(self, tmp_path):
        path = lines(tmp_path / "manifest.json", [{"duration": 3}, '{"duration": 4}{"duration": 5}\n'])
        with pytest.raises(SourceError, match=r"row 1: no JSON object on one line .Extra data"):
            measured(path, length_column="duration")

    def test_a_recording_in_place_of_its_manifest(self, tmp_path):
        (tmp_path / "x.wav").write_bytes(b"RIFF\x24\x98\0\0WAVEfmt \x10\0\0\0")
        with pytest.raises(SourceError, match=r"x\.wav is of no format that packer reads"):
            measured(tmp_path / "x.wav", length_column="duration")

    def test_transcripts_in_any_script_with_keys_in_any_order(self, tmp_path):
        text = (
            '{"duration": 18, "text": "يا أيها الناس"}\n{"text": "ma\u0301", "duration": 29}\n{"text": "x"}\n'
        )
        (tmp_path / "m.jsonl").write_bytes(text.encode())
        assert measured(tmp_path / "m.jsonl", length_column="duration") == [18, 29, 0]

    def test_durations_in_seconds_are_no_lengths(self, tmp_path):
        path = lines(tmp_path / "m.jsonl", [{"duration": 5.0}, {"duration": 18.71}])
        with pytest.raises(SourceError, match=r"row 1: .*number 18\.71 where an integer was expected"):
            measured(path, length_column="duration")
        with pytest.raises(SourceError, match="of type double; name an integer column"):
            measured(table(tmp_path / "x.parquet", duration=[18.71]), length_column="duration")

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "true", '"12"', "-1", "2e19"])
    @pytest.mark.parametrize("fast_bytes", [0, 1 << 30])
    def test_a_duration_that_is_none_is_named(self, tmp_path, monkeypatch, value, fast_bytes):
        monkeypatch.setattr("packer.sources.json_rows._FAST_BYTES", fast_bytes)
        path = lines(tmp_path / "m.jsonl", [{"duration": 1}, f'{{"duration": {value}}}\n'])
        with pytest.raises(SourceError, match="row 1: column 'duration' holds"):
            measured(path, length_column="duration")

    def test_a_data_set_without_ids_of_its_own(self, tmp_path):
        class Plain:
            def __len__(self):
                return 3

            def __getitem__(self, index):
                return np.zeros(index + 1)

        packer.analyze_dataset(
            Plain(), lambda samples: [len(sample) for sample in samples], out=tmp_path / "m"
        )
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [1, 2, 3]

    def test_a_stream_without_a_length_is_told_what_to_do(self, tmp_path):
        with pytest.raises(ConfigError, match=r"generator cannot be asked for its length.*--length-column"):
            packer.analyze_dataset((n for n in range(3)), len, out=tmp_path / "m")
        assert not (tmp_path / "m").exists()


class TestTranslation:
    def test_one_token_over_the_budget(self, tmp_path):
        with pytest.raises(SampleTooLongError, match=r"sample 2 .*513"):
            planned(tmp_path, [512, 1, 513], max_tokens=512)

    def test_the_end_token_is_counted(self, tmp_path):
        path = lines(tmp_path / "x.jsonl", [{"text": "w2 w3"}])
        tokenizer = write_tokenizer(tmp_path, 9)
        assert measured(path, text_column="text", tokenizer=tokenizer) == [3]

    def test_padding_counts_against_the_budget(self, tmp_path):
        seqlens = [1, 64, 1, 64, 2, 60] * 20
        kept, _ = planned(tmp_path, seqlens, max_tokens=256, order="sequential")
        assert all(len(ids) * max(seqlens[n] for n in ids) <= 256 for ids in kept)

    def test_a_corpus_whose_every_sentence_is_too_long(self, tmp_path):
        with pytest.raises(EmptyPlanError):
            planned(tmp_path, [2000] * 9, max_tokens=1024, too_long="drop")

    def test_no_number_of_sentences_has_to_be_a_multiple(self, tmp_path):
        kept, dropped = planned(tmp_path, [20] * 877, max_tokens=160, dp_size=8, remainder="keep")
        assert (len(samples_of(kept)), dropped) == (877, [])

    def test_a_pair_with_one_empty_side_keeps_its_place(self, tmp_path):
        path = lines(tmp_path / "x.jsonl", [{"s": [1] * 4, "t": []}, {"s": [1], "t": [1]}])
        packer.analyze(path, out=tmp_path / "m", tokens_column={"source": "s", "target": "t"})
        metrics = open_metrics(tmp_path / "m")
        assert (metrics.metric("source").tolist(), metrics.metric("target").tolist()) == ([4, 1], [0, 1])

    def test_line_separators_inside_a_text_end_no_line(self, tmp_path):
        text = "a\u2028b\u2029c\u0085d\x0be\x0cf"
        path = tmp_path / "x.jsonl"
        path.write_bytes(f"{json.dumps({'t': text, 'n': 1}, ensure_ascii=True)}\n".encode())
        assert measured(path, length_column="n") == [1]
        raw = tmp_path / "raw"
        raw.mkdir()
        (raw / "x.jsonl").write_bytes('{"t": "a\u2028b\u2029c\u0085d", "n": 1}\n{"n": 2}\n'.encode())
        assert measured(raw / "x.jsonl", length_column="n") == [1, 2]

    def test_another_encoding_is_named(self, tmp_path):
        (tmp_path / "x.jsonl").write_bytes('{"n": 1}\n{"n": 2, "t": "é"}\n'.encode("latin-1"))
        with pytest.raises(SourceError, match=r"row 1: .*not UTF-8: byte 0xe9"):
            measured(tmp_path / "x.jsonl", length_column="n")


class TestProteins:
    def test_longer_than_the_model_reads(self, tmp_path):
        seqlens = [1042, 30, 1024]
        with pytest.raises(SampleTooLongError, match=r"sample 0 .*1042"):
            planned(tmp_path, seqlens, max_tokens=16_384, max_seqlen=1024)

    def test_only_the_first_residues_are_kept_where_asked(self, tmp_path):
        kept, dropped = planned(
            tmp_path, [1042, 30, 1024], max_tokens=16_384, max_seqlen=1024, too_long="truncate"
        )
        assert samples_of(kept) == [0, 1, 2]
        assert dropped == [(0, "truncated")]

    def test_spaces_between_residues_change_no_length(self, tmp_path):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        residues = Tokenizer(models.WordLevel({"[UNK]": 0, "M": 1, "K": 2}, unk_token="[UNK]"))
        residues.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
        )
        residues.save(str(tmp_path / "tokenizer.json"))
        path = lines(tmp_path / "x.jsonl", [{"seq": "MKMK"}, {"seq": "M K M K"}])
        assert measured(path, text_column="seq", tokenizer=tmp_path / "tokenizer.json") == [4, 4]

    @pytest.mark.parametrize("name", ["x.fasta", "x.fasta.gz", "x.a3m.gz"])
    def test_fasta_is_told_what_to_do(self, tmp_path, name):
        content = b">sp|P1\nMKV\n"
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(SourceError, match=r"packer reads.*analyze_dataset.*--length-column"):
            measured(tmp_path / name, length_column="n")

    def test_strings_of_residues_are_no_lists(self, tmp_path):
        path = table(tmp_path / "x.parquet", seq=[["M", "K"]], raw=["MK"])
        for column in ("seq", "raw"):
            with pytest.raises(SourceError, match=r"name a list of integers.*--length-column"):
                measured(path, tokens_column=column)


class TestRecommendation:
    def test_sessions_of_any_length_with_columns_beside_the_items(self, tmp_path):
        path = table(
            tmp_path / "sessions.parquet",
            items=pa.array([[5, 6], [7], [], None], pa.list_(pa.int64())),
            prices=pa.array([[0.5, 1.5], [2.5], [], None], pa.list_(pa.float32())),
        )
        assert measured(path, tokens_column="items") == [2, 1, 0, 0]
        dataset = packer.open_dataset(path, metrics=tmp_path / "measured", fields=["prices"])
        assert dataset[0]["prices"].tolist() == [0.5, 1.5]
        assert len(dataset[3]["prices"]) == 0

    def test_short_sessions_are_filtered(self, tmp_path):
        kept, dropped = planned(tmp_path, [1, 5, 1, 3], max_tokens=10, filter_min=2)
        assert (samples_of(kept), dropped) == ([1, 3], [(0, "filtered"), (2, "filtered")])

    def test_long_sessions_are_truncated(self, tmp_path):
        kept, dropped = planned(tmp_path, [250, 20, 7], max_tokens=60, max_seqlen=20, too_long="truncate")
        assert samples_of(kept) == [0, 1, 2]
        assert dropped == [(0, "truncated")]

    def test_categories_are_texts_and_no_lists(self, tmp_path):
        text = pa.array(["w2 w3", "w4", "w2 w3", None]).dictionary_encode()
        events = pa.array([["a", "b"]] * 4, pa.list_(pa.dictionary(pa.int32(), pa.string())))
        path = table(tmp_path / "x.parquet", text=text, events=events)
        tokenizer = write_tokenizer(tmp_path, 9)
        assert measured(path, text_column="text", tokenizer=tokenizer) == [3, 2, 3, 0]
        with pytest.raises(SourceError, match=r"list<.*dictionary<.*name a list of integers"):
            packer.analyze(path, out=tmp_path / "n", tokens_column="events")

    def test_the_output_of_spark(self, tmp_path):
        for day, length in (("2", 1), ("10", 2), ("__HIVE_DEFAULT_PARTITION__", 3)):
            folder = tmp_path / "out" / f"day={day}"
            folder.mkdir(parents=True)
            table(folder / "part-00000.c000.snappy.parquet", n=[length])
            (folder / ".part-00000.c000.snappy.parquet.crc").write_bytes(b"crc")
        (tmp_path / "out" / "_SUCCESS").touch()
        (tmp_path / "out" / "_metadata").write_bytes(b"PAR1")
        packer.analyze(tmp_path / "out", out=tmp_path / "m", length_column="n")
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [1, 2, 3]

    def test_counts_that_pandas_made_floats(self, tmp_path):
        path = table(tmp_path / "x.parquet", n=[5.0, None])
        with pytest.raises(SourceError, match=r"type double; .*astype\('Int64'\)"):
            measured(path, length_column="n")
        assert measured(lines(tmp_path / "x.jsonl", [{"n": 5.0}, {"n": None}]), length_column="n") == [5, 0]


class TestTimeSeries:
    def test_values_are_no_token_ids_but_have_lengths(self, tmp_path):
        target = pa.array([[1.5, float("nan")], [2.0]])
        data = pa.table({"start": [datetime.datetime(2020, 1, 1)] * 2, "target": target, "n": [2, 1]})
        path = write_arrow(tmp_path / "x.arrow", data, "file")
        with pytest.raises(
            SourceError, match=r"type list<.*double>; name a list of integers.*--length-column"
        ):
            measured(path, tokens_column="target")
        with pytest.raises(SourceError, match=r"type timestamp.*name an integer column"):
            measured(path, length_column="start")
        assert measured(path, length_column="n") == [2, 1]

    def test_several_variates_are_lists_of_lists(self, tmp_path):
        path = table(tmp_path / "x.parquet", target=[[[1.0, 2.0], [3.0, 4.0]]])
        with pytest.raises(SourceError, match=r"list<.*list<.*name a list of integers"):
            measured(path, tokens_column="target")

    def test_a_column_with_a_dot_in_its_name(self, tmp_path):
        data = pa.table({"target": [[1.0] * 6], "target._np_shape": [[2, 3]], "s": [{"n": 7}], "s.n": [8]})
        path = write_arrow(tmp_path / "x.arrow", data, "stream")
        assert measured(path, tokens_column="target._np_shape") == [2]
        packer.analyze(path, out=tmp_path / "m", length_column="s.n")
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [8]

    def test_json_lines_by_the_names_that_others_give_them(self, tmp_path):
        for name in ("a.json", "b.jsonl", "c.json.gz", "d.jsonl.gz", "e.ndjson"):
            content = b'{"n": 3}\n'
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
            packer.analyze(tmp_path / name, out=tmp_path / f"m-{name}", length_column="n")
            assert open_metrics(tmp_path / f"m-{name}").metric("seqlen").tolist() == [3]

    @pytest.mark.parametrize(
        "value", [Decimal(5), True, datetime.timedelta(seconds=5), datetime.date(2020, 1, 1), b"5"]
    )
    def test_what_is_no_integer_is_named_by_its_type(self, tmp_path, value):
        with pytest.raises(SourceError, match=r"column 'n' is of type \w+.*name an integer column"):
            measured(table(tmp_path / "x.parquet", n=[value]), length_column="n")


class TestPreTraining:
    def test_an_empty_first_document(self, tmp_path):
        path = lines(tmp_path / "x.jsonl", [{"text": ""}, {"text": "w2"}])
        tokenizer = write_tokenizer(tmp_path, 9)
        assert measured(path, text_column="text", tokenizer=tokenizer, special_tokens=False) == [0, 1]

    def test_texts_of_length_zero_are_dropped_and_listed(self, tmp_path):
        kept, dropped = planned(tmp_path, [0, 5, 0, 4], max_tokens=10)
        assert (samples_of(kept), dropped) == ([1, 3], [(0, "empty"), (2, "empty")])

    def test_token_files_split_by_sentences(self, tmp_path):
        write_pair(tmp_path / "t", [[1, 2], [3], [4]], 8, np.dtype(np.uint16), documents=[0, 2])
        assert measured(tmp_path / "t.idx") == [2, 1, 1]

    def test_shards_whose_lists_are_of_different_types(self, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        table(folder / "a.parquet", ids=pa.array([[1, 2]], pa.list_(pa.int32())))
        table(folder / "b.parquet", ids=pa.array([[1], [2, 3, 4]], pa.large_list(pa.int64())), more=[1, 2])
        table(folder / "c.parquet", ids=pa.nulls(2))
        table(folder / "d.parquet", ids=pa.array([[9, 9]], pa.list_(pa.uint16(), 2)))
        packer.analyze(folder, out=tmp_path / "m", tokens_column="ids")
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [2, 1, 3, 0, 0, 2]
        dataset = packer.open_dataset(folder, metrics=tmp_path / "m")
        assert [sample["input_ids"].tolist() for sample in dataset] == [
            [1, 2],
            [1],
            [2, 3, 4],
            [],
            [],
            [9, 9],
        ]

    def test_a_key_that_only_some_shards_have(self, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        lines(folder / "a.jsonl", [{"meta": {"n": 1}}])
        lines(folder / "b.jsonl", [{"meta": {"n": 2, "extra": "x"}, "more": []}])
        packer.analyze(folder, out=tmp_path / "m", length_column="meta.n")
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [1, 2]

    def test_a_cut_gz_names_the_file(self, tmp_path):
        content = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(50_000)))
        (tmp_path / "c4-00001.json.gz").write_bytes(content[: len(content) // 2])
        with pytest.raises(SourceError, match=r"c4-00001\.json\.gz"):
            measured(tmp_path / "c4-00001.json.gz", length_column="n")

    @pytest.mark.parametrize(("name", "pack"), [("xz", lzma.compress), ("bz2", bz2.compress)])
    def test_other_compressions_are_named(self, tmp_path, name, pack):
        (tmp_path / f"x.jsonl.{name}").write_bytes(pack(b'{"n": 1}\n'))
        with pytest.raises(SourceError, match=r"is packed by (xz|bzip2), .*gzip or zstd"):
            measured(tmp_path / f"x.jsonl.{name}", length_column="n")

    def test_an_archive_is_named(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr("x.jsonl", '{"n": 1}\n')
        with pytest.raises(SourceError, match=r"is packed by zip"):
            measured(tmp_path / "x.zip", length_column="n")

    @pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.arrow"])
    def test_the_pointer_of_git_lfs_is_named(self, tmp_path, name):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
        (tmp_path / name).write_bytes(pointer)
        with pytest.raises(SourceError, match=r"pointer of Git LFS.*git lfs pull"):
            measured(tmp_path / name, length_column="n")

    def test_a_tail_of_zeros_that_a_crash_left(self, tmp_path):
        (tmp_path / "x.jsonl").write_bytes(b'{"n": 1}\n' + b"\0" * 100)
        with pytest.raises(SourceError, match=r"row 1: .*NUL bytes"):
            measured(tmp_path / "x.jsonl", length_column="n")

    def test_mds_parts_whose_index_was_not_merged(self, tmp_path):
        for part in ("part.2", "part.10"):
            (tmp_path / "mds").mkdir(exist_ok=True)
            write_folder(tmp_path / "mds" / part)
        packer.analyze(tmp_path / "mds", out=tmp_path / "m", tokens_column="ids")
        lengths = [len(row["ids"]) for row in ROWS]
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == lengths * 4

    def test_mds_columns_of_bytes_are_named_by_their_type(self, tmp_path):
        folder = write_folder(tmp_path / "mds", column_encodings=["bytes", "ndarray", "str", "int", "pkl"])
        with pytest.raises(SourceError, match="column 'ids' is of type binary; name a list of integers"):
            packer.analyze(folder, out=tmp_path / "m", tokens_column="ids")

    @pytest.mark.parametrize("half", [r"\ud800", r"\udbc0", r"\udcb2", r"\udfff"])
    def test_halves_of_characters_are_named_or_replaced(self, tmp_path, half):
        path = lines(tmp_path / "x.jsonl", [f'{{"text": "w2 {half}"}}\n'])
        options = {"text_column": "text", "tokenizer": write_tokenizer(tmp_path, 9)}
        with pytest.raises(SourceError, match="row 0: column 'text' holds half of a surrogate pair"):
            measured(path, **options)
        assert measured(path, on_error="replace", **options) == [3]

    def test_a_function_that_returns_lists_of_different_length(self, tmp_path):
        with pytest.raises(SourceError, match="returned what is no array"):
            packer.analyze_dataset([1, 2], lambda samples: [[1], [2, 3]], out=tmp_path / "m")

    def test_a_folder_whose_name_is_a_pattern(self, tmp_path):
        folder = tmp_path / "run[1]*"
        folder.mkdir()
        lines(folder / "x?.jsonl", [{"n": 1}])
        packer.analyze(folder, out=tmp_path / "m", length_column="n")
        packer.analyze(folder / "x?.jsonl", out=tmp_path / "n", length_column="n")
        assert open_metrics(tmp_path / "n").metric("seqlen").tolist() == [1]


class TestResume:
    @pytest.fixture
    def loader(self, tmp_path):
        """Return what opens a loader of two epochs."""
        path = lines(tmp_path / "x.jsonl", [{"ids": [n] * (1 + n % 7)} for n in range(200)])
        packer.analyze(path, out=tmp_path / "m", tokens_column="ids")
        config = packer.PlanConfig(max_tokens=32, epochs=2, remainder="keep")
        plan = packer.make_plan(tmp_path / "m", config, out=tmp_path / "plan")
        dataset = packer.open_dataset(path, metrics=tmp_path / "m")
        return lambda: packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1)

    @pytest.mark.parametrize("num_steps", [1, 17])
    def test_in_the_middle_of_an_epoch_no_sample_comes_twice(self, loader, num_steps):
        first = loader()
        seen = []
        for step in first:
            seen += [batch.sample_ids.tolist() for batch in step]
            if len(seen) == num_steps:
                break
        second = loader()
        second.load_state_dict(first.state_dict())
        seen += [batch.sample_ids.tolist() for step in second for batch in step]
        assert samples_of(seen) == list(range(200))

    def test_beyond_the_first_epoch(self, loader):
        first = loader()
        list(first)
        whole = [[batch.sample_ids.tolist() for batch in step] for step in first]
        again = loader()
        again.set_epoch(1)
        state = None
        for number, step in enumerate(again):
            list(step)
            if number == 2:
                state = again.state_dict()
                break
        resumed = loader()
        resumed.load_state_dict(state)
        rest = [[batch.sample_ids.tolist() for batch in step] for step in resumed]
        assert rest == whole[3:]
        assert samples_of(chain.from_iterable(whole)) == list(range(200))
