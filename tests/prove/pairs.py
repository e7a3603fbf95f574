"""Plans of several techniques, by the names of docs/compositions.md: pairs that no other test's rows have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.spec.layout import least_dp_shard
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.pp.actions import SCHEDULES
from tests.models.hf_models import spec_of
from tests.parity.pipes import stages_per_rank

Row = tuple[ModelSpec, Plan]
SPEC = model_spec("pair", 512, 128, 256, 8, 8, 8, 64)
"""Its sizes can be divided by everything."""


def on(name: str, spec: ModelSpec, plan: Plan) -> Row:
    """The case with a feature switched on."""
    layout, lora = plan.layout, plan.lora or Lora(frozen="bf16")
    if name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid"):
        degrees = {"DDP": (2, 1), "hybrid": (2, 2)}.get(name, (1, 2))
        strategy = {"DDP": "ddp", "hybrid": "zero3"}.get(name, name.lower().replace("-", ""))
        layout = replace(layout, dp_replicate=degrees[0], dp_shard=degrees[1])
        return spec, replace(plan, layout=layout, shard=Shard(strategy))  # type: ignore[arg-type]
    if name in SCHEDULES:
        each = stages_per_rank(name)
        pipeline = Pipeline(name, each, (8 // (2 * each),) * (2 * each))  # type: ignore[arg-type]
        return spec, replace(
            plan, layout=replace(layout, pp=2, v_shaped=SCHEDULES[name].shape == "v"), pipeline=pipeline
        )
    changed: dict[str, dict[str, Any]] = {
        "tp": {"layout": replace(layout, tp=2)},
        "sp": {"layout": replace(layout, tp=2), "sequence_parallel": True},
        "ring": {
            "layout": replace(layout, cp=2 * layout.ulysses),
            "cp_kind": "nested" if layout.ulysses > 1 else "ring",
        },
        "Ulysses": {
            "layout": replace(layout, cp=2 * layout.cp, ulysses=2),
            "cp_kind": "nested" if layout.cp > 1 else "ulysses",
        },
        "gather": {"layout": replace(layout, cp=2), "cp_kind": "gather"},
        "selective": {"remat": Remat("selective")},
        "full": {"remat": Remat("full")},
        "accumulation": {},
        "LoRA": {"lora": lora},
        "DoRA": {"lora": replace(lora, dora=True)},
        "4 bits": {"lora": replace(lora, nf4=True)},
        "8 bits": {"lora": replace(lora, float8=True)},
        "frozen": {"frozen": ("embed.*",)},
        "DPO": {"loss": "dpo"},
        "compile": {"compile": True},
        "bf16": {"precision": replace(plan.precision, compute="bf16")},
        "fp16": {"precision": replace(plan.precision, compute="fp16")},
        "modules": {"precision": replace(plan.precision, modules=(("*norm", "fp32"),))},
        "8-bit moments": {"optim": Optim("adamw8bit")},
        "bf16 moments": {"optim": Optim(moments="bf16")},
        "offload": {"offload": Offload("host")},
        "Muon": {"optim": Optim("muon")},
        "float8": {"precision": _narrow(plan.precision)},
        "codes": _in_codes(plan),
    }
    if name in ("experts", "ep"):
        mixed = (
            with_fields(spec, num_experts=8, experts_per_token=2, expert_size=128) if spec.hf_model is None else spec
        )
        return mixed, _spread(plan) if name == "ep" else plan
    if name == "tied":
        return replace(spec, tie_word_embeddings=True), plan
    if name == "HF modules":
        return spec_of("gpt2"), plan
    return spec, replace(plan, **changed[name])


def _in_codes(plan: Plan) -> dict[str, Any]:
    """With weights gathered as codes: over two shards, or those that have parts of rows, where nothing says how ranks
    are sharded."""
    found: dict[str, Any] = {"precision": replace(_narrow(plan.precision), gather="float8")}
    if plan.layout.dp == 1:
        shards = 2 if plan.layout.cp == 1 else 1
        found |= {"layout": replace(plan.layout, dp_shard=shards), "shard": Shard("zero3")}
    return found


def _narrow(precision: Precision) -> Precision:
    """With products in float8, which GPUs compute in bf16; the first block is not among them."""
    compute = "bf16" if precision.compute == "fp32" else precision.compute
    return replace(precision, compute=compute, products="float8", exclude=("first",))


def _spread(plan: Plan) -> Plan:
    """With experts spread over the ranks that there are, or over two that read other rows."""
    layout = replace(plan.layout, ep=2)
    if not plan.sharded:
        layout = replace(layout, dp_shard=least_dp_shard(layout))
    return replace(plan, layout=layout, sequence_parallel=layout.tp > 1)


def with_all(*names: str) -> Row:
    """The case with all of these: first what a model is, last what is spread over the ranks of all others."""
    spec, plan = SPEC, Plan(batch=Batch(1, 8, 32, 64))
    for name in sorted(names, key=lambda name: (name == "ep") - (name == "HF modules")):
        spec, plan = on(name, spec, plan)
    if spec.experts and plan.lora is not None and plan.lora.dora:  # whose magnitudes are of attention alone
        plan = replace(plan, lora=replace(plan.lora, targets=("q", "k", "v", "o")))
    return spec, plan


ROWS = (
    ("DDP", "tp", "sp", "gpipe", "selective", "frozen", "DPO", "tied", "fp16", "modules", "bf16 moments"),
    ("HF modules", "hybrid", "full", "accumulation", "DoRA", "4 bits", "DPO", "tied", "fp16", "8-bit moments"),
    ("ZeRO-2", "zbv", "full", "frozen", "bf16", "modules", "8-bit moments"),
    ("ZeRO-2", "interleaved_zb", "full", "DoRA", "4 bits", "bf16", "bf16 moments"),
    ("ZeRO-3", "1f1b", "selective", "DoRA", "4 bits", "fp16", "8-bit moments"),
    ("ZeRO-1", "interleaved_zb", "fp16", "modules", "8-bit moments"),
    ("DDP", "dualpipev", "DoRA", "4 bits", "fp16", "8-bit moments"),
    ("DDP", "interleaved", "DoRA", "4 bits", "fp16", "8-bit moments"),
    ("DDP", "zbv", "DoRA", "4 bits", "fp16"),
    ("HF modules", "ZeRO-1", "frozen", "bf16", "bf16 moments"),
    ("ZeRO-3", "interleaved", "bf16", "modules"),
    ("hybrid", "dualpipev", "bf16", "modules"),
    ("gpipe", "4 bits", "bf16", "8-bit moments"),
    ("DDP", "1f1b", "modules"),
    ("DDP", "interleaved_zb"),
    ("HF modules", "ZeRO-2"),
    ("accumulation", "modules"),
    ("ring", "Ulysses", "DDP", "frozen", "tied", "fp16", "modules", "bf16 moments"),
    ("ring", "Ulysses", "ZeRO-2", "DoRA", "4 bits", "bf16", "8-bit moments"),
    ("gather", "DDP", "zbv", "frozen", "fp16", "modules", "bf16 moments"),
    ("gather", "ZeRO-2", "dualpipev", "DoRA", "4 bits", "bf16", "8-bit moments"),
    ("ring", "hybrid", "tied"),
    ("Ulysses", "hybrid"),
    ("gather", "hybrid", "tied"),
    ("ring", "Ulysses", "zbv"),
    ("ring", "Ulysses", "interleaved"),
    ("ring", "gpipe"),
    ("ring", "interleaved_zb"),
    ("ring", "dualpipev"),
    ("Ulysses", "gpipe"),
    ("Ulysses", "interleaved_zb"),
    ("Ulysses", "dualpipev"),
    ("gather", "gpipe"),
    ("gather", "interleaved"),
    ("gather", "interleaved_zb"),
    ("ep", "ZeRO-2", "interleaved", "frozen", "DPO", "tied", "fp16", "8-bit moments"),
    ("ep", "ZeRO-3", "zbv", "DoRA", "4 bits", "bf16 moments"),
    ("ep", "ZeRO-1", "gpipe", "modules", "fp16"),
    ("ep", "interleaved_zb"),
    ("ep", "dualpipev"),
    ("offload", "ZeRO-1", "gpipe", "Ulysses", "selective", "frozen", "DPO"),
    ("offload", "interleaved", "gather", "full", "modules"),
    ("offload", "interleaved_zb", "DoRA"),
    ("offload", "HF modules", "accumulation"),
    ("offload", "dualpipev"),
    ("offload", "zbv"),
    ("ring", "Ulysses", "looped_bfs", "DoRA", "8-bit moments"),
    ("gather", "looped_bfs"),
    ("ep", "looped_bfs", "ZeRO-3"),
    ("offload", "looped_bfs"),
    ("8 bits", "ZeRO-1", "gpipe", "Ulysses", "DPO", "tied", "fp16", "8-bit moments"),
    ("8 bits", "interleaved", "gather", "bf16", "bf16 moments"),
    ("8 bits", "offload", "ZeRO-3"),
    ("8 bits", "interleaved_zb"),
    ("8 bits", "zbv"),
    ("8 bits", "dualpipev"),
    ("8 bits", "looped_bfs"),
    ("8 bits", "HF modules"),
    ("Muon", "float8", "ring", "selective", "frozen", "DPO", "tied", "bf16"),
    ("Muon", "float8", "Ulysses", "interleaved"),
    ("Muon", "float8", "gather", "gpipe", "full"),
    ("Muon", "float8", "ep", "looped_bfs", "ZeRO-3"),
    ("Muon", "accumulation", "modules", "fp16"),
    ("Muon", "interleaved_zb"),
    ("Muon", "zbv"),
    ("Muon", "dualpipev"),
    ("Muon", "HF modules"),
    ("float8", "offload", "8-bit moments"),
    ("float8", "bf16 moments", "ZeRO-1"),
    ("Ulysses", "codes", "interleaved", "frozen", "tied", "Muon"),
    ("gather", "codes", "gpipe", "DPO", "8-bit moments"),
    ("codes", "looped_bfs", "bf16 moments"),
)
COMPILED = (
    ("compile", "ZeRO-1", "1f1b", "frozen", "bf16", "8-bit moments"),
    ("compile", "hybrid", "interleaved", "DPO", "fp16", "bf16 moments"),
    ("compile", "DDP", "gpipe", "modules", "fp16"),
    ("compile", "HF modules", "ZeRO-2", "frozen"),
    ("compile", "ring", "Ulysses", "ZeRO-3", "bf16"),
    ("compile", "gather", "tp", "sp"),
    ("compile", "experts", "ZeRO-3"),
    ("compile", "offload", "ZeRO-3"),
    ("compile", "looped_bfs", "ZeRO-2"),
    ("compile", "Muon", "ZeRO-1"),
    ("compile", "8 bits", "ZeRO-3"),
)
