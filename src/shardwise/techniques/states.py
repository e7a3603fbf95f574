"""The table of what ranks hold of each parameter on each axis, and how its gradient comes; and what follows from it.

On an axis a parameter is cut along a dim, or every rank holds it whole; and what a rank computes of its gradient is all
of it, or a part of a sum over the ranks. From these two follow the sums after backward, how often each element is held
(by which its square is divided in the norm) and the placements that a checkpoint is written from. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.mixers import MIXERS, narrows
from shardwise.models.roles import is_adaptable, is_adapter, is_counted, is_expert, role
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import Sheet, Tensor

Use = Literal["outputs", "inputs", "own", "stream"]
"""How ranks use a parameter: each has the rows, or the columns, of its own outputs or inputs; all hold it whole and use
it with their own heads or columns; or on the residual stream, of which they have their own tokens under sequence
parallelism, and otherwise all."""


class TableRow(NamedTuple):
    """Layers and parameters of theirs, by name, and their use on each axis."""

    layers: str
    words: str
    tp: Use


_COLUMNS, _INPUTS, _WHOLE, _NARROW, _CUT = (
    " ".join(dict.fromkeys(" ".join(words).split()))
    for words in (
        [*(mixer.columns for mixer in MIXERS.values()), "gate up"],
        [*(mixer.rows for mixer in MIXERS.values()), "down"],
        [mixer.whole for mixer in MIXERS.values()],
        [mixer.narrow for mixer in MIXERS.values()],
        [mixer.cut for mixer in MIXERS.values()],
    )
)
"""The layers of all mixers, and of the MLP, by how ranks share them."""
TABLE = (
    TableRow(_COLUMNS, "weight bias codes sizes e4m3 lora_b lora_m", tp="outputs"),
    TableRow(_COLUMNS, "scales groups lora_a", tp="own"),
    TableRow(_INPUTS, "weight codes sizes e4m3 lora_a", tp="inputs"),
    TableRow(_INPUTS, "scales groups lora_b lora_m", tp="own"),
    TableRow(_INPUTS, "bias", tp="stream"),
    TableRow(_WHOLE, "weight bias codes sizes e4m3 scales groups lora_a lora_b lora_m", tp="own"),
    TableRow(_NARROW, "weight bias codes sizes e4m3 scales groups lora_a lora_b lora_m", tp="stream"),
    TableRow("attention", _CUT, tp="outputs"),
    TableRow("router shared_gate join", "weight bias", tp="stream"),
    TableRow("router", "correction", tp="stream"),
    TableRow(
        "expert_gate expert_up expert_down",
        "weight bias codes sizes e4m3 scales groups lora_a lora_b lora_m",
        tp="stream",
    ),
    TableRow("embed head", "weight", tp="outputs"),
    TableRow("q_norm k_norm", "weight", tp="own"),
    TableRow("norm attention_norm mlp_norm attention_after_norm mlp_after_norm", "weight", tp="stream"),
    TableRow("main_norm embed_norm hidden_norm", "weight", tp="stream"),
)
FEW_KEY_HEADS = (TableRow("k v", "weight bias codes sizes e4m3 scales groups lora_a lora_b lora_m", tp="own"),)
"""In place of the above where there are fewer key heads than ranks: each uses the head that its query heads look at."""
ALL_TOKENS = (TableRow(_NARROW, "weight bias codes sizes e4m3 scales groups lora_a lora_b lora_m", tp="own"),)
"""In place of the above where heads are computed of the stream too, so that it is the stream that is gathered."""
PROJECTION_NORMS = (TableRow("q_norm k_norm", "weight", tp="outputs"),)
"""In place of the above where a norm is of all heads together."""
ROW_PRODUCTS = tuple(_INPUTS.split())
"""Layers whose inputs are cut, so that each rank has a part of a sum."""
VOCABULARY = ("embed", "head")


def _indexed(rows: Iterable[TableRow]) -> dict[tuple[str, str], TableRow]:
    return {(layer, word): row for row in rows for layer in row.layers.split() for word in row.words.split()}


_ROWS, _FEW, _PROJECTION, _ALL = (_indexed(rows) for rows in (TABLE, FEW_KEY_HEADS, PROJECTION_NORMS, ALL_TOKENS))


def adapted(weight: str, lora: Lora) -> bool:
    """Return whether the linear layer, or the experts, with this weight (canonical name) get an adapter. A router and
    the gate of a shared MLP never do."""
    return is_adaptable(weight) and (not lora.targets or role(weight) in lora.targets)


def frozen(name: str, plan: Plan) -> bool:
    """Return whether no gradient changes the parameter with this canonical name: with adapters all but theirs and what
    is trained whole beside them, else what ``model.frozen`` names; and what follows from counts."""
    if is_counted(name):
        return True
    if plan.lora is not None:
        return not (is_adapter(name) or plan.lora.saves(name))
    return any(fnmatchcase(name, pattern) for pattern in plan.frozen)


class Division(NamedTuple):
    """The facts that decide how a model is divided among the ``ranks`` of an axis. ``heads_apart``: queries and keys
    are normalised head by head, not over the whole projection; ``narrow``: tokens are made narrow before heads are
    computed (models/mixer.py)."""

    ranks: int
    key_heads: int
    heads_apart: bool = True
    sequence_parallel: bool = False
    narrow: bool = True


@dataclass(frozen=True)
class State:
    """The state of a parameter on one axis: the ``dim`` that is cut over the ranks, None if each holds it whole;
    ``partial``: what each rank computes of its gradient is a part of the sum over the ranks."""

    dim: int | None = None
    partial: bool = False


States = Mapping[str, State]
"""By the name of the group whose ranks they are of; those of a parameter multiply to its stage."""


def division(spec: ModelSpec, plan: Plan) -> Division:
    """Return how ``plan`` divides a model among tensor-parallel ranks."""
    return Division(
        plan.layout.tp,
        spec.attention.num_key_value_heads,
        spec.attention.qk_norm != "projection",
        plan.sequence_parallel,
        narrows(spec),
    )


def division_on_paper(sheet: Sheet, plan: Plan) -> Division:
    """Return how ``plan`` divides the model of a sheet among tensor-parallel ranks."""
    return Division(plan.layout.tp, sheet.key_heads, sheet.heads_apart, plan.sequence_parallel, sheet.narrow)


def use(name: str, how: Division) -> Use:
    """Return how tensor-parallel ranks use the parameter with this canonical name. Raises ValueError where no row of
    the table has it."""
    layer, _, word = name.rpartition(".")
    if layer.endswith((".lora_a", ".lora_b")):
        layer, _, word = layer.rpartition(".")
    key = (layer.rpartition(".")[2], word)
    row = _FEW.get(key) if how.key_heads < how.ranks else None
    row = row or (None if how.heads_apart else _PROJECTION.get(key))
    row = row or (None if how.narrow else _ALL.get(key)) or _ROWS.get(key)
    if row is None:
        raise ValueError(f"no row says what tensor-parallel ranks hold of `{name}`: add one to {__name__}.TABLE")
    return row.tp


def state(name: str, how: Division) -> State:
    """The state of a parameter on the axis ``tp``. What is not cut has a gradient in parts wherever ranks use it with
    different things: their heads and columns, or their tokens."""
    used = use(name, how)
    dim = {"outputs": 0, "inputs": 1}.get(used)
    return State(dim, used == "own" or (used == "stream" and how.sequence_parallel))


def is_cut(name: str, dims: int) -> bool:
    """Return whether a sharded strategy cuts a parameter of so many ``dims``: along dim 0, which a scalar does not
    have; what follows from counts is whole on every rank."""
    return dims > 0 and not is_counted(name)


def states(name: str, dims: int, how: Division, plan: Plan) -> States:
    """The states of a parameter of so many ``dims`` on every axis. Over data-parallel ranks every gradient is a part of
    a sum, and a sharded strategy cuts dim 0 of most."""
    if plan.layout.ep > 1 and is_expert(name):
        found = {"ep": State(0)}
    else:
        found = {"tp": state(name, how)} if how.ranks > 1 else {}
    if plan.sharded and is_cut(name, dims):
        return found | {"dp_replicate": State(None, partial=True), slices_over(name, plan): State(0, partial=True)}
    return found | {summed_over(name, plan): State(None, partial=True)}


def one_of_each(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with, of parameters that are alike in several blocks, only those of one."""
    kinds = {(name.split(".", 2)[-1] if name.startswith("layers.") else name, shapes[name]): name for name in shapes}
    return {name: shapes[name] for name in kinds.values()}


def piece(name: str, shape: tuple[int, ...], of: tuple[Division, Plan], rank_kind: RankKind) -> tuple[int, ...]:
    """The shape of what the rank of ``rank_kind`` holds of a parameter of a plan, of which ``of`` has the division
    too."""
    sizes = list(shape)
    for group, held in states(name, len(shape), *of).items():
        if held.dim is not None:
            start, stop = rank_kind.part(sizes[held.dim], group)
            sizes[held.dim] = stop - start
    return tuple(sizes)


def slices_over(name: str, plan: Plan) -> str:
    """The group over which a sharded strategy cuts the parameter with this name."""
    return "expert_fsdp" if plan.layout.ep > 1 and is_expert(name) else "fsdp"


def summed_over(name: str, plan: Plan) -> str:
    """The group over whose ranks the gradient of a replicated parameter is summed."""
    return "expert_loss" if plan.layout.ep > 1 and is_expert(name) else "loss"


def sums(of: States) -> dict[str, str]:
    """Return by group the collective that makes a gradient whole: an all-reduce where every rank holds the parameter, a
    reduce-scatter where each holds a piece; nothing where its own part is all of it."""
    kinds = {group: "all_reduce" if state.dim is None else "reduce_scatter" for group, state in of.items()}
    return {group: kind for group, kind in kinds.items() if of[group].partial}


def copies(of: States, layout: Layout) -> int:
    """Return on how many ranks of a stage each element is held, by which its square is divided in the norm."""
    return prod(layout.size(group) for group, state in of.items() if state.dim is None)


def uncovered(names: Iterable[str], how: Division) -> list[str]:
    """Return the parameters of which no row says what ranks hold."""
    found = []
    for name in names:
        try:
            use(name, how)
        except ValueError:
            found.append(name)
    return found


def whole_shape(weight: Tensor, sheet: Sheet, layout: Layout) -> tuple[int, ...]:
    """The shape of the whole parameter of which ``weight``, on a sheet that tensor and expert parallelism have cut, is
    a piece."""
    ranks, spread = layout.tp, layout.ep
    shape = [dim for dim in weight.shape if isinstance(dim, int)]
    if spread > 1 and is_expert(weight.name):
        return shape[0] * spread, *shape[1:]
    how = Division(ranks, sheet.key_heads, sheet.heads_apart)
    cut = state(weight.name, how).dim if ranks > 1 else None
    if cut is not None:
        ids = weight.name.rpartition(".")[0] in VOCABULARY
        shape[cut] = sheet.vocabulary if ids else shape[cut] * ranks
    return tuple(shape)


@lru_cache(maxsize=1024)
def trained_stages(spec: ModelSpec, plan: Plan) -> tuple[bool, ...]:
    """Return for each stage whether any of its weights is trained."""
    stages = plan.stages(spec.num_hidden_layers)
    if plan.lora is not None:
        ends = {0: plan.lora.saves("embed.weight"), len(stages) - 1: plan.lora.saves("head.weight")}
        return tuple(len(blocks) > 0 or ends.get(stage, False) for stage, blocks in enumerate(stages))
    if not plan.frozen:
        return (True,) * len(stages)
    held = {number: stage for stage, blocks in enumerate(stages) for number in blocks}
    tied, last = spec.tie_word_embeddings, len(stages) - 1
    found = [False] * len(stages)
    middle = False
    for name in parameter_shapes(spec):
        inside = name.startswith("layers.")
        middle = middle or inside
        trains = not frozen(name, plan)
        found[held[int(name.split(".")[1])] if inside else last if middle else 0] |= trains
        if tied and name == "embed.weight":
            found[last] |= trains
    return tuple(found)
