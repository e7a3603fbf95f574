"""The conversations that ship: they parse, keep their style, repeat nothing, and what they say of Python holds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from shardwise.data.formats import Conversation, parse
from shardwise.data.source import find

STYLE = re.compile(r"In Python, [^`\n]+\. `([^`\n]+)`")
TOUCHES = re.compile(r"(open|Path|urlopen|subprocess|shutil|sleep|exit|print|input|help|raise|tempfile|warn)\b")
"""What an example that is run may not hold: it would touch the disk, the network, the terminal or the clock."""


@cache
def talks() -> list[list[dict[str, str]]]:
    (source,) = find("python-chat", records=True)
    assert (source.name, source.kind) == ("python-chat.jsonl", "jsonl")
    records = [json.loads(line) for line in source.path.read_text(encoding="utf-8").splitlines()]
    assert all(set(record) == {"messages"} for record in records)
    return [record["messages"] for record in records]


def examples() -> list[str]:
    answers = [turn["content"] for talk in talks() for turn in talk[1::2]]
    found = [STYLE.fullmatch(answer) for answer in answers]
    assert [answer for answer, match in zip(answers, found, strict=True) if match is None] == []
    return [match.group(1) for match in found if match]


def test_there_are_enough_and_all_parse() -> None:
    assert len(talks()) >= 300
    assert sum(len(talk) == 4 for talk in talks()) >= 15
    for talk in talks():
        assert [turn["role"] for turn in talk] == ["user", "assistant"] * (len(talk) // 2)
        parsed = parse({"messages": talk}, "messages", "assistant")
        assert isinstance(parsed, Conversation) and parsed.trained == [False, True] * (len(talk) // 2)


def test_nothing_is_there_twice() -> None:
    for role in ("user", "assistant"):
        texts = [turn["content"].casefold() for talk in talks() for turn in talk if turn["role"] == role]
        assert sorted({text for text in texts if texts.count(text) > 1}) == []


def test_answers_keep_the_style_and_their_examples_are_code() -> None:
    for example in examples():
        assert len(example) <= 110, example
        ast.parse(example)


def test_examples_that_say_what_holds_are_right(tmp_path: Path) -> None:
    """Run in a process of their own, each by itself."""
    claims = []
    for example in examples():
        *before, last = ast.parse(example).body
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Compare) and not TOUCHES.search(example):
            claims.append((ast.unparse(before), ast.unparse(last)))
    assert len(claims) > 250
    code = "import json, sys\nfor before, claim in json.load(sys.stdin):\n    names = {'__name__': 'example'}\n"
    code += "    exec(before, names)\n    if eval(claim, names) is not True:\n        print(before, claim)\n"
    given = json.dumps(claims)
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
