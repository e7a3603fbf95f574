"""Chat templates: where they come from, and rendering them as transformers does, in a sandbox with limits.

A template is a program that came with a tokenizer, so it is not trusted: attributes that begin with two underscores are
refused when it is compiled, and compiling and each rendering are limited in seconds, in memory, in size, and in what
one operator may build (limits.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.data.formats import REASONING
from shardwise.data.limits import WHERE, refused, timed
from shardwise.data.tokens import FILES, read_facts
from shardwise.errors import DataError, Problem, ShardwiseError, first_line
from shardwise.spec.files import NOTE_BYTES, read_regular

_TABLES = json.loads(Path(__file__).with_name("templates.json").read_text("utf-8"))
_FILES = sorted(Path(__file__).with_name("templates").glob("*.jinja"))
WITH_TOOLS = {file.stem: file.read_text("utf-8") for file in _FILES}
"""Templates that write tools and reasoning, as the owners of the models wrote them (templates/README.md)."""
SHIPPED: dict[str, str] = _TABLES["shipped"] | WITH_TOOLS
"""Templates by name, for tokenizers without one. ``zephyr`` needs no token but the end-of-text."""
_OWN: dict[str, str] = _TABLES["own"]
"""Names that axolotl and LLaMA-Factory give to templates that a model's tokenizer brings: what is found in each."""
OPEN, CLOSE, PROBE = "\U0010fff0", "\U0010fff1", "\U0010fff2"
"""Around what a template marks with ``{% generation %}``; and what stands for a turn's content (private characters)."""
LIMIT_CHARACTERS = 64 * 2**20


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
    """Limits the operators that could build huge numbers, in C, where no signal stops them."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, scope: Context, operator: str, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" or (whole and left.bit_length() + right.bit_length() > 2**16):
            raise SecurityError(f"the operator {operator} could build something huge")
        return super().call_binop(scope, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0) -> str:
    """Write ``x`` as JSON. Each nested call may double a text, in C, where no signal stops it: so none may be longer
    than a whole rendering."""
    text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=bool(sort_keys))
    if len(text) > LIMIT_CHARACTERS:
        raise SecurityError(f"tojson wrote more than {LIMIT_CHARACTERS:,} characters")
    return text


class Template:
    """One chat template with the special tokens that it may use. ``marked``: it marks the assistant's part itself.
    Raises CHAT001 (not a template) and SEC009 (it uses something that no template needs)."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            with timed():  # constant parts of it are computed now
                _refuse_private(environment.parse(text))
                self._compiled = environment.from_string(text)
        except TimeoutError as error:
            raise refused(str(error)) from error
        except (ShardwiseError, MemoryError):
            raise
        except Exception as error:  # SyntaxError: more than Python can nest; others: of what jinja expects of nodes
            line = f" line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            said = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
            fix = "repair it, or data.chat_template=<another: a name, a file or the text>"
            raise DataError(Problem("CHAT001", f"chat template{line}: {said}", WHERE, fix)) from error
        self._tokens = dict(tokens)
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, generate: bool = False) -> str:
        """The text, with ``OPEN`` and ``CLOSE`` around marked parts; ``generate`` adds the generation prompt.
        Raises RenderError; SEC009 where it takes too long or writes too much."""
        given: dict[str, Any] = {"messages": list(map(_same_reasoning, messages)), "tools": tools, "documents": None}
        given |= {"add_generation_prompt": generate, **self._tokens}
        try:
            with timed():
                text = self._compiled.render(given)
        except (SecurityError, OverflowError, TimeoutError) as error:  # OverflowError: the sandbox's range()
            raise refused(str(error)) from error
        except (ShardwiseError, MemoryError):
            raise
        except Exception as error:  # a program raises what it likes
            raise RenderError(first_line(error)) from error
        if len(text) > LIMIT_CHARACTERS:
            raise refused(f"it wrote more than {LIMIT_CHARACTERS:,} characters")
        return text


def _refuse_private(tree: nodes.Template) -> None:
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)):
        name = node.attr if isinstance(node, nodes.Getattr) else node.name if isinstance(node, nodes.Name) else None
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            name = node.arg.value
        if isinstance(name, str) and name.startswith("__"):
            raise refused(f"it uses `{name}`, at line {node.lineno}")


def _same_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name that templates read, whichever name the data use."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def find_template(named: str | None, tokenizer: Path) -> str:
    """The text of the template that the recipe names (a shipped name, a file, or the text itself), else the
    tokenizer's. Raises CHAT001 if there is none."""
    if named in SHIPPED:
        return SHIPPED[named]
    if named in _OWN:
        if _OWN[named] not in (text := find_template(None, tokenizer)):
            what = f"`{named}` is the chat template of other models: this tokenizer's own is another"
            raise DataError(Problem("CHAT001", what, WHERE, "leave it out for the tokenizer's own"))
        return text
    path = Path(named).expanduser() if named is not None else tokenizer / "chat_template.jinja"
    try:
        if named is not None and ("{{" in named or "{%" in named):
            named.encode()
            return named
        if path.is_file():
            return read_regular(path, NOTE_BYTES).decode()
    except (UnicodeError, OSError) as error:
        name = "" if isinstance(error, UnicodeEncodeError) else f" {path.name[:80]}"
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not UTF-8"
        fix = "save it as readable UTF-8, or data.chat_template=<another>"
        raise DataError(Problem("CHAT001", f"the chat template{name} {why}", WHERE, fix)) from error
    fix = f"data.chat_template={' or '.join(SHIPPED)}, a file, or the text of a template"
    if named is not None:
        raise DataError(Problem("CHAT001", f"`{named}` is neither a chat template nor a file", WHERE, fix))
    stored = read_facts(tokenizer / FILES[1]).get("chat_template")
    if isinstance(stored, list):
        named_ones = [entry for entry in stored if isinstance(entry, dict) and entry.get("name") == "default"]
        stored = named_ones[0].get("template") if named_ones else None
    if not isinstance(stored, str):
        raise DataError(Problem("CHAT001", "the tokenizer has no chat template", WHERE, fix))
    return stored
