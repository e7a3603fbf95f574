"""Plain data written as YAML for people: block style, keys in the order given, a comment beside a value where one is
known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.spec.document import KeyPath, resolve

Comment = Callable[[KeyPath, Any], str]
_PLAIN = re.compile(r"[A-Za-z0-9_./*+][A-Za-z0-9_./*+ -]*")


class Verbatim(str):
    """A text of several lines that is written as such, if a literal block can hold it."""

    def lines(self) -> list[str] | None:
        """Return the lines; None where a block would change the text, or could not be read."""
        found = self.removesuffix("\n").split("\n")
        plain = self.endswith("\n") and all(line.isprintable() and "\ufeff" not in line for line in found)
        return found if plain and found[0].strip() and found[0][0] != " " and found[-1].strip() else None


def emit(data: Mapping[str, Any], comment: Comment) -> str:
    """``data`` as a YAML 1.2 document that reads back equal (tuples as lists)."""
    return "\n".join(_lines(data, (), 0, comment)) + "\n"


def _lines(data: Any, path: KeyPath, indent: int, comment: Comment) -> list[str]:
    lines: list[str] = []
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data)
    for name, value in pairs:
        here = (*path, name)
        lead = " " * indent + (f"{_scalar(str(name))}:" if isinstance(data, Mapping) else "-")
        remark = comment(here, value)
        tail = "  # " + " ".join(remark.split()) if remark else ""
        if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str) and value:
            nested = _lines(value, here, indent + 2, comment)
            if isinstance(data, Mapping):
                lines += [lead + tail, *nested]
            else:
                lines += [f"{lead} {nested[0].lstrip()}", *nested[1:]]
        elif isinstance(value, Verbatim) and (block := value.lines()) is not None:
            lines += [f"{lead} |{tail}", *(" " * (indent + 2) + line if line else "" for line in block)]
        else:
            lines.append(f"{lead} {_scalar(value)}{tail}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and not value.startswith("*") and value == value.strip()
        return value if plain and resolve(value) == value and isinstance(resolve(value), str) else _quoted(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, Sequence):
        return "[]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """JSON's quoting is valid YAML, but for DEL and C1 controls and characters beyond 16 bits, which JSON splits in
    two."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() and c != "\ufeff" else f"\\U{ord(c):08x}" for c in escaped)
