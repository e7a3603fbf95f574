"""Reading: units do not depend on who reads them, bad lines are named, memory stays bounded."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import read
from shardwise.data.faults import Faults
from shardwise.data.read import pieces, units
from shardwise.data.source import find
from shardwise.errors import DataError, ShardwiseError
from tests.said import refuses, shows

SKIP = "data.on_bad_sample=skip"
"""Of records; a text file is never left out."""


def documents(path: Path, faults: Faults | None = None) -> list[str]:
    result, text, faults = [], "", faults or Faults()
    for unit in units(find(str(path))):
        for part in unit:
            for piece in pieces(part, "text", 0.0, faults):
                text += piece.text
                if piece.last:
                    result.append(text)
                    text = ""
    faults.raise_found()
    assert text == ""
    return result


def refusal(path: Path, data: bytes | str) -> DataError:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(DataError) as caught:
        documents(path)
    assert caught.value.exit_code == 65
    return caught.value


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60)), unit=st.integers(1, 80))
def test_jsonl_is_read_whole_whatever_the_units(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit: int
) -> None:
    path = tmp_path_factory.mktemp("x") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "UNIT_BYTES", unit)
        assert documents(path) == texts


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unit=st.integers(1, 40), piece=st.integers(1, 9)
)
def test_text_is_read_whole_whatever_the_units(
    tmp_path_factory: pytest.TempPathFactory, text: str, unit: int, piece: int
) -> None:
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "UNIT_BYTES", unit)
        patch.setattr(read, "_PIECE_BYTES", piece)
        assert documents(path) == [text.removeprefix("\ufeff")]


def test_long_texts_come_in_pieces_cut_after_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words in a line\n" * 100_000)
    (unit, *_) = units(find(str(tmp_path / "a.txt")))
    got = list(pieces(unit[0], "text", 0.0, Faults()))
    assert len(got) > 4 and all(len(piece.text) <= 2**19 for piece in got)
    assert all(piece.text.endswith("line\n") for piece in got)


def test_files_share_units_and_long_files_are_cut(tmp_path: Path) -> None:
    for index, size in enumerate((100, 200, 5 * 2**20, 300)):
        (tmp_path / f"{index}.txt").write_bytes(b"x\n" * (size // 2))
    shape = [[(part.name, part.stop - part.start) for part in unit] for unit in units(find(str(tmp_path)))]
    mib2 = 2 * 2**20
    assert shape == [
        [("0.txt", 100), ("1.txt", 200)],
        [("2.txt", mib2)],
        [("2.txt", mib2)],
        [("2.txt", 2**20), ("3.txt", 300)],
    ]


@pytest.mark.prove
def test_b52_one_bad_line_of_many(tmp_path: Path) -> None:
    path = tmp_path / "my data" / "corpus.jsonl"
    path.parent.mkdir()
    lines = ['{"text": "good enough"}\n'] * 200_000
    lines[123_455] = '{"text": "abc\n'
    error = refusal(path, "".join(lines))
    [problem] = error.problems
    assert (problem.code, problem.where) == ("DATA004", str(path))
    assert problem.what.startswith("corpus.jsonl:123456 col 10: ") and '`{"text": "abc`' in problem.what
    assert shows(problem.fix, f"sed -n 123456p '{path}'", SKIP)


def test_b52_shows_the_place_in_a_long_line(tmp_path: Path) -> None:
    error = refusal(tmp_path / "a.jsonl", '{"text": "' + "x" * 1000 + '" "more": 1}\n')
    assert refuses(error, "DATA004", "a.jsonl:1 col 1013", "','", f'`{"x" * 38}" "more": 1}}`')


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ('{"content": "a longer text", "id": "7"}', ["no `text`", "content, id"], "data.text_key=content"),
        ('{"id": 7}', ["no `text`", "id"], "`text`"),
        ("{}", ["no `text`", "none"], "`text`"),
        ('{"text": null}', ["`text`", "null", "string"], "`text` a string"),
        ('{"text": 5}', ["`text`", "number", "string"], "`text` a string"),
        ('{"text": ["a"]}', ["`text`", "list", "string"], "`text` a string"),
        ('["a"]', ["list", "object"], '{"text": "..."}'),
    ],
)
def test_b53_field_missing_or_of_a_wrong_type(tmp_path: Path, line: str, what: list[str], fix: str) -> None:
    error = refusal(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    assert refuses(error, "DATA005", "a.jsonl:2", *what, where=f"{tmp_path}/a.jsonl", fix=fix)
    assert SKIP in str(error).splitlines()[-1]


@pytest.mark.parametrize(("bom", "offset"), [(b"", 0), (b"\xef\xbb\xbf", 3)])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_b54_not_utf8(tmp_path: Path, name: str, bom: bytes, offset: int) -> None:
    error = refusal(tmp_path / name, bom + b'{"text": "1"}\n{"text": "ab\xff"}\n')
    [problem] = error.problems
    assert (problem.code, problem.where) == ("DATA006", f"{tmp_path}/{name}")
    assert problem.what.startswith(f"{name}:2 byte 13: not UTF-8 (0xff)") and f"byte {26 + offset} of" in problem.what
    assert problem.fix.startswith(f"iconv -f latin1 -t utf-8 {tmp_path}/{name} > a-utf8{Path(name).suffix}, ")
    assert (SKIP in problem.fix) == name.endswith("l")


def test_b54_lone_surrogate(tmp_path: Path) -> None:
    error = refusal(tmp_path / "a.jsonl", '{"text": "ab\\ud800"}\n')
    assert str(error).startswith("error[DATA006]: a.jsonl:1 character 3: lone surrogate U+D800\n")


def test_b54_what_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\r\n{"text": "nul\\u0000"}\r\n  \n{"text": ""}')
    assert documents(path) == ["a\u2028b", "nul\0", ""]
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo\0\n")
    assert documents(text) == ["one\r\ntwo\0\n"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_b55_a_line_without_end_in_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "b"}\n{"text": "')
        file.truncate(2**29)
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        documents(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("DATA007", str(path))
    assert problem.what.startswith(f"{name}:3 ") and "64 MiB" in problem.what
    assert (SKIP in problem.fix) == (name == "a.jsonl")
    # The line's 64 MiB, up to the same again while the buffer grows, and a block or two.
    assert peak_bytes < 160 * 2**20
    [part] = units(find(str(path)))[100]  # it is inside the line, which is not its own
    assert [piece.text for piece in pieces(part, "text", 0.0, Faults())] == []


def test_b55_deep_nesting_and_long_numbers(tmp_path: Path) -> None:
    error = refusal(tmp_path / "a.jsonl", '{"text": "fine"}\n{"text": ' + "[" * 10**6 + "\n")
    assert refuses(str(error), "DATA007", "a.jsonl:2", "nested")
    (tmp_path / "b.jsonl").write_text('{"id": ' + "9" * 10**5 + ', "text": "fine"}\n')
    assert documents(tmp_path / "b.jsonl") == ["fine"]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=80), cut=st.integers(0, 40), jsonl=st.booleans())
def test_any_bytes_are_text_or_a_told_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, jsonl: bool
) -> None:
    path = tmp_path_factory.mktemp("x") / ("a.jsonl" if jsonl else "a.txt")
    whole = b'{"text": "some"}\n{"text": "more \\u00e9", "id": [1, 2]}\n'
    path.write_bytes(whole[:cut] + data + whole[cut:])
    try:
        documents(path)
    except ShardwiseError as error:
        assert error.problems[0].code in {"DATA004", "DATA005", "DATA006"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf16_is_one_fault_with_its_own_remedy(tmp_path: Path, name: str, encoding: str) -> None:
    text = '{"text": "a"}\n' * 50
    error = refusal(tmp_path / name, ("\ufeff" * (encoding != "utf-16") + text).encode(encoding))
    [problem] = error.problems
    assert (problem.code, problem.where) == ("DATA006", f"{tmp_path}/{name}")
    assert f"{name} is UTF-16" in problem.what
    assert problem.fix == f"iconv -f utf-16 -t utf-8 {tmp_path}/{name} > a-utf8{Path(name).suffix}"


def test_integers_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [' + "9" * 6000 + "]}\n")
    [unit] = units(find(str(tmp_path / "a.jsonl")))
    faults = Faults()
    assert list(read.records(unit[0], 0.0, faults)) == []
    with pytest.raises(DataError, match=r"DATA004.*a\.jsonl:1 .*4,300 digits"):
        faults.raise_found()
