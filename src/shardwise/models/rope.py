"""Rope scaling, read from and written to ``config.json``. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.errors import ConfigError, Problem

Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

REQUIRED: dict[Kind, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""The keys that each kind requires."""
OLD_NAMES: dict[str, Kind] = {"su": "longrope"}
"""As Phi-3 called it when it came out."""

WRITTEN: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": REQUIRED["llama3"],
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        "mscale_all_dim",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""The keys of each kind that are written."""


@dataclass(frozen=True)
class RopeScaling:
    """One kind of rope scaling. ``linear`` reads ``factor`` alone; ``dynamic`` (NTK) raises theta for sequences beyond
    ``original_max_position_embeddings``; ``longrope`` divides each frequency by its ``short_factor``, or, in sequences
    beyond it, by its ``long_factor``. ``attention_factor`` multiplies the tables (yarn, longrope);
    ``mscale_all_dim`` says by what latent attention multiplies its scores (yarn)."""

    kind: Kind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def number(values: dict[str, Any], key: str, default: float | None, name: str) -> float:
    """A number of a config. Raises ConfigError (CFG004)."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = f"`{key}` must be a number, got {value!r}"
        raise ConfigError(Problem("CFG004", what, f"config of {name}", f"{key}: a number, without quotes"))
    return float(value)


def unsupported(what: str, name: str, fix: str) -> ConfigError:
    """The error for a feature in a config that is not supported (MOD001)."""
    return ConfigError(Problem("MOD001", what, f"config of {name}", fix))


def read(values: dict[str, Any], longest: int, original: int | None, name: str) -> RopeScaling | None:
    """The scaling that ``rope_parameters`` or ``rope_scaling`` of a config mean, ``longest`` being its
    max_position_embeddings and ``original`` what the config itself says of the trained length."""
    asked = values.get("rope_type", values.get("type", "default"))
    if asked == "default":
        return None
    kinds: dict[str, Kind] = {known: known for known in REQUIRED} | OLD_NAMES
    kind = kinds.get(asked)
    if kind is None:
        raise unsupported(f"rope scaling {asked!r} is not supported", name, f"one of: default, {', '.join(REQUIRED)}")
    if missing := [key for key in REQUIRED[kind] if key not in values]:
        what = f"rope scaling {kind!r} lacks {', '.join(missing)}"
        raise unsupported(what, name, "take the values from the model's own config.json")
    if kind == "dynamic":
        trained = longest
    else:
        trained = original or int(number(values, "original_max_position_embeddings", longest, name))
    factor = number(values, "factor", None, name) if values.get("factor") or kind != "longrope" else longest / trained
    own: dict[str, Any] = {} if kind == "linear" else {"original_max_position_embeddings": trained}
    if kind == "llama3":
        own |= {key: number(values, key, None, name) for key in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        own["attention_factor"] = _yarn_attention(values, factor, name)
        usual = {"beta_fast": 32.0, "beta_slow": 1.0}
        own |= {key: number(values, key, default, name) for key, default in usual.items()}
        own["truncate"] = bool(values.get("truncate", True))
        own["mscale_all_dim"] = number(values, "mscale_all_dim", 0.0, name)
    elif kind == "longrope":
        own["attention_factor"] = _longrope_attention(values, factor, trained, name)
        own |= {key: _numbers(values, key, name) for key in ("short_factor", "long_factor")}
    return RopeScaling(kind, factor, **own)


def write(scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    if scaling is None:
        return {"rope_type": "default"}
    values = asdict(scaling)
    return {"rope_type": scaling.kind} | {
        key: list(values[key]) if isinstance(values[key], tuple) else values[key] for key in WRITTEN[scaling.kind]
    }


def _numbers(values: dict[str, Any], key: str, name: str) -> tuple[float, ...]:
    given = values[key]
    if not isinstance(given, list):
        raise ConfigError(Problem("CFG004", f"`{key}` must be a list of numbers", f"config of {name}", f"{key}: [..]"))
    return tuple(number({key: value}, key, None, name) for value in given)


def _yarn_attention(values: dict[str, Any], factor: float, name: str) -> float:
    """Peng et al., "YaRN" (arXiv 2309.00071), 3.4, with the two weights that DeepSeek added."""
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", None, name)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return scale(number(values, "mscale", None, name)) / scale(number(values, "mscale_all_dim", None, name))
    return scale(1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of the scale of scores that DeepSeek has where yarn stretches positions."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def _longrope_attention(values: dict[str, Any], factor: float, trained: int, name: str) -> float:
    """Ding et al., "LongRoPE" (arXiv 2402.13753), as Phi-3 has it."""
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", None, name)
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
