"""Hashes that are found once an object. A search asks for those of plans, layouts and models many thousand times."""

from __future__ import annotations

from typing import Any, TypeVar

Frozen = TypeVar("Frozen")


def hash_once(cls: type[Frozen]) -> type[Frozen]:
    """A frozen dataclass (without slots) that keeps its hash beside its fields. What is kept so, under a name that
    begins with ``_``, is not pickled: in another process a string has another hash."""
    made: Any = cls
    of_fields = made.__hash__

    def __hash__(self: Any) -> int:
        known: dict[str, int] = vars(self)
        if "_hash" not in known:
            known["_hash"] = of_fields(self)
        return known["_hash"]

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    made.__hash__, made.__getstate__ = __hash__, __getstate__
    return cls
