"""Recomputation (activation checkpointing): save less for backward, and compute it again.

Shards and sends nothing. ``full`` saves a block's input and runs the block's forward again during backward: a third
more compute for the smallest activations. ``selective`` also saves the results of matrix products and of attention, and
recomputes only what is cheap (norms, rotations, gates), or many times as wide as what it is made of (heads of
latents): a few per cent of compute. With ``every`` k, only each k-th block recomputes. It pays where activations do not
fit; a larger micro-batch can then gain more than recomputation costs. Applied to blocks in place, with PyTorch's
non-reentrant checkpoint, which stops recomputing at the last tensor that backward needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from shardwise.errors import Problem
from shardwise.models.blocks import numbered, surround
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan, Remat, SavedResult
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.checkpoint import CheckpointPolicy

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"remat.mode": "none"}
Mode = Literal["none", "selective", "budget", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "budget", "full")
"""From the least recomputation to the most. What a budget saves, a search finds that knows the memory."""


ALL = "all"
"""Places of what is saved, where that is all that may be."""


def saves(block: Unit) -> frozenset[int]:
    """The technique's one fact: the indices of the operations of a block whose results ``selective`` saves: attention,
    the rule of gated delta nets, tokens that are exchanged for heads, rows that go to experts and come back, and every
    matrix product but the last, whose result no gradient needs; but not those of which the block's program says that
    they are made again (:func:`shardwise.models.layers.made_again`)."""
    return frozenset(i for i in may_save(block) if block.again.isdisjoint(block.forward[i].allocates))


def may_save(block: Unit) -> list[int]:
    """Return the same with those that are made again. ``Remat.saved`` has places in this list."""
    products = [i for i, op in enumerate(block.forward) if op.kind == "matmul"]
    others = (i for i, op in enumerate(block.forward) if op.kind in ("attention", "rule") or op.name == "all_to_all")
    return sorted((*products[:-1], *others))


@lru_cache(maxsize=8 * KEPT_UNITS)
def products_of(block: Unit) -> int:
    """Return how many matrix products a block has, by which a budget tells kinds of blocks apart."""
    return sum(op.kind == "matmul" for op in block.forward)


def budgeted(plan: Plan, saved: Iterable[SavedResult]) -> Plan:
    """The plan with a budget that saves these."""
    return dataclasses.replace(plan, remat=Remat("budget", plan.remat.every, tuple(sorted(saved))))


def saving_all(plan: Plan) -> Plan | None:
    """Return the plan that saves all results that a budget may, where ``plan`` saves none of them."""
    if plan.remat.mode not in ("budget", "full") or plan.remat.saved:
        return None
    return dataclasses.replace(plan, remat=Remat("selective", plan.remat.every))


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """The pinned mode, else from the least recomputation to the most."""
    asked = recipe.recompute
    searched = (mode for mode in MODES if mode != "budget")
    for mode in searched if asked.mode == "auto" else (asked.mode,):
        reason = "derived: less recomputation would need more memory than is available"
        if asked.mode != "auto":
            reason = "pinned"
        elif mode == "none":
            reason = "derived: activations fit"
        why = {**plan.why, "remat.mode": reason}
        if mode == "none" and asked.every != 1:
            why["remat.every"] = "not used: nothing is recomputed"
        yield dataclasses.replace(plan, remat=Remat(mode, asked.every if mode != "none" else 1), why=why)


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked, planned = recipe.recompute, plan.remat
    every = asked.every if asked.every != 1 and planned.mode != "none" else "auto"
    return {"recompute.mode": (planned.mode, asked.mode), "recompute.every": (planned.every, every)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.remat.mode != "none" and plan.remat.every > spec.num_hidden_layers:
        what = f"recompute.every is {plan.remat.every}, but the model has {spec.num_hidden_layers} blocks"
        return [Problem("PLAN013", what, "recompute.every", f"1 to {spec.num_hidden_layers}")]
    if plan.remat.mode == "budget" and plan.precision.modules and plan.sharded and plan.compile:
        # As techniques/precision.py says of selective, and for the same reason.
        what = "compiled, recompute by budget does not work with sharded modules that have their own compute dtype"
        return [Problem("PLAN016", what, "recompute.mode", "full or none; or `compile=false`")]
    return []


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Blocks that keep all beside others that are computed again."""
    stages = [[plan.remat.treats(block) for block in stage] for stage in plan.stages(spec.num_hidden_layers)]
    return {
        "blocks that are not computed again": any(False in stage for stage in stages),
        "a stage of which no block is computed again": any(True not in stage for stage in stages),
    }


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    kinds = {(kind, places): 0 for kind, places in _treated(sheet, plan) if places is not None}
    made = tuple(_recomputing(sheet.blocks[kind], plan.remat.mode, places) for kind, places in sorted(kinds))
    kinds = {key: number for number, key in enumerate(sorted(kinds), len(sheet.blocks))}
    order = tuple(kind if places is None else kinds[kind, places] for kind, places in _treated(sheet, plan))
    return dataclasses.replace(sheet, blocks=sheet.blocks + made, order=order)


def _treated(sheet: Sheet, plan: Plan) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Yield the kind of each block, with the places of what it saves by a budget; None if it does not recompute."""
    for kind, number in zip(sheet.order, sheet.rank_kind.blocks, strict=True):
        treated, products = plan.remat.treats(number), products_of(sheet.blocks[kind])
        yield kind, plan.remat.places(number, products) if treated else None


@lru_cache(maxsize=8 * KEPT_UNITS)
def _recomputing(block: Unit, mode: Mode, places: tuple[int, ...]) -> Unit:
    """A block without a backward saves nothing, with or without recomputation."""
    if not block.backward:
        return block
    saved = saves(block) if mode in ("selective", "budget") else frozenset()
    if mode == "budget":
        saved &= {i for place, i in enumerate(may_save(block)) if place in places}
    return dataclasses.replace(block, recompute=True, saved_ops=saved)


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    for part in parts:
        random = any(isinstance(module, nn.Dropout) and module.p > 0 for module in part.modules())
        random |= plan.lora is not None and plan.lora.dropout > 0
        for number, block in numbered(part):
            if plan.remat.treats(number):
                options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
                if plan.remat.saves:
                    products = _products(block)
                    places = plan.remat.places(number, products)
                    given = str(products), " ".join(map(str, places)) if plan.remat.mode == "budget" else ALL
                    options["context_fn"] = partial(_counted, *given, compiled=plan.compile)
                elif plan.compile and torch.__version__ < "2.13":
                    options["context_fn"] = _nothing_saved
                surround(block, partial(partial, checkpoint, **options))
    return parts


def _products(block: nn.Module) -> int:
    from torch import nn

    def multiplies(module: nn.Module) -> bool:
        own = [parameter.ndim for parameter in module.parameters(recurse=False)]
        return isinstance(module, nn.Linear) or (2 in own and not isinstance(module, nn.Embedding))

    return sum(map(multiplies, block.modules()))


def _counted(products: str, places: str, *, compiled: bool) -> Any:
    """Forward and recomputation each count their matrix products; the count, not the shape, says which is the last.
    The number of products is given as text, and ``places`` too: an int that differs between blocks is to the compiler
    one that it does not know, which it refuses here.
    torch's own pair of contexts is for what is compiled: it asks that both run exactly the same operations, and what
    FSDP2 does for modules within a block differs."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    if not compiled:
        from shardwise.techniques.selective import saving

        return saving(_Chosen(products, places), _Chosen(products, places))
    chosen = {again: _Chosen(products, places) for again in (False, True)}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if chosen[ctx.is_recompute](op) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _nothing_saved() -> Any:
    """Told to the compiler of every operation, as torch does since 2.13: 2.11 saves what autograd functions make."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(lambda *given, **named: CheckpointPolicy.PREFER_RECOMPUTE)


class _Chosen:
    """A choice of the operations of a pass, given one after another, whose results are saved."""

    PRODUCTS = frozenset(
        {
            "aten::mm",
            "aten::addmm",
            "shardwise::grouped",
            "shardwise::scaled_product",
            "shardwise::scaled_product_over_ranks",
            "shardwise::two_products",
        }
    )
    OTHERS = frozenset(
        {
            "shardwise::attention",
            "shardwise::attention_over_ranks",
            "shardwise::exchange",
            "shardwise::gated_delta",
            "shardwise::gated_delta_over_ranks",
            "shardwise::start_rows",
        }
    )

    def __init__(self, products: str, places: str) -> None:
        from shardwise.models.layers import is_made_again

        self.left, self.is_made_again = int(products) - 1, is_made_again
        self.place, self.places = -1, None if places == ALL else frozenset(map(int, places.split()))

    def __call__(self, op: Any) -> bool:
        product = op.name() in self.PRODUCTS
        self.left -= product
        saved = self.left >= 0 if product else op.name() in self.OTHERS
        self.place += saved
        chosen = self.places is None or self.place in self.places
        return saved and chosen and not self.is_made_again()
