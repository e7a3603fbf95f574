"""Units of a sheet beside closed forms: what a layer sends and multiplies, by mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import techniques
from shardwise.distributed import collectives
from shardwise.distributed.calls import collective
from shardwise.distributed.calls import payload_bytes as payload_bytes_of
from shardwise.distributed.collectives import gathered, scattered, summed
from shardwise.distributed.meshes import meshes
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.decoder import Decoder
from shardwise.planner.held import recomputed
from shardwise.planner.sheets import sheet_of
from shardwise.planner.trace import trace, traced_here
from shardwise.planner.variants import chosen
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import SEND, Op
from tests.covering import pairwise
from tests.planner.bound import bound
from tests.planner.closed_forms import Line, multiplied_flops, payload_bytes, table

SPEC = model_spec("closed", 640, 128, 512, 4, 8, 4, 64)
PROJECTED = with_fields(SPEC, norm_placement="after", qk_norm="projection", num_key_value_heads=8)
LATENT = with_fields(
    SPEC,
    mixer="latent",
    num_key_value_heads=8,
    head_dim=48,
    kv_lora_rank=64,
    q_lora_rank=96,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=24,
)
MODELS: dict[str, ModelSpec] = {
    "llama": SPEC,
    "biased": with_fields(SPEC, attention_bias=True, mlp_bias=True),
    "gemma": with_fields(SPEC, norm_placement="both", norm_plus_one=True, activation="gelu_tanh", qk_norm="head"),
    "norms over whole projections": PROJECTED,
    "latents": LATENT,
}
ADAPTERS: dict[str, Lora | None] = {
    "full": None,
    "adapters": Lora(16, frozen="bf16"),
    "adapters of some": Lora(16, targets=("q", "down"), frozen="bf16"),
    "dropout": Lora(16, frozen="bf16", dropout=0.1),
    "magnitudes": Lora(16, frozen="bf16", dora=True),
    "nf4": Lora(16, frozen="bf16", nf4=True),
}
MODES = {"whole": (False, 128), "sequence": (True, 128), "uneven": (True, 125)}
"""Whether tokens are cut, and the tokens of a row; of 3 x 125 a rank of 4 or 8 has its own only rounded up."""


def plan_of(mode: str, ranks: int, adapters: Lora | None = None, **settings: Any) -> Plan:
    sequence, tokens = MODES[mode]
    batch = Batch(3 if mode == "uneven" else 2, 1, tokens)
    types = Precision("bf16", "bf16", "bf16")
    plan = Plan(Layout(tp=ranks), batch, Shard(), types, sequence_parallel=sequence and ranks > 1, lora=adapters)
    return replace(plan, **settings)


def sent(ops: tuple[Op, ...], plan: Plan) -> list[tuple[str, int]]:
    """What these operations send, in order: kind and bytes."""
    tokens = plan.batch.micro_batch_size * plan.batch.seq_len
    return [(op.name, op.flops * {"": 1, "b*s": tokens}[op.per]) for op in ops if op.kind == SEND]


def flops(ops: tuple[Op, ...], plan: Plan) -> int:
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    times = {"": 1, "b": b, "b*s": b * s, "b*s*s": b * s * s}
    return sum(op.flops * times[op.per] for op in ops if op.kind != SEND)


def lines(spec: ModelSpec, plan: Plan, *, first: bool) -> list[Line]:
    """What the table says of this model and plan, and of its ``first`` block."""
    words = {
        "": True,
        ", norms after": spec.norm_placement != "before",
        ", norms over whole projections": spec.attention.qk_norm == "projection",
        ", magnitudes": plan.lora is not None and plan.lora.dora,
        ", first": first and plan.lora is not None,
        ", latents": spec.attention.mixer == "latent",
    }
    mode, found = "sequence" if plan.sequence_parallel else "whole", dict[tuple[str, str], Line]()
    for word in (word for word, said in words.items() if said):
        found |= {(line.unit, line.when): line for line in table()[mode + word]}
    return [*found.values()]


def legal(model: str, mode: str, adapters: str, ranks: int) -> bool:
    """One rank has one mode; and the table has no line for two of its headings at once."""
    two = (adapters == "magnitudes" and model == "gemma") or (adapters != "full" and model.startswith("norms"))
    two |= model == "latents" and adapters not in ("full", "adapters", "dropout")
    return mode == "whole" if ranks == 1 else not two


def check(model: str, mode: str, adapters: str, ranks: int) -> None:
    """What the first block, the last, embedding and head send; what the blocks multiply."""
    spec, plan = MODELS[model], plan_of(mode, ranks, ADAPTERS[adapters])
    sheet = sheet_of(spec, plan, units=traced_here)
    for rank_kind in (0, -1):
        block, first = sheet.blocks[sheet.order[rank_kind]], rank_kind == 0
        for line in lines(spec, plan, first=first) if ranks > 1 else ():
            if line.unit == "embedding" and adapters != "full" and not first:
                continue  # which is frozen: said of the first
            unit = {"embedding": sheet.embedding, "block": block, "head": sheet.head}[line.unit]
            ops = {"forward": unit.forward, "backward": unit.backward, "again": recomputed(unit)}[line.when]
            assert sent(ops, plan) == [(kind, payload_bytes(what, spec, plan)) for kind, what in line.sends], line
        if first and (plan.lora is None or plan.lora.targets):
            continue  # what its input's gradient takes depends on what is trained before it: said of the last
        found = {"forward": flops(block.forward, plan), "backward": flops(block.backward, plan)}
        assert found == multiplied_flops(spec, plan, first=first)


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("model", "mode", "adapters", "ranks"), pairwise(MODELS, MODES, ADAPTERS, (1, 2, 4, 8), legal=legal)
)
def test_a_layer_sends_and_multiplies_what_the_table_and_its_sizes_say(
    model: str, mode: str, adapters: str, ranks: int
) -> None:
    """On one rank, and over 2, 4 and 8, of which two share a key head."""
    check(model, mode, adapters, ranks)


@pytest.mark.big
def test_every_combination() -> None:
    """What the covering above is of."""
    for case in product(MODELS, MODES, ADAPTERS, (1, 2, 4, 8)):
        if legal(*case):
            check(*case)


def forgotten(partial: Tensor, group: collectives.Group) -> Tensor:
    return partial.clone()


def twice(partial: Tensor, group: collectives.Group) -> Tensor:
    total = summed(partial, group)
    dist.all_reduce(total.clone(), group=group)  # whose result nobody uses: every number stays right
    return total


def wide(partial: Tensor, group: collectives.Group) -> Tensor:
    return summed(partial.float(), group).to(partial.dtype)


def gathered_for_nothing(partial: Tensor, group: collectives.Group) -> Tensor:
    share = scattered(partial, group)
    gathered(share, group, tuple(partial.shape[:-1]))
    return share


FAULTS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "a sum is forgotten": ("whole", "summed", forgotten),
    "a sum is sent twice": ("whole", "summed", twice),
    "a sum is sent in fp32": ("whole", "summed", wide),
    "a share is gathered for nothing": ("sequence", "scattered", gathered_for_nothing),
}
"""By the mode in which it shows, and the function of distributed/collectives.py that is replaced. A trace says each of
them faithfully, and so would the drift test; parity would see the first alone."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_real_program_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, name, planted = FAULTS[fault]
    plan = plan_of(mode, 2)

    def sends_are_right() -> None:
        units = {
            unit: trace(chosen(SPEC, plan, RankKind(plan.layout), unit).variant) for unit in ("embedding", 0, "head")
        }
        for line in lines(SPEC, plan, first=False):
            made = chosen(SPEC, plan, RankKind(plan.layout), {"block": 0}.get(line.unit, line.unit))
            unit = bound(units[{"block": 0}.get(line.unit, line.unit)], made.numbers)
            ops = {"forward": unit.forward, "backward": unit.backward, "again": recomputed(unit)}[line.when]
            assert sent(ops, plan) == [(kind, payload_bytes(what, SPEC, plan)) for kind, what in line.sends]

    sends_are_right()
    monkeypatch.setattr(collectives, name, planted)
    with pytest.raises(AssertionError):
        sends_are_right()


class Sends(TorchDispatchMode):
    """Lists the collectives that torch runs, in order: kind and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind := collective(func):
            self.listed.append((kind, payload_bytes_of(args)))
        return func(*args, **(kwargs or {}))


def sent_by_a_model(rank: int, ranks: int, spec: ModelSpec, plan: Plan) -> dict[str, list[tuple[str, int]]]:
    """What a rank of a real group sends in a forward and a backward of embedding, blocks and head."""
    groups = meshes(plan.layout, "cpu")
    torch.manual_seed(0)
    model = Decoder(spec).to(torch.bfloat16)
    techniques.apply([model], plan, groups)
    ids = torch.zeros((plan.batch.micro_batch_size, plan.batch.seq_len), dtype=torch.int64)
    positions = torch.arange(plan.batch.seq_len).expand_as(ids)
    with Sends() as forward:
        hidden = model(ids, positions, MaskSpec(), lambda hidden, weight: hidden)
    with Sends() as backward:
        hidden.sum().backward()
    return {"forward": forward.listed, "backward": backward.listed}


@pytest.mark.parametrize("mode", MODES)
def test_two_real_ranks_send_what_the_table_says(mode: str, ranks: RankPool) -> None:
    plan = plan_of(mode, 2)
    told = {(line.unit, line.when): line.sends for line in lines(SPEC, plan, first=False)}
    ways = {"forward": ("embedding", *["block"] * 4, "head"), "backward": ("head", *["block"] * 4, "embedding")}
    wanted = {
        when: [(kind, payload_bytes(what, SPEC, plan)) for unit in units for kind, what in told[unit, when]]
        for when, units in ways.items()
    }
    assert ranks.run(sent_by_a_model, SPEC, plan, world=2) == [wanted, wanted]
