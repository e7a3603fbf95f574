"""Records whose messages have other field names or roles: renamed to the format ``messages`` before they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from shardwise.data.faults import Fault
from shardwise.spec.recipe import Data

Record = dict[str, Any]
_MISSING = object()


@dataclass(frozen=True)
class Fields:
    """The names of a record's list of messages, and of a message's role and content (a dotted name reaches into an
    object); ``roles``: pairs of a role's name in the data and its name here. Empty: the name in the known formats."""

    messages: str = ""
    role: str = ""
    content: str = ""
    roles: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, data: Data) -> Self:
        """The fields that a recipe names."""
        keys = (data.messages_key or "", data.role_key or "", data.content_key or "")
        return cls(*keys, tuple(sorted(data.roles.items())))

    def rename(self, record: Record) -> Record:
        """The record renamed to the format ``messages``. Raises Fault DATA005 if a field is missing."""
        if self == Fields():
            return record
        key = self.messages or "messages"
        lists = {key: "messages"} if self.messages or key in record else {}
        lists |= {side: side for side in ("prompt", "chosen", "rejected") if isinstance(record.get(side), list)}
        found = {ours: self._turns(record, theirs) for theirs, ours in lists.items()}
        if not self.messages and isinstance(turns := record.get("conversations"), list):
            found["conversations"] = [self._said_by(turn) for turn in turns]
        return {name: value for name, value in record.items() if name != key.partition(".")[0]} | found

    def _turns(self, record: Record, key: str) -> list[Any]:
        turns = _reach(record, key, "messages_key", "")
        if not isinstance(turns, list):
            raise Fault("DATA005", f"`{key}` is not a list of messages", "name the list: data.messages_key")
        return [self._turn(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]

    def _said_by(self, turn: Any) -> Any:
        """A turn of the format ``sharegpt``, whose role is ``from``."""
        said = turn.get("from") if isinstance(turn, dict) else None
        return {**turn, "from": dict(self.roles).get(said, said)} if isinstance(said, str) else turn

    def _turn(self, turn: Any, where: str) -> Any:
        if not isinstance(turn, dict):
            return turn
        role, content = self.role or "role", self.content or "content"
        roots = {name.partition(".")[0] for name in (role, content)}
        said = _reach(turn, role, "role_key", f"{where}.")
        made = {name: value for name, value in turn.items() if name not in roots}
        made["role"] = dict(self.roles).get(said, said) if isinstance(said, str) else said
        return made | {"content": _reach(turn, content, "content_key", f"{where}.")}


def _reach(value: Record, dotted: str, setting: str, where: str) -> Any:
    """The field with this name, or the nested field that the dots lead to."""
    if dotted in value:
        return value[dotted]
    found: Any = value
    for name in dotted.split("."):
        found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
    if found is _MISSING:
        keys = ", ".join(list(value)[:12]) or "none"
        raise Fault("DATA005", f"has no `{where}{dotted}`; the keys there are {keys}", f"name one: data.{setting}")
    return found
