"""The file of units that ships with the package, of which only the units that are asked for are read.

It is text, in xz: parts, a line each, then units, a line each after its key. What many units have alike (an operation
but for its tensors, a tensor, a weight) is a part, and stands in a unit by the number of its line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

SHIPPED = "sheets.json.xz"
KEY = 32
"""Characters of a key."""
OWN = slice(2, 5)
"""Of a packed operation, what is not part of it but of its unit: the tensors that it allocates, frees and reads."""


class Shipped:
    """The packed units in such a file, by key."""

    def __init__(self, data: bytes) -> None:
        parts, _, units = _text_of(data).partition(b"\n\n")
        self._parts = parts.split(b"\n")
        self._read: dict[int, Any] = {}
        self._lines = {line[:KEY].decode(): line for line in units.splitlines()}

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._lines)

    def unit(self, key: str) -> list[Any] | None:
        """The packed unit of this key, if there is one."""
        if key not in self._lines:
            return None
        name, weights, tensors, forward, frees, backward, *rest = json.loads(self._lines[key][KEY:])
        first, second = ([self._op(op) for op in ops] for ops in (forward, backward))
        return [name, [*map(self._part, weights)], [*map(self._part, tensors)], first, frees, second, *rest]

    def _part(self, number: int) -> Any:
        if number not in self._read:
            self._read[number] = json.loads(self._parts[number])
        return self._read[number]

    def _op(self, packed: list[Any]) -> list[Any]:
        number, *own = packed
        kind, name, *rest = self._part(number)
        return [kind, name, *own, *rest]


def written(units: Mapping[str, list[Any]]) -> bytes:
    """Return the contents of such a file, of packed units by key."""
    count: Counter[str] = Counter()
    for _, weights, tensors, forward, _, backward, *_ in units.values():
        count.update(map(_text, (*weights, *tensors, *map(_shared, forward), *map(_shared, backward))))
    parts = sorted(count, key=lambda part: (-count[part], part))
    numbers = {part: number for number, part in enumerate(parts)}

    def op(packed: list[Any]) -> list[Any]:
        return [numbers[_text(_shared(packed))], *packed[OWN]]

    lines = []
    for key, (name, weights, tensors, forward, frees, backward, *rest) in units.items():
        listed = ([numbers[_text(part)] for part in each] for each in (weights, tensors))
        lines.append(f"{key}\t{_text([name, *listed, [*map(op, forward)], frees, [*map(op, backward)], *rest])}")
    # Units that end alike are alike, and as neighbours they compress to half of what they take sorted by key.
    lines.sort(key=lambda line: line[::-1])
    import lzma

    return lzma.compress(("\n".join(parts) + "\n\n" + "\n".join(lines)).encode(), preset=6 | lzma.PRESET_EXTREME)


def _text_of(data: bytes) -> bytes:
    try:
        import lzma
    except ImportError:  # some builds of Python lack it: units are traced instead
        return b""
    return lzma.decompress(data)


def _shared(op: list[Any]) -> list[Any]:
    return [*op[: OWN.start], *op[OWN.stop :]]


def _text(what: Any) -> str:
    return json.dumps(what, separators=(",", ":"))
