"""Shell scripts as the flags of the program that they start. Nothing is run: what is not static stays as it is written.

Understood are assignments, arrays, ``+=``, continuation lines, ``${X}``, ``${X:-8}`` and arithmetic of whole numbers.
What a branch assigns a second time, the environment, arguments (``$1``) and what commands print are not in the file.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.interop.system import Said

PROGRAMS = re.compile(r"(.*\.py|swift|megatron|llamafactory-cli|trl|axolotl|pretrain_gpt)$")
ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.S)
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+)")
ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
"""A quoted array stands for its words."""
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\(expr ([^()]*)\)")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
OPENS, CLOSES = re.compile(r"(if|for|while|until|case)\b"), re.compile(r"(fi|done|esac)\b")
MOST_CHARACTERS = 100_000
"""Of a value after its variables are replaced: some grow with every line."""


@dataclass
class _Script:
    values: dict[str, str]
    fixed: frozenset[str]
    commands: list[tuple[int, str]] = field(default_factory=list)
    arrays: list[tuple[int, str]] = field(default_factory=list)


def read_flags(text: str, name: str, given: Mapping[str, str]) -> dict[str, Said]:
    """The flags of the command of ``text`` that has most, by name with ``_`` for ``-``. ``given``: values of variables
    that the script does not set, or sets otherwise."""
    script = _Script(dict(given), frozenset(given))
    depth = 0
    for line, statement in _statements(text):
        word = statement.strip()
        if CLOSES.match(word):
            depth = max(0, depth - 1)
        elif OPENS.match(word):
            depth += 1
        else:
            _take(script, line, word, branch=depth > 0)
    best = max(
        script.commands or [(0, " ".join(words for _, words in script.arrays))], key=lambda one: one[1].count("--")
    )
    return _flags(best[1], f"{name}:{best[0]}" if best[0] else name)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Statements with their first lines: continuation lines joined, comments left out, arrays and quotes whole."""
    held, start = "", 0
    skipped = ""
    for number, raw in enumerate(text.splitlines(), 1):
        if skipped:
            skipped = "" if raw.strip() == skipped else skipped
            continue
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        start = start if held else number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        held += line
        if heredoc := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", held):
            skipped, held = heredoc.group(1), ""
            continue
        if _open(held):
            held += " "
            continue
        if held.strip():
            yield start, held
        held = ""
    if held.strip():
        yield start, held


def _open(text: str) -> bool:
    """Return whether an array or a quotation goes on in the next line."""
    plain = re.sub(r"\$\([^()]*\)", "", text)
    array = re.match(r"\s*(?:export\s+)?\w+\+?=\(", plain)
    return bool((array and plain.count("(") > plain.count(")")) or plain.replace('\\"', "").count('"') % 2)


def _take(script: _Script, line: int, statement: str, *, branch: bool) -> None:
    """Remember an assignment, or a command."""
    assigned = ASSIGNMENT.match(statement)
    command = statement
    if assigned and not re.search(r"^\S+=\S*\s+\S", statement.split("(")[0] if "=(" in statement else ""):
        name, more, value = assigned.groups()
        array = value.strip().startswith("(")
        plain = value.strip()[1:].rstrip(") ") if array else _unquoted(value.strip())
        prefix = not array and re.match(r"\S+\s+\S", value.strip()) and value.strip()[:1] not in "\"'$"
        if not prefix:
            found = _expanded(plain, script.values)
            if name in script.fixed or (branch and (more or name in script.values)):
                return
            script.values[name] = f"{script.values.get(name, '')} {found}" if more else found
            if array:
                script.arrays.append((line, found))
            if not re.search(r"\.py\b.*--", found):
                return
            command = found
    command = _expanded(command, script.values)
    if command.count("--") > 2 and any(PROGRAMS.match(word.strip("\"'")) for word in command.split()):
        script.commands.append((line, command))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """``text`` with variables and arithmetic replaced, as far as they are known."""

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        if name in values:
            return values[name]
        return match.group() if default is None else _unquoted(default)

    def computed(match: re.Match[str]) -> str:
        expression = _expanded(match.group(1) or match.group(2), values)
        expression = re.sub(r"\b([A-Za-z_]\w*)\b", lambda name: values.get(name.group(), name.group()), expression)
        found = whole_number(expression.replace("/", "//").replace("$", ""))
        return match.group() if found is None else str(found)

    replaced = VARIABLE.sub(value, ARITHMETIC.sub(computed, ARRAY.sub(r"\1", text)))
    return replaced[:MOST_CHARACTERS]


def whole_number(expression: str) -> int | None:
    """The value of an expression of whole numbers and + - * /; None for anything else."""

    def evaluate(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**63:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right)))
        raise ValueError

    try:
        return evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def flag_name(flag: str) -> str:
    """Return the name of a flag as its program has it: ``num_layers`` of ``--num-layers``."""
    return flag.removeprefix("--").replace("-", "_")


def _flags(command: str, where: str) -> dict[str, Said]:
    """``--name value``, ``--name=value`` and ``--name`` after the program's own name."""
    try:
        words = shlex.split(command.replace("\n", " "))
    except ValueError:
        words = command.split()
    start = next((place for place, word in enumerate(words) if PROGRAMS.match(word)), -1)
    found: dict[str, Said] = {}
    rest = words[start + 1 :]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        values: list[str] = [value] if equals else []
        while not equals and rest and not re.match(r"--?[A-Za-z]|[|&;>]", rest[0]):
            values.append(rest.pop(0))
        key = flag_name(name)
        said = True if not values else values[0] if len(values) == 1 else values
        found[key] = Said(key, said, where)
    return found
