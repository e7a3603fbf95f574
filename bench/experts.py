"""A mixture of experts, forward and backward: on two gloo ranks with different experts beside a plain all-to-all loop
of the same products; in one process beside transformers' own module; and, with a shared expert, on two ranks beside
itself with nothing computed while rows are on their way.

    python bench/experts.py [--pairs 20] [--tokens 2048] [--json FILE]

The plain loop is what one writes with torch alone: top-k, a stable sort, counts and rows by ``all_to_all_single``, one
product after another for each expert, rows home again and added up by ``index_add``. transformers' module is that of
Qwen3-MoE, with the implementation of experts that it takes by itself here. The links of the last comparison take
``LINK`` bytes a second: an exchange is over no earlier, and takes no processor's time until then; the same without that
is the memory of one machine. One thread a process; rounds are interleaved, each side first in every other one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.moe import MoE
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from shardwise.techniques import ep

WORLD = 2
HIDDEN, WIDTH, EXPERTS, TOP = 512, 256, 16, 4
SPEC = model_spec(
    "experts", 64, HIDDEN, WIDTH, 1, 8, 2, 64, num_experts=EXPERTS, experts_per_token=TOP, expert_size=WIDTH
)
SHARED = with_fields(SPEC, shared_expert_size=4 * WIDTH, shared_expert_gate=True)
LINK = 2e8
Side = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""From hidden states [n,d] and the gradient of what comes out: that, and the gradients of input and weights."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


WEIGHTS = {"router": (EXPERTS, HIDDEN), "gate": (EXPERTS * WIDTH, HIDDEN), "up": (EXPERTS * WIDTH, HIDDEN)}
WEIGHTS |= {"down": (EXPERTS * HIDDEN, WIDTH)}


class Under:
    """An exchange that is over no earlier than at this time."""

    def __init__(self, work: dist.Work, until_s: float) -> None:
        self.work, self.until_s = work, until_s

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.until_s - time.perf_counter()))


exchange = dist.all_to_all_single


def over_link(out: Tensor, x: Tensor, *splits: list[int], group: Any, async_op: bool) -> Under:
    until_s = time.perf_counter() + out.numel() * out.element_size() / LINK
    return Under(exchange(out, x, *splits, group=group, async_op=True), until_s)


def ours(spread: bool, spec: ModelSpec = SPEC, beside: bool = True) -> Side:
    torch.manual_seed(0)
    module = MoE(spec)
    held = [module.router, module.experts.expert_gate, module.experts.expert_up, module.experts.expert_down]
    with torch.no_grad():
        for seed, (one, shape) in enumerate(zip(held, WEIGHTS.values(), strict=True)):
            one.weight.copy_(drawn(*shape, seed=seed))
    if spread:
        layout = Layout(dp_shard=WORLD, ep=WORLD)
        ep.apply([module], Plan(layout), meshes(layout, "cpu"))
    if not beside:
        inner: Any = module.experts.inner
        module.experts.inner = lambda rows, counts, _: inner(rows, counts)  # type: ignore[method-assign]

    def run(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        out = module(x)
        out.backward(grad)
        made = [local(one.weight.grad) for one in held]
        module.zero_grad()
        return out.detach(), x.grad, *made

    return run


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], come: list[int]) -> Tensor:
        ctx.splits = sent, come
        out = x.new_empty(sum(come), x.shape[1])
        dist.all_to_all_single(out, x, come, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, come = ctx.splits
        return _Exchanged.apply(grad.contiguous(), come, sent), None, None


def plain() -> Side:
    own, rank = EXPERTS // WORLD, dist.get_rank()
    router = drawn(*WEIGHTS["router"], seed=0).requires_grad_()
    held = []
    for seed, name in enumerate(("gate", "up", "down"), 1):
        whole = drawn(*WEIGHTS[name], seed=seed).unflatten(0, (EXPERTS, -1))
        held.append(whole[rank * own : (rank + 1) * own].clone().requires_grad_())
    gate, up, down = held

    def run(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        weights, ids = functional.linear(x, router).softmax(-1, dtype=torch.float32).topk(TOP, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts)
        sent, come = (each.view(WORLD, own).sum(1).tolist() for each in (counts, there))
        order = ids.flatten().argsort(stable=True)
        rows = _Exchanged.apply(x[order // TOP], sent, come)
        which = torch.arange(own).repeat(WORLD).repeat_interleave(there)
        made = torch.zeros_like(rows)
        for expert in range(own):
            mine = (which == expert).nonzero().flatten()
            inner = functional.silu(rows[mine] @ gate[expert].t()) * (rows[mine] @ up[expert].t())
            made = made.index_add(0, mine, inner @ down[expert].t())
        home = _Exchanged.apply(made, come, sent) * weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x).index_add(0, order // TOP, home)
        found = torch.autograd.grad(out, (x, router, *held), grad)
        return out.detach(), found[0], found[1], *(one.flatten(0, 1) for one in found[2:])

    return run


def theirs() -> Side:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": WIDTH}
    module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, norm_topk_prob=True)).model.layers[0].mlp
    gate, up, down = (
        drawn(*WEIGHTS[name], seed=seed).unflatten(0, (EXPERTS, -1))
        for seed, name in enumerate(("gate", "up", "down"), 1)
    )
    with torch.no_grad():
        module.gate.weight.copy_(drawn(*WEIGHTS["router"], seed=0))
        module.experts.gate_up_proj.copy_(torch.cat([gate, up], 1))
        module.experts.down_proj.copy_(down)

    def run(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x = x.detach()[None].requires_grad_()
        out = module(x)
        out.backward(grad[None])
        both = module.experts.gate_up_proj.grad
        made = (module.gate.weight.grad, both[:, :WIDTH].flatten(0, 1), both[:, WIDTH:].flatten(0, 1))
        found = out.detach()[0], x.grad[0], *made, module.experts.down_proj.grad.flatten(0, 1)
        module.zero_grad()
        return found

    return run


def shared(rank: int, world: int, tokens: int, pairs: int, link: bool) -> dict[str, Any]:
    """As :func:`compared`: with something beside exchanges, and without."""
    with patch.object(dist, "all_to_all_single", over_link if link else exchange):
        return timed({"ours": ours(True, SHARED), "other": ours(True, SHARED, beside=False)}, rank, tokens, pairs)


def compared(rank: int, world: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Seconds of each side, and how far their results are apart."""
    if world > 1:
        return timed({"ours": ours(spread=True), "other": plain()}, rank, tokens, pairs)
    return timed({"ours": ours(spread=False), "other": theirs()}, rank, tokens, pairs)


def timed(sides: dict[str, Side], rank: int, tokens: int, pairs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    given = drawn(tokens, HIDDEN, seed=10 + rank) * HIDDEN**0.5, drawn(tokens, HIDDEN, seed=20 + rank)
    results = {name: side(*given) for name, side in sides.items()}
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*results.values(), strict=True))
    taken: dict[str, list[float]] = {name: [] for name in (*sides, "again")}
    for number in range(pairs):
        order = ["ours", "other", "again"] if number % 2 else ["again", "other", "ours"]
        for name in order:
            dist.barrier()
            began_s = time.perf_counter()
            sides["ours" if name == "again" else name](*given)
            taken[name].append(time.perf_counter() - began_s)
    return {"apart": apart, "taken": taken}


def ratio(answers: list[dict[str, Any]], name: str) -> list[float]:
    """Quartiles of ours over another side, of the slower rank in each round."""

    def slowest(side: str) -> list[float]:
        return [max(times) for times in zip(*(answer["taken"][side] for answer in answers), strict=True)]

    return statistics.quantiles([a / b for a, b in zip(slowest("ours"), slowest(name), strict=True)], n=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path, default=None)
    chosen, told = parser.parse_args(), dict[str, Any]()
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"torch {torch.__version__}, {load}, {chosen.tokens} tokens a rank")
    comparisons: dict[str, tuple[int, Callable[..., dict[str, Any]], tuple[bool, ...]]] = {
        "a plain all-to-all loop, ep 2": (WORLD, compared, ()),
        "transformers' module, one process": (1, compared, ()),
        "nothing beside exchanges, ep 2": (WORLD, shared, (False,)),
        f"the same, links of {LINK:.0e} bytes a second": (WORLD, shared, (True,)),
    }
    for what, (world, function, more) in comparisons.items():
        with RankPool(world) as pool:
            answers = pool.run(function, chosen.tokens, chosen.pairs, *more, world=world, timeout_s=3600)
        other, again = ratio(answers, "other"), ratio(answers, "again")
        apart = max(answer["apart"] for answer in answers)
        told[what] = {"other": other, "again": again, "apart": apart}
        quartiles = f"{other[1]:.3f} ({other[0]:.3f} to {other[2]:.3f})"
        print(f"{what}: {quartiles} of its time; A/A {again[1]:.3f}; apart {apart:.1e}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
