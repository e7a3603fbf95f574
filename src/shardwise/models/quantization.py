"""The storage of weights in a model's files, as the ``quantization_config`` of its config.json says it. No torch."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError, Problem
from shardwise.spec.complaints import show_value

Config = dict[str, Any]
Block = tuple[int, int]
"""Rows and columns of a matrix that have one scale in common."""

KEYS = ("quantization_config", "compression_config")
"""The second is what compressed-tensors wrote at first."""
USUAL: Block = (128, 128)
"""DeepSeek's (arXiv 2412.19437), where nothing else is said."""
FLOAT8 = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors")
"""Values of ``quant_method`` under which files hold float8 and scales; the last two have other formats too."""
READ = (*FLOAT8, "mxfp4")


def quantisation(config: Config) -> Config:
    """Return the ``quantization_config`` of a config, or of its text part; empty if it has none. Raises ConfigError
    CFG004 if it is no object."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    found = next((part[key] for part in parts for key in KEYS if part.get(key)), None)
    if not isinstance(found or {}, dict):
        raise _wrong("quantization_config", found)
    return found or {}


def _wrong(key: str, value: Any) -> ConfigError:
    fix = "take it from the model's own config.json"
    return ConfigError(Problem("CFG004", f"`{key}` cannot be {show_value(value)}", "quantization_config", fix))


def _weights(settings: Config) -> list[Config]:
    """Return what compressed-tensors says of the weights of each group of layers that it has."""
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    return [group["weights"] for group in each if isinstance(group, dict) and isinstance(group.get("weights"), dict)]


def unread(config: Config) -> str:
    """Return the name of the format in which weights are stored, where it is none that is read; else nothing."""
    settings = quantisation(config)
    method, kinds = str(settings.get("quant_method", "")), _weights(settings)
    if method == "modelopt" and settings.get("quant_algo", "FP8") != "FP8":
        return f"{method} ({settings['quant_algo']})"
    if any((kind.get("type"), kind.get("num_bits")) != ("float", 8) for kind in kinds):
        return f"{method} ({settings.get('format')})"
    if settings.get("transform_config"):
        return f"{method} (with transforms)"
    return (method or "a method without a name") if settings and method not in READ else ""


def blocks(config: Config) -> tuple[Block, ...]:
    """Return the blocks of weights in float8 that have a scale; beside them one for a row or a whole matrix may
    occur. Raises ConfigError CFG004."""
    settings, found = quantisation(config), list[Block]()
    for kind in (settings, *_weights(settings)):
        sizes = [kind.get("weight_block_size"), kind.get("block_structure")]
        sizes += [[1, kind["group_size"]]] if kind.get("group_size") else []
        for size in filter(None, sizes):
            if not (isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)):
                raise _wrong("weight_block_size", size)
            found.append((size[0], size[1]))
    return tuple(dict.fromkeys(found))


def without_float8(config: Config) -> tuple[Config, str]:
    """Return the config of the same model with weights in 16 bits, and words for how its files hold them; the config as
    it is, and nothing, where that is not float8. Raises ConfigError CFG004."""
    if quantisation(config).get("quant_method") not in FLOAT8 or unread(config):
        return config, ""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = {key: value for key, value in inner.items() if key not in KEYS}
    sizes = ", ".join(f"{rows} x {columns}" for rows, columns in blocks(config))
    return plain, f"float8{f', with a scale for {sizes}' if sizes else ''}"
