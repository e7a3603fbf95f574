"""JSON that this program wrote, read back: what is not of the shape it was written in is damage, said in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, or of a step: what a file of ours can hold in earnest."""


@dataclass(frozen=True)
class Numbered:
    """A line that belongs to a step."""

    step: Count


_adapter = cache(TypeAdapter)


def from_json(kind: Callable[..., T], text: bytes | str) -> T:
    """``text`` as ``kind``, a dataclass or a dict: every value has the type that its annotation names, and keys that
    it does not name are passed over. Raises ValueError for anything else: not JSON, nested too deep, out of range."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:80]
        raise ValueError(f"`{place}`: {first['msg']}" if place else first["msg"]) from None
