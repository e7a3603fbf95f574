"""Step time and memory of Shardwise against a plain hand-written loop, on two gloo ranks of one thread each.

    python bench/step.py [--pairs 30] [--case ddp-fp32 ...] [--rows 2] [--json FILE]
    python bench/step.py --compile [--case ddp-bf16 ...]        # compiled blocks against eager ones instead
    python bench/step.py --frameworks                           # against Accelerate and DeepSpeed instead
    python bench/step.py --case tp-fp32 tp_sp-fp32              # against torch's parallelize_module
    python bench/step.py --against CHECKOUT                     # against another version (bench/versions.py)

The model is a Llama of 32.5 M parameters at 512 tokens. Shardwise runs the plan that the planner chooses, through
techniques.apply and runtime.step, with the count of tokens that the training loop makes before every step. The plain
loop is transformers' LlamaForCausalLM (sdpa) from the same weights on the same batches, clip_grad_norm_ and
AdamW(fused=True), under DistributedDataParallel (gradient_as_bucket_view; bf16: autocast over fp32 weights) or under
fully_shard, block by block (bf16: MixedPrecisionPolicy with fp32 reduction; zero2: reshard_after_forward=False), or cut
by parallelize_module as torch's tutorial says to (tp; ``tp_sp`` has sequence parallelism on our side).
Accelerate (DDP) and DeepSpeed (ZeRO-1, 2, 3) train the same model with the same optimizer of torch, as their own pages
say to; they are installed by ``pip install '.[frameworks]'``.

Every case runs in one process group: a step of each program in turn, in an order that changes from round to round.
Both programs have the same setting of products. A step's time is that of the slower rank. ``ratio`` is the median
over rounds of Shardwise's time over the other's; ``A/A`` is the same of Shardwise against itself in the round before;
``cpu`` the median ratio of processor time over both ranks, which other programs on the machine disturb less. ``memory``
is the ratio of the peaks of torch's allocations in a third step, everything held included, measured in separate runs by
the profiler's memory records.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import versions

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import meshes
from shardwise.models import init
from shardwise.models.config import model_spec, parameter_count, parameter_shapes, to_hf
from shardwise.models.hf_names import to_hf_name
from shardwise.planner import search
from shardwise.prove.pool import RankPool
from shardwise.runtime.build import build
from shardwise.runtime.passes import finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.step import StepRules, step
from shardwise.spec.cluster import local_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, OptimSection, Parallel, PrecisionSection, Recipe, Recompute, Run, Train

SPEC = model_spec("bench", 8192, 512, 1280, 8, 8, 8, 64, max_position_embeddings=512)
SEQ_LEN = 512
WORLD = 2
BATCHES = 4
WARMUP = 2
OPTIM = OptimSection(learning_rate=3e-4, schedule="constant", weight_decay=0.1, max_grad_norm=1.0)
NUMBERS = {"fp32": ("fp32", "highest"), "fp32-medium": ("fp32", "medium"), "bf16": ("bf16", "highest")}
FRAMEWORK_CASES = [f"{strategy}-{number}" for strategy in ("ddp", "zero1", "zero2", "zero3") for number in NUMBERS]
TENSOR_CASES = ["tp-fp32", "tp_sp-fp32"]
CASES = [f"{strategy}-{number}" for number in NUMBERS for strategy in ("ddp", "zero2", "zero3")]

Step = Callable[[torch.Tensor], float]
"""Trains on ids [rows, seq] and returns the loss."""


@dataclass(frozen=True)
class Case:
    """What is compared. ``sides`` are names of :data:`SIDES`; the first is Shardwise."""

    name: str
    plan: Plan
    sides: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.plan.batch.micro_batch_size


@dataclass
class Result:
    """What one case gave: medians in seconds, ratios by side."""

    case: str
    rounds: int
    loss_chunk_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_ratio: dict[str, float] = field(default_factory=dict)
    ratio: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    first_step_s: dict[str, float] = field(default_factory=dict)


def plan_of(name: str, rows: int) -> Plan:
    """The plan that the planner makes for a case."""
    strategy, _, number = name.partition("-")
    compute, matmul = NUMBERS[number]
    tensor = Parallel(tp=WORLD, sequence_parallel=strategy == "tp_sp")
    recipe = Recipe(
        run=Run(device="cpu", nproc=WORLD),
        train=Train(seq_len=SEQ_LEN, micro_batch_size=rows, gradient_accumulation_steps=1),
        optim=OPTIM,
        parallel=tensor if name in TENSOR_CASES else Parallel(strategy=strategy),  # type: ignore[arg-type]
        precision=PrecisionSection(compute=compute, matmul=matmul),  # type: ignore[arg-type]
        recompute=Recompute(mode="none"),
    )
    return search.choose(recipe, SPEC, local_cluster(WORLD, "cpu"))


def shardwise(plan: Plan) -> Step:
    """The product: the runtime's step over the parts that the techniques made."""
    groups = meshes(plan.layout, "cpu")
    state = build(Recipe(optim=OPTIM), SPEC, plan, groups, torch.device("cpu"))
    rules = StepRules(plan, groups, OPTIM, 10_000, finish_of(Method(), plan))

    def train(ids: torch.Tensor) -> float:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        batch = MicroBatch(ids, labels, positions, None, ids.shape[1])
        supervised, _ = count_supervised(groups, batch.supervised_tokens())
        return step(state, [batch], supervised, rules).loss

    return train


def compiled(plan: Plan) -> Step:
    return shardwise(replace(plan, compile=True))


def plain_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in to_hf(SPEC).items() if value is not None} | {"use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="sdpa"))
    weights = {
        to_hf_name(name): init.fill(name, shape, [slice(0, size) for size in shape], Run().seed, SPEC)
        for name, shape in parameter_shapes(SPEC).items()
    }
    model.load_state_dict(weights)
    return model.train()


def plain_loop(plan: Plan, model: torch.nn.Module, autocast: bool) -> Step:
    """What anyone would write around a model. The ranks' losses are averaged, so that both sides tell the same.
    DTensors and plain tensors, where a model has both, are updated and clipped apart: torch's kernels take no
    mixture."""
    from torch.distributed.tensor import DTensor

    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
    groups = [{"params": parameters} for parameters in kinds if parameters]
    optimizer = torch.optim.AdamW(
        groups, OPTIM.learning_rate, (OPTIM.beta1, OPTIM.beta2), OPTIM.eps, OPTIM.weight_decay, fused=True
    )

    def clip() -> None:
        assert OPTIM.max_grad_norm is not None
        if len(groups) == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm)
            return
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) for parameters in kinds
        ]
        total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for parameters in kinds:
            torch.nn.utils.clip_grads_with_norm_(parameters, OPTIM.max_grad_norm, total)

    def train(ids: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told = loss.detach()
        dist.all_reduce(told)
        return float(told) / WORLD

    return train


def plain_ddp(plan: Plan) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(plain_model(), gradient_as_bucket_view=True)
    return plain_loop(plan, model, plan.precision.compute == "bf16")


def plain_fsdp(plan: Plan) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = plain_model()
    settings: dict[str, Any] = {"mesh": init_device_mesh("cpu", (WORLD,))}
    if plan.precision.compute == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reshard = plan.shard.strategy == "zero3"
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=reshard, **settings)
    fully_shard(model, reshard_after_forward=None if reshard else False, **settings)
    return plain_loop(plan, model, False)


def plain_tp(plan: Plan) -> Step:
    """Torch's own tensor parallelism, as its tutorial says to; losses are alike on all ranks, and so is their mean."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = plain_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    within: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for block in model.model.layers:
        parallelize_module(block, mesh, within)
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, ends | {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return plain_loop(plan, model, False)


def rank_variables() -> None:
    """What a launcher would have set: both look for it, and then take the process group that is there."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # theirs, of names that torch is about to change
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}


def accelerate_ddp(plan: Plan) -> Step:
    rank_variables()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if plan.precision.compute == "bf16" else "no")
    plain = plain_model()
    optimizer = torch.optim.AdamW(
        plain.parameters(), OPTIM.learning_rate, (OPTIM.beta1, OPTIM.beta2), OPTIM.eps, OPTIM.weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(plain, optimizer)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)

    def train(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        dist.all_reduce(told)
        return float(told) / WORLD

    return train


def deepspeed_zero(plan: Plan) -> Step:
    rank_variables()
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    plain = plain_model()
    optimizer = torch.optim.AdamW(
        plain.parameters(), OPTIM.learning_rate, (OPTIM.beta1, OPTIM.beta2), OPTIM.eps, OPTIM.weight_decay, fused=True
    )
    config = {
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch_size,
        "gradient_clipping": OPTIM.max_grad_norm,
        "zero_optimization": {"stage": int(plan.shard.strategy.removeprefix("zero"))},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": plan.precision.compute == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer, config=config)

    def train(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        told = loss.detach().float()
        dist.all_reduce(told)
        return float(told) / WORLD

    return train


SIDES: dict[str, Callable[[Plan], Step]] = {
    "shardwise": shardwise,
    "compiled": compiled,
    "plain ddp": plain_ddp,
    "plain fsdp": plain_fsdp,
    "plain tp": plain_tp,
    "Accelerate": accelerate_ddp,
    "DeepSpeed": deepspeed_zero,
}


def set_up(rank: int, case: Case) -> list[torch.Tensor]:
    """Settings of a rank; the batches that all its programs see."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(case.plan.precision.matmul)
    generator = torch.Generator().manual_seed(0 if case.plan.layout.tp > 1 else rank)
    return [torch.randint(SPEC.vocab_size, (case.rows, SEQ_LEN), generator=generator) for _ in range(BATCHES)]


@dataclass
class Times:
    """Seconds of each step of one program on one rank, and of processor time; ``first`` is the very first step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first: float = 0.0


def times(rank: int, world: int, case: Case, rounds: int) -> dict[str, Times]:
    """What the steps of each side take."""
    batches = set_up(rank, case)
    programs = {side: SIDES[side](case.plan) for side in case.sides}
    taken = {side: Times() for side in case.sides}
    losses: dict[str, list[float]] = {side: [] for side in case.sides}
    for number in range(rounds + WARMUP):
        for side in case.sides if number % 2 else reversed(case.sides):
            dist.barrier()
            begun, begun_cpu = time.perf_counter(), time.process_time()
            losses[side].append(programs[side](batches[number % BATCHES]))
            wall, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
            if number == 0:
                taken[side].first = wall
            if number >= WARMUP:
                taken[side].wall.append(wall)
                taken[side].cpu.append(cpu)
    tolerance = 1e-4 if case.plan.precision.compute == "fp32" else 2e-3
    for side in case.sides:
        told = losses[side][0], losses[case.sides[0]][0]
        assert math.isclose(*told, rel_tol=tolerance), f"{side} does not compute the same: {told}"
    return taken


def peak(rank: int, world: int, case: Case, side: str) -> int:
    """The most that torch has allocated at any time of the third step, the model and the optimizer included."""
    from torch.profiler import ProfilerActivity, profile, record_function

    batches = set_up(rank, case)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        program = SIDES[side](case.plan)
        for number in range(3):
            with record_function(f"step {number}"):
                program(batches[number])
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    begun = next(event.start_ns() for event in events if event.name() == "step 2")
    running = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        running += event.nbytes()
        if event.start_ns() >= begun:
            highest = max(highest, running)
    return highest


def divided(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high, "min": min(ratios), "max": max(ratios)}


def run(pool: RankPool, case: Case, rounds: int, memory: bool) -> Result:
    result = Result(case.name, rounds, case.plan.batch.loss_chunk_tokens)
    if rounds:
        pool.close()  # a library may hold on to the process group of the case before
        compare(result, case, pool.run(times, case, rounds, timeout_s=3600))
    if memory:
        for side in case.sides:
            pool.close()  # what a library keeps from one program must not count for the next
            result.peak_bytes[side] = max(pool.run(peak, case, side, timeout_s=600))
    return result


def of_versions(case: Case, checkout: Path, rounds: int, exact: bool) -> Result:
    """This version against that in ``checkout``."""
    result = Result(case.name, rounds, case.plan.batch.loss_chunk_tokens)
    taken = versions.compare(checkout, case.name, case.rows, rounds, exact)
    ratios(result, case, {side: taken[side]["wall"] for side in taken}, {side: taken[side]["cpu"] for side in taken})
    return result


def compare(result: Result, case: Case, ranks: list[dict[str, Times]]) -> None:
    wall = {side: [max(pair) for pair in zip(*(r[side].wall for r in ranks), strict=True)] for side in case.sides}
    cpu = {side: [sum(pair) for pair in zip(*(r[side].cpu for r in ranks), strict=True)] for side in case.sides}
    result.first_step_s = {side: max(r[side].first for r in ranks) for side in case.sides}
    ratios(result, case, wall, cpu)


def ratios(result: Result, case: Case, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    """Of each round's seconds, the slower rank's, and processor seconds, all ranks'."""
    own = case.sides[0]
    for side in case.sides:
        result.seconds[side] = statistics.median(wall[side])
        if side != own:
            result.ratio[side] = spread(divided(wall[own], wall[side]))
            result.cpu_ratio[side] = statistics.median(divided(cpu[own], cpu[side]))
    result.ratio["A/A"] = spread([after / before for before, after in pairwise(wall[own])])


HEADER = ("case", "against", "ratio", "quartiles", "extremes", "A/A, quartiles", "cpu", "step", "memory", "peak")
WIDTHS = (15, 10, 5, 14, 14, 22, 5, 7, 6, 8)


def line(cells: Sequence[str]) -> None:
    print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip(), flush=True)


def show(result: Result, case: Case) -> None:
    own = case.sides[0]
    for side in case.sides[1:]:
        cells = [result.case, side, *[""] * 8]
        if result.ratio:
            ratio, same = result.ratio[side], result.ratio["A/A"]
            cells[2:8] = (
                f"{ratio['median']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
                f"{ratio['min']:.3f} to {ratio['max']:.3f}",
                f"{same['median']:.3f}, {same['low']:.3f} to {same['high']:.3f}",
                f"{result.cpu_ratio[side]:.3f}",
                f"{result.seconds[own] * 1e3:.0f} ms",
            )
        if result.peak_bytes:
            cells[8] = f"{result.peak_bytes[own] / result.peak_bytes[side]:.3f}"
            cells[9] = f"{result.peak_bytes[own] / 2**20:.0f} MiB"
        line(cells)
    if "compiled" in result.first_step_s:
        print("first step: " + ", ".join(f"{side} {taken:.1f} s" for side, taken in result.first_step_s.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="0 measures memory alone")
    parser.add_argument("--case", nargs="+", choices=sorted({*CASES, *FRAMEWORK_CASES, *TENSOR_CASES}), default=None)
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch on a rank")
    parser.add_argument("--compile", action="store_true", help="compare compiled blocks with eager ones")
    parser.add_argument("--frameworks", action="store_true", help="compare with Accelerate and DeepSpeed")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the version in this directory")
    parser.add_argument("--exact", action="store_true", help="with --against: the losses must be equal bit by bit")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    if chosen.against is not None and not (chosen.against / "bench" / "step.py").is_file():
        parser.error(f"--against: {chosen.against} is no checkout of Shardwise with a bench/step.py")
    cases = []
    usual = FRAMEWORK_CASES[:3] if chosen.compile else FRAMEWORK_CASES if chosen.frameworks else CASES
    for name in chosen.case or usual:
        rivals = ("plain ddp", *(["plain fsdp"] if name[:4] == "zero" else []))
        rivals = ("plain tp",) if name in TENSOR_CASES else rivals
        if chosen.frameworks:
            rivals = ("Accelerate",) if name.startswith("ddp") else ("DeepSpeed",)
        rivals = ("before",) if chosen.against else rivals
        sides = ("compiled", "shardwise") if chosen.compile else ("shardwise", *rivals)
        cases.append(Case(name, plan_of(name, chosen.rows), sides))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes lines between ours
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
    print(f"{parameter_count(SPEC):,} parameters, {chosen.rows} x {SEQ_LEN} tokens a rank, {chosen.pairs} rounds")
    line(HEADER)
    results = []
    with RankPool(WORLD) as pool:
        for case in cases:
            if chosen.against:
                results.append(of_versions(case, chosen.against, chosen.pairs, chosen.exact))
            else:
                results.append(run(pool, case, chosen.pairs, chosen.memory))
            show(results[-1], case)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
