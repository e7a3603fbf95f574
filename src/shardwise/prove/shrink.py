"""A plan and its model made small enough for the CPU ranks of one machine: the same kinds of everything, fewer of each.

Every degree above 1 becomes 2 (or 4), and every size the smallest that the techniques' own ``check`` admits with those
degrees, so what must divide does, and what need not does not. Each block stands for one of the model: of a stage the
first, the last, and one of each kind (its window, the width of its MLP or whether it has experts, what of it is
frozen). What a property rests on is kept: a window shorter than a row, fewer key heads than tensor-parallel ranks, an
uneven split, a loss in several chunks, ranks that have the same experts or none that do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from typing import Any

from shardwise import techniques
from shardwise.errors import ConfigError, Problem, first_line
from shardwise.models.config import ModelSpec, flat, layer_kinds, parameter_shapes, problems, with_fields
from shardwise.models.lookup import read_spec
from shardwise.models.mixers import mixers_of
from shardwise.prove import regimes
from shardwise.prove.regimes import Case
from shardwise.prove.small_layout import Raised, small_layout
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import MESH, Axis, Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision
from shardwise.spec.rows import parts_of
from shardwise.techniques import float8
from shardwise.techniques.dtypes import compute_dtype
from shardwise.techniques.pp.actions import illegal
from shardwise.techniques.states import frozen

AXES: tuple[Axis, ...] = (*MESH, "ep")
VOCABULARY = 67
"""A prime: no number of ranks divides it."""
HEAD_DIMS = (8, 16, 32, 64, 128)
WIDTHS = ((20, 28), (20, 36), (64, 128), (128, 256), (256, 512))
"""Of hidden states and MLPs."""
EXPERTS, CHOSEN = 4, 2
"""At least so many of a layer; of which a token goes to so many, unless it goes to one, or to all."""
BLOCKS, STAGED = 3, 5
"""Of a model that is not split, unless more kinds of block ask for more; and how many choices of stages are tried."""
WINDOW, TEXT, PAIRS = 5, 12, 24
"""Tokens that a sliding layer sees; of a row of text; of a row of pairs of answers."""
WIDE = ("intermediate_size", "shared_expert_size")
"""Of MLPs: where they differ, what is made of them differs."""
DEVIATION = 1.3
"""Of what a matrix makes of normed hidden states: large, so that no gradient is lost in rounding."""
BUCKET_BYTES = 4096
THEIRS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Of a model in transformers' own modules, by the names that its config maps to its own."""
EXACT = Precision("fp64", "fp64", "fp64")


@dataclass(frozen=True)
class Shrunk:
    """A model and its plan made small. ``plan`` computes in float64, ``own`` is the same in the dtypes of the plan
    itself. ``blocks``: for each block the one of the model for which it stands. ``changed``: what is smaller, in words.
    ``unseen``: what a proof of it therefore does not show. ``lost``: the paths of code (prove/regimes.py) that were to
    be kept and are not."""

    spec: ModelSpec
    plan: Plan
    own: Plan
    blocks: tuple[int, ...]
    changed: tuple[str, ...]
    unseen: tuple[str, ...]
    lost: frozenset[str] = frozenset()


def shrink(
    spec: ModelSpec, plan: Plan, most: int = 2, raised: Raised | None = None, wanted: frozenset[str] | None = None
) -> Shrunk:
    """The smallest that has all that ``plan`` does with ``spec``, with at most so many ranks along an axis, and takes
    the ``wanted`` paths, or as many of them as sizes near it do; None: all that the plan does. Raises ConfigError where
    no sizes serve, PLAN025 if transformers makes no smaller model of this family."""
    layout = small_layout(plan.layout, most, raised or {})
    wanted, best = regimes.held(spec, plan) if wanted is None else wanted, None
    for stages in islice(_stages(spec, plan, layout), STAGED):
        case, blocks = _smallest(spec, plan, layout, stages)
        if best is not None and len(regimes.nearest(case, best[2], _legal)[1]) == len(best[2]):
            continue  # with these stages there is no more
        case, missing = regimes.nearest(case, wanted, _legal)
        if best is None or len(missing) < len(best[2]):
            best = case, blocks, missing
        if not missing:
            break
    assert best is not None
    (fewer, tried), blocks, missing = best
    own = _in_own_dtypes(plan, blocks, fewer, tried)
    told = tuple(_changed(spec, plan, fewer, tried)), tuple(_unseen(plan, most))
    return Shrunk(fewer, tried, own, blocks, *told, missing)


def _smallest(
    spec: ModelSpec, plan: Plan, layout: Layout, stages: Sequence[Sequence[int]]
) -> tuple[Case, tuple[int, ...]]:
    """The smallest legal case with these blocks of the model, and these."""
    blocks, refused = tuple(block for stage in stages for block in stage), None
    small = _plan(plan, layout, tuple(map(len, stages)) if layout.pp > 1 else ())
    fraction = max(plan.offload.optimizer_fraction, 1 / len(blocks))  # a block, at least
    small = replace(small, offload=replace(small.offload, optimizer_fraction=fraction))
    for fewer in _specs(spec, plan, blocks, small):
        precision = replace(EXACT, **_products(spec, plan, blocks, fewer))
        tried = replace(small, frozen=_frozen(spec, plan, blocks, fewer), precision=precision)
        if not (refused := _refused(fewer, tried)):
            return (fewer, tried), blocks
    raise ConfigError(*(refused or ()))


def _refused(spec: ModelSpec, plan: Plan) -> list[Problem]:
    return problems(spec) or techniques.check(spec, plan, _cpus(plan.layout.world))


def _legal(case: Case) -> bool:
    return not _refused(*case)


@lru_cache
def _cpus(ranks: int) -> Cluster:
    return parse_cluster(f"{ranks}xCPU")


def _plan(plan: Plan, layout: Layout, split: tuple[int, ...]) -> Plan:
    batch, pipeline = plan.batch, plan.pipeline
    rows, count = min(2, batch.micro_batch_size), min(2, batch.accumulation)
    if layout.pp > 1:
        count = max(count, 2 * layout.pp if batch.accumulation > plan.layout.pp else 1)
        found = {one.name: one.nearest for one in illegal(pipeline.schedule, layout.pp, len(split) // layout.pp, count)}
        count = found.get("micro_batches", count)
        pipeline = replace(pipeline, stages_per_rank=len(split) // layout.pp, split=split)
    multiple = parts_of(layout.ring, layout.ulysses)
    length = -(-(PAIRS if plan.method.pairs else TEXT) // multiple) * multiple
    chunk = 7 if batch.loss_chunk_tokens < batch.micro_batch_size * plan.row_tokens else 2 * length
    return replace(
        plan,
        layout=layout,
        batch=Batch(rows, count, length, chunk),
        shard=replace(
            plan.shard, reshard_after_forward=bool(plan.shard.reshard_after_forward), bucket_bytes=BUCKET_BYTES
        ),
        precision=EXACT,
        remat=replace(plan.remat, every=min(2, plan.remat.every)),
        compile=False,
        attention="auto",
        optim=plan.optim.exact,
        lora=_lora(plan.lora) if plan.lora else None,
        pipeline=pipeline,
    )


def _lora(lora: Lora) -> Lora:
    """Adapters of a small rank, with the same factor."""
    rank = min(4, lora.rank)
    alpha = lora.alpha * (rank / lora.rank) ** (0.5 if lora.rslora else 1.0)
    return replace(lora, frozen="fp64", dropout=0.0, rank=rank, alpha=alpha)


def _stages(spec: ModelSpec, plan: Plan, layout: Layout) -> Iterator[list[list[int]]]:
    """The blocks of the model for which those of each stage stand: of stages from the first to the last, with a block
    more each, or with a stage between them in the place of one of these. One that is longer than others keeps more."""
    real, each = plan.stages(spec.num_hidden_layers), 2 if plan.remat.every > 1 else 1
    if layout.pp == 1:
        yield [_pick(spec, plan, real[0], max(BLOCKS, 2 * each))]
        return
    count = layout.pp * min(2, plan.pipeline.stages_per_rank)
    first = [round(place * (len(real) - 1) / (count - 1)) for place in range(count)]
    others = ([*first[:place], other, *first[place + 1 :]] for place, other in product(range(count), range(len(real))))
    tried = set[tuple[object, ...]]()
    for number, numbers in enumerate((first, first, *others)):
        kept = [real[number] for number in numbers]
        fewest, more = min(map(len, kept)), number == 1
        stages = [_pick(spec, plan, stage, each + more + (len(stage) > fewest)) for stage in kept]
        alike = tuple(len({_kind(spec, plan, block) for block in stage}) for stage in stages), tuple(map(len, stages))
        if alike not in tried:
            tried.add(alike)
            yield stages


def _pick(spec: ModelSpec, plan: Plan, stage: range, count: int) -> list[int]:
    """``count`` blocks of a stage, or as many as it has kinds of."""
    of_kind: dict[object, int] = {}
    for block in stage:
        of_kind.setdefault(_kind(spec, plan, block), block)
    chosen = set(of_kind.values())
    for block in (stage[-1], stage[0], *stage):
        if len(chosen) < count:
            chosen.add(block)
    return sorted(chosen)


@lru_cache(maxsize=4096)
def _kind(spec: ModelSpec, plan: Plan, block: int) -> tuple[object, ...]:
    """Return what tells a block from others: its attention, its MLP, what of it is frozen, and what multiplies in
    float8."""
    names = [name for name in parameter_shapes(spec) if plan.frozen and name.startswith(f"layers.{block}.")]
    held = frozenset(name.split(".", 2)[2] for name in names if frozen(name, plan))
    inside, prefix = float8.layers(spec, plan.precision), f"layers.{block}."
    narrow = frozenset(name.removeprefix(prefix) for name in inside if name.startswith(prefix))
    return layer_kinds(spec)[1][block], spec.mlp_size(block), spec.has_experts(block), held, narrow


def _specs(spec: ModelSpec, plan: Plan, blocks: Sequence[int], small: Plan) -> Iterator[ModelSpec]:
    """The model with fewer of everything, the smaller first."""
    if spec.hf_model is not None:
        yield _theirs(spec, plan, blocks)
        return
    for sizes in _sizes(spec, plan.layout, small.layout):
        own = sizes | _experts(spec, small.layout.ep, sizes["intermediate_size"])
        for mixer in mixers_of(spec):
            own |= mixer.small(spec, sizes)
        yield _spec(spec, blocks, _window(spec, plan, small.batch.seq_len), own)


def _theirs(spec: ModelSpec, plan: Plan, blocks: Sequence[int]) -> ModelSpec:
    """A model that runs in transformers' own modules, made from a smaller config. Raises PLAN025 where that is no model
    of its family."""
    from transformers import CONFIG_MAPPING

    assert spec.hf_model is not None
    config = json.loads(spec.hf_model.config)
    own = CONFIG_MAPPING[config["model_type"]].attribute_map
    wanted = {own.get(key, key): value for key, value in THEIRS.items()}
    for key, value in config.items():  # sizes that follow the hidden states by another name
        if type(value) is int and key not in wanted and value and not value % spec.hidden_size:
            wanted[key] = THEIRS["hidden_size"] * (value // spec.hidden_size)
    small = {key: value for key, value in wanted.items() if config.get(key) is not None}
    small[own.get("num_hidden_layers", "num_hidden_layers")] = len(blocks)
    if config.get("layer_types"):
        small["layer_types"] = [config["layer_types"][block] for block in blocks]
    if config.get("sliding_window") and config["sliding_window"] < plan.batch.seq_len:
        small["sliding_window"] = WINDOW
    if spec.attention.num_key_value_heads == spec.attention.num_attention_heads and config.get("num_key_value_heads"):
        small["num_key_value_heads"] = THEIRS["num_attention_heads"]
    try:
        return read_spec(config | small, f"{spec.name} (shrunk)")
    except Exception as error:  # each family's own code says what is wrong with such sizes, in its own way
        what = f"{spec.name} runs in transformers' own modules, and no smaller model of its family could be made"
        problem = Problem("PLAN025", f"{what}: {first_line(error)}", "model", "a model of another family")
        raise ConfigError(problem) from error


def _sizes(spec: ModelSpec, layout: Layout, few: Layout) -> Iterator[dict[str, Any]]:
    """Sizes, the smaller first. Key heads that are fewer than the ranks that share them stay so."""
    sharing, each = few.tp * few.ulysses, spec.attention.num_key_value_heads
    key_heads = max(2, sharing)
    if each == 1 or (layout.tp > 1 and each < layout.tp):
        key_heads = 1
    elif each < layout.tp * layout.ulysses:
        key_heads = few.tp
    heads = key_heads * (2 if spec.attention.num_attention_heads > spec.attention.num_key_value_heads else 1)
    counts = {"num_attention_heads": max(heads, sharing), "num_key_value_heads": key_heads}
    for (hidden, width), head_dim in product(WIDTHS, HEAD_DIMS):
        yield {**counts, "hidden_size": hidden, "intermediate_size": width, "head_dim": head_dim}


def _experts(spec: ModelSpec, ranks: int, width: int) -> dict[str, Any]:
    """Return as many experts as ``ranks`` can share; of groups two, of which one is kept where not all are."""
    if not spec.experts:
        return {}
    own = spec.experts
    every, few_chosen = own.experts_per_token == own.num_experts, min(CHOSEN, own.experts_per_token)
    least = EXPERTS if every else max(EXPERTS, 2 * few_chosen + 1)
    count = -(-least // ranks) * ranks
    chosen = count if every else few_chosen
    found: dict[str, Any] = {"num_experts": count, "experts_per_token": chosen, "expert_size": width // 2}
    for key, routing in (("sigmoid", own.sigmoid), ("softmax_groups", own.softmax_groups)):
        if routing is not None:
            few = 2 if routing.groups > 1 and count % 2 == 0 else 1
            found[key] = replace(routing, groups=few, kept_groups=1 if routing.kept_groups < routing.groups else few)
    return found


def _window(spec: ModelSpec, plan: Plan, length: int) -> int | None:
    """Return how many tokens a sliding layer of the small model sees of a row of ``length``: all where the model's sees
    a whole row."""
    window = spec.attention.sliding_window
    cuts = window is not None and window < plan.batch.seq_len
    return WINDOW if cuts else window and 2 * length


def _spec(spec: ModelSpec, blocks: Sequence[int], window: int | None, sizes: dict[str, Any]) -> ModelSpec:
    width = sizes["intermediate_size"]
    widths = {size: width * (1 + place) for place, size in enumerate(sorted(spec.mlp_sizes))}
    known = flat(spec)
    sizes = sizes | {key: widths[known[key]] for key in WIDE if known[key] in widths}
    few = with_fields(
        spec,
        name=f"{spec.name} (shrunk)",
        vocab_size=VOCABULARY,
        num_hidden_layers=len(blocks),
        sliding_window=window,
        layer_types=tuple(spec.attention.layer_types[block] for block in blocks) if spec.attention.layer_types else (),
        dense_layers=tuple(place for place, block in enumerate(blocks) if block in spec.experts.dense_layers),
        nope_layers=tuple(place for place, block in enumerate(blocks) if block in spec.positions.nope_layers),
        intermediate_sizes=tuple(widths[spec.mlp_size(block)] for block in blocks) if spec.intermediate_sizes else (),
        initializer_range=DEVIATION * sizes["hidden_size"] ** -0.5,
        **sizes,
    )
    scaling = spec.positions.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return few
    pairs = few.rotary_dim // 2
    short, long = scaling.short_factor[:pairs], scaling.long_factor[:pairs]
    return with_fields(few, rope_scaling=replace(scaling, short_factor=short, long_factor=long))


def _frozen(spec: ModelSpec, plan: Plan, blocks: Sequence[int], few: ModelSpec) -> tuple[str, ...]:
    """The names that are frozen where those for which they stand are."""
    if not plan.frozen:
        return ()
    names = parameter_shapes(few)
    return tuple(name for name in names if frozen(real_name(name, blocks), plan))


def _products(spec: ModelSpec, plan: Plan, blocks: Sequence[int], few: ModelSpec) -> dict[str, Any]:
    """The settings of products in float8, of which those layers are that stand for such."""
    own = plan.precision
    if own.products == "compute":
        return {}
    within, every = float8.layers(spec, own), float8.layers(few, replace(own, exclude=()))
    exclude = tuple(name for name in every if real_name(name, blocks) not in within)
    return {"products": own.products, "scales": own.scales, "exclude": exclude, "gather": own.gather}


def _in_own_dtypes(plan: Plan, blocks: Sequence[int], few: ModelSpec, small: Plan) -> Plan:
    """``small`` in the dtypes of ``plan``, whose rules for modules are told for the blocks that are left."""
    modules = {name.rpartition(".")[0] for name in parameter_shapes(few)}
    rules = {name: compute_dtype(plan.precision, real_name(name, blocks)) for name in modules}
    kept = tuple((name, dtype) for name, dtype in sorted(rules.items()) if dtype != plan.precision.compute)
    lora = replace(small.lora, frozen=plan.lora.frozen) if small.lora and plan.lora else None
    precision = replace(plan.precision, modules=kept, exclude=small.precision.exclude)
    return replace(small, precision=precision, lora=lora, optim=plan.optim)


def real_name(name: str, blocks: Sequence[int]) -> str:
    """The parameter of the model for which the shrunk one stands."""
    head, _, rest = name.partition("layers.")
    if head or not rest:
        return name
    number, _, part = rest.partition(".")
    return f"layers.{blocks[int(number)]}.{part}"


def _changed(spec: ModelSpec, plan: Plan, few: ModelSpec, small: Plan) -> Iterator[str]:
    """Yield what is smaller, in words."""
    for axis in AXES:
        if (before := plan.layout.degree(axis)) != (after := small.layout.degree(axis)):
            yield f"{axis} {before:,} -> {after}"
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    was, made = flat(spec), flat(few)
    counts = ("num_experts", "experts_per_token", "expert_size", "shared_expert_size")
    for key in (*keys, *counts, "num_hidden_layers", "sliding_window"):
        if (before := was[key]) != (after := made[key]):
            yield f"{key} {before:,} -> {after}"
    for key in ("seq_len", "micro_batch_size", "accumulation"):
        if (before := getattr(plan.batch, key)) != (after := getattr(small.batch, key)):
            yield f"{key} {before:,} -> {after}"
    if plan.layout.pp > 1:
        yield f"split into {len(plan.pipeline.split)} stages -> {list(small.pipeline.split)}"
    if plan.lora is not None and plan.lora.rank != (small.lora or plan.lora).rank:
        yield f"rank of adapters {plan.lora.rank} -> {(small.lora or plan.lora).rank}"


def _unseen(plan: Plan, most: int) -> Iterator[str]:
    """Yield what proofs on CPUs, in float64 and at these sizes do not show."""
    if large := [axis for axis in AXES if plan.layout.degree(axis) > most]:
        yield f"what goes wrong only with more than {most} ranks along {', '.join(large)}"
    if plan.compile:
        yield "compiled blocks: they compute as they are written here"
    pinned = f"; attention {plan.attention}" if plan.attention != "auto" else ""
    yield f"kernels, NCCL and numerical range on GPUs: ranks are CPU processes{pinned}"
    if filed := plan.offload.filed:
        yield f"what files on NVMe hold at this size: for drift {' and '.join(filed)} wait on the host instead"
    if plan.optim.spec.packed and plan.layout.tp > 1:
        yield "moments in 8 bits: blocks of rows are longer than the small rows that ranks of tp have parts of"
    if type(plan.shard.reshard_after_forward) is int:
        yield f"weights that {plan.shard.reshard_after_forward} ranks keep between forward and backward: all do here"
    if plan.lora is not None and plan.lora.dropout:
        yield f"dropout of adapters ({plan.lora.dropout:g}): it is off here"
