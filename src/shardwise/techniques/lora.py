"""LoRA (Hu et al., arXiv 2106.09685): the model's weights are frozen, and the product of two thin, trained matrices is
added to each chosen linear layer: y = W x + alpha / rank * B A x, with A [rank, in] and B [out, rank].

Shards and sends nothing of its own: A and B are parameters of the block they are in, gathered and reduced with it, and
everything else is frozen (freeze.py), so gradients, moments and reductions shrink to a few per cent. It pays when the
state of full training does not fit, or when many adapted copies are to be stored. rsLoRA (Kalajdzievski, arXiv
2312.03732) divides by the square root of the rank. B begins at zero: step 0 is the initial model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.families import FAMILIES
from shardwise.models.roles import is_linear, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Dtype, Lora, Plan, Precision
from shardwise.spec.recipe import LoraSection, Recipe
from shardwise.spec.sheet import Op, Sheet, Tensor, Unit
from shardwise.techniques.draft import Draft
from shardwise.techniques.dtypes import chosen_dtype
from shardwise.techniques.quantised import nf4_rows_at_once

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from shardwise.techniques.meshes import Meshes


_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def settings(asked: LoraSection, precision: Precision) -> Lora | None:
    """What the recipe asks for, in the plan's words; None without adapters."""
    if asked.rank is None:
        return None
    narrow: Dtype = "bf16" if precision.compute == "bf16" else precision.weights
    frozen: Dtype = asked.frozen if asked.frozen in ("fp32", "bf16") else narrow
    names = [asked.targets] if isinstance(asked.targets, str) else asked.targets
    chosen = () if names == ["all-linear"] else tuple(name.removesuffix("_proj") for name in names)
    alpha = 2.0 * asked.rank if asked.alpha is None else asked.alpha
    small = asked.frozen == "nf4"
    return Lora(asked.rank, alpha, chosen, asked.rslora, frozen, small, asked.dropout, asked.dora)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """What the recipe says."""
    precision = Precision(chosen_dtype(recipe, cluster)[0], recipe.precision.weights)
    yield dataclasses.replace(plan, lora=settings(recipe.lora, precision))


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {"lora": (plan.lora, settings(recipe.lora, plan.precision))}


def targets(lora: Lora, weight: str) -> bool:
    """The technique's one fact: whether the linear layer with this weight (canonical name) gets an adapter."""
    return is_linear(weight) and (not lora.targets or role(weight) in lora.targets)


def scale(lora: Lora) -> float:
    """What B A x is multiplied by."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)


def adapters(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that the adapters add, by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and targets(lora, name):
            shapes |= _added(name.removesuffix(".weight"), shape, lora)
    return shapes


def _added(layer: str, shape: tuple[int, ...], lora: Lora) -> dict[str, tuple[int, ...]]:
    """What an adapter adds to the layer whose weight is [out, in]."""
    wide_out, wide_in = shape
    sizes: dict[str, tuple[int, ...]] = {f"{layer}.lora_m": (wide_out,)} if lora.dora else {}
    return sizes | {f"{layer}.lora_a.weight": (lora.rank, wide_in), f"{layer}.lora_b.weight": (wide_out, lora.rank)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.lora is None:
        return []
    problems, stacks = [], _stacks(spec)
    roles = list(dict.fromkeys(role(name) for name in parameter_shapes(spec) if is_linear(name)))
    for name in plan.lora.targets:
        if name not in roles:
            near = get_close_matches(name, roles, 1)
            fix = f"did you mean `{near[0]}`?" if near else f"all-linear, or some of {', '.join(roles)}"
            fix = ", ".join(stacks[name]) if name in stacks else fix
            problems.append(Problem("PLAN018", f"no linear layer has the role `{name}`", "lora.targets", fix))
    if plan.precision.modules:
        what = "adapters cannot be combined with precision.modules"
        problems.append(Problem("PLAN018", what, "precision.modules", "leave out precision.modules"))
    for stack in stacks.values():
        left = [name for name in stack if name not in plan.lora.targets]
        if 0 < len(left) < len(stack):
            what = f"{spec.family} stacks {', '.join(stack)} in one layer: target all of them or none"
            problems.append(Problem("PLAN018", what, "lora.targets", f"add {', '.join(left)}"))
    least = min(spec.hidden_size, spec.intermediate_size, spec.num_key_value_heads * spec.head_dim)
    if plan.lora.rank > least:
        what = f"rank {plan.lora.rank} exceeds the narrowest layer's {least}: an adapter would be larger than the layer"
        problems.append(Problem("PLAN018", what, "lora.rank", f"{min(16, least)}"))
    return problems


def _stacks(spec: ModelSpec) -> dict[str, list[str]]:
    """The layers that the family's files store as one: its name there (``qkv``), and the roles of the layers in it."""
    found: dict[str, list[str]] = {}
    for ours, theirs in () if spec.hf_model is not None else FAMILIES[spec.family].names.items():
        found.setdefault(theirs.rpartition(".")[2].removesuffix("_proj"), []).append(ours.rpartition(".")[2])
    return {name: roles for name, roles in found.items() if len(roles) > 1}


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Every targeted product becomes five operations, and its backward that of all five."""
    lora = plan.lora
    if lora is None:
        return sheet
    gathered = "compute" if plan.sharded else "weights"
    after = ("o", "down") if plan.layout.tp > 1 else ()  # their biases are added to the sum over the ranks
    return dataclasses.replace(sheet, blocks=tuple(_adapted(block, lora, gathered, after) for block in sheet.blocks))


class _AdapterDraft(Draft):
    """``shapes`` are [out, in] of the weight of each layer that gets an adapter; ``gathered`` is the type in which a
    layer finds its adapter's parameters; layers with a role in ``unbiased`` have no bias when their adapter runs."""

    def __init__(self, unit: Unit, lora: Lora, gathered: str, unbiased: tuple[str, ...]) -> None:
        super().__init__(unit)
        self.gathered, self.unbiased = gathered, unbiased
        self.shapes = {
            weight.name: (int(weight.shape[0]), int(weight.shape[1]))
            for weight in unit.weights
            if weight.name.endswith(".weight") and targets(lora, f"layers.0.{weight.name}")
        }


def _adapted(unit: Unit, lora: Lora, gathered: str, unbiased: tuple[str, ...]) -> Unit:
    draft = _AdapterDraft(unit, lora, gathered, unbiased)
    for index in range(len(draft.forward) - 1, -1, -1):
        if draft.forward[index].kind == "matmul" and f"{_module(draft.forward[index])}.weight" in draft.shapes:
            _adapt(draft, index, lora)
    return draft.done(_with_adapters(unit.weights, draft.shapes, lora))


def _with_adapters(weights: tuple[Tensor, ...], shapes: dict[str, tuple[int, int]], lora: Lora) -> Iterator[Tensor]:
    """An adapter stands behind all that is its layer's own, as the modules list their parameters."""
    for weight, after in zip_longest(weights, weights[1:]):
        yield weight
        module = weight.name.rpartition(".")[0]
        if f"{module}.weight" in shapes and (after is None or after.name.rpartition(".")[0] != module):
            for name, shape in _added(module, shapes[f"{module}.weight"], lora).items():
                yield Tensor(name, shape, "weights", "weights")


def _module(op: Op) -> str:
    """The layer of a product; one with a bias has the bias's name."""
    return op.weight.rpartition(".")[0]


def _adapt(draft: _AdapterDraft, index: int, lora: Lora) -> None:
    """Rewrite the product at ``index`` of the forward operations, and its backward. A layer holds its input until its
    adapter has run too."""
    op, rank = draft.forward[index], lora.rank
    module = _module(op)
    wide_out, wide_in = draft.shapes[f"{module}.weight"]
    given, result = op.reads[0], op.allocates[0]
    down, scaled, up, total = (draft.add("b*s", size) for size in (rank, rank, wide_out, wide_out))
    read, mask = (draft.add("b*s", wide_in), draft.add("b*s", wide_in, dtype="bool")) if lora.dropout else (given, -1)
    biased = not op.weight.endswith(".weight") and module.rpartition(".")[2] not in draft.unbiased
    sized = _Sized(draft, module, total, biased=biased) if lora.dora else None
    last = sized.last if sized else total
    for ops, keep in ((draft.forward, True), (draft.plain, False)):
        old, held = ops[index], () if keep else (scaled,)
        ops[index:] = [
            dataclasses.replace(old, frees=()),
            *([Op("elementwise", "aten.native_dropout", (read, mask), (), (given,))] if lora.dropout else []),
            Op("matmul", "aten.mm", (down,), (), (read,), f"{module}.lora_a.weight", 2 * wide_in * rank),
            Op("elementwise", "aten.mul.Tensor", (scaled,), (down,), (down,)),
            Op("matmul", "aten.mm", (up,), held, (scaled,), f"{module}.lora_b.weight", 2 * wide_out * rank),
            Op("elementwise", "aten.add.Tensor", (total,), (result, up, *old.frees), (result, up)),
            *(sized.forward(keep=keep) if sized else []),
            *(_renamed(other, result, last) for other in ops[index + 1 :]),
        ]
        if lora.dropout and not keep:
            ops[index + 5] = dataclasses.replace(ops[index + 5], frees=(*ops[index + 5].frees, read, mask))
    draft.saved |= {scaled} | ({read, mask} if lora.dropout else set()) | (sized.saved if sized else set())
    if result in draft.saved:
        draft.saved.remove(result)
        draft.saved.add(last)
    draft.backward = [_renamed(other, result, last) for other in draft.backward]
    _adapt_backward(draft, module, (read, mask, scaled), sized)


class _Sized:
    """DoRA's part of a layer: what the layer and its adapter made (``total``; ``bare`` without the layer's bias) times
    a magnitude over a norm; ``last`` is the result. Indices of tensors."""

    def __init__(self, draft: _AdapterDraft, module: str, total: int, *, biased: bool) -> None:
        wide_out, wide_in = draft.shapes[f"{module}.weight"]
        self.module, self.total = module, total
        self.bare = draft.add("b*s", wide_out) if biased else total
        self.norm, self.gain = draft.add(wide_out, dtype=draft.gathered), draft.add(wide_out)
        self.product = draft.add("b*s", wide_out)
        self.last = draft.add("b*s", wide_out) if biased else self.product
        self.wide = draft.add(nf4_rows_at_once(wide_out, wide_in), wide_in, dtype="statistics")

    @property
    def saved(self) -> set[int]:
        return {self.bare, self.norm, self.gain}

    def forward(self, *, keep: bool) -> Iterator[Op]:
        yield Op("elementwise", "dora", (self.norm, self.wide), (self.wide,), (), self.module)
        yield Op("elementwise", "aten.div.Tensor", (self.gain,), (), (self.norm,))
        if self.bare != self.total:
            yield Op("elementwise", "aten.sub.Tensor", (self.bare,), (self.total,), (self.total,))
        freed = () if keep else (self.bare, self.norm, self.gain)
        yield Op("elementwise", "aten.mul.Tensor", (self.product,), freed, (self.bare, self.gain))
        if self.bare != self.total:
            yield Op("elementwise", "aten.add.Tensor", (self.last,), (self.product,), (self.product,))

    def backward(self, draft: _AdapterDraft, incoming: int) -> tuple[list[Op], int]:
        """Its operations, and the gradient that goes on into the layer and its adapter."""
        wide_out, _ = draft.shapes[f"{self.module}.weight"]
        through, summand, grad = draft.add("b*s", wide_out), draft.add("b*s", wide_out), draft.add(wide_out)
        draft.gradients[f"{self.module}.lora_m"] = grad
        return [
            Op("elementwise", "aten.mul.Tensor", (through,), (), (incoming, self.gain)),
            Op("elementwise", "aten.mul.Tensor", (summand,), (self.gain, self.bare), (incoming, self.bare)),
            Op("elementwise", "aten.sum.dim_IntList", (grad,), (summand, self.norm), (summand, self.norm)),
        ], through


def _adapt_backward(draft: _AdapterDraft, module: str, kept: tuple[int, int, int], sized: _Sized | None) -> None:
    """The adapter's backward comes before the layer's own, and the input's gradients are summed as they arrive."""
    wide_out, wide_in = draft.shapes[f"{module}.weight"]
    read, mask, scaled = kept
    rank = int(draft.tensors[scaled].shape[1])
    mine = {draft.gradients[name] for name in (f"{module}.weight", f"{module}.bias") if name in draft.gradients}
    product = next(op for op in draft.backward if op.kind == "matmul" and op.weight == f"{module}.weight")
    incoming, outgoing = product.reads[0], product.allocates[0]
    own = [i for i, op in enumerate(draft.backward) if op is product or not mine.isdisjoint(op.allocates)]
    first, last = own[0], own[-1]
    ops: list[Op] = []
    if sized is not None:
        ops, incoming = sized.backward(draft, incoming)
        users = [i for i in own if product.reads[0] in draft.backward[i].reads]
        for i in users:
            op = draft.backward[i]
            reads = tuple(incoming if tensor == product.reads[0] else tensor for tensor in op.reads)
            frees = (*op.frees, incoming) if i == users[-1] else op.frees
            draft.backward[i] = dataclasses.replace(op, reads=reads, frees=frees)
    grad_b, grad_scaled, grad_down = draft.add(wide_out, rank), draft.add("b*s", rank), draft.add("b*s", rank)
    grad_a, through, summed = draft.add(rank, wide_in), draft.add("b*s", wide_in), draft.add("b*s", wide_in)
    a, b = f"{module}.lora_a.weight", f"{module}.lora_b.weight"
    draft.gradients |= {a: grad_a, b: grad_b}
    thin_in, thin_out = 2 * wide_in * rank, 2 * wide_out * rank
    ops += [
        Op("matmul", "aten.mm", (grad_b,), (), (incoming, scaled), "", thin_out),
        Op("matmul", "aten.mm", (grad_scaled,), (scaled,), (incoming,), b, thin_out),
        Op("elementwise", "aten.mul.Tensor", (grad_down,), (grad_scaled,), (grad_scaled,)),
        Op("matmul", "aten.mm", (grad_a,), (), (grad_down, read), "", thin_in),
        Op("matmul", "aten.mm", (through,), (grad_down,), (grad_down,), a, thin_in),
    ]
    if mask >= 0:
        dropped, through = through, draft.add("b*s", wide_in)
        freed = (dropped, read, mask)
        ops.append(Op("elementwise", "aten.native_dropout_backward", (through,), freed, (dropped, mask)))
    join = next(
        (i for i, op in enumerate(draft.backward) if op.name == "aten.add.Tensor" and outgoing in op.reads[1:]), 0
    )
    if join:  # another layer's gradient of the same input is there already
        before = draft.backward[join].reads[0]
        draft.tensors[summed] = dataclasses.replace(draft.tensors[summed], inside=draft.tensors[before].inside)
        ops.append(Op("elementwise", "aten.add.Tensor", (summed,), (before, through), (before, through)))
        draft.backward[join] = _renamed(draft.backward[join], before, summed)
        draft.backward[first:first] = ops
    else:
        ops += draft.backward[first : last + 1]
        ops.append(Op("elementwise", "aten.add.Tensor", (summed,), (through, outgoing), (through, outgoing)))
        rest = [_renamed(op, outgoing, summed) for op in draft.backward[last + 1 :]]
        draft.backward[first:] = ops + rest


def _renamed(op: Op, old: int, new: int) -> Op:
    """``op`` reading and freeing ``new`` in the place of ``old``."""
    if old not in op.reads and old not in op.frees:
        return op
    reads = tuple(new if tensor == old else tensor for tensor in op.reads)
    frees = tuple(new if tensor == old else tensor for tensor in op.frees)
    return dataclasses.replace(op, reads=reads, frees=frees)


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Gives each targeted layer two more, ``lora_a`` and ``lora_b``, whose product is added to what it returns. Its
    ``lora_share`` says what of the layer this rank has."""
    if plan.lora is None:
        return parts
    from torch import nn

    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear) and targets(plan.lora, f"{name}.weight"):
                _attach(module, plan.lora)
    return parts


def _attach(module: nn.Linear, lora: Lora) -> None:
    import torch
    from torch import nn

    from shardwise.techniques.dora import WHOLE, row_norms
    from shardwise.techniques.dropout import dropped
    from shardwise.techniques.slices import local

    like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
    if lora.dora:
        module.lora_m = nn.Parameter(torch.empty(module.out_features, **like))
    down = module.lora_a = nn.Linear(module.in_features, lora.rank, bias=False, **like)
    up = module.lora_b = nn.Linear(lora.rank, module.out_features, bias=False, **like)
    factor = scale(lora)

    def add(module: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        if module.lora_off:
            return out
        x = args[0]
        if lora.dropout and torch.is_grad_enabled():
            x = dropped(x, lora.dropout, module.lora_share.place)
        total: torch.Tensor = out + up(down(x) * factor)
        if not lora.dora:
            return total
        # Sharded, the magnitude comes in the compute type: the norms are rounded alike, so that both cancel at first.
        share, sizes = module.lora_share, local(module.lora_m)
        norms = row_norms(module, factor, share).to(sizes.dtype)
        gain: torch.Tensor = (sizes[share.rows] / norms).to(out.dtype)
        if module.bias is None or share.group is not None:
            return total * gain
        bias: torch.Tensor = local(module.bias)[share.rows].to(out.dtype)
        return (total - bias) * gain + bias

    module.lora_off = False  # type: ignore[assignment]
    module.lora_share = WHOLE  # type: ignore[assignment]
    _HOOKS[module] = module.register_forward_hook(add)


@contextmanager
def disabled(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the model computes without its adapters."""
    layers = [module for part in parts for module in part.modules() if module in _HOOKS]
    for layer in layers:
        layer.lora_off = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_off = False  # type: ignore[assignment]


def detach(module: nn.Module) -> None:
    """Remove a layer's adapter (after its product was added to the layer's weight, for example)."""
    _HOOKS.pop(module).remove()
    del module.lora_a, module.lora_b
    if "lora_m" in dict(module.named_parameters(recurse=False)):
        del module.lora_m
