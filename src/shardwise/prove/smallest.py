"""The smallest layout that fails: what a plan does is switched off, one after another, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardwise import techniques
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.family import FULL, SLIDING
from shardwise.models.kinds import DeltaSpec, LatentSpec
from shardwise.models.mixers import MIXERS
from shardwise.prove.regimes import Case
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import MESH, Axis, least_dp_shard
from shardwise.spec.plan import Offload, Optim, Pipeline, Plan, Precision, Remat, Shard

Outcome = Literal["passes", "fails", "fails otherwise", "cannot be"]
"""Of a case, compared with how the first one failed."""


@dataclass(frozen=True)
class Smallest:
    """The smallest case that fails. ``words``: what is on in it; without any one of ``needed`` it passes, and without
    any one of ``changing`` it fails in another way."""

    spec: ModelSpec
    plan: Plan
    words: tuple[str, ...]
    needed: tuple[str, ...]
    changing: tuple[str, ...] = ()

    def __str__(self) -> str:
        passes = f"; it passes without {', or without '.join(self.needed)}" if self.needed else ""
        other = f"; it fails in another way without {', or without '.join(self.changing)}" if self.changing else ""
        return f"{', '.join(self.words) or 'one process, with everything switched off'}{passes}{other}"


def smallest(spec: ModelSpec, plan: Plan, outcome: Callable[[ModelSpec, Plan], Outcome]) -> Smallest:
    """Switch off all of a failing case without which it still fails in the same way, and return what is left.
    ``outcome`` is asked of legal cases."""
    case = (spec, plan)
    left = dict[str, Outcome]()
    before = None
    while case != before:  # what was needed before others were switched off may no longer be
        before, left = case, {}
        for name, off in SWITCHES.items():
            tried = off(*case)
            if tried == case or techniques.check(*tried, parse_cluster(f"{tried[1].layout.world}xCPU")):
                continue
            if (came := outcome(*tried)) == "fails":
                case = tried
            elif came != "cannot be":
                left[_words(name, *case)] = came
    words = tuple(_words(name, *case) for name, off in SWITCHES.items() if off(*case) != case)
    needed = tuple(name for name, came in left.items() if came == "passes")
    return Smallest(*case, words, needed, tuple(name for name in left if name not in needed))


def _alone(axis: Axis) -> Callable[[ModelSpec, Plan], Case]:
    """Return a switch that leaves one rank along an axis; where ranks along it read other rows, that one reads them
    all."""

    def off(spec: ModelSpec, plan: Plan) -> Case:
        rows = plan.batch.micro_batch_size
        if axis in ("dp_replicate", "dp_shard"):
            rows *= plan.layout.degree(axis)
        return spec, replace(_laid_out(plan, **{axis: 1}), batch=replace(plan.batch, micro_batch_size=rows))

    return off


def _laid_out(plan: Plan, **changes: Any) -> Plan:
    """The plan with these changes of its layout, on one node."""
    layout = replace(plan.layout, **changes)
    return replace(plan, layout=replace(layout, ranks_per_node=layout.world))


def _plain_schedule(spec: ModelSpec, plan: Plan) -> Case:
    if plan.layout.pp == 1:
        return spec, plan
    split, each = plan.pipeline.split, plan.pipeline.stages_per_rank
    joined = tuple(sum(split[place : place + each]) for place in range(0, len(split), each))
    return spec, replace(plan, layout=replace(plan.layout, v_shaped=False), pipeline=Pipeline(split=joined))


def _gathered(spec: ModelSpec, plan: Plan) -> Case:
    whole = plan.layout.cp == 1
    return spec, plan if whole else replace(plan, layout=replace(plan.layout, ulysses=1), cp_kind="gather")


def _no_accumulation(spec: ModelSpec, plan: Plan) -> Case:
    if plan.layout.pp > 1:
        return spec, plan
    rows = plan.batch.micro_batch_size * plan.batch.accumulation
    return spec, replace(plan, batch=replace(plan.batch, micro_batch_size=rows, accumulation=1))


def _no_ep(spec: ModelSpec, plan: Plan) -> Case:
    """Return the same ranks, each of which has all experts."""
    whole = replace(plan, layout=replace(plan.layout, ep=1))
    return spec, whole if plan.sharded else _ddp(spec, whole)[1]


def _no_experts(spec: ModelSpec, plan: Plan) -> Case:
    """Put an MLP in the place of experts in every layer."""
    dense = {"num_experts": 0, "experts_per_token": 0, "expert_size": 0, "expert_bias": False, "router_bias": False}
    plain = with_fields(_no_shared_expert(spec, plan)[0], sigmoid=None, softmax_groups=None)
    return with_fields(plain, dense_layers=(), **dense), plan


def _no_shared_expert(spec: ModelSpec, plan: Plan) -> Case:
    return with_fields(spec, shared_expert_size=0, shared_expert_gate=False), plan


def _no_biases(spec: ModelSpec, plan: Plan) -> Case:
    off: dict[str, Any] = dict.fromkeys(("attention_bias", "mlp_bias", "expert_bias", "router_bias"), False)
    return with_fields(spec, attention_output_bias=None, **off), plan


def _ddp(spec: ModelSpec, plan: Plan) -> Case:
    least = least_dp_shard(plan.layout)
    layout = replace(plan.layout, dp_replicate=plan.layout.dp // least, dp_shard=least)
    return spec, replace(plan, layout=layout, shard=Shard("ddp", bucket_bytes=plan.shard.bucket_bytes))


def _wide_products(spec: ModelSpec, plan: Plan) -> Case:
    wide = replace(plan.precision, products="compute", scales="block", exclude=(), gather="compute")
    return spec, replace(plan, precision=wide)


def _one_dtype(spec: ModelSpec, plan: Plan) -> Case:
    own = plan.precision
    kept = Precision(products=own.products, scales=own.scales, exclude=own.exclude, gather=own.gather)
    return spec, plan if own.compute == "fp64" else replace(plan, precision=kept)


def _one_chunk(spec: ModelSpec, plan: Plan) -> Case:
    batch = plan.batch
    least = batch.micro_batch_size * plan.row_tokens
    return spec, replace(plan, batch=replace(batch, loss_chunk_tokens=max(least, batch.loss_chunk_tokens)))


def _feature(**off: Any) -> Callable[[ModelSpec, Plan], Case]:
    """Return a switch that sets these fields of the model to these values; a model in transformers' own modules stays
    as it is: there they are its config's."""
    return lambda spec, plan: (spec if spec.hf_model else with_fields(spec, **off), plan)


def _no_window(spec: ModelSpec, plan: Plan) -> Case:
    """Have every layer see all tokens before it."""
    if spec.attention.sliding_window is None:
        return spec, plan
    others = tuple(FULL if kind == SLIDING else kind for kind in spec.attention.layer_types)
    return _feature(sliding_window=None, local_rope_theta=None, layer_types=others)(spec, plan)


FEATURES: dict[str, Callable[[ModelSpec, Plan], Case]] = {
    "losses of routers": _feature(router_aux_loss_coef=0.0, router_z_loss_coef=0.0),
    "capacity of experts": _feature(expert_capacity=None),
    "window": _no_window,
    "cap of attention scores": _feature(attention_soft_cap=None),
    "cap of logits": _feature(final_soft_cap=None),
    "gate of attention": _feature(attention_gate=False),
    "attention sinks": _feature(attention_sinks=False),
    "norms of queries and keys": _feature(qk_norm=None),
    "scaled rotation": _feature(rope_scaling=None),
}
"""Of the model."""


def _attention(spec: ModelSpec) -> ModelSpec:
    """The model with softmax attention in all layers."""
    mixed = any(kind in MIXERS for kind in spec.attention.layer_types)
    types = () if mixed else spec.attention.layer_types
    return with_fields(spec, mixer="softmax", layer_types=types, **asdict(LatentSpec()), **asdict(DeltaSpec()))


SWITCHES: dict[str, Callable[[ModelSpec, Plan], Case]] = {
    "ep": _no_ep,
    "dp_replicate": _alone("dp_replicate"),
    "dp_shard": _alone("dp_shard"),
    "tp": lambda spec, plan: (spec, replace(_laid_out(plan, tp=1), sequence_parallel=False)),
    "cp": lambda spec, plan: (spec, replace(_laid_out(plan, cp=1, ulysses=1), cp_kind="ring")),
    "pp": lambda spec, plan: (spec, replace(_laid_out(plan, pp=1, v_shaped=False), pipeline=Pipeline())),
    "sequence parallelism": lambda spec, plan: (spec, replace(plan, sequence_parallel=False)),
    "strategy": _ddp,
    "kind of context parallelism": _gathered,
    "schedule": _plain_schedule,
    "recomputation": lambda spec, plan: (spec, replace(plan, remat=Remat())),
    "accumulation": _no_accumulation,
    "4-bit weights": lambda spec, plan: (spec, replace(plan, lora=plan.lora and replace(plan.lora, nf4=False))),
    "weights in float8": lambda spec, plan: (spec, replace(plan, lora=plan.lora and replace(plan.lora, float8=False))),
    "adapters": lambda spec, plan: (spec, replace(plan, lora=None)),
    "frozen weights": lambda spec, plan: (spec, replace(plan, frozen=())),
    "weights gathered as codes": lambda spec, plan: (
        spec,
        replace(plan, precision=replace(plan.precision, gather="compute")),
    ),
    "products in float8": _wide_products,
    "dtypes": _one_dtype,
    "optimizer": lambda spec, plan: (spec, replace(plan, optim=Optim())),
    "offload": lambda spec, plan: (spec, replace(plan, offload=Offload())),
    "chunks of the loss": _one_chunk,
    "shared expert": _no_shared_expert,
    "choice by sigmoids": lambda spec, plan: (with_fields(spec, sigmoid=None), plan),
    "groups of experts": lambda spec, plan: (with_fields(spec, softmax_groups=None), plan),
    "experts": _no_experts,
    "mixer": lambda spec, plan: (_attention(spec), plan),
    **FEATURES,
    "tied embeddings": lambda spec, plan: (replace(spec, tie_word_embeddings=False), plan),
    "biases": _no_biases,
}
"""How each thing is switched off; it is on where that changes the case."""


def _words(name: str, spec: ModelSpec, plan: Plan) -> str:
    """Something that is on, with its value."""
    layout, lora = plan.layout, plan.lora
    values: dict[str, str] = {
        **{axis: f"{axis} {layout.degree(axis)}" for axis in (*MESH, "ep")},
        "kind of context parallelism": plan.cp_kind,
        "offload": " and ".join(plan.offload.words),
        "strategy": plan.shard.strategy,
        "schedule": f"schedule {plan.pipeline.schedule}",
        "recomputation": f"{plan.remat.mode} recomputation" + f" of every {plan.remat.every}" * (plan.remat.every > 1),
        "accumulation": f"{plan.batch.accumulation} micro-batches",
        "adapters": f"adapters{' with magnitudes' if lora and lora.dora else ''}",
        "dtypes": f"computing in {plan.precision.compute}",
        "optimizer": plan.optim.words,
    }
    return values.get(name, name)
