"""Bad records: reported together with their lines, or all left out and counted; and looked for by a dry run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.data import read, shards
from shardwise.data.faults import BadRecord, BadRecords
from shardwise.data.prepare import check_records, prepare
from shardwise.errors import DataError
from shardwise.spec.recipe import Data
from tests.said import shows

Make = Callable[..., Data]
GOOD = json.dumps({"messages": [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]})
BAD = {
    "DATA004": b'{"messages": [',
    "DATA005": b'{"message": []}',
    "DATA006": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "DATA007": b'{"messages": ' + b"[" * 5_000,
    "DATA009": b'{"input_ids": [1, 99999]}',
    "DATA015": json.dumps({"prompt": "alpha", "completion": " beta" * 500}).encode(),
    "CHAT002": b'{"messages": [{"role": "user", "content": "alpha"}]}',
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A good record, then one of each kind, then the next good one."""
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join([GOOD.encode(), *BAD.values(), GOOD.encode()]) + b"\n")
    return path


@pytest.fixture
def tune(settings: Make) -> Callable[..., Data]:
    def make(path: Path, **more: object) -> Data:
        return settings(path, **{"chat_template": "zephyr", "too_long": "error", "validation_share": 0.0, **more})

    return make


def test_all_kinds_are_reported_at_once(mixed: Path, tune: Make) -> None:
    with pytest.raises(DataError) as caught:
        prepare(tune(mixed), sample_tokens=64)
    problems = caught.value.problems
    assert {p.code: p.what.partition(" ")[0] for p in problems} == {
        code: f"mixed.jsonl:{line}" for line, code in enumerate(BAD, 2)
    }
    assert all(p.where == str(mixed) and p.fix for p in problems)
    assert "data.on_bad_sample=skip" in problems[-1].fix


def test_all_kinds_may_be_left_out_and_are_counted(mixed: Path, tune: Make) -> None:
    made = prepare(tune(mixed, on_bad_sample="skip"), sample_tokens=64)
    assert made.train.split.documents == 2
    assert made.manifest.counts == {"bad": len(BAD), **dict.fromkeys(BAD, 1)}


def test_lines_over_the_limit_are_left_out_too(tmp_path: Path, tune: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the units are: those that begin inside the line pass over it."""
    for name in ("_PIECE_BYTES", "LINE_BYTES", "UNIT_BYTES"):
        monkeypatch.setattr(read, name, {"_PIECE_BYTES": 64, "LINE_BYTES": 1000}.get(name, 300))
    path = tmp_path / "a.jsonl"
    path.write_text(f'{GOOD}\n{{"messages": "{"x" * 5000}"}}\n{GOOD}\n')
    made = prepare(tune(path, on_bad_sample="skip"), sample_tokens=64)
    assert made.train.split.documents == 2 and made.manifest.counts == {"bad": 1, "DATA007": 1}
    with pytest.raises(DataError, match=r"DATA007.*a\.jsonl:2 exceeds 0 MiB"):
        prepare(tune(path), sample_tokens=64)


def test_text_is_read_alike(tmp_path: Path, settings: Make) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "a"}\n{"text": 5}\nx\n{"text": "fine"}\n')
    with pytest.raises(DataError) as caught:
        prepare(settings(path))
    assert [p.what.partition(" ")[0] for p in caught.value.problems] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    untrained = settings(path, on_bad_sample="skip", validation_share=0, tokenizer={"vocab_size": 300})
    made = prepare(untrained)
    assert made.train.split.documents == 2 and made.manifest.counts == {"bad": 3, "DATA004": 1, "DATA005": 2}


def test_text_files_are_reported_together_and_never_left_out(tmp_path: Path, settings: Make) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(b"fine\ncaf\xe9\n" if name != "b" else b"fine\n")
    with pytest.raises(DataError) as caught:
        prepare(settings(f"{tmp_path}/*.txt", on_bad_sample="skip", validation_share=0))
    assert [p.what.partition(" ")[0] for p in caught.value.problems] == ["a.txt:2", "c.txt:2"]


def test_the_first_twenty_and_the_same_fault_once(tmp_path: Path, tune: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "UNIT_BYTES", 400)
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n" + '{"message": []}\n' * 15 + f"{GOOD}\n" * 9 + "[]\n" * 500)
    with pytest.raises(DataError) as caught:
        prepare(tune(path), sample_tokens=64)
    first, second = caught.value.problems
    same = ", ".join(f"a.jsonl:{line}" for line in range(3, 17))
    assert first.what.startswith("a.jsonl:2 ") and first.what.endswith(f"; the same at {same}")
    same = ", ".join(f"a.jsonl:{line}" for line in range(27, 31))
    assert second.what.startswith("a.jsonl:26 ") and second.what.endswith(f"; the same at {same}")
    assert second.fix.endswith(" first 20)")


def test_reading_ends_some_way_after_the_first(tmp_path: Path, tune: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "UNIT_BYTES", 400)
    monkeypatch.setattr(shards, "_FURTHER_UNITS", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("[]\n" + f"{GOOD}\n" * 100 + "[]\n")
    with pytest.raises(DataError) as caught:
        prepare(tune(path), sample_tokens=64)
    assert [p.what.partition(" ")[0] for p in caught.value.problems] == ["a.jsonl:1"]


def test_they_travel_between_processes() -> None:
    error = BadRecords(BadRecord("DATA005", "a", 3, "is bad", "mend it", "here/a"))
    again = copy.copy(error)  # as pickle does
    assert (again.found, again.problems) == (error.found, error.problems)


def test_a_check_reads_the_beginning_of_each_file(mixed: Path, tune: Make, tmp_path: Path) -> None:
    many = tmp_path / "d"
    many.mkdir()
    (many / "a.jsonl").write_text(f"{GOOD}\n" * 3)
    (many / "b.jsonl").write_text(f"{GOOD}\n" * 2000 + "[]\n")
    (many / "c.json").write_text(json.dumps([json.loads(GOOD)] * 2))
    counts = check_records(tune(many), 64)
    assert set(counts) == {"read"} and 5 + 100 < counts["read"] < 2005
    assert not (tmp_path / "cache" / "converted").exists() and not (tmp_path / "cache" / "data").exists()
    with pytest.raises(DataError) as caught:
        check_records(tune(mixed), 64)
    assert len(caught.value.problems) == len(BAD)
    assert check_records(tune(mixed, on_bad_sample="skip"), 64) == {"read": 2, "bad": len(BAD), **dict.fromkeys(BAD, 1)}
    with pytest.raises(DataError, match=r"TOK004.*a.jsonl:1 .*`text`") as caught:
        check_records(tune(many, tokenizer={"vocab_size": 300}), 64)
    assert len(caught.value.problems) == 1


def test_a_tokenizer_is_not_trained_on_nothing(tune: Make, tmp_path: Path) -> None:
    """Where every record was left out."""
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n" * 3)
    data = tune(tmp_path / "a.jsonl", tokenizer={"vocab_size": 300}, on_bad_sample="skip")
    for use in (check_records, lambda data, tokens: prepare(data, sample_tokens=tokens)):
        with pytest.raises(DataError, match=r"TOK004.*none of 3 .*`text`"):
            use(data, 64)


def test_leaving_out_is_no_remedy_where_it_leaves_out_nothing(tune: Make, tmp_path: Path) -> None:
    """A text file is never left out; where all records were, why is still to be said."""
    (tmp_path / "a.txt").write_bytes(b"no text \xff\n")
    with pytest.raises(DataError, match=r"DATA006.*not UTF-8") as caught:
        prepare(tune(tmp_path / "a.txt", format="auto"))
    assert "skip" not in caught.value.problems[0].fix
    (tmp_path / "b.jsonl").write_bytes(BAD["DATA005"] + b"\n")
    with pytest.raises(DataError, match=r"DATA002.*1 are bad") as caught:
        prepare(tune(tmp_path / "b.jsonl", on_bad_sample="skip"), sample_tokens=64)
    assert "data.on_bad_sample=error" in caught.value.problems[0].fix


TABLE = b'prompt,completion\nalpha,"beta\ngamma"\nalpha\nalpha,beta,gamma\n"",\nalpha,beta\nalpha,b,e,t,a\n'


def test_rows_of_a_table_with_other_fields_than_its_header_are_reported_together(tmp_path: Path, tune: Make) -> None:
    """By the line of the file, of a row of several lines the last."""
    path = tmp_path / "a.csv"
    path.write_bytes(TABLE)
    with pytest.raises(DataError) as caught:
        prepare(tune(path, format="prompt_completion"), sample_tokens=64)
    said = [problem.what for problem in caught.value.problems]
    counts = ("a.csv:4", "1 field"), ("a.csv:5", "3 fields"), ("a.csv:8", "5 fields")
    for what, values in zip([what for what in said if "the header" in what], counts, strict=True):
        assert shows(what, *values, "2 fields")
    assert [what.partition(" ")[0] for what in said if "the header" not in what] == ["a.csv:6"], said


def test_rows_of_a_table_with_other_fields_than_its_header_may_be_left_out(tmp_path: Path, tune: Make) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(TABLE)
    made = prepare(tune(path, format="prompt_completion", on_bad_sample="skip"), sample_tokens=64)
    assert made.train.split.documents == 2 and made.manifest.counts["DATA004"] == 3
