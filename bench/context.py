"""Attention over two gloo ranks of one thread each, forward and backward, against plain loops of the same; and a step
of a small model with its rows on two ranks beside one rank that has them whole.

    python bench/context.py [--pairs 20] [--tokens 8192] [--json FILE]

The plain ring has the same zigzag pieces: keys and values go around by batch_isend_irecv while torch's flash operation
computes with those that are there, outputs are joined by their log-sum-exps, and gradients of keys and values go round
behind them. The plain Ulysses exchanges by all_to_all_single around torch's scaled_dot_product_attention. Both are for
whole causal rows alone; Shardwise's are the operations that training runs. Rounds are interleaved, each side first in
every other one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwise.distributed.meshes import meshes
from shardwise.models.attention import Attention, MaskSpec
from shardwise.models.config import model_spec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import MAX_STEPS, OPTIM, job_of
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.step import step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.recipe import Recipe, Run
from shardwise.techniques import cp

WORLD, HEADS, KEY_HEADS, HEAD_DIM = 2, 8, 2, 64
SPEC = model_spec("context", 2048, 256, 640, 4, 4, 2, 64, max_position_embeddings=1 << 20)
aten = torch.ops.aten
Side = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""From q, k, v and the gradient of the output, of a rank's tokens: the output and the gradients."""


def ours(kind: str, tokens: int) -> Side:
    layout = Layout(cp=WORLD, ulysses=WORLD if kind == "ulysses" else 1)
    module = Attention(model_spec("seam", 1, HEADS * HEAD_DIM, 8, 1, HEADS, KEY_HEADS, HEAD_DIM))
    cp.apply([module], Plan(layout, cp_kind=kind), meshes(layout, "cpu"))  # type: ignore[arg-type]
    mask = MaskSpec(row_length=tokens)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        out, _ = module.inner(q, k, v, mask)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])

    return run


def _sent_on(tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    coming, rank = torch.empty_like(tensor), dist.get_rank()
    ops = [dist.P2POp(dist.isend, tensor, (rank + 1) % WORLD), dist.P2POp(dist.irecv, coming, (rank - 1) % WORLD)]
    return coming, dist.batch_isend_irecv(ops)


def _seen(source: int, half: int) -> tuple[slice, slice, bool]:
    """Queries and keys of zigzag pieces that see each other, and whether they are the same tokens."""
    if source == dist.get_rank():
        return slice(None), slice(None), True
    return (slice(None), slice(half), False) if source < dist.get_rank() else (slice(half, None), slice(None), False)


def plain_ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    rank, half = dist.get_rank(), q.shape[2] // 2
    out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -math.inf)
    keys = torch.stack([k, v])
    for turn in range(WORLD):
        coming, works = _sent_on(keys) if turn < WORLD - 1 else (keys, [])
        mine, theirs, same = _seen((rank - turn) % WORLD, half)
        given = q[:, :, mine], keys[0][:, :, theirs], keys[1][:, :, theirs]
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, same)
        joined = torch.logaddexp(lse[:, :, mine], part_lse)
        kept, added = (lse[:, :, mine] - joined).exp().unsqueeze(-1), (part_lse - joined).exp().unsqueeze(-1)
        out[:, :, mine] = out[:, :, mine] * kept + part * added
        lse[:, :, mine] = joined
        for work in works:
            work.wait()
        keys = coming
    grad_q, sums = torch.zeros_like(out), torch.zeros(2, *k.shape)
    keys = torch.stack([k, v])
    for turn in range(WORLD):
        coming, works = _sent_on(keys) if turn < WORLD - 1 else (keys, [])
        mine, theirs, same = _seen((rank - turn) % WORLD, half)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        given = grad[:, :, mine], q[:, :, mine], keys[0][:, :, theirs], keys[1][:, :, theirs], out[:, :, mine]
        of_q, of_k, of_v = backward(*given, lse[:, :, mine].contiguous(), 0.0, same)
        grad_q[:, :, mine] += of_q
        sums[0][:, :, theirs] += of_k
        sums[1][:, :, theirs] += of_v
        for work in works:
            work.wait()
        keys = coming
        sums, going = _sent_on(sums)
        for work in going:
            work.wait()
    return out, grad_q, sums[0], sums[1]


class _Exchanged(torch.autograd.Function):
    """[b,h,s,e], of which dim ``split`` is given away and dim ``join`` got."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.dims = split, join
        parts = torch.stack([part.contiguous() for part in x.chunk(WORLD, split)])
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts)
        return torch.cat([*out], join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        split, join = ctx.dims
        return _Exchanged.apply(grad, join, split), None, None


def plain_ulysses(*given: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    swapped = (_Exchanged.apply(x, 1, 2) for x in (q, k, v))
    out = _Exchanged.apply(functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True), 2, 1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])


def compared(rank: int, world: int, kind: str, tokens: int, pairs: int) -> dict[str, Any]:
    """Seconds of each side, and how far their results are apart."""
    torch.set_num_threads(1)
    sides: dict[str, Side] = {"ours": ours(kind, tokens), "plain": plain_ring if kind == "ring" else plain_ulysses}
    draw = torch.Generator().manual_seed(rank)

    def drawn(heads: int) -> Tensor:  # laid out as projections make them
        return torch.randn(1, tokens // WORLD, heads, HEAD_DIM, generator=draw).transpose(1, 2)

    given = drawn(HEADS), drawn(KEY_HEADS), drawn(KEY_HEADS), drawn(HEADS)
    results = {name: side(*given) for name, side in sides.items()}
    apart = max(float((a - b).abs().max()) for a, b in zip(*results.values(), strict=True))
    taken: dict[str, list[float]] = {name: [] for name in (*sides, "again")}
    for number in range(pairs):
        order = ["ours", "plain", "again"] if number % 2 else ["again", "plain", "ours"]
        for name in order:
            dist.barrier()
            began_s = time.perf_counter()
            sides["ours" if name == "again" else name](*given)
            taken[name].append(time.perf_counter() - began_s)
    return {"apart": apart, "taken": taken}


def steps(rank: int, world: int, tokens: int, layout: Layout, kind: str, count: int) -> dict[str, float]:
    """Seconds of a step of a small model, and the peak of the process."""
    torch.set_num_threads(1)
    plan = Plan(layout, Batch(1, 1, tokens, 512), Shard("ddp"), Precision(), cp_kind=kind)  # type: ignore[arg-type]
    groups, job = meshes(layout, "cpu"), job_of(SPEC, plan, count)
    state = build(Recipe(optim=OPTIM, run=Run()), SPEC, plan, groups, torch.device("cpu"))
    rules = StepRules(plan, groups, OPTIM, MAX_STEPS, finish_of(job.setting.method, plan))
    taken = []
    for number in range(count):
        batches = parity.share_of_rank(job.batch(number), groups, plan)
        terms, _ = reduce.count_supervised(groups, sum(batch.terms() for batch in batches))
        began_s = time.perf_counter()
        step(state, batches, terms, rules)
        taken.append(time.perf_counter() - began_s)
    return {
        "step_s": statistics.median(taken[1:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def ratio(answers: list[dict[str, Any]], name: str) -> list[float]:
    """Quartiles of ours over another side, of the slower rank in each round."""

    def slowest(side: str) -> list[float]:
        return [max(times) for times in zip(*(answer["taken"][side] for answer in answers), strict=True)]

    found = [a / b for a, b in zip(slowest("ours"), slowest(name), strict=True)]
    return statistics.quantiles(found, n=4) if len(found) > 1 else found * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, default=None)
    chosen, told = parser.parse_args(), dict[str, Any]()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {chosen.tokens} tokens")
    with RankPool(WORLD) as pool:
        for kind in ("ring", "ulysses"):
            answers = pool.run(compared, kind, chosen.tokens, chosen.pairs, timeout_s=3600)
            quartiles = {name: ratio(answers, name) for name in ("plain", "again")}
            told[kind] = quartiles | {"apart": max(answer["apart"] for answer in answers)}
            plain, again = ([f"{value:.3f}" for value in quartiles[name]] for name in ("plain", "again"))
            middle = f"{plain[1]} ({plain[0]} to {plain[2]}) of a plain loop"
            print(f"{kind}: {middle}; A/A {again[1]} ({again[0]} to {again[2]})")
    sides = {"one rank": (Layout(), "ring"), "ring": (Layout(cp=2), "ring"), "gather": (Layout(cp=2), "gather")}
    for name, (layout, kind) in (sides | {"ulysses": (Layout(cp=2, ulysses=2), "ulysses")}).items():
        with RankPool(layout.world) as pool:  # of its own, for its own peak of memory
            found = pool.run(steps, chosen.tokens, layout, kind, 4, world=layout.world, timeout_s=3600)
        told[f"step, {name}"] = found
        seconds, peak = (max(each[key] for each in found) for key in ("step_s", "peak_mib"))
        print(f"step of {chosen.tokens} tokens, {name}: {seconds:.2f} s, {peak:.0f} MiB a process")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
