"""A small mixture of experts and the layouts in which the losses of its routers are proved."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardwise.data.micro_batch import collate
from shardwise.distributed.meshes import meshes
from shardwise.methods.loss import mask
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoE
from shardwise.prove import parity
from shardwise.prove.workload import MAX_STEPS, OPTIM, job_of
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.step import StepStats, step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Remat, Shard
from shardwise.spec.recipe import Recipe, Run
from tests.parity import drawn
from tests.parity.cases import FP64

MOE = model_spec(
    "tiny-experts",
    67,
    16,
    32,
    2,
    4,
    4,
    4,
    initializer_range=0.3,
    num_experts=5,
    experts_per_token=2,
    expert_size=12,
    shared_expert_size=8,
    shared_expert_gate=True,
    router_aux_loss_coef=2.0,  # large, so that what is wrong with it shows
    router_z_loss_coef=0.5,
)
DEEP = with_fields(MOE, num_hidden_layers=4, dense_layers=(1,))
"""For pipelines; a layer without experts is among them."""
ROWS, LENGTH = 8, 12


def plan(layout: Layout = Layout(), strategy: str = "ddp", accumulation: int = 1, **more: object) -> Plan:  # noqa: B008
    """Eight rows a step, however they are split."""
    return Plan(
        layout,
        Batch(ROWS // accumulation // layout.dp, accumulation, LENGTH, loss_chunk_tokens=7),
        Shard(strategy, bucket_bytes=4096),  # type: ignore[arg-type]
        FP64,
        sequence_parallel=layout.tp > 1,
        **more,  # type: ignore[arg-type]
    )


FULL, SELECTIVE = Remat("full"), Remat("selective")
TWO, FOUR = (1, 3), (1,) * 4
PLANS = {  # the last rank of "tp 4, uneven" has a token of padding; of "cp x tp" ranks begin amid a row
    "alone": plan(),
    "2 micro-batches, full": plan(accumulation=2, remat=FULL),
    "4 micro-batches, selective": plan(accumulation=4, remat=SELECTIVE),
    "ddp": plan(Layout(dp_replicate=2), remat=FULL),
    "zero3": plan(Layout(dp_shard=2), "zero3", 2, remat=SELECTIVE),
    "hsdp": plan(Layout(dp_replicate=2, dp_shard=2), "zero3", 2),
    "tp": plan(Layout(tp=2), accumulation=2, remat=SELECTIVE),
    "tp, whole stream": replace(plan(Layout(tp=2), remat=FULL), sequence_parallel=False),
    "tp 4, uneven": replace(plan(Layout(tp=4)), batch=Batch(3, 1, 13, 7)),
    "cp": plan(Layout(cp=2), remat=FULL),
    "cp, ulysses": plan(Layout(cp=2, ulysses=2), "zero3", 2, cp_kind="ulysses"),
    "cp x tp": replace(plan(Layout(cp=2, tp=2), remat=SELECTIVE), batch=Batch(3, 1, 20, 7)),
    "dp x tp": plan(Layout(dp_shard=2, tp=2), "zero3", 2, remat=FULL),
    "1f1b": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, TWO), remat=FULL),
    "zbv": plan(Layout(pp=2, v_shaped=True), accumulation=4, pipeline=Pipeline("zbv", 2, FOUR), remat=SELECTIVE),
    "interleaved x dp": plan(
        Layout(pp=2, dp_shard=2), "zero3", accumulation=2, pipeline=Pipeline("interleaved", 2, FOUR)
    ),
}


def model(of: Plan) -> ModelSpec:
    """What is trained under this plan."""
    return DEEP if of.layout.pp > 1 else MOE


def counted(rank: int, world: int, plans: list[Plan]) -> list[list[StepStats]]:
    """What two steps under each plan tell."""
    return [two_steps(model(plan), plan) for plan in plans]


def two_steps(spec: ModelSpec, plan: Plan) -> list[StepStats]:
    """What each tells."""
    job = job_of(spec, plan, 2, drawn.RANDOM)
    groups = meshes(plan.layout, "cpu")
    recipe = Recipe(optim=OPTIM, run=Run(seed=job.seed))
    state = build(recipe, job.spec, plan, groups, parity.CPU, job.setting.draw)
    rules = StepRules(plan, groups, OPTIM, MAX_STEPS, finish_of(job.setting.method, plan))
    found = []
    for number in range(2):
        batches = parity.share_of_rank(job.batch(number), groups, plan)
        terms, _ = reduce.count_supervised(groups, sum(batch.terms() for batch in batches))
        found.append(step(state, batches, terms, rules))
    return found


def expected(plan: Plan) -> tuple[dict[str, float], dict[int, list[float]]]:
    """Of the first step the losses of the routers and the loads, from the model's own logits of whole rows."""
    job = job_of(model(plan), plan, 1, drawn.RANDOM)
    decoder, logits = Decoder(job.spec).double(), dict[int, Tensor]()
    for number, block in enumerate(decoder.layers):
        if isinstance(block.mlp, MoE):
            block.mlp.router.register_forward_hook(lambda _, args, out, number=number: logits.update({number: out}))
    batch = collate(job.batch(0))
    with torch.no_grad():
        torch.func.functional_call(decoder, parity.plain_parameters(job), (batch.ids, batch.positions, mask(batch)))
    auxiliary, z, loads = 0.0, 0.0, {}
    for number, of_layer in logits.items():
        chosen = of_layer.topk(MOE.experts.experts_per_token).indices
        loads[number] = [float((chosen == expert).sum()) for expert in range(MOE.experts.num_experts)]
        for row in range(len(batch.ids)):
            own = of_layer.unflatten(0, batch.ids.shape)[row]
            ids = own.topk(MOE.experts.experts_per_token).indices
            share = torch.stack([(ids == expert).sum() for expert in range(MOE.experts.num_experts)]).double() / len(
                own
            )
            auxiliary += float(MOE.experts.num_experts * (share * own.softmax(-1).mean(0)).sum())
            z += float(own.logsumexp(-1).square().mean())
    terms = len(batch.ids) * len(logits)
    return {"router_aux_loss": auxiliary / terms, "router_z_loss": z / terms}, loads
