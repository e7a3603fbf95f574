"""Where sheets come from. Units of the decoder ship with the package, one for each set of features, in symbols; sheets
of transformers' own modules are kept in a cache, else traced.

The key of each names what it was made from: a unit's features or a model's dimensions, the variant, and the code that
was traced.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cache, partial
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash

from shardwise.data.whole import write_whole
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.planner.features import What, assembled, joined, name_of
from shardwise.spec.files import read_regular
from shardwise.spec.plan import Precision
from shardwise.spec.sheet import Op, Sheet, Tensor, Unit
from shardwise.techniques.cells import NAMES

SHIPPED = "sheets.json.gz"
CACHE = Path.home() / ".cache" / "shardwise" / "sheets"
TRACED = (
    "models/attention.py",
    "models/decoder.py",
    "models/layers.py",
    "models/rotary.py",
    "planner/features.py",
    "planner/record.py",
    "planner/symbols.py",
    "planner/trace.py",
    "spec/sheet.py",
    "techniques/adapter.py",
    "techniques/dropout.py",
)
MARKS = ("input", "output", "gradient_in", "gradient_out")
"""Fields of a unit that are tensors of its own."""


def variant(precision: Precision) -> str:
    """Which variant of a unit serves these types."""
    return precision.variant


def sheet_of(spec: ModelSpec, which: str, cache_directory: Path = CACHE, *, ranks: int = 1) -> Sheet:
    """The sheet of a model, or of each of ``ranks`` tensor-parallel ranks. Those of the decoder's families are put
    together from units that ship with the package; another model is traced once, which imports torch and takes
    seconds."""
    cells = cells_of(which, cache_directory)
    if spec.hf_model is None:
        sheet = assembled(spec, lambda what, template: _unit_of(what, template, which, cache_directory), ranks)
        return replace(sheet, cells=cells, types=which)
    path = cache_directory / f"{key(spec, which)}.json"
    packed = _cached(path)
    if packed is None:
        from shardwise.planner.trace import trace

        packed = pack(trace(spec, which))
        _keep(path, packed)
    return replace(unpack(packed, spec), cells=cells, types=which)


def _unit_of(what: What, template: ModelSpec, which: str, cache_directory: Path) -> Unit:
    """The unit of a template: of features that no family of today has, traced and kept."""

    def trace() -> Unit:
        from shardwise.planner.trace import trace_template

        return trace_template(which, what, template)

    return _symbolic_unit(name_of(what, template, which), trace, cache_directory)


@cache
def cells_of(which: str, cache_directory: Path = CACHE) -> dict[str, Unit]:
    """What techniques put in the place of a layer, by name."""

    def trace(name: str) -> Unit:
        from shardwise.planner.trace import trace_cell

        return trace_cell(which, name)

    return {name: _symbolic_unit(f"{name} {which}", partial(trace, name), cache_directory) for name in NAMES}


def _symbolic_unit(name: str, trace: Callable[[], Unit], cache_directory: Path) -> Unit:
    """The unit that ships under this name, or one that was traced and kept."""
    if name in shipped():
        return unpack_unit(json.loads(shipped()[name]), symbolic=True)
    path = cache_directory / f"{_digest([name, code_digest()])}.json"
    packed = _cached(path)
    if packed is None:
        packed = pack_unit(trace())
        _keep(path, packed)
    return unpack_unit(packed, symbolic=True)


def key(spec: ModelSpec, which: str) -> str:
    """A key of everything that the sheet of a model of transformers' modules depends on; its name and number of blocks
    are not part of it."""
    kinds, _ = layer_kinds(spec)
    neutral = replace(spec, name="", num_hidden_layers=1, sliding_window=None, layer_types=(), final_soft_cap=None)
    theirs = [code_digest("models/hf_model.py"), metadata.version("transformers")]
    return _digest([astuple(neutral), [kind.local for kind in kinds], which, theirs])


def _digest(made_from: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(made_from).encode())


@cache
def code_digest(*more: str) -> str:
    """A digest of the code whose behaviour a sheet records."""
    root = files("shardwise")
    digest = xxhash.xxh3_128()
    for path in (*TRACED, *more):
        digest.update(root.joinpath(path).read_bytes())
    return digest.hexdigest()


@cache
def shipped() -> dict[str, str]:
    """The packed units of every set of features that a family can have, by name, as ``python -m
    shardwise.planner.ship`` made them; none where they are of other code."""
    data = files("shardwise.planner").joinpath(SHIPPED)
    if not data.is_file():
        return {}
    digest, *lines = gzip.decompress(data.read_bytes()).decode().splitlines()
    named = (line.partition("\t") for line in lines)
    return {name: packed for name, _, packed in named} if digest == code_digest() else {}


def _cached(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError):
        return None  # a cache that cannot be read is made again


def _keep(path: Path, packed: Any) -> None:
    with suppress(OSError):  # without a cache the next run traces again
        write_whole(path, json.dumps(packed, separators=(",", ":")))


def pack(sheet: Sheet) -> list[Any]:
    """The units of a traced sheet as nested lists; what techniques add is not kept."""
    return [pack_unit(unit) for unit in sheet.units]


def unpack(packed: list[Any], spec: ModelSpec) -> Sheet:
    """The sheet of ``spec``, whose depth, name and windows are not packed."""
    stem, *traced, tail = (unpack_unit(unit, symbolic=False) for unit in packed)
    # The output layer is the tail's last weight, which is not of what was traced.
    own = tuple(weight for weight in tail.weights if weight.name != "head.weight")
    return joined(spec, stem, traced, replace(tail, weights=own))


def pack_unit(unit: Unit) -> list[Any]:
    """A unit as nested lists."""
    return [
        unit.name,
        [[weight.name, weight.shape] for weight in unit.weights],
        [[tensor.shape, tensor.dtype, int(tensor.inside)] for tensor in unit.tensors],
        [[_pack_op(op) for op in ops] for ops in (unit.forward, unit.forward_plain, unit.backward)],
        [vars(unit)[mark] for mark in MARKS],
        unit.weight_gradients,
        sorted(unit.saved),
    ]


def _pack_op(op: Op) -> list[Any]:
    return [*astuple(op)[:6], op.symbols or op.flops, op.per, op.node]


def unpack_unit(packed: list[Any], *, symbolic: bool) -> Unit:
    """The inverse of :func:`pack_unit`; ``symbolic``: its sizes are to be bound."""
    name, weights, tensors, ops, marks, gradients, saved = packed
    held = tuple(
        Tensor(name, tuple(shape), "weights", "weights", symbols=tuple(shape) if symbolic else ())
        for name, shape in weights
    )
    made = tuple(
        Tensor(f"t{i}", tuple(shape), dtype, symbols=tuple(shape) if symbolic else (), inside=bool(inside))
        for i, (shape, dtype, inside) in enumerate(tensors)
    )
    forward, plain, backward = (tuple(_op(op) for op in each) for each in ops)
    named = dict(zip(MARKS, marks, strict=True)) | {"weight_gradients": tuple(map(tuple, gradients))}
    return Unit(name, held, made, forward, plain, backward, **named, saved=frozenset(saved))


def _op(packed: list[Any]) -> Op:
    kind, name, allocates, frees, reads, weight, size, per, node = packed
    flops, symbols = (0, size) if isinstance(size, str) else (size, "")
    return Op(kind, name, tuple(allocates), tuple(frees), tuple(reads), weight, flops, per, node, symbols)
