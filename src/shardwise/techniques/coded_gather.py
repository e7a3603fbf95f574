"""Weights that sharded ranks gather as codes of float8 (``precision.gather: float8``): of which that is possible, and
how many bytes they are. float8 sets ``gathered_as`` of layers, shard reads it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.spec.plan import Plan
from shardwise.spec.sheet import SCALED, Unit
from shardwise.techniques.quantised import FLOAT8_BLOCK
from shardwise.techniques.states import slices_over

if TYPE_CHECKING:
    from torch import nn

SCALE_BYTES = 4


def whole_blocks(rows: int, ranks: int) -> bool:
    """Return whether each of so many ranks has whole blocks of so many rows: then its codes, and its scales, are those
    of the whole weight."""
    return ranks > 1 and rows % (ranks * FLOAT8_BLOCK) == 0


def code_bytes(numbers: int) -> int:
    """Bytes of the codes of so many numbers, whole blocks, and of the blocks' scales."""
    return numbers + SCALE_BYTES * (numbers // FLOAT8_BLOCK**2)


def may_be_codes(unit: Unit, plan: Plan) -> frozenset[str]:
    """The weights of a unit on paper that are, over whichever number of ranks."""
    if plan.precision.gather != "float8":
        return frozenset()
    return frozenset(op.weight for op in unit.forward if op.name in SCALED)


def in_codes(unit: Unit, plan: Plan) -> frozenset[str]:
    """The weights of a unit on paper, as tensor and expert parallelism have cut it, that are gathered as codes."""
    scaled = may_be_codes(unit, plan)
    rows = {weight.name: int(weight.shape[0]) for weight in unit.weights if weight.name in scaled}
    return frozenset(name for name, n in rows.items() if whole_blocks(n, plan.layout.size(slices_over(name, plan))))


def layers_in_codes(part: nn.Module, plan: Plan) -> dict[nn.Module, object]:
    """The layers of a part, not sharded yet, whose weights are gathered as codes, and the form of each."""
    from shardwise.distributed.slices import local

    found: dict[nn.Module, object] = {}
    for name, module in part.named_modules():
        form, ranks = vars(module).get("gathered_as"), plan.layout.size(slices_over(f"{name}.weight", plan))
        if form and whole_blocks(local(module.get_parameter("weight")).shape[0], ranks):
            found[module] = form
    return found
