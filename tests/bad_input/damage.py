"""Two hundred ways to damage a file, each a function of its number: first the file as a whole, then a value in it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COUNT = 200
ODD = [
    "1e400", "-1e400", "-1", "-3.5", "NaN", "true", "null", '"x"', '""', "[]", "{}", "[[1]]", '{"a": {"b": []}}', "0",
    "1" * 400, "9" * 5000, "9223372036854775807", "[" * 100_000, '{"a":' * 50_000, '"\\ud800"', '"\\u001b[2J"', "01",
    "1.0", "4294967296", '"a\\u0000b"', '"/etc/passwd"', '"BESIDE/OLD"', '"OUTSIDE/OLD"', '"link/OLD"', '"."',
    '".."', '"' + "y" * 5000 + '"', '"x/../BESIDE/OLD"', "1e-320", "-9223372036854775809",
]  # fmt: skip
"""What is put in place of a value OLD, as it stands in the file. If that is the name of a file, it is one in OUTSIDE
too (from here, BESIDE) and behind the link."""
MARK = "the value to be replaced"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, its own first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def _other(value: Any, pick: random.Random, odd: str) -> str:
    """JSON with another value at one place, without it, with it twice, or with a list for an object."""
    if not isinstance(value, dict | list) or not value:
        return odd.replace("OLD", str(value))
    *above, last = pick.choice([*places(value)][1:])
    target = value
    for key in above:
        target = target[key]
    way = 7 if "OLD" in odd else pick.randrange(8)
    old = target[last] if isinstance(target[last], str) and target[last].isprintable() else "x"
    if way == 0:
        del target[last]
    elif way == 1 and isinstance(target[last], dict):
        target[last] = list(target[last].values())
    elif way == 2 and isinstance(target[last], list):
        target[last] = {str(number): each for number, each in enumerate(target[last])}
    elif way == 3:
        target[last] = [target[last]] * 2
    elif way == 4 and isinstance(target, dict):
        own = json.dumps(last)
        target[MARK] = MARK
        return json.dumps(value).replace(f'"{MARK}": "{MARK}"', f"{own}: {odd}")  # the key twice
    elif way == 5 and isinstance(target[last], int):
        target[last] += pick.choice([-1, 1, 2**31, -(2**31), 2**62])
    else:
        target[last] = MARK
    return json.dumps(value).replace(f'"{MARK}"', odd.replace("OLD", old))


def _line(text: str, pick: random.Random, odd: str, mark: str) -> str:
    """Text with one line changed: what stands behind ``mark``, all of it, missing, twice, or in another place."""
    lines = text.splitlines() or [""]
    at, way = pick.randrange(len(lines)), pick.randrange(6)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(pick.randrange(len(lines) + 1), lines[at])
    elif way == 2:
        lines[at] = odd
    elif way == 3:
        column = pick.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:column] + pick.choice("\"'{}[]:,%#-&*!|>\t\\\0\u2028") + lines[at][column:]
    else:
        head, mark, _ = lines[at].partition(mark)
        lines[at] = f"{head}{mark} {odd}"
    return "\n".join(lines) + "\n"


def _bytes(data: bytes, pick: random.Random) -> bytes:
    """Some bytes changed, put in or left out; mostly near the beginning, where headers are."""
    at = pick.randrange(max(1, min(len(data), pick.choice([16, 64, 256, len(data)]))))
    some = pick.randbytes(pick.choice([1, 2, 8, 64]))
    way = pick.randrange(5)
    if way == 0:
        return data[:at] + some + data[at:]
    if way == 1:
        return data[:at] + data[at + len(some) :]
    fill = {2: b"\0" * len(some), 3: b"\xff" * len(some)}.get(way, some)
    return data[:at] + fill + data[at + len(some) :]


def _replaced(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


WHOLE: list[Callable[[Path], object]] = [
    *map(_replaced, (b"", b"null", b"[]", b'"x"', b"{}", b"0", b"NaN", b"\n", b"\0" * 1000, b"\xff" * 1000)),
    *map(_replaced, (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"a" * 2**21, b'{"a": 1, "a": 2}', b"- a\n")),
    _replaced(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94."),
    _replaced(b"PK\x03\x04" + b"\0" * 100),
    _replaced(b"<!DOCTYPE html>\n<html></html>\n"),
    _replaced(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    _changed(lambda data: data[: len(data) // 3]),
    _changed(lambda data: data[:-1]),
    _changed(lambda data: data[1:]),
    _changed(lambda data: data * 2),
    _changed(lambda data: b"\xef\xbb\xbf" + data),
    _changed(lambda data: data.decode("latin-1").encode("utf-16")),
    _changed(lambda data: data[: len(data) // 2] + b"\0" + data[len(data) // 2 :]),
    _changed(lambda data: data[: len(data) // 2] + b"\xc3\x28" + data[len(data) // 2 :]),
    _changed(lambda data: data.replace(b"\n", b"\r")),
    _instead(Path.mkdir),
    _instead(lambda path: path.symlink_to("nowhere")),
    _instead(lambda path: path.symlink_to(path.name)),
    _instead(os.mkfifo),
    _instead(lambda path: None),
    _instead(_sparse),
]
"""Damage to a file as a whole."""


def damage(path: Path, kind: str, number: int, outside: Path) -> bool:
    """Damage a file of this ``kind`` (json, jsonl, bytes, or text in which values stand behind that mark) in one of
    COUNT ways; whether it was a value in it, so that sums over the file may be made right again. ``outside``: a copy of
    the file's directory elsewhere."""
    if number < len(WHOLE):
        WHOLE[number](path)
        return False
    pick = random.Random(f"{path.name} {number}")
    odd = ODD[number % len(ODD)].replace("OUTSIDE", str(outside))
    odd = odd.replace("BESIDE", os.path.relpath(outside, path.parent))
    text = path.read_bytes()
    if kind == "json":
        changed = _other(json.loads(text), pick, odd).encode()
    elif kind == "jsonl":
        first, *rest = text.decode().splitlines()
        changed = "\n".join([_other(json.loads(first), pick, odd), *rest, ""]).encode()
    elif kind in (":", ",", " "):
        changed = _line(text.decode(), pick, odd, kind).encode(errors="surrogatepass")
    else:
        changed = _bytes(text, pick)
    path.write_bytes(changed)
    return True
