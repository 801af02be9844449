"""Small good data sets in every format, and for each a reader that shares no code with packer's.

A reader takes the place and a column and returns the column as Python values; whatever it raises means that
it cannot read the file.
"""

import csv
import gzip
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from packer.mmididx import DEEPSPEED_DTYPES, MEGATRON_DTYPES
from tests.fuzz.mutations import mutate, mutate_json_text

NUM_ROWS = 24
IDS = [None if row == 5 else [row * 7 % 90 + at for at in range(row * 5 % 13)] for row in range(NUM_ROWS)]
ROWS: dict[str, list[Any]] = {
    "ids": IDS,
    "labels": [
        None if ids is None else [-100 if at % 3 == 0 else token for at, token in enumerate(ids)]
        for ids in IDS
    ],
    "n": [None if row == 9 else row * 11 % 17 for row in range(NUM_ROWS)],
    "text": [
        None if row == 7 else " ".join(f"w{word}" for word in range(row % 9)) + "é" * (row % 2)
        for row in range(NUM_ROWS)
    ],
    "chat": [
        [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4 " * (row % 4)}]
        for row in range(NUM_ROWS)
    ],
}

Read = Callable[[Path, str], list[Any]]
KINDS = ("tokens", "labels", "length", "text", "messages")


@dataclass(frozen=True)
class Format:
    """One format."""

    writers: tuple[Callable[[Path], None], ...]
    """Each fills a folder with a good data set."""
    opened: str
    """What is opened in that folder; empty for the folder itself."""
    read: Read
    damaged: tuple[str, ...]
    """Patterns of the files that are damaged."""
    kinds: tuple[str, ...] = KINDS
    """Length definitions that the data have columns for."""
    unpack: Callable[[bytes], bytes] | None = None
    pack: Callable[[bytes], bytes] = bytes
    """Of lines: half of the inputs are damaged before they are packed."""
    mutate_unpacked: Callable[[bytes, Random], bytes] = lambda content, random: _mutate_lines(content, random)

    def damage(self, folder: Path, random: Random) -> None:
        """Damage one file of a data set."""
        victim = random.choice(sorted(folder.glob(random.choice(self.damaged))))
        content = victim.read_bytes()
        if self.unpack is not None and random.random() < 0.5:
            victim.write_bytes(self.pack(self.mutate_unpacked(self.unpack(content), random)))
        elif victim.suffix == ".json" and random.random() < 0.7:
            victim.write_bytes(mutate_json_text(content, random))
        else:
            victim.write_bytes(mutate(content, random))


# Arrow and Parquet.


def _table(types: dict[str, pa.DataType]) -> pa.Table:
    arrays = {}
    for name, values in ROWS.items():
        data_type = types.get(name)
        if data_type is not None and pa.types.is_dictionary(data_type):
            arrays[name] = pa.array(values, data_type.value_type).dictionary_encode()
        else:
            arrays[name] = pa.array(values, data_type)
    return pa.table(arrays)


_TYPES: tuple[dict[str, pa.DataType], ...] = (
    {"ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32()), "n": pa.int32()},
    {"ids": pa.large_list(pa.int64()), "n": pa.uint64(), "text": pa.large_string()},
    {"ids": pa.list_view(pa.uint16()), "labels": pa.large_list_view(pa.int16()), "text": pa.string_view()},
    {"n": pa.int8(), "text": pa.dictionary(pa.int32(), pa.string())},
)


def _write_arrow(number: int, kind: str, compression: str | None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        table = _table(_TYPES[number])
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with new(str(folder / "data.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=7)

    return write


def _read_arrow(path: Path, column: str) -> list[Any]:
    content = pa.py_buffer(path.read_bytes())
    is_file = content[:6].to_pybytes() == b"ARROW1"
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    columns = opened(content).schema.get_all_field_indices(column)
    reader = opened(content, options=pa.ipc.IpcReadOptions(included_fields=columns))
    batches = [reader.get_batch(n) for n in range(reader.num_record_batches)] if is_file else list(reader)
    values: list[Any] = []
    for batch in batches:
        array = batch.column(column)
        array.validate(full=True)
        values += array.to_pylist()
    return values


def _write_parquet(**options: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        table = _table({"ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32()), "n": pa.int32()})
        pq.write_table(table, folder / "data.parquet", row_group_size=9, **options)

    return write


def _read_parquet(path: Path, column: str) -> list[Any]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read([column], use_threads=False).column(column).to_pylist()


def _write_hugging_face(folder: Path) -> None:
    table = _table({})
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(12 * number, 12), max_chunksize=5)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"n": {"dtype": "int64"}}}))


def _read_hugging_face(folder: Path, column: str) -> list[Any]:
    state = json.loads((folder / "state.json").read_bytes())
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError("the rows are others than those in the files")
    return [
        value for entry in state["_data_files"] for value in _read_arrow(folder / entry["filename"], column)
    ]


# JSON Lines.


def _lines(*, line_end: bytes = b"\n") -> bytes:
    rows = [{name: values[row] for name, values in ROWS.items()} for row in range(NUM_ROWS)]
    return line_end.join(json.dumps(row, ensure_ascii=bool(at % 2)).encode() for at, row in enumerate(rows))


def _write_lines(pack: Callable[[bytes], bytes], name: str) -> tuple[Callable[[Path], None], ...]:
    contents = (_lines() + b"\n", b"\xef\xbb\xbf" + _lines(line_end=b"\r\n"))
    return tuple(
        lambda folder, content=content: (folder / name).write_bytes(pack(content)) for content in contents
    )


def _mutate_lines(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    at = random.randrange(NUM_ROWS)
    mark = b"\xef\xbb\xbf" if lines[at].startswith(b"\xef\xbb\xbf") else b""
    choice = random.random()
    if choice < 0.6:
        lines[at] = mark + mutate_json_text(lines[at].removeprefix(mark), random)
    elif choice < 0.8:
        lines[at] = mutate(lines[at], random)
    else:
        lines.insert(at, random.choice((b"", b" \t\r", b"{}", b"null", b"[]", b"\xef\xbb\xbf", lines[at])))
    return b"\n".join(lines)


def _unpack(content: bytes) -> bytes:
    if content.startswith(b"\x1f\x8b"):
        return gzip.decompress(content)
    if content.startswith(b"\x28\xb5\x2f\xfd"):
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content), read_across_frames=True) as file:
            return file.read()
    return content


def _read_lines(path: Path, column: str) -> list[Any]:
    lines = _unpack(path.read_bytes()).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is no object")
    return [row.get(column) for row in rows]


# CSV and TSV.


def _delimited(delimiter: str, line_end: str) -> bytes:
    def cell(value: Any) -> str:
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)

    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
    columns = {name: values for name, values in ROWS.items() if name != "chat"}
    writer.writerow([*columns, "note"])
    for row in range(NUM_ROWS):
        note = 'a "quoted"\nline' if row % 5 == 0 else "plain"
        writer.writerow([*(cell(values[row]) for values in columns.values()), note])
    return file.getvalue().encode()


def _write_delimited(pack: Callable[[bytes], bytes], name: str) -> tuple[Callable[[Path], None], ...]:
    delimiters = "\t" if "tsv" in name else ",;"
    contents = [_delimited(sign, line_end) for sign in delimiters for line_end in ("\n", "\r\n")]
    return tuple(
        lambda folder, content=content: (folder / name).write_bytes(pack(content)) for content in contents
    )


def _read_delimited(path: Path, column: str) -> list[Any]:
    text = _unpack(path.read_bytes()).removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    delimiter = "\t" if "tsv" in path.name else next(sign for sign in ",;" if sign in text.split("\n")[0])
    header, *rows = (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row)
    if any(len(row) != len(header) for row in rows) or header.count(column) != 1:
        raise ValueError("rows of other columns")
    cells = [row[header.index(column)] for row in rows]
    "".join(cells).encode()
    if column == "n":
        if not all(re.fullmatch(r"-?[0-9]*", cell.strip(" \t"), re.ASCII) for cell in cells):
            raise ValueError("no integers")
        return [int(cell) if cell.strip(" \t") else None for cell in cells]
    if column == "text":
        return [cell or None for cell in cells]
    return [json.loads(cell) if cell else None for cell in cells]


# WebDataset.


def _npy(values: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values, np.int32))
    return file.getvalue()


def _write_webdataset(dialect: int, members: tuple[str, ...]) -> Callable[[Path], None]:
    """Write a sample's columns as members of their own, the others as keys of a JSON member."""

    def write(folder: Path) -> None:
        with tarfile.open(folder / "data.tar", "w", format=dialect) as archive:
            for row in range(NUM_ROWS):
                keys = {name: values[row] for name, values in ROWS.items() if name not in members}
                contents = {"json": json.dumps(keys, indent=row % 3 or None).encode()}
                for name in members:
                    value = ROWS[name][row]
                    if value is not None:
                        is_list = isinstance(value, list)
                        contents[f"{name}.npy" if is_list else name] = (
                            _npy(value) if is_list else str(value).encode()
                        )
                for extension, content in contents.items():
                    info = tarfile.TarInfo(f"{'long/' * 25}ü{row:03}.{extension}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))

    return write


def _read_webdataset(path: Path, column: str) -> list[Any]:
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isfile():
                found = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name, re.DOTALL)
                if found is None or re.match(r"__[^/]*__($|/)", member.name):
                    continue  # of no sample, by WebDataset's rule; a long name has no checksum
                if not samples or samples[-1][0] != found[1]:
                    samples.append((found[1], {}))
                samples[-1][1][found[2].lower()] = archive.extractfile(member).read()  # type: ignore[union-attr]
    values: list[Any] = []
    for _, members in samples:
        if column in members:
            text = members[column].decode()
            values.append(int(text) if column == "n" else text)
        elif f"{column}.npy" in members:
            values.append(np.load(io.BytesIO(members[f"{column}.npy"])).tolist())
        else:
            values.append(json.loads(members.get("json", b"{}")).get(column))
    return values


# Lance, which alone reads its files: whole tables here.


def _write_lance(folder: Path) -> None:
    import lance

    path = folder / "data.lance"
    lance.write_dataset(_table({}), path, max_rows_per_file=9)
    lance.dataset(path).delete("n = 3")
    lance.write_dataset(_table({}).slice(0, 3), path, mode="append")


def _read_lance(path: Path, column: str) -> list[Any]:
    import lance

    return lance.dataset(path).to_table(columns=[column])[column].to_pylist()


# Token files.


def _write_indexed(code: int, dtype: Any, modes: bool = False) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        rows = [np.array(ids or [], dtype) for ids in IDS]
        sizes = np.array([len(row) for row in rows], "<i4")
        pointers = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
        documents = np.arange(NUM_ROWS + 1, dtype="<i8")
        head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, NUM_ROWS, len(documents))
        parts = [sizes, pointers, documents, *([np.zeros(NUM_ROWS, np.int8)] if modes else [])]
        (folder / "data.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
        (folder / "data.bin").write_bytes(np.concatenate(rows).tobytes())

    return write


def _read_indexed(path: Path, _: str) -> list[Any]:
    index, data = path.read_bytes(), path.with_suffix(".bin").read_bytes()
    magic, version, code, num_items, _ = struct.unpack_from("<9sQBQQ", index)
    if magic != b"MMIDIDX\0\0" or version != 1:
        raise ValueError("no index")
    sizes = struct.unpack_from(f"<{num_items}i", index, 34)
    pointers = struct.unpack_from(f"<{num_items}q", index, 34 + 4 * num_items)
    dtypes = {DEEPSPEED_DTYPES[code], MEGATRON_DTYPES[code], np.dtype(np.float64 if code == 7 else np.uint8)}
    for dtype in dtypes:
        if dtype.itemsize * sum(sizes) == len(data) and dtype.kind != "f":
            return [
                np.frombuffer(data, dtype, size, pointer).tolist()
                for size, pointer in zip(sizes, pointers, strict=True)
            ]
    raise ValueError("no type fits")


# MDS.

_MDS_COLUMNS = (("ids", "ndarray:int32"), ("labels", "ndarray"), ("n", "int"), ("text", "str"))


def _write_mds(folder: Path) -> None:
    def array(values: list[int] | None, code: bytes) -> bytes:
        return code + bytes([1 << 2]) + bytes([len(values or [])]) + np.array(values or [], "<i4").tobytes()

    shards = []
    for number in range(2):
        samples = []
        for row in range(12 * number, 12 * number + 12):
            varying = [
                array(ROWS["ids"][row], b""),
                array(ROWS["labels"][row], bytes([33])),
                (ROWS["text"][row] or "").encode(),
            ]
            fixed = np.int64(ROWS["n"][row] or 0).tobytes()
            sizes = np.array([len(part) for part in varying], "<u4").tobytes()
            samples.append(sizes + varying[0] + varying[1] + fixed + varying[2])
        bounds = 4 * (len(samples) + 2) + np.cumsum([0] + [len(sample) for sample in samples])
        name = f"shard.{number:05}.mds"
        head = np.array([len(samples), *bounds], "<u4").tobytes()
        (folder / name).write_bytes(head + b"".join(samples))
        shards.append(
            {
                "column_names": [column for column, _ in _MDS_COLUMNS],
                "column_encodings": [encoding for _, encoding in _MDS_COLUMNS],
                "column_sizes": [None, None, 8, None],
                "format": "mds",
                "version": 2,
                "samples": len(samples),
                "raw_data": {"basename": name, "bytes": 0, "hashes": {}},
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _read_mds(folder: Path, column: str) -> list[Any]:
    values: list[Any] = []
    for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        bounds = struct.unpack_from(f"<{shard['samples'] + 1}I", data, 4)
        columns = list(
            zip(shard["column_names"], shard["column_sizes"], shard["column_encodings"], strict=True)
        )
        for start, stop in pairwise(bounds):
            sample = data[start:stop]
            at = 4 * sum(size is None for _, size, _ in columns)
            varying = iter(struct.unpack_from(f"<{at // 4}I", sample))
            parts = {}
            for name, size, encoding in columns:
                length = next(varying) if size is None else size
                parts[name] = (sample[at : at + length], encoding)
                at += length
            values.append(_mds_value(*parts[column]))
    return values


def _mds_value(part: bytes, encoding: str) -> Any:
    if encoding == "str":
        return part.decode()
    if encoding == "int":
        return struct.unpack("<q", part)[0]
    codes = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
    dtype, part = ("<i4", part) if encoding == "ndarray:int32" else (codes[part[0]], part[1:])
    if part[0] >> 2 != 1:
        raise ValueError("no list")
    return np.frombuffer(part[1 + (1 << (part[0] & 3)) :], dtype).tolist()


def _arrow(kind: str) -> Format:
    """Return the file or the stream format, plain and compressed."""
    return Format(
        writers=tuple(
            _write_arrow(number, kind, packed) for number in range(4) for packed in (None, "lz4", "zstd")
        ),
        opened="data.arrow",
        read=_read_arrow,
        damaged=("data.arrow",),
    )


_zstd = zstandard.ZstdCompressor(write_checksum=True).compress

FORMATS = {
    "parquet": Format(
        writers=(
            _write_parquet(write_page_checksum=True),
            _write_parquet(write_page_checksum=True, compression="zstd", data_page_version="2.0"),
            _write_parquet(),
            _write_parquet(compression="none", use_dictionary=False),
            _write_parquet(compression="gzip", data_page_version="2.0", data_page_size=64),
            _write_parquet(
                compression="none",
                use_dictionary=False,
                column_encoding={"n": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY"},
            ),
        ),
        opened="data.parquet",
        read=_read_parquet,
        damaged=("data.parquet",),
    ),
    "arrow file": _arrow("file"),
    "arrow stream": _arrow("stream"),
    "hugging face": Format(
        writers=(_write_hugging_face,),
        opened="",
        read=_read_hugging_face,
        damaged=("*.json", "*.json", "*.arrow"),
    ),
    "jsonl": Format(
        writers=_write_lines(bytes, "data.jsonl"),
        opened="data.jsonl",
        read=_read_lines,
        damaged=("data.jsonl",),
        unpack=_unpack,
        pack=bytes,
    ),
    "jsonl.gz": Format(
        writers=_write_lines(gzip.compress, "data.jsonl.gz"),
        opened="data.jsonl.gz",
        read=_read_lines,
        damaged=("data.jsonl.gz",),
        unpack=_unpack,
        pack=gzip.compress,
    ),
    "jsonl.zst": Format(
        writers=_write_lines(_zstd, "data.jsonl.zst"),
        opened="data.jsonl.zst",
        read=_read_lines,
        damaged=("data.jsonl.zst",),
        unpack=_unpack,
        pack=_zstd,
    ),
    **{
        name: Format(
            writers=_write_delimited(pack, f"data.{name}"),
            opened=f"data.{name}",
            read=_read_delimited,
            damaged=(f"data.{name}",),
            kinds=("tokens", "labels", "length", "text"),
            unpack=_unpack,
            pack=pack,
            mutate_unpacked=mutate,
        )
        for name, pack in (("csv", bytes), ("tsv", bytes), ("csv.gz", gzip.compress))
    },
    "webdataset": Format(
        writers=tuple(
            _write_webdataset(dialect, members)
            for dialect in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
            for members in ((), ("n", "text"))
        ),
        opened="data.tar",
        read=_read_webdataset,
        damaged=("data.tar",),
    ),
    "webdataset of arrays": Format(
        writers=(_write_webdataset(tarfile.PAX_FORMAT, ("ids", "labels")),),
        opened="data.tar",
        read=_read_webdataset,
        damaged=("data.tar",),
        kinds=("arrays",),
    ),
    "lance": Format(
        writers=(_write_lance,),
        opened="data.lance",
        read=_read_lance,
        damaged=("data.lance/data/*.lance", "data.lance/_versions/*.manifest", "data.lance/_deletions/*"),
        kinds=("tokens", "labels", "length", "text"),
    ),
    "indexed": Format(
        writers=(
            _write_indexed(8, np.uint16),
            _write_indexed(4, np.int32, modes=True),
            _write_indexed(6, np.uint16),
            _write_indexed(7, np.uint32),
            _write_indexed(1, np.uint8),
            _write_indexed(5, np.int64),
        ),
        opened="data.idx",
        read=_read_indexed,
        damaged=("data.idx", "data.idx", "data.bin"),
        kinds=("indexed",),
    ),
    "mds": Format(
        writers=(_write_mds,),
        opened="",
        read=_read_mds,
        damaged=("index.json", "*.mds"),
        kinds=("tokens", "labels", "length", "text"),
    ),
}
