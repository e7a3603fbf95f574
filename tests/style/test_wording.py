"""Tests say what is refused or shown (codes, fields, values: ``tests.said``), not its words: few compare sentences.

A sentence is a text of four or more words. A word is a run of letters between blanks, punctuation beside it aside: what
an f-string fills in, figures, options, names with dots and what stands in backticks are none, nor are three or more
words that commas alone part. It counts where it is compared: in an ``assert``, or as ``match=``; and, by the names that
stand there, in what a test is parametrized with, what a loop goes over, constants, and what functions of tests that
compare an argument are called with. Keys of dicts are names, and none. All of them by file, and those of one:

    .venv/bin/python -m tests.style.test_wording [FILE]
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.style.source import ROOT

WORDS = 4
MOST = 30
NOT_OURS = re.compile(
    r"Traceback \(most recent|Input should be|Invalid value for|No such command|CUDA |NCCL: |Permission denied|"
    r"not JSON serializable|Connection closed by|inplace operation|Cannot connect|Protocol not known|BuilderConfig|"
    r"Unknown split|DefaultCPUAllocator|pip install|<\|im_start|\{\{|\{\"\w+\"|_comment|deepspeed accelerate|"
    r"\bimport \w|__name__|= \[|#!/bin|torchrun|annot allocate memory|failed to map|start new thread"
)
"""What Python and libraries say, programs, commands, and data: templates, JSON, lists of names."""
DATA = {"AXOLOTL", "LLAMAFACTORY", "TORCHTITAN", "TORCHTUNE", "PROMPTS", "QUESTION", "SCHEMA"}
"""Constants of tests that hold prompts, and files of other systems."""
ASKS = {"startswith", "endswith", "count", "index", "find", "search", "match", "fullmatch", "findall", "split"}
LISTS = {"all", "any", "set", "list", "tuple", "dict", "sorted", "escape", "join", "format"}
LOOKS_INTO = ASKS | LISTS | {"shows", "refuses", "refusal"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Bindings = list[tuple[ast.expr, ast.expr]]
Comparing = defaultdict[str, set[int | str]]
"""By function, the places and names of the parameters that it compares."""


def is_sentence(text: str) -> bool:
    said = re.sub(r"\w+(?:, \w+){2,}|`[^`]*`", "", text.replace(r"\ ", " "))
    words = (word.strip("()[]\"'`.,;:!?*^$|\\") for word in said.split())
    return not NOT_OURS.search(text) and sum(map(is_word, words)) >= WORDS


def is_word(text: str) -> bool:
    return re.fullmatch(r"[^\W\d_]+(['’-][^\W\d_]+)*", text) is not None


def text_of(node: ast.AST) -> str:
    """The text that an expression is, with ``{}`` for what it fills in; empty if it is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A compared expression and what is compared of it: not what a call that looks elsewhere is given."""
    yield node
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.Call):
        listed = called(node) == "split" and not node.args  # "a list of words".split()
        parts = [] if listed else parts if called(node) in LOOKS_INTO else [node.func]
    elif isinstance(node, ast.Subscript):
        parts = [node.value]
    elif isinstance(node, ast.Dict):
        parts = list(node.values)
    for part in parts:
        yield from within(part)


def compared(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert):
        yield from within(node.test)
    elif isinstance(node, ast.keyword) and node.arg == "match":
        yield from within(node.value)


def passed(calls: list[ast.Call], comparing: Comparing) -> Iterator[ast.AST]:
    """What calls give to functions that compare it."""
    for call in calls:
        if known := comparing.get(called(call)):
            given = [*enumerate(call.args), *((keyword.arg or "", keyword.value) for keyword in call.keywords)]
            for place, value in given:
                if place in known:
                    yield from within(value)


def bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets, and the values that they are given: by assignments and by loops over what stands there."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield from ((node.target, item) for item in items(node.iter))


def parametrized(scope: Function, constants: Bindings) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The same of what a test is parametrized with."""
    for decorator in scope.decorator_list:
        if isinstance(decorator, ast.Call) and called(decorator) == "parametrize":
            first, table = decorator.args[:2]
            given = text_of(first).split(",") if text_of(first) else map(text_of, getattr(first, "elts", []))
            names: list[ast.expr] = [ast.Name(name.strip()) for name in given]
            tables = picked(constants, {table.id}) if isinstance(table, ast.Name) else [table]
            for item in (item for each in tables for item in items(each)):
                values = item
                if isinstance(item, ast.Call) and called(item) == "param":
                    values = ast.Tuple(item.args) if len(names) > 1 else item.args[0]
                yield ast.Tuple(names) if len(names) > 1 else names[0], values


def items(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return list(node.elts)
    if isinstance(node, ast.Dict):
        return [ast.Tuple([ast.Name("_"), value]) for value in node.values]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        return items(node.func.value)
    return []


def picked(bound: Bindings, names: set[str]) -> Iterator[ast.expr]:
    """What these names stand for."""
    for target, value in bound:
        if isinstance(target, ast.Name) and target.id in names - DATA:
            yield value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.List):
            yield from picked([*zip(target.elts, value.elts, strict=False)], names)


class Scope:
    """A function: its expressions that are compared, those that it calls others with, and what its names stand for."""

    def __init__(self, path: str, function: Function, constants: Bindings) -> None:
        nodes = list(ast.walk(function))
        self.path, self.name = path, function.name
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.compared = [part for node in nodes for part in compared(node)]
        self.bound = [*constants, *bindings(nodes), *parametrized(function, constants)]
        given = function.args
        self.given = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
        self.given = [name for name in self.given if name not in ("self", "cls")]

    def sentences(self, comparing: Comparing) -> set[tuple[int, str]]:
        """Those that it compares; what of its own arguments it compares is added to ``comparing``."""
        nodes, seen = [*self.compared, *passed(self.calls, comparing)], set[str]()
        while names := {node.id for node in nodes if isinstance(node, ast.Name)} - seen:
            seen |= names
            nodes += [part for value in picked(self.bound, names) for part in within(value)]
        for place, name in enumerate(self.given):
            if name in seen and not self.name.startswith("test_"):
                comparing[self.name] |= {place, name}
        told = ((getattr(node, "lineno", 0), text_of(node)) for node in nodes)
        return {(line, text) for line, text in told if text and is_sentence(text)}


def sentences(texts: dict[str, str]) -> dict[str, set[tuple[int, str]]]:
    """By file, the line and text of every sentence that is compared."""
    scopes: list[Scope] = []
    for path, text in texts.items():
        tree = ast.parse(text)
        constants = list(bindings(tree.body))
        scopes += [Scope(path, node, constants) for node in ast.walk(tree) if isinstance(node, Function)]
    found: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
    comparing: Comparing = defaultdict(set)
    for scope in [scope for scope in scopes if not scope.name.startswith("test_")] * 2 + scopes:
        found[scope.path] |= scope.sentences(comparing)
    return found


def of_tests() -> dict[str, set[tuple[int, str]]]:
    """Those of all tests; tests of style speak of the code itself."""
    files = (path for path in sorted((ROOT / "tests").rglob("*.py")) if path.parent.name != "style")
    return sentences({str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files})


def test_few_assertions_compare_sentences() -> None:
    found = of_tests()
    told = [f"{path}:{line}: {text[:80]!r}" for path in found for line, text in sorted(found[path])]
    assert len(told) <= MOST, "\n".join(["compare codes, fields and values (tests.said):", *told])


PLANTED = """
SAID = "a constant of four words"
@pytest.mark.parametrize(("given", "told"), [("not what is compared here", "what a table has told")])
def test_one(given, told):
    assert told in str(error(given)) and SAID in text, "not the message of it"
    with pytest.raises(ValueError, match="which a pattern looks for"):
        run("not what is given to it")
    for words in ("what a loop goes over",):
        assert words == f"{len(page)} what is filled in here"
    has("what another function compares")
    assert keys == {"not a key of a dict": 1} and refuses(text, "CFG001", "what an error is searched for")
    assert lists in ("one, two, three, four", "`a b c d e`", "import what it may be")
def has(what):
    assert what in page
"""


def test_what_counts_and_what_does_not() -> None:
    texts = {text for _, text in sentences({"a.py": PLANTED})["a.py"]}
    assert {text.split()[0] for text in texts} == {"a", "what", "which", "{}"} and len(texts) == 7


if __name__ == "__main__":
    everywhere = of_tests()
    for path in sorted(everywhere, key=lambda path: -len(everywhere[path])):
        if path in sys.argv[1:]:
            print(*(f"{path}:{line}: {text!r}" for line, text in sorted(everywhere[path])), sep="\n")
        elif everywhere[path] and not sys.argv[1:]:
            print(len(everywhere[path]), path)
    print(sum(map(len, everywhere.values())), "in", sum(map(bool, everywhere.values())), "files")
