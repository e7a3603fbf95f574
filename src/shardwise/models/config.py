"""What a model is made of: dimensions and kinds of block, read from a Hugging Face ``config.json``. No torch."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ConfigError, DataError, MissingInputError, PolicyError, Problem
from shardwise.models import known
from shardwise.spec.hub import fetch

ARCHITECTURES = {"LlamaForCausalLM": "llama"}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained range. ``linear`` reads ``factor`` alone."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """The dimensions of one model, named as Hugging Face names them."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    family: str = "llama"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its canonical name, in the model's order. Tied, there is no ``head.weight``."""
    d, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    linears = {f"attention.{name}": (size, d) for name, size in (("q", q), ("k", kv), ("v", kv))}
    linears |= {"attention.o": (d, q), "mlp.gate": (f, d), "mlp.up": (f, d), "mlp.down": (d, f)}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, d)}
    for layer in range(spec.num_hidden_layers):
        shapes |= {f"layers.{layer}.{norm}.weight": (d,) for norm in ("attention_norm", "mlp_norm")}
        for name, shape in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if spec.attention_bias if name.startswith("attention") else spec.mlp_bias:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
    shapes["norm.weight"] = (d,)
    return shapes if spec.tie_word_embeddings else shapes | {"head.weight": (spec.vocab_size, d)}


def parameter_count(spec: ModelSpec) -> int:
    """Trainable elements; tied embeddings count once."""
    return sum(prod(shape) for shape in parameter_shapes(spec).values())


def problems(spec: ModelSpec) -> list[Problem]:
    """Dimensions that no Llama can have."""
    found: list[Problem] = []

    def refuse(what: str, fix: str) -> None:
        found.append(Problem("PLAN008", what, where=f"config of {spec.name}", fix=fix))

    sizes = asdict(spec)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        if sizes[key] < 1:
            refuse(f"{key} is {sizes[key]}", f"{key}: 1 or more")
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if heads < 1 or kv_heads < 1:
        refuse(f"{heads} attention heads and {kv_heads} key-value heads", "1 or more of each")
    elif heads % kv_heads:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        what = f"{kv_heads} key-value heads do not divide {heads} attention heads"
        refuse(what, f"num_key_value_heads: one of {legal}")
    if spec.head_dim < 2 or spec.head_dim % 2:
        what = f"head_dim {spec.head_dim} is not even, and rotary embedding turns pairs"
        refuse(what, f"head_dim: {max(2, spec.head_dim + 1)}")
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        what = f"rope: high_freq_factor {scaling.high_freq_factor} is not above"
        refuse(f"{what} low_freq_factor {scaling.low_freq_factor}", "high_freq_factor: 4.0, low_freq_factor: 1.0")
    return found


def from_hf(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec that a Hugging Face ``config.json`` describes (transformers 4 and 5)."""
    _check_architecture(config, name)
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    where = f"config of {name}"
    wrong = [
        Problem("CFG004", f"`{key}` must be a whole number, got {config.get(key)!r}", where, f"{key}: a whole number")
        for key in (*required, "num_key_value_heads", "head_dim")
        if type(config.get(key)) is not int and (key in required or config.get(key) is not None)
    ]
    if wrong:
        raise ConfigError(*wrong)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        if heads < 1 or config["hidden_size"] % heads:
            what = f"hidden_size {config['hidden_size']} / {heads} heads is not whole"
            raise ConfigError(Problem("PLAN008", what, where, f"hidden_size: a multiple of {heads}, or give head_dim"))
        head_dim = config["hidden_size"] // heads
    eos = config.get("eos_token_id")
    theta, scaling = _rope(config, name)
    spec = ModelSpec(
        name=name,
        **{key: config[key] for key in required},
        num_key_value_heads=heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, name),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(_number(config, "max_position_embeddings", 2048, name)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        initializer_range=_number(config, "initializer_range", 0.02, name),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
    )
    if found := problems(spec):
        raise ConfigError(*found)
    return spec


def _check_architecture(config: dict[str, Any], name: str) -> None:
    where, known = f"config of {name}", ", ".join(ARCHITECTURES)
    if config.get("auto_map"):
        what = f"{name} wants to run its own Python ({', '.join(config['auto_map'])}); it is never executed"
        raise PolicyError(Problem("SEC008", what, where, f"supported architectures: {known}"))
    kinds = config.get("architectures") or [f"model_type {config.get('model_type', 'missing')!r}"]
    if config.get("model_type") not in ARCHITECTURES.values() and kinds[0] not in ARCHITECTURES:
        raise ConfigError(Problem("MOD001", f"{kinds[0]} is not supported", where, f"a model of one of these: {known}"))
    if config.get("hidden_act", "silu") != "silu":
        what = f"hidden_act {config['hidden_act']!r} is not supported"
        raise ConfigError(Problem("MOD001", what, where, "hidden_act: silu"))


def _rope(config: dict[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    values: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = _number(values if "rope_theta" in values else config, "rope_theta", 10_000.0, name)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return theta, None
    where = f"config of {name}"
    if kind not in ("linear", "llama3"):
        what = f"rope scaling {kind!r} is not supported"
        raise ConfigError(Problem("MOD001", what, where, "one of: default, linear, llama3"))
    required = ["factor"]
    if kind == "llama3":
        required += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if missing := [key for key in required if key not in values]:
        what = f"rope scaling {kind!r} lacks {', '.join(missing)}"
        raise ConfigError(Problem("MOD001", what, where, "take the values from the model's own config.json"))
    factor, *others = (_number(values, key, None, name) for key in required)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    return theta, RopeScaling(kind, factor, others[0], others[1], int(others[2]))


def _number(values: dict[str, Any], key: str, default: float | None, name: str) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = f"`{key}` must be a number, got {value!r}"
        raise ConfigError(Problem("CFG004", what, f"config of {name}", f"{key}: a number, without quotes"))
    return float(value)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of ``spec``, with the keys of transformers 5 and of 4."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        stretch = asdict(spec.rope_scaling)
        kind = stretch.pop("kind")
        rope |= {"rope_type": kind} | (stretch if kind == "llama3" else {"factor": spec.rope_scaling.factor})
    config = {key: value for key, value in asdict(spec).items() if key not in ("name", "family")}
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_scaling": None if spec.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
        "attention_dropout": 0.0,
        "eos_token_id": list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id,
        "use_cache": True,
    }


def load_spec(source: str, revision: str | None = None) -> ModelSpec:
    """The spec of a directory with a ``config.json``, of a built-in model, or of a Hub id, tried in that order."""
    path = Path(source).expanduser()
    if path.exists():
        return from_hf(_read_json(path / "config.json" if path.is_dir() else path), path.name)
    if (match := known.find(source)) is not None:
        return from_hf(match[1], match[0])
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        directory = fetch(source, revision, ["config.json"], "model.path")
        return from_hf(_read_json(directory / "config.json"), source.rpartition("/")[2])
    raise MissingInputError(Problem("MOD002", f"no model {source!r}", "model.path", _nearest(source)))


def _nearest(source: str) -> str:
    names = {name.lower(): name for name in known.CONFIGS}
    close = difflib.get_close_matches(source.rpartition("/")[2].lower(), names, n=3, cutoff=0.5)
    hint = "a directory with config.json, a Hub id such as meta-llama/Llama-3.1-8B, or a built-in name"
    if not close:
        return f"{hint}: {', '.join(known.CONFIGS)}"
    return f"did you mean {' or '.join(names[name] for name in close)}? ({hint})"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        fix = "a directory that holds config.json as transformers' save_pretrained writes it"
        raise MissingInputError(Problem("MOD002", f"no {path.name} in {path.parent}", "model.path", fix))
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        what = f"{path} is not JSON, or no object: {error}"
        raise DataError(Problem("MOD004", what, str(path), "fetch the file again")) from error
