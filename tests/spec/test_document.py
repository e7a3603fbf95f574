"""YAML 1.2 read strictly: what a value means, what is refused, and where it says so."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, MissingInputError, PolicyError, ShardwiseError
from shardwise.spec.document import MAX_BYTES, parse, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-.5", -0.5),
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("true", True),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ('"null"', "null"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse(f"key: {text}\n", "r.yaml").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_collections_aliases_and_lines() -> None:
    document = parse("a: &x [1, {b: c}]\nd:\n  e: *x\n  f: >\n    folded\n    text\n", "r.yaml")
    assert document.data == {"a": [1, {"b": "c"}], "d": {"e": [1, {"b": "c"}], "f": "folded text\n"}}
    assert document.place(("d", "e")) == "r.yaml:3"
    assert document.place(("d", "e", 0)) == "r.yaml:3"
    assert document.place(("nowhere",)) == "r.yaml"


def test_every_duplicate_key_is_reported_with_both_lines() -> None:
    problems = parse("steps: 1\nb:\n  c: 1\n  c: 2\nsteps: 3\n", "r.yaml").problems
    assert [(p.code, p.what, p.where) for p in problems] == [
        ("CFG003", "`b.c` is set twice", "r.yaml:3 and :4"),
        ("CFG003", "`steps` is set twice", "r.yaml:1 and :5"),
    ]


def one_problem(error: ShardwiseError) -> tuple[str, int, str]:
    (problem,) = error.problems
    return problem.code, error.exit_code, problem.what


@pytest.mark.parametrize(
    ("text", "code", "exit_code", "what"),
    [
        ("a:\n\tb: 1", "CFG007", 78, "r.yaml:2:1 .* tab"),
        ("a: [1", "CFG007", 78, "r.yaml:1:6 .*flow sequence"),
        ("a: 1\n---\nb: 2", "CFG007", 78, "r.yaml .*second document.* line 2"),
        ("? [a]\n: b", "CFG007", 78, "r.yaml .*line 1: .* key .*collection"),
        ("a: &x [*x]", "CFG007", 78, r"r.yaml .*line 1: alias \*x"),
        ("a: \x00", "CFG007", 78, "r.yaml .*unacceptable character"),
        ('a: "\\ud800"', "CFG007", 78, "r.yaml .*line 1: .*surrogate pair"),
        ("a: !!str 1", "SEC001", 77, "a tag, `!!str`; refused"),
        ("a: !include ../../etc/passwd", "SEC003", 77, "`!include`: includes are refused"),
        ("a: x ${oc.env:HOME}", "SEC003", 77, r"interpolation '\$\{oc.env:HOME\}'"),
        ("[" * 10_000, "SEC002", 77, r"r.yaml:1 .* 64 deep \(limit\)"),
    ],
)
def test_what_is_refused(text: str, code: str, exit_code: int, what: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        parse(text, "r.yaml")
    found = one_problem(caught.value)
    assert found[:2] == (code, exit_code)
    assert re.match(what, found[2])


def test_a_python_tag_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(PolicyError) as caught:
        parse(f"a: 1\nb: !!python/object/apply:os.system ['touch {canary}']\n", "r.yaml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("SEC001", "r.yaml:2")
    assert "`!!python/object/apply:os.system`" in problem.what
    assert not canary.exists()


def test_an_alias_bomb_is_counted_and_not_expanded() -> None:
    rows = ["a0: &a0 [" + ",".join("x" * 10) + "]"]
    rows += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    start = time.monotonic()
    with pytest.raises(PolicyError) as caught:
        parse("\n".join(rows), "r.yaml")
    code, exit_code, what = one_problem(caught.value)
    assert (code, exit_code) == ("SEC002", 77) and what.startswith("r.yaml ") and "1,000,000 nodes" in what
    assert time.monotonic() - start < 2.0


def test_a_large_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as stream:
        os.truncate(stream.fileno(), 100 * 2**20)
    with pytest.raises(PolicyError) as caught:
        read(path)
    code, exit_code, what = one_problem(caught.value)
    assert (code, exit_code) == ("SEC002", 77) and what.startswith(f"{path} ") and f"{MAX_BYTES:,} bytes" in what


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("there.yaml", "short.yml", ".pre-commit-config.yaml"):
        (tmp_path / name).write_text("a: 1")
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run" / "recipe.yaml").write_text("{}")
    with pytest.raises(MissingInputError) as caught:
        read(tmp_path / "nowhere.yaml")
    (problem,) = caught.value.problems
    assert problem.code == "CFG011" and f"{tmp_path / 'nowhere.yaml'}: no such file" in problem.what
    assert problem.fix == f"there are: {tmp_path / 'a-run'}, {tmp_path / 'short.yml'}, {tmp_path / 'there.yaml'}"
    with pytest.raises(MissingInputError):
        read(tmp_path)


def test_byte_order_mark_and_carriage_returns_are_accepted_and_utf16_is_not(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes("\ufeffa: 1\r\nb: é\r\n".encode())
    assert read(path).data == {"a": 1, "b": "é"}
    path.write_bytes("a: 1\n".encode("utf-16"))
    with pytest.raises(ConfigError) as caught:
        read(path)
    code, exit_code, what = one_problem(caught.value)
    assert (code, exit_code) == ("CFG007", 78) and what.startswith(f"{path} ") and "byte 0xff at 0" in what
