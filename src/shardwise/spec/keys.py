"""The keys of a recipe or a plan, taken from its JSON schema, and the other names users know them by (keys.json)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
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
MEANT: dict[str, dict[str, str]] = _TABLES["meant"]
"""By key: what to write in place of other systems' words that are no value here."""
DROP = object()


def translate(key: str, name: str, value: Any) -> Any:
    """The value of an alias in our words: ``gradient_checkpointing: true`` is ``full``. DROP: it has no effect (``bf16:
    false``)."""
    alias = name.rpartition(".")[2]
    if name in ("datasets.path", "dataset_name") and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(value)):
        local = os.path.exists(value) or re.search(r"\.(json|jsonl|csv|parquet|arrow|txt|gz|zst)$", value)
        return value if local else f"hf://datasets/{value}"
    if alias == "warmup_ratio" and isinstance(value, int | float):
        return float(value) or 0 if value < 1 else f"{value} of the run"  # and not so many steps
    if alias == "lora_target" and isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",")]
    word = str(value).lower()
    if name != key and word in _TABLES["dropped"].get(alias, ()):
        return DROP
    return {**_VALUES.get(key, {}), **_VALUES.get(alias, {})}.get(word, value)


@cache
def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def near(word: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``word`` misspells. Another word or another number is no misspelling (`pp` of `tp`,
    `save_strategy` of `strategy`, `ipo` of `dpo`): a guess that is followed must not change what is trained."""
    ours = _words(word)

    def alike(name: str) -> float:
        theirs = _words(name)
        if "".join(ours) == "".join(theirs):
            return 1.0
        if len(ours) != len(theirs) or re.findall(r"\d+", word) != re.findall(r"\d+", name):
            return 0.0
        for a, b in zip(ours, theirs, strict=True):
            if (a[0] != b[0] and len(a) < 6) or (a != b and SequenceMatcher(None, a, b).ratio() < 0.65):
                return 0.0
        return SequenceMatcher(None, word.lower(), name.lower()).ratio()

    best = max(names, key=alike, default="")
    return best if len(word) > 2 and alike(best) > 0.7 else None


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


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as sections within sections."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        section = found
        *names, leaf = key.split(".")
        for name in names:
            section = section.setdefault(name, {})
        section[leaf] = value
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
        homes = self.homes(leaf)
        if leaf in _BY_ALIAS and _BY_ALIAS[leaf] in self.leaves:
            homes = [_BY_ALIAS[leaf]]
        if len(homes) == 1 and section in ("", homes[0].rpartition(".")[0]):
            return homes[0]
        return None

    def meant(self, dotted: str) -> str | None:
        """The key that is meant by ``dotted``, which may be a section that can be written as one value."""
        return self.canonical(dotted) or self.canonical(f"{dotted}.{SHORT.get(dotted, '')}")

    def types(self, key: str) -> set[str]:
        """The types of JSON that a key takes, without those of references; none for an unknown key."""
        schema = self.leaves.get(key, {})
        return {option.get("type", "") for option in schema.get("anyOf", [schema])}

    def nearest(self, dotted: str) -> str | None:
        """The key that ``dotted`` misspells, in its section or in its name; None if there is none. Of keys in a section
        that is none of ours nothing is known."""
        section, _, leaf = dotted.rpartition(".")
        home = section if section in self.sections else near(section, sorted(self.sections))
        if section and home is None:
            return None
        names = {key.rpartition(".")[2]: key for key in reversed(self.leaves)}  # of leaves with one name the first
        names |= {alias: key for alias, key in _BY_ALIAS.items() if key in self.leaves}
        names |= {name: key for name in names for key in self.leaves if home and key == f"{home}.{name}"}
        there = {name: key for name, key in names.items() if home and key.startswith(f"{home}.")}
        found = leaf if leaf in names else near(leaf, there if home else names)
        return names[found] if found else None

    def homes(self, leaf: str) -> list[str]:
        """The keys of this name, in whatever section."""
        return [key for key in self.leaves if key.rpartition(".")[2] == leaf]


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
    """Say in words what a value must be: ``a whole number ≥ 1, or null``."""
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
