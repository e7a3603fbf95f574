"""Damaged and hostile files of each kind: a recipe or a coded error within a second, nothing run, and nothing read but
the file that was named."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.interop.imports import foreign, read_files
from shardwise.interop.systems import SYSTEMS
from shardwise.spec.load import read_settings
from tests.interop.test_imports import SAMPLES
from tests.interop.test_nemo import SAMPLES as NEMO
from tests.interop.test_programs import PROGRAM
from tests.interop.test_scripts import ARGUMENTS, MEGATRON

SWIFT = "swift sft --model org/model --train_type lora --dataset a.jsonl --learning_rate 1e-4 --deepspeed zero2\n"
FSDP = '{"fsdp_transformer_layer_cls_to_wrap": ["Block"], "backward_prefetch": "x", "reshard_after_forward": true}'
KINDS = {
    **SAMPLES,
    **{f"nemo {name}": ("a.yaml", text) for name, text in NEMO.items()},
    "megatron": ("a.sh", MEGATRON),
    "a script of hf": ("a.sh", ARGUMENTS),
    "swift": ("a.sh", SWIFT),
    "fsdp": ("a.json", FSDP),
    "a program of torchtitan": ("a.py", PROGRAM),
}
FILES, BLOCK = 300, 30
"""Files of each kind, and of a test."""
VALUES = (
    "[]",
    "{}",
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    "nan",
    "1" * 400,
    "1" * 5000,
    "'x'",
    "[1, 2, [3]]",
    "{a: {b: 1}}",
    '{"a": 1}',
    "/etc/passwd",
    "../../etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:9/x",
    "${HOME}",
    "${oc.env:HOME}",
    "${.a}",
    "$((9**9**9))",
    "%(x)s",
    "{{ 7 * 7 }}",
    "\x00",
    "é" * 200,
    "a" * 100_000,
    "=1+1",
    "!!python/name:os.system",
    "&a [*a]",
    "*nothing",
    "<<",
    "9" * 20 + "." + "9" * 20,
)
ANCHORS = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 40) if n else '1, 2'}]\n" for n in range(12))

KEYS = "".join(
    f"k{n}: &k{n} {{{', '.join(f'a{i}: *k{n - 1}' if n else f'a{i}: 1' for i in range(9))}}}\n" for n in range(6)
)
"""Fewer nodes than are refused, and half a million keys."""


def hostile(text: str, chance: random.Random, mark: str) -> bytes:
    """``text`` damaged in one to three ways. What would be run would make the file ``mark``."""
    touch = f"touch {mark}"
    commands = (f"$({touch})", f"`{touch}`", f"; {touch} #", f"!!python/object/apply:os.system ['{touch}']")
    commands += (f"__import__('os').system('{touch}')", f"\nsource {mark}\n. {mark}\n", f"<({touch})")
    data = text
    for _ in range(chance.randint(1, 3)):
        at, lines = chance.randrange(len(data) + 1), data.split("\n")
        line = chance.randrange(len(lines))
        way = chance.randrange(14)
        if way == 0:
            data = data[:at]
        elif way == 1:
            sign = chance.choice("\x00\t{}[]\"':#&*!|>%@`$\\\u2028\ufeff-\r")
            data = data[:at] + sign * chance.choice((1, 3, 200)) + data[at:]
        elif way == 2:
            data = data[:at] + chance.choice(commands) + data[at:]
        elif way in (3, 4, 5):  # another value of a key
            for sign in chance.sample((": ", "=", " = ", " "), 4):
                if sign in lines[line]:
                    key = lines[line].partition(sign)[0]
                    lines[line] = key + sign + chance.choice((*VALUES, *commands))
                    break
            data = "\n".join(lines)
        elif way == 6:
            data = "\n".join([*lines[:line], lines[line], *lines[line:]])
        elif way == 7:
            chance.shuffle(lines)
            data = "\n".join(lines)
        elif way == 8:
            deep = chance.choice((40, 400, 20_000))
            data = data[:at] + chance.choice(("[", "{a: ", "(", "${", '"', "- ", "if x:\n ")) * deep + data[at:]
        elif way == 9:
            bomb = chance.choice((ANCHORS, KEYS))
            data = bomb + data if chance.random() < 0.5 else data + bomb
        elif way == 10:
            data = data[: at // 2] + data[at:]
        elif way == 11:
            data += "\n" + lines[line].strip() * chance.choice((10, 3000))
        elif way == 12:
            data = data.replace(" ", chance.choice(("\t", "  ", "\u00a0", "")), chance.choice((1, -1)))
        else:
            data = data.replace(chance.choice("aeiou=:-[]{}\"'"), chance.choice("xé0-:"), chance.choice((1, 5, -1)))
    encoding = chance.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1"))
    return data.encode(encoding, "replace")


STARTS = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "os.listdir")
"""The beginnings of events that start a program or a connection, or look around."""


class Watch:
    """A record of what is opened or started while somebody watches; Python keeps such a hook for good."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            self.seen.append(str(arguments[0]))
        elif event.startswith(STARTS):
            self.seen.append(event)

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        found = self.seen = []
        try:
            yield found
        finally:
            self.seen = None


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


OURS = (str(Path(shardwise.__file__).parent), sys.prefix, sys.base_prefix)


def outcome(path: Path, system: str | None) -> None:
    """Read a file as far as a recipe, or to a coded error."""
    try:
        found = read_files([path], 8, system)
        settings = {key: (setting.value, setting.origin) for key, setting in (found.settings | found.pins).items()}
        read_settings(settings, [f"{key}={8 if key == 'train.seq_len' else 'model'}" for key in found.asked])
    except ShardwiseError as error:
        assert all(problem.code for problem in error.problems)


def processor_seconds(read: Callable[[], object]) -> float:
    """The least of up to three readings of how long ``read`` takes; the first that is quick is enough. A core that is
    shared with others counts more for the same work, now and then much more."""
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        read()
        least = min(least, time.process_time() - began)
        if least < 1:
            break
    return least


@pytest.mark.matrix(20)
@pytest.mark.rare(4)
@pytest.mark.parametrize("block", range(FILES // BLOCK))
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_ends_in_a_recipe_or_a_coded_error(tmp_path: Path, watch: Watch, kind: str, block: int) -> None:
    name, text = KINDS[kind]
    names = [None, *(system.name for system in SYSTEMS)]
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        chance = random.Random(f"{kind} {number}")
        mark = tmp_path / "mark"
        path = tmp_path / name
        path.write_bytes(hostile(text, chance, str(mark)))
        system = names[number % len(names)] if number % 3 == 0 else None
        with watch.watched() as seen:
            took = processor_seconds(lambda path=path, system=system: (foreign(path), outcome(path, system)))
        assert took < 1, f"file {number} of {kind} took {took:.1f} s"
        assert not mark.exists(), f"file {number} of {kind}"
        others = [each for each in seen if each != str(path) and not each.startswith(OURS)]
        assert not others, f"file {number} of {kind}"


@pytest.mark.matrix(4)
@pytest.mark.rare(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_fifty_megabytes_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    name, text = KINDS[kind]
    path = tmp_path / name
    with path.open("w") as file:
        file.write(text)
        file.truncate(50_000_000)

    def read() -> None:
        with pytest.raises(ShardwiseError):
            read_files([path], 8)

    assert processor_seconds(read) < 1
