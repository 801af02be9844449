"""Odd files of other projects: the right lengths, or one error that names file and place."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import SourceError
from packer.samples import LengthDefinition, check_definition, default_definition, measure_unit, open_dataset
from packer.sources import open_source

DATA = Path(__file__).parents[1] / "data"
tokens, length = LengthDefinition.by_tokens, LengthDefinition.by_length


def lengths_of(path, definition, target_bytes=64):
    source = open_source(path)
    check_definition(source, definition)
    units = source.units(list(definition.read_columns), target_bytes=target_bytes)
    return [n for unit in units for m in measure_unit(source, unit, definition) for n in m.lengths["seqlen"]]


@pytest.mark.parametrize(
    ("name", "definition", "lengths"),
    [
        ("odd/null_list.parquet", tokens("emptylist"), [0]),
        ("odd/repeated_primitive_no_list.parquet", tokens("Int32_list"), [4, 0, 1, 4]),
        (
            "odd/repeated_primitive_no_list.parquet",
            tokens("group_of_lists.Int32_list_in_group"),
            [4, 0, 1, 4],
        ),
        ("odd/dict-page-offset-zero.parquet", length("l_partkey"), [1552] * 39),
        ("odd/1.0.0-bigendian__generated_primitive.arrow", length("uint8_nullable"), None),
        ("odd/2.0.0-compression__generated_lz4.arrows", length("ints"), None),
        ("odd/foods1_polars.ipc", length("calories"), None),
        ("odd_jsonl/different_schemas.ndjson", length("id"), [1, 2, 3, 4, 5]),
        ("odd_jsonl/duplicate_key.ndjson", length("id"), [1, 2, 42, 4, 5]),  # the last one counts
        ("odd_jsonl/example_rn.ndjson", length("id"), [1, 2, 3, 4, 5]),
        ("odd_jsonl/example_rn.ndjson.gz", length("id"), [1, 2, 3, 4, 5]),
    ],
)
def test_right_lengths(name, definition, lengths):
    found = lengths_of(DATA / name, definition)
    column = definition.columns[0][1]
    assert found == (lengths if lengths is not None else plain_lengths(DATA / name, column))
    assert len(found) > 0


def plain_lengths(path, column):
    """Read a file the obvious way, row by row."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
    else:
        with pa.OSFile(str(path)) as file:
            opened = pa.ipc.open_stream(file) if path.suffix == ".arrows" else pa.ipc.open_file(file)
            table = opened.read_all()
    top, *names = column.split(".")
    rows = table[top].to_pylist()
    for name in names:
        rows = [row and row[name] for row in rows]
    return [len(row or []) if isinstance(row, list | None) else row for row in rows]


@pytest.mark.parametrize(
    ("name", "definition", "message"),
    [
        (
            "odd/list_columns.parquet",
            tokens("int64_list"),
            "row group 0, row 1: .*'int64_list' holds a null among",
        ),
        ("odd/list_columns.parquet", tokens("utf8_list"), "of type list<.*string.*name a list of integers"),
        ("odd/nested_lists.snappy.parquet", tokens("a"), "of type list<.*list<.*--length-column"),
        ("odd/nullable.impala.parquet", tokens("int_array"), "row 1: .*holds a null among its elements"),
        (
            "odd/nullable.impala.parquet",
            tokens("nested_struct.b"),
            "row 1: .*holds a null among its elements",
        ),
        ("odd/nullable.impala.parquet", tokens("int_array_Array"), "of type list<.*list<"),
        ("odd/old_list_structure.parquet", tokens("a"), "of type list<.*list<"),
        ("odd/repeated_primitive_no_list.parquet", tokens("String_list"), "of type list<.*string"),
        (
            "odd/1.0.0-littleendian__generated_nested_large_offsets.arrows",
            tokens("large_list_nullable"),
            r"record batch \d+, row \d+: .*holds a null among its elements",
        ),
        (
            "odd/1.0.0-littleendian__generated_nested_large_offsets.arrows",
            tokens("large_list_nested"),
            "of type large_list<.*list<",
        ),
        ("odd/large_string_map.brotli.parquet", tokens("arr"), "column 'arr' is of type map<.*name a list"),
        ("odd/datapage_v2_empty_datapage.snappy.parquet", length("value"), "type float; name an integer"),
        (
            "odd/int32_with_null_pages.parquet",
            length("int32_field"),
            "row group 0, row 0: .* length -654807448",
        ),
        ("odd/delta_binary_packed.parquet", length("bitwidth1"), "row group 0, row 1: .* length -1"),
        ("odd/datapage_v1-corrupt-checksum.parquet", length("a"), "row group 0: .*CRC checksum"),
        (
            "odd/encrypt_columns_and_footer.parquet.encrypted",
            tokens("x"),
            "if it is encrypted, decrypt it first",
        ),
        ("odd/PARQUET-1481.parquet", tokens("x"), "Invalid physical column type"),
        (
            "odd/ARROW-GH-41317.parquet",
            length("int32"),
            "row group 0, row 0: .* length -2000000000",
        ),
        (
            "odd/1.0.0-littleendian__generated_dictionary.arrow",
            length("dict2"),
            "type dictionary<.*an integer",
        ),
        ("odd/0.14.1__generated_primitive_zerolength.arrows", length("int8_nullable"), "data set is empty"),
        ("odd/cpp-21.0.0__generated_binary_view.arrow", tokens("sv"), "type string_view; name a list"),
        ("odd_jsonl/empty.ndjson", length("id"), "data set is empty"),
        ("odd_jsonl/whitespace_only.json", length("id"), "data set is empty"),
        ("odd_jsonl/example_r.ndjson", length("id"), "row 0: .*bare carriage returns"),
        ("odd_jsonl/inconsistent_schemas.ndjson", length("id"), 'row 0: .*string "1" where an integer'),
        ("odd_jsonl/multiple_objects_per_line.ndjson", length("id"), "row 0: .*Extra data"),
        ("odd_jsonl/sample_utf8_bom.json", length("id"), "row 0: an object over several lines .*jq -c"),
        ("odd_jsonl/trailing_content.ndjson", length("a"), "row 1: .*Extra data"),
        ("odd_jsonl/unterminated_quotes.ndjson", length("id"), "row 2: .*Unterminated string"),
    ],
)
def test_one_clear_error(name, definition, message):
    with pytest.raises(SourceError, match=message) as caught:
        lengths_of(DATA / name, definition)
    assert Path(name).name in str(caught.value)


def test_every_column_of_every_odd_file_is_one_or_the_other():
    outcomes = {"lengths": 0, "error": 0}
    for path in sorted([*(DATA / "odd").iterdir(), *(DATA / "odd_jsonl").iterdir()]):
        try:
            columns = open_source(path).parts[0].schema.names
        except SourceError:
            outcomes["error"] += 1
            continue
        for column in columns:
            for definition in (tokens(column), length(column)):
                try:
                    lengths_of(path, definition, target_bytes=1 << 20)
                    outcomes["lengths"] += 1
                except SourceError:
                    outcomes["error"] += 1
    assert min(outcomes.values()) > 30


def test_token_files_of_both_writers():
    peps = DATA / "sources/peps_sections_mcore"
    source = open_source(peps)
    assert source.num_rows == 596  # sequences; there are 60 documents
    lengths = lengths_of(peps, default_definition(source), target_bytes=1000)
    assert (sum(lengths), min(lengths), max(lengths)) == (203_048, 5, 6248)
    assert lengths == [len(sample["input_ids"]) for sample in open_dataset(peps)]
    gsm8k = lengths_of(DATA / "sources/gsm8k_test_deepspeed.bin", LengthDefinition.by_index())
    assert (len(gsm8k), sum(gsm8k), min(gsm8k), max(gsm8k)) == (1319, 213_457, 60, 414)


def test_mds_holds_the_tokens_of_the_bin_file():
    by_index = open_dataset(DATA / "sources/gsm8k_test_deepspeed")
    dataset = open_dataset(DATA / "sources/mds_gsm8k", definition=tokens("input_ids"))
    assert len(dataset) == 300
    for row, sample in enumerate(dataset):
        assert np.array_equal(sample["input_ids"], by_index[row]["input_ids"])


def test_a_saved_hugging_face_data_set():
    source = open_source(DATA / "sources/hf_gsm8k")
    assert (source.num_rows, len(source.files)) == (1319, 2)
    first, last = source.rows([0, 1318], {"question": None})
    assert first["question"][0].as_py().startswith("Janet")
    assert len(last["question"][0].as_py()) > 50
