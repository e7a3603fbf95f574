"""Tables as jsonl: what their cells become, and what no text is made of."""

from __future__ import annotations

import datetime
import decimal
import errno
import gzip
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from shardwise.data import convert
from shardwise.data.convert import to_jsonl
from shardwise.data.prepare import prepare
from shardwise.data.source import find
from shardwise.errors import DataError, MissingInputError, OutputError
from shardwise.spec.recipe import Data


def write(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    return path


def converted(path: Path, cache: Path) -> list[Any]:
    [source] = find(str(path), records=True)
    return [json.loads(line) for line in to_jsonl(source, cache).path.read_bytes().splitlines()]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_binary_columns_are_text_in_utf8(tmp_path: Path, settings: Callable[..., Data], name: str) -> None:
    texts = [f"été number {i}" for i in range(20)]
    path = write(tmp_path / name, pa.table({"text": pa.array([text.encode() for text in texts], pa.binary())}))
    assert converted(path, tmp_path) == [{"text": text} for text in texts]
    as_text = write(tmp_path / f"as-{name}", pa.table({"text": texts}))
    both = [prepare(settings(one, validation_share=0)).train for one in (path, as_text)]
    assert both[0].read(0, both[0].tokens).tolist() == both[1].read(0, both[1].tokens).tolist()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_bytes_that_are_no_text_are_refused_where_they_would_be_trained_on(
    tmp_path: Path, settings: Callable[..., Data], name: str
) -> None:
    cells = pa.array([b"fine", b"caf\xe9 " + b"x" * 99], pa.binary())
    path = write(tmp_path / name, pa.table({"text": cells}))
    with pytest.raises(DataError) as caught:
        prepare(settings(path))
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("DATA006", str(path))
    assert problem.what.startswith(f"{name}:2 character 4: ") and "0xe9" in problem.what
    assert "data.on_bad_sample=skip" in problem.fix
    talk = [{"role": "user", "content": b"caf\xe9"}, {"role": "assistant", "content": b"b"}]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.binary()}))
    path = write(tmp_path / f"talk-{name}", pa.table({"messages": pa.array([talk], kind)}))
    with pytest.raises(DataError, match=rf"DATA006.*talk-{name}:1 not UTF-8 \(0xe9\)"):
        prepare(settings(path, chat_template="zephyr", validation_share=0), sample_tokens=64)


def test_a_column_that_is_not_read_may_hold_anything(tmp_path: Path, settings: Callable[..., Data]) -> None:
    image = pa.array([b"\x89PNG\r\n\x1a\n" + bytes(10**5)] * 3, pa.binary())
    path = write(tmp_path / "a.parquet", pa.table({"text": ["one", "two", "three"], "image": image}))
    assert prepare(settings(path, validation_share=0)).train.split.documents == 3
    [file] = (tmp_path / "cache" / "converted").rglob("records.jsonl")
    assert file.stat().st_size < 200


def test_dates_decimals_and_what_is_nested(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    row = {
        "when": when,
        "day": when.date(),
        "time": when.time(),
        "price": decimal.Decimal("1.50"),
        "took": datetime.timedelta(seconds=90),
        "raw": b"text",
        "nested": [{"raw": b"in", "days": [when.date(), None]}],
    }
    path = write(tmp_path / "a.parquet", pa.Table.from_pylist([row]))
    assert converted(path, tmp_path) == [
        {
            "when": "2024-05-06T07:08:09+00:00",
            "day": "2024-05-06",
            "time": "07:08:09",
            "price": 1.5,
            "took": 90.0,
            "raw": "text",
            "nested": [{"raw": "in", "days": ["2024-05-06", None]}],
        }
    ]


def test_numbers_are_no_text(tmp_path: Path, settings: Callable[..., Data]) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": [decimal.Decimal("1.50")]}))
    with pytest.raises(DataError, match=r"DATA005.*a\.parquet:1 `text` is a number"):
        prepare(settings(path))
    for field in ({"input": 5}, {"system": ["a"]}):
        (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "a", "output": "b", **field}))
        with pytest.raises(DataError, match=rf"DATA005.*b\.jsonl:1 `{next(iter(field))}`"):
            prepare(settings(tmp_path / "b.jsonl", chat_template="zephyr"), sample_tokens=64)
    thinking = {"role": "assistant", "content": "b", "reasoning_content": ["a"]}
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, thinking]}))
    with pytest.raises(DataError, match=r"DATA005.*`messages\[1\]\.reasoning_content`"):
        prepare(settings(tmp_path / "b.jsonl", chat_template="zephyr"), sample_tokens=64)


def test_values_of_no_kind_that_json_has_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": ["a"]}))
    rows = iter([{"text": "a", "id": uuid.UUID(int=5)}, {"text": "a", "id": 2j}])
    monkeypatch.setattr("shardwise.data.convert._parquet", lambda source: rows)
    with pytest.raises(DataError, match=r"DATA005.*a\.parquet:2 .*complex"):
        converted(path, tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "what", "encoding"),
    [
        ("a.csv", b"text\n" + b"fine\n" * 5000 + b"caf\xe9\n", ":5002 byte 4: not UTF-8 (0xe9)", "latin1"),
        ("a.csv", "text\nfine\n".encode("utf-16"), ":1 byte 1: not UTF-8 (0xff)", "utf-16"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), " byte 1: not UTF-8 (0xff)", "utf-16"),
    ],
)
def test_other_encodings_are_named_with_line_and_remedy(
    tmp_path: Path, name: str, data: bytes, what: str, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        converted(path, tmp_path)
    [problem] = caught.value.problems
    remedy = f"iconv -f {encoding} -t utf-8 {path} > a-utf8{path.suffix}"
    guess = ", if it is Latin-1" * (encoding == "latin1")
    assert (problem.code, problem.what, problem.fix) == ("DATA006", f"{name}{what}", remedy + guess)


def packed(path: Path, records: int) -> Path:
    """The same record again and again, which packs well."""
    text = "ab " * 50
    lines = f'{{"text": "{text}"}}\n'.encode() * records
    if path.suffix == ".parquet":
        return write(path, pa.table({"text": [text] * records}))
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else pa.compress(lines, "zstd", asbytes=True))
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_is_made_to_fill_the_disk_is_refused(
    tmp_path: Path, settings: Callable[..., Data], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path / name, 20_000)
    monkeypatch.setattr(convert, "LEAST_BYTES", 10_000)
    with pytest.raises(DataError, match=rf"DATA007.*{name}, .*200 times"):
        prepare(settings(path))
    assert not list((tmp_path / "cache").rglob("records.jsonl"))
    monkeypatch.undo()
    assert len(converted(path, tmp_path / "cache")) == 20_000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_some_room_is_left_on_the_disk(
    tmp_path: Path, settings: Callable[..., Data], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(OutputError, match=f"OUT002.*{name} .*disk"):
        prepare(settings(packed(tmp_path / name, 20_000)))
    assert not list((tmp_path / "cache").rglob("records.jsonl"))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**62], pa.duration("s")),
        pa.array([2**30], pa.date32()),
        pa.array([2**60], pa.timestamp("us")),
    ],
    ids=["duration", "date", "timestamp"],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_that_are_out_of_range_are_the_columns_fault_and_not_the_files(
    tmp_path: Path, column: pa.Array, kind: str
) -> None:
    table, path = pa.table({"text": ["a"], "when": column}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(DataError, match=rf"DATA005\]: a.{kind} .*out of range"):
        to_jsonl(find(str(path))[0], tmp_path / "cache")


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl.gz"])
def test_a_disk_that_fails_while_a_file_is_converted_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    source = find(str(tmp_path / name), records=True)[0]

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(source.path))

    for place in (
        "pathlib.Path.read_text",
        "shardwise.data.convert.gzip.open",
        "shardwise.data.convert.csv.DictReader",
    ):
        monkeypatch.setattr(place, fail)
    with pytest.raises(MissingInputError, match=rf"DATA001\]: .*{name} .*: Input/output error"):
        to_jsonl(source, tmp_path / "cache")


def test_columns_that_point_outside_of_the_file_are_refused(tmp_path: Path) -> None:
    """They were read there, and the process ended with SIGBUS."""
    offsets = pa.array([0, 2**30, 4], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.utf8(), 2, [None, offsets, pa.py_buffer(b"abcd")])
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, pa.schema([("text", pa.utf8())])) as out:
        out.write_batch(pa.record_batch([column], ["text"]))
    [source] = find(str(path), records=True)
    with pytest.raises(DataError, match="DATA008"):
        to_jsonl(source, tmp_path / "cache")


def test_a_table_without_an_end_of_line_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(2**40)
    [source] = find(str(tmp_path / "a.csv"), records=True)
    with pytest.raises(DataError, match="DATA007"):
        to_jsonl(source, tmp_path / "cache")
