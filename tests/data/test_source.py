"""Finding the text: files, directories, globs, the standard library; what is held out; what is not there."""

from __future__ import annotations

import errno
import os
import sysconfig
from pathlib import Path

import pytest

from shardwise.data.faults import Faults
from shardwise.data.read import pieces, units
from shardwise.data.source import Source, divide, find, mix, reading, taken_and_left_out, unit_hash
from shardwise.errors import DataError, MissingInputError, ShardwiseError
from tests.said import refuses, shows


def names(sources: list[Source] | tuple[Source, ...]) -> list[str]:
    return [source.name for source in sources]


def message(caught: pytest.ExceptionInfo[ShardwiseError]) -> str:
    return str(caught.value)


def test_directories_are_walked_in_order_without_hidden_files(corpus: Path) -> None:
    (corpus / ".git").mkdir()
    (corpus / ".git" / "config").write_text("x")
    (corpus / ".hidden").write_text("x")
    found = names(find(str(corpus)))
    assert found == [*sorted(f"{i}.md" for i in range(0, 12, 2)), *sorted(f"inner/{i}.txt" for i in range(1, 12, 2))]


def test_of_a_directory_what_is_no_data_is_left_out_and_told(corpus: Path) -> None:
    for name in ("picture.png", "inner/weights.pt"):
        (corpus / name).write_bytes(b"\x89PNG")
    found = find(str(corpus))
    assert len(found) == 12 and {source.path.suffix for source in found} == {".md", ".txt"}
    [told] = taken_and_left_out(str(corpus), False)
    assert shows(told, corpus, "6 .md, 6 .txt", "left out", "1 .png, 1 .pt")
    (corpus / "a.jsonl.gz").write_bytes(b"")
    (corpus / "b.json").write_text("[]")
    (corpus / "README.md").write_text("what it is")
    assert names(find(str(corpus), True)) == ["a.jsonl.gz", "b.json"]
    assert sorted(names(find(str(corpus)))) == sorted([*names(found), "a.jsonl.gz", "b.json"])
    [told] = taken_and_left_out([str(corpus)], True)
    assert shows(told, corpus, "1 .json, 1 .jsonl", "left out", "7 .md", "1 .png", "1 .pt", "6 .txt")
    assert taken_and_left_out(str(corpus / "inner"), False)[0].endswith("left out: 1 .pt")
    assert taken_and_left_out(["stdlib", str(corpus / "b.json")], True) == []


def test_globs_files_and_lists_name_each_file_once(corpus: Path) -> None:
    (corpus / "lines.jsonl").write_text('{"text": "a"}\n')
    found = find([f"{corpus}/**/*.txt", str(corpus / "inner" / "1.txt"), str(corpus / "lines.jsonl")])
    assert names(found) == [*sorted(f"inner/{i}.txt" for i in range(1, 12, 2)), "lines.jsonl"]
    assert [source.kind for source in found] == ["text"] * 6 + ["jsonl"]


def test_names_do_not_depend_on_the_place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absolute = find(str(corpus))
    monkeypatch.chdir(tmp_path)
    assert find("corpus") == absolute
    corpus.rename(tmp_path / "elsewhere")
    assert names(find("elsewhere")) == names(absolute)


def test_text_files_are_held_out_by_the_hash_of_their_name(corpus: Path) -> None:
    sources = find(str(corpus))
    divided = divide(sources, 0.3)
    assert names(divided.validation) == [s.name for s in sources if unit_hash(s.name) < 0.3]
    assert sorted(names(divided.train) + names(divided.validation)) == sorted(names(sources))
    (corpus / "another.txt").write_text("new")
    assert set(names(divided.validation)) <= set(names(divide(find(str(corpus)), 0.3).validation))
    assert divide(sources, 0.0).validation == ()


@pytest.mark.parametrize("share", [1e-9, 0.5])
def test_neither_split_of_several_files_is_empty(tmp_path: Path, share: float) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    divided = divide(find(str(tmp_path)), share)
    assert len(divided.train) == len(divided.validation) == 1


def test_a_text_file_alone_is_held_out_at_its_end(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "one.txt").write_text(text)
    divided = divide(find(str(tmp_path / "one.txt")), 0.1)

    def read(part: tuple[Source, ...]) -> str:
        return "".join(piece.text for unit in units(part) for p in unit for piece in pieces(p, "text", 0.0, Faults()))

    assert read(divided.train) + read(divided.validation) == text
    assert read(divided.train).endswith("\n")
    assert len(read(divided.validation)) == pytest.approx(len(text) / 10, abs=10)


def test_the_standard_library_without_its_tests() -> None:
    found = names(find("stdlib"))
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py", "idlelib/editor.py"} <= set(found)
    assert len(found) > 400 and len(set(found)) == len(found)
    assert all(name.endswith(".py") for name in found)
    left_out = {"test", "tests", "idle_test", "site-packages"}
    assert not [name for name in found if left_out & set(name.split("/")[:-1])]
    divided = divide(find("stdlib"), 0.05)
    assert 0.02 < len(divided.validation) / len(found) < 0.09


def test_the_conversations_that_ship_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = find("python-chat")
    assert (found.name, found.kind) == ("python-chat.jsonl", "jsonl") and found.stop > 50_000
    assert [source.path for source in mix(["python-chat"], [1.0], [found])] == [found.path]


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "abc.py").write_text("x = 1\n")
    (tmp_path / "zipped.pyc").write_bytes(b"x" * 10**6)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MissingInputError) as caught:
        find("stdlib")
    assert message(caught).startswith(f"error[DATA001]: the Python in {tmp_path} ")
    assert "1 .py files, 6 bytes" in message(caught) and "data.path=DIRECTORY" in message(caught)


def test_b49_a_glob_that_matches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.jsonl.gz").write_bytes(b"\x1f\x8b")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingInputError) as caught:
        find("data/*.jsonl")
    assert caught.value.exit_code == 66
    assert message(caught).startswith("error[DATA001]: `data/*.jsonl` matches no file")
    assert message(caught).endswith("\nwhere: data.path\nfix:   data.path=data/*.jsonl.gz")


def test_b49_a_file_that_is_not_there(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    with pytest.raises(MissingInputError) as caught:
        find("inner/1.text")
    assert message(caught).startswith("error[DATA001]: `inner/1.text` does not exist")
    assert message(caught).endswith("\nwhere: data.path\nfix:   data.path=inner/1.txt")
    with pytest.raises(MissingInputError) as caught:
        find("nowhere/at/all.txt")
    assert message(caught).startswith("error[DATA001]: `nowhere/at/all.txt` does not exist\n")
    assert shows(message(caught), "fix", corpus, "0.md, 10.md, 2.md, 4.md, 6.md", "2 more")


def test_b49_a_directory_without_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInputError, match=r"error\[DATA001\]: `.*/empty` .*without files"):
        find(str(tmp_path / "empty"))
    with pytest.raises(MissingInputError, match=r"DATA001.*no data"):
        find([])


def test_compressed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError) as caught:
        find(str(tmp_path))
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("DATA008", f"{tmp_path}/a.txt.gz")
    assert f"gunzip -k {tmp_path}/a.txt.gz" in problem.fix


@pytest.mark.parametrize(("target", "name"), [("loop", "loop"), ("nowhere", "loop")])
def test_a_link_that_leads_nowhere_is_called_that(tmp_path: Path, target: str, name: str) -> None:
    (tmp_path / name).symlink_to(target)
    with pytest.raises(MissingInputError) as caught:
        find(str(tmp_path / name))
    assert refuses(message(caught), "DATA001", f"`{tmp_path}/{name}`", "broken link", target)
    assert f"ls -l {tmp_path}/{name}" in message(caught)


def test_what_is_no_file_is_called_that(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MissingInputError, match=r"DATA001.*pipe` is neither"):
        find(str(tmp_path / "pipe"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_read_is_missing_input_and_one_that_cannot_be_written_is_not(number: int) -> None:
    with pytest.raises(MissingInputError) as caught, reading(Path("a.jsonl")):
        raise OSError(errno.EIO, "Input/output error")
    [problem] = caught.value.problems
    assert problem.code == "DATA001" and "a.jsonl" in problem.what and "Input/output error" in problem.what
    with pytest.raises(OSError, match="of the disk"), reading(Path("a.jsonl")):
        raise OSError(number, "of the disk")
