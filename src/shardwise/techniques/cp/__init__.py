"""Context parallelism: the ranks of a group have some tokens each of the same rows, for sequences that do not fit one.

All but attention is computed token by token, so it needs nothing of other ranks. Attention sees the keys of all:

    kind      what travels                                          a rank computes
    ring      keys and values, from rank to rank, while it computes  its queries, with one rank's keys at a time
    gather    keys and values of all ranks, at once                  its queries, with all keys
    ulysses   queries, keys, values and the output: tokens for heads some heads, of all tokens
    nested    ulysses among neighbours, a ring across them           some heads, with one group's keys at a time

Which tokens a rank has, spec/rows.py says: it reads, trains on and counts those alone, so that what is kept of a row
falls with the ranks. A rank of a ring sends only key heads, and nothing that no query sees; but a step of a ring waits
for the slowest link. Ulysses sends less where there are many ranks, and has at most as many as there are query heads.
Weights are cut over these ranks too: of them a sharded strategy has dp_shard x cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, layer_kinds, with_fields
from shardwise.models.mixers import DELTA, mixers_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import divisors
from shardwise.spec.plan import CpKind, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.rows import RowShare, WholeRows, held, hops, needs, parts_of, pieces_of, sights
from shardwise.spec.sheet import At, Op, Within
from shardwise.techniques.cp import paper
from shardwise.techniques.cp.parts import copies
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.distributed.meshes import Meshes
    from shardwise.models.attention import Attention, MaskSpec
    from shardwise.models.delta import GatedDeltaNet
    from shardwise.models.moe import MoE
    from shardwise.models.router_losses import RowPlaces

SETTINGS = {"layout.cp": 1}
INSIDE = (
    "spec/rows.py",
    "techniques/cp/__init__.py",
    "techniques/cp/ring_attention.py",
    "techniques/cp/exchange.py",
    "techniques/cp/parts.py",
    "techniques/cp/delta_states.py",
    "techniques/cp/ulysses.py",
)
RING, EXCHANGING, REPEATED, SEVERAL = 11, 13, 7, 17
"""Primes that stand, where a unit is traced, for ranks of a ring, for those that exchange heads, for those that each
key head goes to, and for these key heads."""
KINDS: tuple[CpKind, ...] = ("gather", "ulysses", "ring", "nested")
"""Simpler ones first."""
LEAST_TOKENS = 8_192
"""Where the degree is open, no rank gets fewer of a row: a micro-batch holds as many on every device."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True) -> Iterator[Plan]:
    """Yield the plan with the pinned degree; else with 1, and where rows are long with all that leave each rank
    ``LEAST_TOKENS``. The kind is the one that is asked for, else each that the heads allow."""
    asked = recipe.parallel.cp
    length = recipe.train.seq_len
    others = cluster.world // plan.layout.tp // plan.layout.pp
    degrees = [1]
    if length >= 2 * LEAST_TOKENS and not _apart(spec):
        degrees = [n for n in divisors(max(1, others)) if n <= length // LEAST_TOKENS and length % (2 * n) == 0]
    for ranks in [asked] if asked and pinned else degrees:
        kind = recipe.parallel.cp_kind
        if ranks == 1:
            yield plan
        else:
            kinds = KINDS if kind == "auto" or not pinned else (kind,)
            yield from _of_degree(spec, cluster, plan, ranks, kinds)


def _of_degree(spec: ModelSpec, cluster: Cluster, plan: Plan, ranks: int, kinds: Sequence[CpKind]) -> Iterator[Plan]:
    """Yield the plan with each of these kinds, and of several those alone that the heads allow; nested, which takes as
    many neighbours in a node as can share heads, only where ulysses cannot do the same."""
    tp, per_node = plan.layout.tp, cluster.devices_per_node
    sharing = [n for n in divisors(ranks)[1:] if not _odd(spec, tp, n)]
    neighbours = max((n for n in sharing if n < ranks and n * tp <= per_node), default=2)
    for kind in kinds:
        exchanging = {"ulysses": ranks, "nested": neighbours}.get(kind, 1)
        possible = exchanging == 1 or exchanging in sharing
        needless = kind == "nested" and ranks in sharing and ranks * tp <= per_node
        if len(kinds) == 1 or (possible and not needless):
            yield replace(plan, layout=replace(plan.layout, cp=ranks, ulysses=exchanging), cp_kind=kind)


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {
        "parallel.cp": (plan.layout.cp, recipe.parallel.cp or "auto"),
        "parallel.cp_kind": (plan.cp_kind, recipe.parallel.cp_kind if plan.layout.cp > 1 else "auto"),
    }


def check(spec: ModelSpec, plan: Plan, cluster: Cluster | None = None) -> list[Problem]:
    layout, length = plan.layout, plan.batch.seq_len
    if layout.cp == 1:
        return []
    problems = []
    if whose := _apart(spec):
        what = f"{spec.name} {whose}, which context parallelism cannot replace"
        fix = "`parallel.cp=1`, with `recompute=full` or weights sharded by zero3 for long sequences"
        problems.append(Problem("PLAN026", what, "parallel.cp", fix))
    wanted = {"ulysses": layout.ulysses == layout.cp, "nested": 1 < layout.ulysses < layout.cp}
    if layout.cp % layout.ulysses or not wanted.get(plan.cp_kind, layout.ulysses == 1):
        what = f"`cp_kind: {plan.cp_kind}` and `layout.ulysses: {layout.ulysses}` contradict each other"
        fix = "ulysses 1 for ring and gather, as large as cp for ulysses, a divisor between the two for nested"
        return [*problems, Problem("PLAN026", what, "layout.ulysses", fix)]
    problems += _heads(spec, plan)
    multiple = parts_of(layout.ring, layout.ulysses)
    if DELTA in mixers_of(spec):  # of the same length, which the sums over tokens look back in
        multiple = layout.cp * pieces_of(layout.ring)
        if 0 < length // multiple < (least := spec.delta.linear_conv_kernel_dim - 1):
            what = f"pieces of {length // multiple} tokens are shorter than what {spec.name} adds up before each"
            fix = f"a multiple of {multiple}, {least * multiple:,} or more"
            problems.append(Problem("PLAN026", what, "train.seq_len", fix))
            return problems
    if length % multiple:
        nearest = max(1, length // multiple) * multiple
        what = f"rows of {length:,} tokens cannot be cut for {plan.cp_kind} over {layout.cp} ranks"
        problems.append(Problem("PLAN026", what, "train.seq_len", f"a multiple of {multiple}, such as {nearest:,}"))
    return problems


def _apart(spec: ModelSpec) -> str:
    """Return what of a model mixes tokens in a way of its own; empty where all its layers have the seam."""
    if spec.hf_model is not None:
        return "runs in transformers' own modules with their attention"
    return next((f"has the mixer {mixer.name}" for mixer in mixers_of(spec) if not mixer.sequence), "")


def _heads(spec: ModelSpec, plan: Plan) -> list[Problem]:
    ranks, tp = plan.layout.ulysses, plan.layout.tp
    if ranks == 1 or not (odd := _odd(spec, tp, ranks)):
        return []
    good = [str(n) for n in range(2, spec.attention.num_attention_heads // tp + 1) if not _odd(spec, tp, n)]
    fix = f"one of {', '.join(good)} ranks, or `parallel.cp_kind=ring`" if good else "`parallel.cp_kind=ring`"
    what = f"{ranks} ranks cannot share the heads of {spec.name}: {odd}"
    return [Problem("PLAN026", what, "parallel.cp_kind", fix)]


def _odd(spec: ModelSpec, tp: int, ranks: int) -> str:
    """Return why so many ranks cannot share the heads that a rank has; empty where they can."""
    heads, key_heads = spec.attention.num_attention_heads // tp, max(1, spec.attention.num_key_value_heads // tp)
    if heads % ranks:
        return f"{ranks} does not divide {heads} query heads"
    if key_heads % ranks and ranks % key_heads:
        return f"{ranks} does not divide {key_heads} key heads, nor do they divide {ranks}"
    return ""


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Say how keys come round a ring, what a window leaves of them, and which heads and pieces ranks do not share
    evenly."""
    layout = plan.layout
    rows = WholeRows(plan.batch.seq_len)
    ring = plan.layout.ring
    windows = {kind.window for kind in layer_kinds(spec)[0]}
    heads = max(1, spec.attention.num_key_value_heads // layout.tp)
    seen = {needs(rows, 1, ring, True, window) for window in windows if plan.cp_kind != "gather"}
    steps = [hop for each in seen for rank in range(ring) for hop in hops(each, rank)]
    pieces, ends = [piece for own in held(rows, 0, ring) for piece in own], rows.ends(0)
    later = [pair for pair in product(pieces, pieces) if ring > 1 and pair[1] < pair[0]]
    found = [[*sights(*pair, ends, window=window)] for window in windows if window for pair in later]
    sizes = {(one.queries.length, one.keys.length) for each in found for one in each}
    whole = pieces[0].length
    runs = {len(RowShare(ring, layout.ulysses, index).runs(rows, 0)) for index in range(layout.ulysses)}
    return {
        "gradients of keys that pass through a third rank": any(hop.sums_from is not None for hop in steps),
        "keys that are sent past a rank that sees none": any(hop.own_to is not None for hop in steps),
        "a rank that sees none of another's keys": any(not all(row) for each in seen for row in each),
        "a window that hides a piece of a row": [] in found,
        "a window shorter than a piece of a row": any(queries < whole and keys < whole for queries, keys in sizes),
        "a window that shows a whole piece": any(whole in pair for pair in sizes),
        "key heads between one and those that exchange heads": heads > 1 and copies(heads, layout.ulysses) > 1,
        "one key head for all that exchange heads": heads == 1 and copies(heads, layout.ulysses) > 1,
        "tokens of two pieces on some ranks that exchange heads": len(runs) > 1,
    }


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Give a block its symbols: ``c`` ranks of a ring, ``u`` that exchange heads; other symbols are of one rank."""
    layout, exchanging = plan.layout, 1
    if made.variant.what != "block":
        return made
    if layout.ulysses > 1:
        exchanging, made = _exchanging(made, spec, plan)
    if layout.ring > 1:
        made = made.told(atoms=(*made.variant.atoms, ("c", RING))).bound(c=layout.ring)
    cp, acting = exchanging * (RING if layout.ring > 1 else 1), made.variant.plan
    cut, rows = (
        replace(acting.layout, cp=cp, ulysses=exchanging),
        replace(acting.batch, seq_len=acting.batch.seq_len * cp),
    )
    return made.applied(layout=cut, batch=rows)  # how keys come changes what is sent and held (paper.py), not the unit


def _exchanging(made: Traced, spec: ModelSpec, plan: Plan) -> tuple[int, Traced]:
    """Return the ranks that stand for those that exchange heads, and a model whose heads they can share. Where these
    are fewer than ranks, each goes to ``m`` of them. As elsewhere, a rank's single head is no symbol."""
    model = made.variant.model
    ranks = plan.layout.ulysses
    tp = made.variant.plan.layout.tp
    atoms = dict(made.variant.atoms)
    rules = made.variant.rules
    few = spec.attention.num_key_value_heads < plan.layout.tp
    used = 1 if few else spec.attention.num_key_value_heads // plan.layout.tp
    if used >= ranks:
        heads, group = atoms.pop("K"), model.attention.num_attention_heads // model.attention.num_key_value_heads
        heads = heads if used > ranks else 1
        standing, key_heads = EXCHANGING, heads * EXCHANGING * tp
        atoms |= {"u": EXCHANGING} | ({"K over u": heads} if heads > 1 else {})
        rules += ((("K over u", "u"), "K"),) if heads > 1 else ()
        made = made.bound(**{"u": ranks, "K over u": used // ranks})
        model = with_fields(model, num_key_value_heads=key_heads, num_attention_heads=key_heads * group)
    else:
        each = made.numbers["G"] * used // ranks  # query heads of a rank after the exchange
        group = atoms.pop("G") if each > 1 else 1
        heads = 1 if used == 1 else SEVERAL
        standing, key_heads = heads * REPEATED, model.attention.num_key_value_heads if few else heads * tp
        atoms |= {"m": REPEATED} | ({"G over m": group} if each > 1 else {}) | ({"K": heads} if heads > 1 else {})
        rules += ((("G over m", "m"), "G"),) if each > 1 else ()
        made = made.bound(**{"m": ranks // used, "G over m": each})
        model = with_fields(model, num_key_value_heads=key_heads, num_attention_heads=heads * REPEATED * group * tp)
    return standing, made.told(model=model, atoms=tuple(atoms.items()), rules=rules)


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "all_to_all": paper.exchange,
    "shardwise.attention_over_ranks": paper.forward,
    "shardwise.attention_over_ranks_backward": paper.backward,
    "shardwise.gated_delta_over_ranks": paper.states,
    "shardwise.gated_delta_over_ranks_backward": paper.states_back,
    "shardwise.conv_silu_over_ranks": paper.tails,
    "shardwise.conv_silu_over_ranks_backward": paper.tails_back,
}


def steps_of(operation: str) -> Callable[..., Any] | None:
    """Return what an operation of this technique's own does, operation by operation."""
    if operation == "shardwise::exchange":
        from shardwise.techniques.cp.ulysses import swapped

        return swapped
    if operation.startswith("shardwise::attention_over_ranks"):
        from shardwise.techniques.cp import ring_attention

        return ring_attention.backward if operation.endswith("_backward") else ring_attention.forward
    if operation.startswith(("shardwise::gated_delta_over_ranks", "shardwise::conv_silu_over_ranks")):
        from shardwise.techniques.cp import delta_states

        rule = operation.startswith("shardwise::gated_delta")
        if operation.endswith("_backward"):
            return delta_states.backward if rule else delta_states.convolve_backward
        return delta_states.forward if rule else delta_states.convolve
    return None


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Replace the attention of every layer, and tell layers with experts that rows are cut."""
    from shardwise.models.attention import Attention
    from shardwise.models.delta import GatedDeltaNet
    from shardwise.models.moe import MoE

    for part in parts:
        for module in part.modules():
            if isinstance(module, Attention):
                module.inner = _inner(module, plan, meshes)  # type: ignore[method-assign]
            elif isinstance(module, GatedDeltaNet):
                _pass_states(module, plan, meshes)
            elif isinstance(module, MoE):
                _share_rows(module, meshes)
    return parts


def _pass_states(module: GatedDeltaNet, plan: Plan, meshes: Meshes) -> None:
    """Tell a gated delta net that its rows are cut."""
    from shardwise.models.delta import conv_silu
    from shardwise.techniques.cp.delta_states import conv_silu_over_ranks, gated_delta_over_ranks

    sums = module.convolve
    rule = module.recur
    layout = plan.layout

    def cut(mask: MaskSpec) -> tuple[Any, ...]:
        return mask.bounds, str(meshes.groups["cp"].group_name), mask.row_length, layout.ring, layout.ulysses

    def convolve(x: Tensor, weight: Tensor, mask: MaskSpec) -> Tensor:
        if mask.row_length is None:  # every rank has whole rows
            return sums(x, weight, mask)
        alone = weight.shape[-1] == 1
        found: Tensor = conv_silu(x, weight, None) if alone else conv_silu_over_ranks(x, weight, *cut(mask))[0]
        return found

    def recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, mask: MaskSpec) -> Tensor:
        if mask.row_length is None:
            return rule(q, k, v, decay, rate, mask)
        found: Tensor = gated_delta_over_ranks(q, k, v, decay, rate, *cut(mask))[0]
        return found

    module.convolve, module.recur = convolve, recur  # type: ignore[method-assign]


def _share_rows(module: MoE, meshes: Meshes) -> None:
    """Tell a layer that the ranks have a part each of each row; among those of sequence parallelism that is cut
    already."""
    from shardwise.distributed.collectives import summed

    own = module.rows_of
    beside = module.over_rows
    ranks = meshes.size("cp")
    group = meshes.groups["cp"]

    def rows_of(x: Tensor) -> RowPlaces:
        return own(x)._replace(ranks=ranks)

    def over_rows(counts: Tensor) -> Tensor:
        return summed(beside(counts), group)

    module.rows_of, module.over_rows = rows_of, over_rows  # type: ignore[method-assign]


def _inner(module: Attention, plan: Plan, meshes: Meshes) -> Any:
    from shardwise.techniques.cp.ring_attention import attention_over_ranks
    from shardwise.techniques.cp.ulysses import heads_for_tokens, tokens_for_heads

    whole, layout = module.inner, plan.layout
    neighbours, ring = (
        str(meshes.groups[name].group_name) if layout.size(name) > 1 else "" for name in ("ulysses", "ring")
    )

    def over_ring(mask: MaskSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layout.ring == 1:
            return whole(q, k, v, mask)
        rule = mask.row_length, mask.causal, mask.window, mask.soft_cap, mask.scale, mask.kernel
        found: tuple[Tensor, Tensor] = attention_over_ranks(
            q, k, v, mask.sinks, mask.bounds, ring, plan.cp_kind == "gather", *rule
        )
        return found

    def inner(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        if mask.row_length is None:  # every rank has whole rows
            return whole(q, k, v, mask)
        if not neighbours:
            return over_ring(mask, q, k, v)
        if mask.sinks is not None:
            mask = replace(mask, sinks=mask.sinks.chunk(layout.ulysses)[meshes.index("ulysses")])
        out, lse = over_ring(mask, *(heads_for_tokens(x, neighbours, layout.ulysses) for x in (q, k, v)))
        return tokens_for_heads(out, neighbours, layout.ulysses), lse

    return inner
