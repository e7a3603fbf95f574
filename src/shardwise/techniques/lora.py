"""LoRA (Hu et al., arXiv 2106.09685): the model's weights stay as they are, and each chosen linear layer gets a trained
product of two thin matrices added: y = W x + alpha / rank * B A x, with A [rank, in] and B [out, rank].

Shards and sends nothing of its own: A and B are parameters of the block they are in, gathered and reduced with it, and
everything else is frozen (freeze.py), so gradients, moments and what is reduced shrink to some per cent. It pays when
a model is to be adapted and its state does not fit, or when many adapted copies are to be kept. rsLoRA (Kalajdzievski,
arXiv 2312.03732) divides by the square root of the rank. B begins at zero: step 0 is the model as it came.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.families import FAMILIES
from shardwise.models.roles import LINEAR, role
from shardwise.spec import recipe
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.sheet import Op, Sheet, Tensor, Unit

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle


_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def settings(asked: recipe.Lora) -> Lora | None:
    """What the recipe asks for, in the plan's words; None without adapters."""
    if asked.rank is None:
        return None
    names = [asked.targets] if isinstance(asked.targets, str) else asked.targets
    chosen = () if names == ["all-linear"] else tuple(name.removesuffix("_proj") for name in names)
    return Lora(asked.rank, 2.0 * asked.rank if asked.alpha is None else asked.alpha, chosen, asked.rslora)


def targets(lora: Lora, weight: str) -> bool:
    """The technique's one fact: whether the linear layer with this weight (canonical name) gets an adapter."""
    return role(weight) in (lora.targets or LINEAR)


def scale(lora: Lora) -> float:
    """What B A x is multiplied by."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)


def adapters(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that the adapters add, by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and targets(lora, name):
            layer = name.removesuffix("weight")
            shapes |= {f"{layer}lora_a.weight": (lora.rank, shape[1]), f"{layer}lora_b.weight": (shape[0], lora.rank)}
    return shapes


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.lora is None:
        return []
    problems = []
    for name in plan.lora.targets:
        if name not in LINEAR:
            near = get_close_matches(name, LINEAR, 1)
            fix = f"did you mean `{near[0]}`?" if near else f"all-linear, or some of {', '.join(LINEAR)}"
            problems.append(Problem("PLAN018", f"no linear layer has the role `{name}`", "lora.targets", fix))
    if plan.precision.modules:
        what = "adapters and types by module do not go together"
        problems.append(Problem("PLAN018", what, "precision.modules", "leave out precision.modules"))
    stacked = [name for name, count in Counter(FAMILIES[spec.family].names.values()).items() if count > 1]
    if stacked:
        what = f"{spec.family} stacks layers in its files, for which PEFT's format has no adapter of ours"
        problems.append(Problem("PLAN018", what, "lora.rank", "full fine-tuning, or a model of another family"))
    least = min(spec.hidden_size, spec.intermediate_size, spec.num_key_value_heads * spec.head_dim)
    if plan.lora.rank > least:
        what = f"rank {plan.lora.rank} is more than the narrowest layer's {least}: an adapter would not be thin"
        problems.append(Problem("PLAN018", what, "lora.rank", f"{min(16, least)}"))
    return problems


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Every targeted product becomes five operations, and its backward that of all five."""
    lora = plan.lora
    if lora is None:
        return sheet
    return dataclasses.replace(sheet, blocks=tuple(_adapted(block, lora) for block in sheet.blocks))


@dataclasses.dataclass
class _Draft:
    """A block being rewritten. ``shapes`` are [out, in] of each linear layer's weight."""

    shapes: dict[str, tuple[int, int]]
    tensors: list[Tensor]
    forward: list[Op]
    plain: list[Op]
    backward: list[Op]
    saved: set[int]
    gradients: dict[str, int]

    def add(self, *shape: int | str) -> int:
        self.tensors.append(Tensor(f"t{len(self.tensors)}", shape, "compute"))
        return len(self.tensors) - 1


def _adapted(unit: Unit, lora: Lora) -> Unit:
    shapes = {
        weight.name: (int(weight.shape[0]), int(weight.shape[1]))
        for weight in unit.weights
        if weight.name.endswith(".weight") and targets(lora, f"layers.0.{weight.name}")
    }
    draft = _Draft(
        shapes,
        list(unit.tensors),
        list(unit.forward),
        list(unit.forward_plain),
        list(unit.backward),
        set(unit.saved),
        dict(unit.weight_gradients),
    )
    for index in range(len(draft.forward) - 1, -1, -1):
        if draft.forward[index].kind == "matmul" and f"{_module(draft.forward[index])}.weight" in shapes:
            _adapt(draft, index, lora.rank)
    return dataclasses.replace(
        unit,
        weights=tuple(_with_adapters(unit.weights, shapes, lora.rank)),
        tensors=tuple(draft.tensors),
        forward=tuple(draft.forward),
        forward_plain=tuple(draft.plain),
        backward=tuple(draft.backward),
        saved=frozenset(draft.saved),
        weight_gradients=tuple(draft.gradients.items()),
    )


def _with_adapters(weights: tuple[Tensor, ...], shapes: dict[str, tuple[int, int]], rank: int) -> Iterator[Tensor]:
    """An adapter stands behind all that is its layer's own, as the modules list their parameters."""
    for weight, after in zip_longest(weights, weights[1:]):
        yield weight
        module = weight.name.rpartition(".")[0]
        if f"{module}.weight" in shapes and (after is None or after.name.rpartition(".")[0] != module):
            wide_out, wide_in = shapes[f"{module}.weight"]
            yield Tensor(f"{module}.lora_a.weight", (rank, wide_in), "weights", "weights")
            yield Tensor(f"{module}.lora_b.weight", (wide_out, rank), "weights", "weights")


def _module(op: Op) -> str:
    """The layer of a product; one with a bias goes by the bias's name."""
    return op.weight.rpartition(".")[0]


def _adapt(draft: _Draft, index: int, rank: int) -> None:
    """Rewrite the product at ``index`` of the forward operations, and its backward. A layer holds its input until its
    adapter has run too."""
    op = draft.forward[index]
    module = _module(op)
    wide_out, wide_in = draft.shapes[f"{module}.weight"]
    given, result = op.reads[0], op.allocates[0]
    down, scaled, up, total = (draft.add("b*s", size) for size in (rank, rank, wide_out, wide_out))
    for ops, keep in ((draft.forward, True), (draft.plain, False)):
        old = ops[index]
        ops[index:] = [
            dataclasses.replace(old, frees=()),
            Op("matmul", "aten.mm", (down,), (), (given,), f"{module}.lora_a.weight", 2 * wide_in * rank),
            Op("elementwise", "aten.mul.Tensor", (scaled,), (down,), (down,)),
            Op(
                "matmul",
                "aten.mm",
                (up,),
                () if keep else (scaled,),
                (scaled,),
                f"{module}.lora_b.weight",
                2 * wide_out * rank,
            ),
            Op("elementwise", "aten.add.Tensor", (total,), (result, up, *old.frees), (result, up)),
            *(_renamed(other, result, total) for other in ops[index + 1 :]),
        ]
    draft.saved.add(scaled)
    if result in draft.saved:
        draft.saved.remove(result)
        draft.saved.add(total)
    draft.backward = [_renamed(other, result, total) for other in draft.backward]
    _adapt_backward(draft, module, given, scaled)


def _adapt_backward(draft: _Draft, module: str, given: int, scaled: int) -> None:
    """The adapter's backward comes before the layer's own, and the input's gradients are summed as they arrive."""
    wide_out, wide_in = draft.shapes[f"{module}.weight"]
    rank = int(draft.tensors[scaled].shape[1])
    mine = {draft.gradients[name] for name in (f"{module}.weight", f"{module}.bias") if name in draft.gradients}
    product = next(op for op in draft.backward if op.kind == "matmul" and op.weight == f"{module}.weight")
    incoming, outgoing = product.reads[0], product.allocates[0]
    own = [i for i, op in enumerate(draft.backward) if op is product or not mine.isdisjoint(op.allocates)]
    first, last = own[0], own[-1]
    grad_b, grad_scaled, grad_down = draft.add(wide_out, rank), draft.add("b*s", rank), draft.add("b*s", rank)
    grad_a, through, summed = draft.add(rank, wide_in), draft.add("b*s", wide_in), draft.add("b*s", wide_in)
    a, b = f"{module}.lora_a.weight", f"{module}.lora_b.weight"
    draft.gradients |= {a: grad_a, b: grad_b}
    thin_in, thin_out = 2 * wide_in * rank, 2 * wide_out * rank
    ops = [
        Op("matmul", "aten.mm", (grad_b,), (), (incoming, scaled), "", thin_out),
        Op("matmul", "aten.mm", (grad_scaled,), (scaled,), (incoming,), b, thin_out),
        Op("elementwise", "aten.mul.Tensor", (grad_down,), (grad_scaled,), (grad_scaled,)),
        Op("matmul", "aten.mm", (grad_a,), (), (grad_down, given), "", thin_in),
        Op("matmul", "aten.mm", (through,), (grad_down,), (grad_down,), a, thin_in),
    ]
    join = next(
        (i for i, op in enumerate(draft.backward) if op.name == "aten.add.Tensor" and outgoing in op.reads[1:]), 0
    )
    if join:  # another layer's gradient of the same input is there already
        before = draft.backward[join].reads[0]
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


def apply(parts: list[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> list[nn.Module]:
    """Gives each targeted layer two more, ``lora_a`` and ``lora_b``, whose product is added to what it returns."""
    if plan.lora is None:
        return parts
    from torch import nn

    for part in parts:
        for name, module in list(part.named_modules()):
            if (
                isinstance(module, nn.Linear)
                and f"{name}.weight" != "head.weight"
                and targets(plan.lora, f"{name}.weight")
            ):
                _attach(module, plan.lora)
    return parts


def _attach(module: nn.Linear, lora: Lora) -> None:
    from torch import nn

    like = {"device": module.weight.device, "dtype": module.weight.dtype}
    down = module.lora_a = nn.Linear(module.in_features, lora.rank, bias=False, **like)
    up = module.lora_b = nn.Linear(lora.rank, module.out_features, bias=False, **like)
    factor = scale(lora)

    def add(module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        narrow: torch.Tensor = down(args[0])
        wide: torch.Tensor = up(narrow * factor)
        return out + wide

    _HOOKS[module] = module.register_forward_hook(add)


def detach(module: nn.Module) -> None:
    """Take the adapter of a layer away again (its product may have been added to the layer's weight)."""
    _HOOKS.pop(module).remove()
    del module.lora_a, module.lora_b
