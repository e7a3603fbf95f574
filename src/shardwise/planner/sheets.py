"""The source of sheets: the units that a plan makes of a model, each bound to the model's and the plan's numbers.

Units are traced after the plan's techniques were applied to them (planner/trace.py), one for each variant
(techniques/variant.py). Those that ordinary plans need ship with the package; another is traced when it is first asked
for, and kept, with a digest of what it was made from: the code that was traced, that of the techniques that acted in
it, and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cache, lru_cache
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter

from shardwise import techniques
from shardwise.data.whole import write_whole
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.models.mixers import MIXERS, narrows
from shardwise.planner.apart import traced_apart
from shardwise.planner.shipped_units import SHIPPED, Shipped
from shardwise.planner.variants import chosen
from shardwise.spec.files import read_regular
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind, rank_kind_of
from shardwise.spec.record import from_json
from shardwise.spec.sheet import KEPT_UNITS, Dim, Op, Sheet, Tensor, Unit, grown
from shardwise.techniques.states import frozen, trained_stages
from shardwise.techniques.variant import Traced, Variant

CACHE = Path.home() / ".cache" / "shardwise" / "sheets"
TRACED = (
    "distributed/calls.py",
    "distributed/fake_world.py",
    "models/attention.py",
    "models/decoder.py",
    "models/delta_sizes.py",
    "models/layers.py",
    "models/rotary.py",
    "planner/recorder.py",
    "planner/symbols.py",
    "planner/trace.py",
    "planner/variants.py",
    "spec/sheet.py",
    "techniques/variant.py",
)
EXPERTS = ("models/router_losses.py", "models/grouped.py", "models/moe.py", "techniques/tp/row_counts.py")
"""Of what is traced where a block has experts."""
THEIRS = ("models/hf_model.py", "models/hf_spec.py", "planner/hf_units.py")
"""Of what is traced where a model runs in transformers' own modules."""
MARKS = ("input", "output", "gradient_in", "gradient_out")
"""Fields of a unit that are tensors of its own."""
FORMAT = 2
"""Of a packed unit."""
NOTHING: tuple[Any, ...] = ((), (), (), "", "", (), "", (), (), ())
"""What an operation has of each of its fields from the third on where it is packed without them."""
VARIANTS = TypeAdapter(Variant)
Units = Callable[[Iterable[Variant]], Mapping[Variant, Unit]]
"""Finds the units of variants, in symbols."""


def sheet_of(spec: ModelSpec, plan: Plan, rank_kind: RankKind | None = None, units: Units | None = None) -> Sheet:
    """Return what the techniques that act inside units make of a model on a kind of rank (by default the first), with
    numbers for all symbols but ``b`` and ``s``. ``units``: where they come from, by default :func:`units_of`."""
    where = rank_kind or rank_kind_of(0, plan.layout, plan.stages(spec.num_hidden_layers))
    inside = acting = techniques.inside(plan)
    if even(acting):
        acting = replace(acting, batch=replace(acting.batch, micro_batch_size=1))
    rank = acting.layout.rank({"tp": where.coordinate("tp")})
    if plan.layout.pp == 1:
        sheet = _sheet(spec, acting, RankKind(acting.layout, rank, where.blocks), units or units_of)
        return replace(sheet, rank_kind=where, inside=inside)
    trained, copied = trained_stages(spec, plan), spec.tie_word_embeddings
    if copied:  # each end has a weight of its own
        held = ("head.weight",) if acting.lora is None and frozen("embed.weight", plan) else ()
        spec, acting = replace(spec, tie_word_embeddings=False), replace(acting, frozen=(*acting.frozen, *held))
    sheet = _sheet(spec, acting, RankKind(acting.layout, rank, where.blocks), units or units_of).at(where)
    ends = sheet.with_ends(embedding=where.embedding, head=where.head)
    return replace(ends, copied=copied, trained=trained, inside=inside)


def even(acting: Plan) -> bool:
    """Return whether every rank has as many tokens of each row as others, so that units grow evenly with the rows and
    one sheet holds for micro-batches of all sizes."""
    return acting.row_tokens % acting.layout.tp == 0


@lru_cache(maxsize=8 * KEPT_UNITS)
def _sheet(spec: ModelSpec, plan: Plan, rank_kind: RankKind, units: Units) -> Sheet:
    kinds, order = layer_kinds(spec)
    ends = [chosen(spec, plan, rank_kind, end) for end in ("embedding", "head")]
    variants: dict[tuple[int, ...], Traced] = {}
    each = []
    for number in rank_kind.blocks:
        # Unless they are told apart by name, or some have no adapters, blocks of a kind differ in whether they are the
        # first.
        alike = (order[number], number == 0, spec.mlp_size(number), spec.has_experts(number), spec.predicts(number))
        some_adapted = plan.lora is not None and bool(plan.lora.targets) and spec.experts.num_experts > 0
        named = plan.precision.modules or plan.precision.exclude
        key = (number,) if plan.frozen or named or some_adapted else alike
        if key not in variants:
            variants[key] = chosen(spec, plan, rank_kind, number)
        each.append(variants[key])
    found = units([made.variant for made in (*ends, *variants.values())])
    known = {id(made): (found[made.variant], *_numbers(made, even=even(plan))) for made in (*ends, *variants.values())}
    embedding, head = (_bound(*known[id(made)], None) for made in ends)
    blocks = [_bound(*known[id(made)], kinds[order[n]].window) for made, n in zip(each, rank_kind.blocks, strict=True)]
    distinct = list(dict.fromkeys(blocks))
    return Sheet(
        spec.name,
        embedding,
        tuple(distinct),
        tuple(map(distinct.index, blocks)),
        head,
        spec.tie_word_embeddings,
        capped=spec.final_soft_cap is not None,
        key_heads=spec.attention.num_key_value_heads,
        heads_apart=spec.attention.qk_norm != "projection",
        narrow=narrows(spec),
        inside=plan,
        vocabulary=spec.vocab_size,
        counts=spec.expert_counts,
        per_token=1 + spec.predictors,
    )


Pairs = tuple[tuple[str, Any], ...]
OF_ROWS = ("n", "R")
"""Symbols of tokens and rows that a rank has: so many times the rows of a micro-batch, where these are split evenly."""


def _numbers(made: Traced, *, even: bool) -> tuple[Pairs, Pairs]:
    """The numbers of the symbols that the variant has, and its dtypes. Where rows are split evenly, what grows with
    them is so much of each: ``b*512``."""
    variant = made.variant
    known = {symbol for symbol, _ in (*variant.atoms, *variant.sums)} | {symbol for _, symbol in variant.rules}
    numbers = [(symbol, number) for symbol, number in made.numbers.items() if symbol in known]
    each = ((symbol, f"b*{number}" if even and symbol in OF_ROWS else number) for symbol, number in numbers)
    return tuple(each), tuple(made.dtypes.items())


class _Dims(dict[Dim, tuple[int, str]]):
    """Each dim of a unit as a number and what it grows with (``b``, ``b*s``, ``b*s*s`` or nothing), found once."""

    def __init__(self, numbers: Pairs) -> None:
        self.sizes = {symbol: number for symbol, number in numbers if isinstance(number, int)}
        self.rows = {symbol: number for symbol, number in numbers if isinstance(number, str)}
        self.shapes: dict[tuple[Dim, ...], tuple[Dim, ...]] = {}  # many tensors, and many operations, have the same
        self.listed: dict[tuple[Dim, ...], tuple[Dim, ...]] = {}

    def __missing__(self, dim: Dim) -> tuple[int, str]:
        rewritten = dim
        if self.rows and isinstance(dim, str):
            above, bar, below = dim.partition("/")
            rewritten = "*".join(self.rows.get(factor, factor) for factor in above.split("*")) + bar + below
        self[dim] = found = grown(rewritten, self.sizes)
        return found

    def shape(self, symbols: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """A shape with numbers; of a dim that grows with rows its number and what it grows with are two."""
        if symbols not in self.shapes:
            parts = (self[dim] for dim in symbols)
            each = ([size] * (size != 1 or not per) + [per] * bool(per) for size, per in parts)
            self.shapes[symbols] = tuple(part for both in each for part in both)
        return self.shapes[symbols]

    def sizes_of(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return each dim with numbers: ``512*b*s``."""
        if dims not in self.listed:
            both = map(self.__getitem__, dims)
            self.listed[dims] = tuple(f"{size}*{per}" if per else size for size, per in both)
        return self.listed[dims]

    def tensor(self, tensor: Tensor, real: Mapping[str, str]) -> Tensor:
        """A tensor with numbers for its symbols, in its real dtypes."""
        shape = self.shape(tensor.symbols) if tensor.symbols else tensor.shape
        dtype, used_as = (real.get(name, name) for name in (tensor.dtype, tensor.used_as))
        return Tensor(
            tensor.name, shape, dtype, tensor.category, tensor.shards, used_as, tensor.trained, tensor.symbols
        )

    def op(self, op: Op) -> Op:
        """An operation with numbers for all of its dims, bytes and FLOPs but ``b`` and ``s``."""
        flops, per = (op.flops, op.per) if not op.symbols or _of_matrix(op) else self[op.symbols]
        dims, read, written = map(self.sizes_of, (op.dims, op.read, op.written))
        kept = (op.weight, flops, per, op.symbols, op.writes, op.axis)
        return Op(op.kind, op.name, op.allocates, op.frees, op.reads, *kept, dims, read, written)


def _of_matrix(op: Op) -> bool:
    """Return whether an operation that is no product has a matrix, and no FLOPs."""
    return op.kind == "elementwise" and bool(op.dims)


@lru_cache(maxsize=8 * KEPT_UNITS)
def _bound(unit: Unit, numbers: Pairs, dtypes: Pairs, window: int | None) -> Unit:
    dims, real = _Dims(numbers), dict(dtypes)
    weights, tensors = (tuple(dims.tensor(tensor, real) for tensor in each) for each in (unit.weights, unit.tensors))
    forward, backward = (tuple(map(dims.op, ops)) for ops in (unit.forward, unit.backward))
    # The operations are those of forward: binding half as many is half the time.
    plain = tuple(op.freeing(other.frees) for op, other in zip(forward, unit.forward_plain, strict=True))
    made = {"weights": weights, "tensors": tensors, "forward": forward, "forward_plain": plain, "backward": backward}
    return replace(unit, window=window, **made)  # type: ignore[arg-type]


def units_of(variants: Iterable[Variant], cache_directory: Path = CACHE) -> dict[Variant, Unit]:
    """The unit of each variant: as it ships, as it was kept, or traced, which takes some seconds, and kept."""
    known, missing = _known(), dict[Variant, Path]()
    for variant in dict.fromkeys(variants):
        if variant not in known:
            key = key_of(variant)
            path = cache_directory / f"{key}.json"
            packed = shipped().unit(key)
            unit = _kept(path) if packed is None else unpack_unit(packed)
            if unit is None:
                missing[variant] = path
            else:
                known[variant] = unit
    if missing:
        made = traced_anew([*missing], cache_directory)
        for (variant, path), packed in zip(missing.items(), made, strict=True):
            known[variant] = unpack_unit(packed)
            _keep(path, packed)
    return {variant: known[variant] for variant in variants}


@cache
def _known() -> dict[Variant, Unit]:
    return {}


def traced_anew(variants: list[Variant], kept_in: Path) -> list[Any]:
    """The packed units of variants, traced in another process."""
    return traced_apart([name_of(variant) for variant in variants], kept_in)


def name_of(variant: Variant) -> str:
    """Return a name that no other variant has: JSON, and behind it the settings that only a subclass of Plan has."""
    common = {each.name for each in fields(Plan)}
    own = sorted({each.name for each in fields(variant.plan)} - common)
    more = "".join(f" {key}={vars(variant.plan)[key]!r}" for key in own)
    return VARIANTS.dump_json(variant, exclude_defaults=True).decode() + more


def variant_of(name: str) -> Variant:
    """The inverse of :func:`name_of`. Raises ValueError for the name of a variant with settings of a subclass."""
    return VARIANTS.validate_json(name)


def digest_of(variant: Variant) -> str:
    """A digest of everything that a unit depends on besides its variant."""
    more = THEIRS if variant.concrete else EXPERTS if variant.model.experts else ()
    if variant.what == "block" and not variant.concrete:
        more = (*more, *_file_of(MIXERS[variant.model.attention.mixer].module.partition(":")[0]))
    version = metadata.version("transformers") if variant.concrete else ""
    return _digest((*TRACED, *variant.code, *more), version)


@cache
def _file_of(module: str) -> tuple[str, ...]:
    """Return where a mixer's program stands, in this package or another; it is not imported."""
    if module.startswith("shardwise."):
        return (module.removeprefix("shardwise.").replace(".", "/") + ".py",)
    found = find_spec(module)
    return (found.origin,) if found and found.origin else ()


@cache
def _digest(paths: tuple[str, ...], version: str) -> str:
    root, torch = files("shardwise"), metadata.version("torch").partition("+")[0]
    digest = xxhash.xxh3_128(f"{torch} {version}".encode())
    for path in dict.fromkeys(paths):
        digest.update(root.joinpath(path).read_bytes())
    return digest.hexdigest()


def key_of(variant: Variant) -> str:
    """The name of a variant's unit as this code makes it."""
    return xxhash.xxh3_128_hexdigest(f"{FORMAT} {digest_of(variant)} {name_of(variant)}".encode())


@cache
def shipped() -> Shipped:
    """The units that ``python -m shardwise.planner.ship`` made."""
    return Shipped(files("shardwise.planner").joinpath(SHIPPED).read_bytes())


@dataclass(frozen=True)
class _KeptUnit:
    """A file of the cache: the JSON of a packed unit, and the xxh3-128 of it."""

    xxh3: str
    unit: str


def _kept(path: Path) -> Unit | None:
    """The unit that :func:`_keep` wrote; None where it cannot be read, or is not what was written: it is made again."""
    try:
        kept = from_json(_KeptUnit, read_regular(path))
        return unpack_unit(json.loads(kept.unit)) if kept.xxh3 == _sum(kept.unit) else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _keep(path: Path, packed: Any) -> None:
    unit = json.dumps(packed, separators=(",", ":"))
    with suppress(OSError):  # without a cache the next run traces again
        write_whole(path, json.dumps(asdict(_KeptUnit(_sum(unit), unit))))


def _sum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def pack_unit(unit: Unit) -> list[Any]:
    """A unit as nested lists. Of a forward pass that saves nothing only what differs from the other is kept: when what
    is freed."""
    bare, plain = ([op.freeing(()) for op in ops] for ops in (unit.forward, unit.forward_plain))
    assert bare == plain, f"a {unit.name} does something else where nothing is saved"
    return [
        unit.name,
        [[w.name, w.symbols, w.dtype, int(w.trained)] for w in unit.weights],
        [[t.symbols, t.dtype, *([t.category] if t.category != "activations" else [])] for t in unit.tensors],
        [_pack_op(op) for op in unit.forward],
        [op.frees for op in unit.forward_plain],
        [_pack_op(op) for op in unit.backward],
        [vars(unit)[mark] for mark in MARKS],
        unit.weight_gradients,
        sorted(unit.saved),
        sorted(unit.again),
    ]


def _pack_op(op: Op) -> list[Any]:
    packed = [*astuple(op)[:6], op.symbols, op.writes, op.axis, op.dims, op.read, op.written]
    while not packed[-1]:
        packed.pop()
    return packed


def unpack_unit(packed: list[Any]) -> Unit:
    """The inverse of :func:`pack_unit`."""
    name, weights, tensors, forward, frees, backward, marks, gradients, saved, again = packed
    held, made = [], []
    for weight, shape, dtype, trained in weights:
        held.append(Tensor(weight, tuple(shape), dtype, "weights", (), dtype, bool(trained), tuple(shape)))
    for index, (shape, dtype, *other) in enumerate(tensors):
        category = other[0] if other else "activations"
        made.append(Tensor(f"t{index}", tuple(shape), dtype, category, symbols=tuple(shape)))
    saving = tuple(map(_op, forward))
    plain = tuple(op.freeing(tuple(freed)) for op, freed in zip(saving, frees, strict=True))
    named = dict(zip(MARKS, marks, strict=True)) | {"weight_gradients": tuple(map(tuple, gradients))}
    own = (saving, plain, tuple(map(_op, backward)))
    return Unit(name, tuple(held), tuple(made), *own, **named, saved=frozenset(saved), again=frozenset(again))


def _op(packed: list[Any]) -> Op:
    kind, name, *rest = packed
    filled: list[Any] = [*rest, *NOTHING[len(rest) :]]
    allocates, frees, reads, writes, dims, read, written = (tuple(filled[i]) for i in (0, 1, 2, 5, 7, 8, 9))
    seen = {"symbols": filled[4], "writes": writes, "axis": filled[6], "dims": dims, "read": read, "written": written}
    return Op(kind, name, allocates, frees, reads, filled[3], **seen)
