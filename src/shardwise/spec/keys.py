"""The keys of a recipe or a plan, taken from its JSON schema, and the other names users know them by (keys.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

SHORT: dict[str, str] = _TABLES["short"]
"""A section written as one value means this key of it: ``recompute: full``."""
SIZES: dict[str, str] = _TABLES["sizes"]
"""Keys that take ``8k`` and ``1M``, and what they count: tokens, steps or bytes."""
_BY_ALIAS: dict[str, str] = {alias: key for key, names in _TABLES["aliases"].items() for alias in names.split()}
"""Other systems' names of our keys (axolotl, transformers, torchtitan, Megatron, DeepSpeed, Automodel)."""
PLANNED: dict[str, str] = _TABLES["planned"]
"""Settings whose name in a plan differs from that in the recipe; either is understood."""
_BY_ALIAS |= PLANNED
_VALUES: dict[str, dict[str, Any]] = _TABLES["values"]
"""By key: what another system's values mean, where the key was given by that system's name."""
DROP = object()


def translate(key: str, alias: str, value: Any) -> Any:
    """The value of an alias in our words: ``gradient_checkpointing: true`` is ``full``. DROP: it has no effect (``bf16:
    false``)."""
    if alias == "warmup_ratio" and isinstance(value, int | float):
        return float(value) or 0  # 1 would be a step, not the whole run
    if alias == "lora_target" and isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",")]
    if alias == "load_in_4bit" and str(value).lower() == "false":
        return DROP
    if alias in ("bf16", "fp16"):
        return {"true": alias, "false": DROP, "none": DROP, "auto": "auto"}.get(str(value).lower(), value)
    return _VALUES.get(key, {}).get(str(value).lower(), value)


def resolve_reference(schema: Schema, root: Schema) -> Schema:
    """Follow ``$ref`` into the definitions of ``root``."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def other_names() -> dict[str, list[str]]:
    """The other names of each key."""
    return {key: names.split() for key, names in _TABLES["aliases"].items()}


def alias_leaf(name: str) -> str:
    """``lr`` -> ``learning_rate``; a name that is not an alias is returned unchanged."""
    return _BY_ALIAS.get(name, name).rpartition(".")[2]


def dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= dotted(item, f"{prefix}{key}.") if isinstance(item, Mapping) and item else {f"{prefix}{key}": item}
    return found


@dataclass(frozen=True)
class Keys:
    """``leaves`` maps every dotted key to the schema of its value; ``sections`` are the prefixes that hold keys."""

    leaves: dict[str, Schema]
    sections: frozenset[str]

    def canonical(self, dotted: str) -> str | None:
        """The key meant by ``dotted``: itself, an alias, or a leaf name that only one section has; None if unknown."""
        if dotted in self.leaves:
            return dotted
        if _BY_ALIAS.get(dotted) in self.leaves:
            return _BY_ALIAS[dotted]
        section, _, leaf = dotted.rpartition(".")
        homes = [key for key in self.leaves if key.rpartition(".")[2] == leaf]
        if leaf in _BY_ALIAS and _BY_ALIAS[leaf] in self.leaves:
            homes = [_BY_ALIAS[leaf]]
        if len(homes) == 1 and section in ("", homes[0].rpartition(".")[0]):
            return homes[0]
        return None

    def nearest(self, dotted: str) -> str | None:
        """The key that ``dotted`` was probably meant to be; None if none is near."""
        section, _, leaf = dotted.rpartition(".")
        if leaf in _BY_ALIAS and _BY_ALIAS[leaf] in self.leaves:
            return _BY_ALIAS[leaf]
        names = {key.rpartition(".")[2]: key for key in reversed(self.leaves)}  # of leaves with one name the first
        names |= {alias: key for alias, key in _BY_ALIAS.items() if key in self.leaves}
        names |= {key: key for key in self.leaves}
        if section:
            sections = get_close_matches(section, sorted(self.sections), 1, 0.6)
            if sections and f"{sections[0]}.{leaf}" in self.leaves:
                return f"{sections[0]}.{leaf}"
        for candidate in (dotted, leaf):
            found = get_close_matches(candidate, sorted(names), 1, 0.72)
            if found:
                return names[found[0]]
        return None


def keys_of(root: Schema) -> Keys:
    """All keys of a JSON schema whose nested objects are sections."""
    leaves: dict[str, Schema] = {}
    sections: set[str] = set()

    def walk(schema: Schema, prefix: str) -> None:
        for name, child in schema.get("properties", {}).items():
            resolved = resolve_reference(child, root)
            if "properties" in resolved:
                sections.add(prefix + name)
                walk(resolved, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = resolved

    walk(root, "")
    return Keys(leaves, frozenset(sections))


def describe(schema: Schema, root: Schema) -> str:
    """What a value must be, in words: ``a whole number ≥ 1, or null``."""
    schema = resolve_reference(schema, root)
    if "anyOf" in schema:
        words = [describe(option, root) for option in schema["anyOf"]]
        return ", or ".join(dict.fromkeys(words))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{'a whole number' if kind == 'integer' else 'a number'} {_bounds(schema)}".rstrip()
    if kind == "array":
        of = describe(schema["items"], root) if "items" in schema else ""
        return f"a list of {of.replace('a number', 'numbers')}" if of else "a list"
    simple = {"string": "text", "boolean": "true or false", "null": "null", "object": "a mapping"}
    return simple.get(str(kind), "a value")


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " and ".join(f"{sign} {schema[name]:,.10g}" for name, sign in signs.items() if name in schema)
