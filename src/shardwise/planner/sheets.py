"""Sheets at hand: of well-known models from data that ships with the package, of others from a cache, else traced.

A sheet's key says what it was made from: the dimensions of the model, the variant, and the code that was traced.
"""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash

from shardwise.data.whole import write_whole
from shardwise.models.config import TOKENS, LayerKind, ModelSpec, layer_kinds
from shardwise.spec.plan import Precision
from shardwise.spec.sheet import Op, Sheet, Tensor, Unit

SHIPPED = "sheets.json.gz"
CACHE = Path.home() / ".cache" / "shardwise" / "sheets"
TRACED = (
    "models/attention.py",
    "models/decoder.py",
    "models/layers.py",
    "models/rotary.py",
    "planner/record.py",
    "planner/trace.py",
    "spec/sheet.py",
)
MARKS = ("input", "output", "gradient_in", "gradient_out")
"""Fields of a unit that are tensors of its own."""
UNTRACED: dict[str, Any] = {
    **dict.fromkeys(("name", "family"), ""),
    "num_hidden_layers": 1,
    "max_position_embeddings": 0,
    **dict.fromkeys(("rope_theta", "initializer_range", "rms_norm_eps"), 0.0),
    **dict.fromkeys((*TOKENS, "local_rope_theta", "sliding_window"), None),
    **dict.fromkeys(("attention_scale", "attention_soft_cap", "final_soft_cap"), None),
    **dict.fromkeys(("layer_types", "nope_layers"), ()),
}
"""Fields of ModelSpec that no sheet depends on, and what stands for them in its key: the number of blocks and what is
stated of each, names, and what only changes values."""


def variant(precision: Precision) -> str:
    """``wide`` where statistics have the compute type, so that converting to them costs nothing."""
    return "wide" if precision.compute in ("fp32", "fp64") else "narrow"


def sheet_of(spec: ModelSpec, which: str, cache_directory: Path = CACHE) -> Sheet:
    """The sheet of a model. Only a model never met before is traced, which imports torch and takes seconds."""
    name = key(spec, which)
    packed = shipped().get(name) or _cached(cache_directory / f"{name}.json")
    if packed is None:
        from shardwise.planner.trace import trace

        packed = pack(trace(spec, which), spec)
        _keep(cache_directory / f"{name}.json", packed)
    return unpack(packed, spec)


def key(spec: ModelSpec, which: str) -> str:
    """What the sheet depends on."""
    kinds, _ = layer_kinds(spec)
    dims = astuple(replace(spec, **UNTRACED))
    theirs = [] if spec.foreign is None else [code_digest("models/foreign.py"), metadata.version("transformers")]
    sorts = [
        list(dict.fromkeys(_sort(kind, spec) for kind in kinds)),
        sorted({kind.local for kind in kinds if kind.rotated}),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps([dims, sorts, which, code_digest(), theirs]).encode())


def _sort(kind: LayerKind, spec: ModelSpec) -> bool:
    """Layers allocate alike that are both rotated, or both not; of a foreign model those that see alike."""
    return kind.rotated if spec.foreign is None else kind.local


@cache
def code_digest(*more: str) -> str:
    """A digest of the code whose behaviour a sheet records."""
    root = files("shardwise")
    digest = xxhash.xxh3_128()
    for path in (*TRACED, *more):
        digest.update(root.joinpath(path).read_bytes())
    return digest.hexdigest()


@cache
def shipped() -> dict[str, Any]:
    """The sheets of models/known.py, made by ``python -m shardwise.planner.ship``."""
    data = files("shardwise.planner").joinpath(SHIPPED)
    return dict(json.loads(gzip.decompress(data.read_bytes()))) if data.is_file() else {}


def _cached(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None  # a cache that cannot be read is made again


def _keep(path: Path, packed: Any) -> None:
    with suppress(OSError):  # without a cache the next run traces again
        write_whole(path, json.dumps(packed, separators=(",", ":")))


def pack(sheet: Sheet, spec: ModelSpec) -> list[Any]:
    """A traced sheet as nested lists; what techniques add is not kept."""
    kinds, _ = layer_kinds(spec)
    blocks = {_sort(kind, spec): block for kind, block in zip(kinds, sheet.blocks, strict=True)}
    return [_pack_unit(unit) for unit in (sheet.stem, *blocks.values(), sheet.tail)]


def unpack(packed: list[Any], spec: ModelSpec) -> Sheet:
    """The sheet of ``spec``, whose depth, name and windows are not packed."""
    stem, *traced, tail = (_unpack_unit(unit) for unit in packed)
    kinds, order = layer_kinds(spec)
    by_sort = dict(zip(dict.fromkeys(_sort(kind, spec) for kind in kinds), traced, strict=True))
    blocks = tuple(replace(by_sort[_sort(kind, spec)], window=kind.window) for kind in kinds)
    capped = spec.final_soft_cap is not None
    return Sheet(spec.name, stem, blocks, order, tail, spec.tie_word_embeddings, capped=capped)


def _pack_unit(unit: Unit) -> list[Any]:
    return [
        unit.name,
        [[t.name, t.shape, t.dtype, t.category] for t in unit.weights],
        [[t.name, t.shape, t.dtype, t.category] for t in unit.tensors],
        [[astuple(op) for op in ops] for ops in (unit.forward, unit.forward_plain, unit.backward)],
        [vars(unit)[mark] for mark in MARKS],
        unit.weight_gradients,
        sorted(unit.saved),
    ]


def _unpack_unit(packed: list[Any]) -> Unit:
    name, *held, ops, marks, listed, saved = packed
    weights, tensors = (tuple(Tensor(n, tuple(shape), *types) for n, shape, *types in each) for each in held)
    forward, plain, backward = (tuple(_op(op) for op in each) for each in ops)
    gradients = tuple((weight, tensor) for weight, tensor in listed)
    named = dict(zip(MARKS, marks, strict=True)) | {"weight_gradients": gradients, "saved": frozenset(saved)}
    return Unit(name, weights, tensors, forward, plain, backward, **named)


def _op(packed: list[Any]) -> Op:
    kind, name, allocates, frees, reads, *rest = packed
    return Op(kind, name, tuple(allocates), tuple(frees), tuple(reads), *rest)
