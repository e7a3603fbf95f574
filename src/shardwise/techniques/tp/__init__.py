"""Tensor parallelism: each rank of a group computes some heads, and some columns of the MLP, for the same tokens.

    weights of                  cut along        what crosses the edge (distributed/collectives.py)
    q, k, v, gate, up           rows (outputs)   enter: the residual stream, before them
    o, down                     columns (inputs) leave: the sum of the ranks' products, after them
    embedding, output layer     rows (ids)       leave after the one, enter before the other
    norms, biases of o, down    nothing
    q_a, kv_a (latents)         nothing          enter: what they make of a rank's own tokens, in the stream's place

With sequence parallelism each rank holds its own tokens of the residual stream, between ``leave`` and ``enter``: an
all-reduce becomes a reduce-scatter and an all-gather, which send as much, and norms and sums are computed once. Without
it every rank holds the whole stream. It pays inside a node, where a layer's weights or activations are too large for
one device. Parameters are DTensors over the axis ``tp``; what flows between layers are plain tensors of local shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.blocks import named, spec_of
from shardwise.models.config import ModelSpec, flat, parameter_shapes, with_fields
from shardwise.models.mixers import mixer_of
from shardwise.models.roles import is_adaptable, is_counted, is_expert
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout, cut, divisors, missing
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import Collective, Sheet
from shardwise.techniques.dtypes import compute_dtype, torch_dtype
from shardwise.techniques.share import LayerShare, MatrixPiece
from shardwise.techniques.states import (
    ROW_PRODUCTS,
    VOCABULARY,
    Division,
    division,
    division_on_paper,
    one_of_each,
    piece,
    state,
    sums,
    uncovered,
    use,
)
from shardwise.techniques.tp.sizes import odd, own_head, own_rows, travels_alone
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"layout.tp": 1}
INSIDE = (
    "techniques/tp/__init__.py",
    "techniques/tp/cut_norm.py",
    "techniques/tp/sizes.py",
    "techniques/product.py",
    "techniques/share.py",
    "techniques/states.py",
    "distributed/collectives.py",
    "distributed/vocabulary.py",
)
RANKS, FEW = 19, 17
"""Primes that stand, where a unit is traced, for the ranks, and for key heads that are fewer."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True) -> Iterator[Plan]:
    """The pinned degree; else 1, then every degree inside a node. With ``pinned`` false all of them, whatever the
    recipe says."""
    asked = recipe.parallel.tp
    degrees = sorted({*divisors(cluster.devices_per_node), asked or 1})
    for ranks in [asked] if asked and pinned else degrees:
        alone = "derived: no split of the batch and no recomputation alone stays below the margin"
        why = {"layout.tp": "pinned" if asked else alone} if ranks > 1 and pinned else {}
        sequence_parallel = ranks > 1 and recipe.parallel.sequence_parallel
        layout = replace(plan.layout, tp=ranks)
        yield replace(plan, layout=layout, sequence_parallel=sequence_parallel, why={**plan.why, **why})


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    off = plan.layout.tp > 1 and not recipe.parallel.sequence_parallel
    return {
        "parallel.tp": (plan.layout.tp, recipe.parallel.tp or "auto"),
        "parallel.sequence_parallel": (plan.sequence_parallel, False if off else "auto"),
    }


def check(spec: ModelSpec, plan: Plan, cluster: Cluster | None = None) -> list[Problem]:
    ranks = plan.layout.tp
    if ranks == 1:
        return []
    if spec.hf_model is not None:
        what = f"{spec.name} runs in transformers' own modules, which tensor parallelism cannot cut"
        fix = "`parallel.tp=1`: the batch, or weights, are divided instead"
        return [Problem("PLAN022", what, "parallel.tp", fix)]
    if missing := uncovered(_names(spec, plan.lora is not None), division(spec, plan)):
        what = f"tensor parallelism does not know what ranks hold of {', '.join(f'`{name}`' for name in missing)}"
        return [Problem("PLAN022", what, "parallel.tp", "`parallel.tp=1`: the batch, or weights, are divided instead")]
    found = odd(spec, plan, ranks)
    if not found:
        return []
    devices = plan.layout.world if cluster is None else cluster.world
    legal = [str(n) for n in divisors(devices)[1:] if not odd(spec, plan, n)]
    fix = f"one of 1, {', '.join(legal)}"
    if not legal:
        fix = f"`parallel.tp=1`, the only number that serves this model, with these settings, on {devices} devices"
    what = f"tensor parallelism over {ranks} ranks: {'; '.join(found)}"
    return [Problem("PLAN022", what, "parallel.tp", fix)]


@lru_cache(maxsize=64)
def _names(spec: ModelSpec, adapted: bool) -> list[str]:
    """The parameters of a model, of alike blocks those of one, and those that adapters and 4 bits may add."""
    names = [*one_of_each(dict(reversed(parameter_shapes(spec).items())))]
    linear = [name.removesuffix("weight") for name in names if is_adaptable(name) and adapted]
    added = ("lora_a.weight", "lora_b.weight", "lora_m", "codes", "sizes", "groups", "e4m3", "scales")
    return names + [layer + word for layer in linear for word in added]


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """A rank's part of the unit: whether each has all tokens, or its own (as many on all, or rounded up), and whether
    key heads are fewer than ranks. ``t`` is the ranks and ``n`` a rank's own tokens; other symbols are of one rank."""
    ranks = plan.layout.tp
    b = plan.batch.micro_batch_size
    s = plan.row_tokens
    made = _own_sizes(made, spec, plan, rank_kind)
    made = made.told(atoms=(*made.variant.atoms, ("t", RANKS))).bound(t=ranks)
    made = made.spread(b * s, ranks, RANKS) if plan.sequence_parallel else made
    return made.applied(layout=Layout(tp=RANKS), sequence_parallel=plan.sequence_parallel)


def _own_sizes(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """The numbers of one rank, and a model of which each of ``RANKS`` has the variant's part. As for a whole model, a
    rank's single head is no symbol: of it torch makes fewer copies."""
    ranks = plan.layout.tp
    model = made.variant.model
    is_block = made.variant.what == "block"
    heads, key_heads = spec.attention.num_attention_heads, spec.attention.num_key_value_heads
    few, (start, stop) = key_heads < ranks, rank_kind.part(spec.vocab_size, "tp")
    held, group = key_heads if few else key_heads // ranks, heads // max(ranks, key_heads)
    one = is_block and (few or held == 1)
    prime_held = 1 if is_block and held == 1 else FEW if is_block and few else model.attention.num_key_value_heads
    prime_group = (
        1 if one and group == 1 else model.attention.num_attention_heads // model.attention.num_key_value_heads
    )
    whole = prime_held if is_block and few else prime_held * RANKS
    model = with_fields(
        model,
        vocab_size=model.vocab_size * RANKS,
        intermediate_size=model.intermediate_size * RANKS,
        num_key_value_heads=whole,
        num_attention_heads=prime_group * (RANKS if is_block and few else whole),
    )
    if model.experts.shared_expert_size:
        model = with_fields(model, shared_expert_size=model.experts.shared_expert_size * RANKS)
    mixer = mixer_of(spec, made.unit) if isinstance(made.unit, int) else None
    if mixer is not None and mixer.share:
        model = with_fields(model, **{field: flat(model)[field] * RANKS for field in mixer.heads.split()})
        made = made.bound(**{mixer.share: made.numbers[mixer.share] // ranks})
    atoms = dict(made.variant.atoms) | ({"K": prime_held, "G": prime_group} if is_block else {})
    made = made.told(model=model, atoms=tuple((symbol, prime) for symbol, prime in atoms.items() if prime > 1))
    f, h = (made.numbers[symbol] // ranks for symbol in "fh")
    return made.bound(V=stop - start, f=made.numbers["f"] if model.experts else f, h=h, K=held, G=group)


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Adds the sums of gradients after the last backward."""
    return replace(sheet, step=(*sheet.step, *_last_sums(sheet, plan)))


def _last_sums(sheet: Sheet, plan: Plan) -> list[Collective]:
    """Bytes of this rank's slices of the gradients that are parts of a sum over the ranks: of the small ones together,
    of each large one."""
    how, each = division_on_paper(sheet, plan), BYTES[plan.precision.reduce]
    small, sizes = 0, list[int]()
    for unit, times in sheet.repeated():
        for weight in unit.weights:
            if weight.trained and _summed(weight.name, how, plan):
                slices = weight.cut(("fsdp", 0)) if plan.sharded else weight
                size = slices.local_numel(sheet.rank_kind, padded=False) * each
                if travels_alone(size, plan):
                    sizes += times * [size]
                else:
                    small += times * size
    return [Collective("all_reduce", "tp", "gradients", size) for size in (small, *sizes) if size]


def _summed(name: str, how: Division, plan: Plan) -> bool:
    """Return whether a gradient is summed over the ranks after the last backward of a step."""
    if plan.layout.ep > 1 and is_expert(name):
        return False
    return "tp" in sums({"tp": state(name, how)})


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Heads that ranks share, what does not divide, and gradients on both sides of a bucket's size."""
    ranks, how = plan.layout.tp, division(spec, plan)
    heads = {own_head(ranks, spec.attention.num_key_value_heads, index) for index in range(ranks)}
    held = [
        piece(name, shape, (how, plan), RankKind(plan.layout))
        for name, shape in one_of_each(trained).items()
        if _summed(name, how, plan)
    ]
    alone = {travels_alone(prod(shape) * BYTES[plan.precision.reduce], plan) for shape in held}
    tokens = plan.batch.micro_batch_size * plan.row_tokens
    return {
        "one key head for all ranks of tp": heads == {0},
        "key heads between one and the ranks of tp": None not in heads and len(heads) > 1,
        "tokens that the ranks of tp do not divide": plan.sequence_parallel and missing(tokens, ranks) > 0,
        "ids that the ranks of tp do not divide": missing(spec.vocab_size, ranks) > 0,
        "a gradient as large as a bucket, summed over tp": True in alone,
        "gradients smaller than a bucket, summed over tp": False in alone,
    }


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Cuts the weights, and makes every layer compute with this rank's part."""
    for part in parts:
        _cut(part, plan, meshes)
        _connect(part, plan, meshes)
    return parts


def after_backward(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Adds the gradients that are parts of a sum over this axis, in ``precision.reduce``: the small ones in one
    all-reduce, each that is as large as a bucket by itself."""
    import torch
    from torch import distributed

    from shardwise.distributed.slices import local

    how, wire = division(spec_of(parts), plan), torch_dtype(plan.precision.reduce)
    summed = (parameter.grad for name, parameter in named(parts).items() if _summed(name, how, plan))
    own = [local(gradient) for gradient in summed if gradient is not None]
    shards = [shard for shard in own if not travels_alone(shard.numel() * wire.itemsize, plan)]
    for shard in (shard for shard in own if travels_alone(shard.numel() * wire.itemsize, plan)):
        total = shard.to(wire)
        distributed.all_reduce(total, group=meshes.groups["tp"])
        shard.copy_(total)
    if shards:
        flat = torch.cat([shard.flatten() for shard in shards]).to(wire)
        distributed.all_reduce(flat, group=meshes.groups["tp"])
        for shard, total in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
            shard.copy_(total.view_as(shard))


def _cut(part: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Replace every parameter by a DTensor, of which this rank holds its part; but for what follows from counts, which
    is computed with as it is."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = meshes.mesh("tp")
    ranks = meshes.size("tp")
    made = {}
    how = division(spec_of([part]), plan)
    for name, parameter in list(part.named_parameters(remove_duplicate=False)):
        if is_counted(name):
            continue
        if id(parameter) not in made:  # a tied weight is one parameter
            dim, piece = state(name, how).dim, parameter.detach()
            if dim is not None:
                start, stop = cut((0, parameter.shape[dim]), ranks, meshes.index("tp"))
                piece = piece.narrow(dim, start, stop - start).contiguous()
            placement = Replicate() if dim is None else Shard(dim)
            whole = DTensor.from_local(
                piece, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            made[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
        layer, _, word = name.rpartition(".")
        setattr(part.get_submodule(layer), word, made[id(parameter)])


def _connect(part: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Give layers a forward that computes with local weights, with ``enter`` and ``leave`` around each pair."""
    from torch import nn

    from shardwise.distributed import vocabulary
    from shardwise.distributed.collectives import enter, enter_together, leave
    from shardwise.models.latent import LatentAttention
    from shardwise.models.layers import MLP, RMSNorm
    from shardwise.models.moe import MoE, Router, Stacked
    from shardwise.techniques.product import product_of
    from shardwise.techniques.tp.row_counts import share_rows

    group, spec, sequence_parallel = meshes.groups["tp"], spec_of([part]), plan.sequence_parallel
    outside = torch_dtype(plan.precision.compute)
    shape: list[int] = []  # [b,s] of the pass

    def begun(ids: Tensor) -> None:
        shape[:] = ids.shape[:2]

    def tokens() -> tuple[int, ...] | None:
        return tuple(shape) if sequence_parallel else None

    def entered(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return enter(args[0], group, tokens()), *args[1:]

    def left(module: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        out = leave(out, group, sequence_parallel)
        return out if module.bias is None else out + module.bias.to_local().to(out.dtype)

    def embedded(ids: Tensor) -> Tensor:
        begun(ids)
        rows = vocabulary.look_up(ids, part.get_parameter("embed.weight"), spec.vocab_size)
        return leave(rows.flatten(2).to(outside), group, sequence_parallel)

    if "embed" not in dict(part.named_children()):
        part.register_forward_pre_hook(lambda part, args: begun(args[0]))
    for name, module in part.named_modules():
        inside = torch_dtype(compute_dtype(plan.precision, name))
        place = name.rpartition(".")[2]
        if place in VOCABULARY:
            module.forward = embedded if place == "embed" else partial(_logits, part)
        elif isinstance(module, RMSNorm):
            cut = place in ("q_norm", "k_norm") and spec.attention.qk_norm == "projection"
            product_of(module, inside, outside).multiply = _normed(module, group if cut else None)
        elif isinstance(module, nn.Linear):
            module.share = _share(module, name, spec, plan, meshes)  # type: ignore[assignment]
            product_of(module, inside, outside)
        elif isinstance(module, Router | Stacked):
            product_of(module, *(inside, outside) if isinstance(module, Stacked) else ())  # a router's are its own
            module.share = LayerShare(place=meshes.index("tp") if sequence_parallel else None)  # type: ignore[assignment]
        elif isinstance(module, MoE) and sequence_parallel:
            share_rows(module, shape, meshes)
        elif place == "attention":
            module.own = partial(_own, module)
        if isinstance(module, LatentAttention) and module.narrows:
            module.to_heads = lambda *narrow: enter_together(narrow, group, tokens())  # type: ignore[method-assign]
        elif isinstance(module, MLP) or place in ("attention", "head"):
            module.register_forward_pre_hook(entered)
        if place in ROW_PRODUCTS:
            module.register_forward_hook(left)  # after an adapter's, whose product is a part of the sum too


def _logits(part: nn.Module, hidden: Tensor, finish: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    from shardwise.distributed.vocabulary import logits

    weight = part.get_parameter("head.weight")
    return logits(hidden, weight, spec_of([part]).vocab_size) if finish is None else finish(hidden, weight)


def _share(module: nn.Linear, layer: str, spec: ModelSpec, plan: Plan, meshes: Meshes) -> LayerShare:
    """The part of the layer with which this rank multiplies."""
    ranks = meshes.size("tp")
    index = meshes.index("tp")
    used = use(f"{layer}.weight", division(spec, plan))
    heads = own_rows(layer, spec.attention.num_key_value_heads, spec.attention.head_dim, ranks, index)
    rows, columns = module.out_features, module.in_features
    if layer.rpartition(".")[2] in ROW_PRODUCTS:
        piece = MatrixPiece(0, cut((0, columns), ranks, index)[0], columns)
        return LayerShare(place=index, group=meshes.groups["tp"], piece=piece)
    if used == "outputs" or heads is not None:
        row = cut((0, rows), ranks, index)[0] if heads is None else heads.start
        return LayerShare(heads or slice(None), piece=MatrixPiece(row, 0, columns))
    return LayerShare(place=index if used == "stream" and plan.sequence_parallel else None)


def _own(module: Any, name: str) -> Tensor:
    found: Tensor = getattr(module, name).to_local()
    return found


def _normed(module: Any, group: Any) -> Callable[[Tensor], Tensor]:
    """The norm of rows, whose columns are cut over the ranks of ``group``, unless it is None."""
    from shardwise.models.layers import rms_norm
    from shardwise.techniques.tp.cut_norm import cut_norm

    if group is not None:
        return lambda x: cut_norm(x, module.weight.to_local(), module.eps, group)
    return lambda x: rms_norm(x, module.weight.to_local(), module.eps, module.plus_one)
