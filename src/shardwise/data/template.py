"""Chat templates: where they come from, and rendering them as transformers does, in a sandbox with limits.

A template is a program that came with a tokenizer, so it is not trusted: attributes that begin with two underscores are
refused when it is compiled, and each rendering is limited in seconds, in size, and in what one operator may build.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.data.formats import REASONING
from shardwise.data.tokens import FILES, read_facts
from shardwise.errors import DataError, PolicyError, Problem
from shardwise.spec.files import NOTE_BYTES, read_regular

_TABLES = json.loads(Path(__file__).with_name("templates.json").read_text("utf-8"))
SHIPPED: dict[str, str] = _TABLES["shipped"]
"""Templates by name, for tokenizers without one. ``zephyr`` needs no token but the end-of-text."""
_OWN: dict[str, str] = _TABLES["own"]
"""Names that axolotl and LLaMA-Factory give to templates that a model's tokenizer brings: what is found in each."""
OPEN, CLOSE, PROBE = "\U0010fff0", "\U0010fff1", "\U0010fff2"
"""Around what a template marks with ``{% generation %}``; and what stands for a turn's content (private characters)."""
LIMIT_S = 2.0
LIMIT_CHARACTERS = 64 * 2**20
_WHERE = "data.chat_template"


class RenderError(Exception):
    """The template rejected these messages, or raised an error on them."""


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` encloses the assistant's part."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Limits the operators that could build a huge value from a small one."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, scope: Context, operator: str, left: Any, right: Any) -> Any:
        sized, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
        built = isinstance(sized, str | list | tuple) and isinstance(times, int) and len(sized) * times > 2**20
        if (operator == "*" and built) or operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"the operator {operator} could build something huge")
        return super().call_binop(scope, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=bool(sort_keys))


class Template:
    """One chat template with the special tokens that it may use. ``marked``: it marks the assistant's part itself.
    Raises CHAT001 (not a template) and SEC009 (it uses something that no template needs)."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            _refuse_private(environment.parse(text))
            self._compiled = environment.from_string(text)
        except TemplateSyntaxError as error:
            what = f"chat template line {error.lineno}: {error.message}"
            fix = "repair it, or data.chat_template=<another: a name, a file or the text>"
            raise DataError(Problem("CHAT001", what, _WHERE, fix)) from error
        self._tokens = dict(tokens)
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, generate: bool = False) -> str:
        """The text, with ``OPEN`` and ``CLOSE`` around marked parts; ``generate`` adds the generation prompt.
        Raises RenderError; SEC009 where it takes too long or writes too much."""
        given: dict[str, Any] = {"messages": list(map(_same_reasoning, messages)), "tools": tools, "documents": None}
        given |= {"add_generation_prompt": generate, **self._tokens}
        pieces: list[str] = []
        size = 0
        try:
            with _limited():
                for piece in self._compiled.generate(given):
                    pieces.append(piece)
                    size += len(piece)
                    if size > LIMIT_CHARACTERS:
                        raise SecurityError(f"it wrote more than {LIMIT_CHARACTERS:,} characters")
        except (SecurityError, OverflowError, TimeoutError) as error:  # OverflowError: the sandbox's range()
            raise _insecure(str(error)) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise RenderError(str(error) or type(error).__name__) from error
        return "".join(pieces)


def _insecure(why: str) -> PolicyError:
    fix = "use a template that you trust: data.chat_template=<a name, a file or the text>"
    return PolicyError(Problem("SEC009", f"the chat template was refused: {why}", _WHERE, fix))


def _refuse_private(tree: nodes.Template) -> None:
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)):
        name = node.attr if isinstance(node, nodes.Getattr) else node.name if isinstance(node, nodes.Name) else None
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            name = node.arg.value
        if isinstance(name, str) and name.startswith("__"):
            raise _insecure(f"it uses `{name}`, at line {node.lineno}")


def _same_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name that templates read, whichever name the data use."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


@contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError after LIMIT_S of processor time. Only in the main thread, since signals need it. Our signal handler
    stays installed if there was none before (or only one set by C): setting it for each rendering would cost as much as
    rendering."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGVTALRM)
    if before is not _overdue:
        signal.signal(signal.SIGVTALRM, _overdue)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if before not in (None, _overdue, signal.SIG_DFL):  # None: a handler set by C
            signal.signal(signal.SIGVTALRM, before)


def _overdue(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"it ran for more than {LIMIT_S:g} s")


def find_template(named: str | None, tokenizer: Path) -> str:
    """The text of the template that the recipe names (a shipped name, a file, or the text itself), else the
    tokenizer's. Raises CHAT001 if there is none."""
    if named in SHIPPED:
        return SHIPPED[named]
    if named is not None and ("{{" in named or "{%" in named):
        return named
    if named in _OWN:
        if _OWN[named] not in (text := find_template(None, tokenizer)):
            what = f"`{named}` is the chat template of other models: this tokenizer's own is another"
            raise DataError(Problem("CHAT001", what, _WHERE, "leave it out for the tokenizer's own"))
        return text
    path = Path(named).expanduser() if named is not None else tokenizer / "chat_template.jinja"
    if path.is_file():
        try:
            return read_regular(path, NOTE_BYTES).decode()
        except UnicodeDecodeError as error:
            fix = "save it as UTF-8, or data.chat_template=<another>"
            raise DataError(Problem("CHAT001", f"the chat template {path.name} is not UTF-8", _WHERE, fix)) from error
    fix = f"data.chat_template={' or '.join(SHIPPED)}, a file, or the text of a template"
    if named is not None:
        raise DataError(Problem("CHAT001", f"`{named}` is neither a chat template nor a file", _WHERE, fix))
    stored = read_facts(tokenizer / FILES[1]).get("chat_template")
    if isinstance(stored, list):
        named_ones = [entry for entry in stored if isinstance(entry, dict) and entry.get("name") == "default"]
        stored = named_ones[0].get("template") if named_ones else None
    if not isinstance(stored, str):
        raise DataError(Problem("CHAT001", "the tokenizer has no chat template", _WHERE, fix))
    return stored
