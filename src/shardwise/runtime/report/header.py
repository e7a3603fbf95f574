"""The lines that a run begins with."""

from __future__ import annotations

from dataclasses import replace

import torch

import shardwise
from shardwise.models import added_rows, attention, kernel_choice
from shardwise.models.config import ModelSpec, active_parameter_count, parameter_count
from shardwise.models.hf_spec import NOTICE
from shardwise.models.resolve import data_of
from shardwise.runtime.expert_counts import LOSSES
from shardwise.runtime.job import Job
from shardwise.spec.explain import NAMES
from shardwise.spec.finetune import BATCH, KEYS
from shardwise.spec.host import cpu_has_bf16
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import counted, show_bytes, show_count
from shardwise.techniques.dtypes import torch_dtype

COMPILED = (
    ", blocks compiled (adds half a minute or more to the first step, seconds if torch has them cached; "
    "`compile=false` runs them uncompiled)"
)


def header(job: Job) -> str:
    """Return the lines that say what runs, on which machines and data, and how it is split. They show every setting
    that changes results."""
    plan, recipe = job.plan, job.recipe
    precision, layout = plan.precision, plan.layout
    devices = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "CPU"
    backend = "nccl" if job.device.type == "cuda" else "gloo"
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    tokens = job.step_room
    split = job.prepared.manifest.splits["train"]
    run = f"run {recipe.run.name} · seed {recipe.run.seed}"
    ranks = f"{layout.world} x {devices} ({backend}, {threads} per rank)"
    model = f"{job.spec.name}, {show_count(parameter_count(job.spec))} parameters"
    if job.spec.experts:
        model += f" ({show_count(active_parameter_count(job.spec))} active)"
    if job.spec.hf_model is not None:
        model += f", {NOTICE}"
    if job.spec.stored:
        model += f", read from {job.spec.stored}"
    terms = f"supervised tokens of a step (of {tokens:,})"
    if recipe.pairs:
        options = recipe.method.model_dump(include=set(recipe.method.spec.options))
        told = "".join(f", {key} {value:g}" for key, value in options.items())
        terms = f"pairs of a step (in {tokens:,} tokens){told}"
    loss = f"loss: mean over the {terms}{of_routers(job.spec)}"
    kept = f"{plan.kept}, compute {precision.compute}{why_compute(recipe, plan, job.device.type)}"
    kept += precision.products_words
    sums = f"gradients summed in {precision.reduce}"
    number = counted(split.documents, "sample" if split.packs else "document")
    number = f"{split.documents:,} answers, two per pair" if split.pairs else number
    portions = f"streamed in {job.portions.count:,} portions, one prepared ahead; the first: " if job.portions else ""
    text = f"{portions}{show_bytes(split.text_bytes)} of {'answers' if split.packs else 'text'} in {number}"
    share = f", {split.supervised_tokens / split.tokens:.1%} of them supervised" if split.packs else ""
    vocabulary = f"vocabulary {job.prepared.manifest.vocab_size:,}{added_rows.told(data_of(recipe))}"
    ids = f"{show_count(split.tokens)} tokens ({vocabulary}){share}"
    every = "every step" if job.save_steps == 1 else f"every {job.save_steps} steps"
    saves = f"a checkpoint {every if job.save_steps < job.max_steps else 'at the end'}, into {job.directory}"
    read, held_out = len(job.evaluated), len(job.held_out or ())
    saves += f" · validation on {read:,} of {held_out:,} held-out samples" if read < held_out else ""
    taken = f", attention {_kernels(job)}"
    lines = [
        ("", f"shardwise {shardwise.__version__} · {run} · torch {torch.__version__} · {ranks}"),
        ("model", f"{model} · {loss}"),
        ("dtypes", f"{kept}, {sums} · fp32 matmul precision {precision.matmul}"),
        ("data", f"{text}, {ids}"),
        ("plan", f"{strategy(job)}, {execution(plan)}{taken}"),
        ("length", f"{counted(job.max_steps, 'step')}, {show_count(read_tokens(job))} tokens · {saves}"),
    ]
    if assumed := assumptions(plan, recipe):
        lines.append(("assumed", assumed))
    return "\n".join(f"{name:<8}{text}" if name else text for name, text in lines)


def read_tokens(job: Job) -> int:
    """The tokens that the run reads, padding left out: of text every window is full but the last, which is counted as
    if it were; of samples there are as many as on average."""
    samples = job.max_steps * job.plan.batch.global_batch_size(job.plan.layout.dp)
    samples = min(samples, job.end or samples)
    if not job.prepared.manifest.splits["train"].packs:
        return samples * job.plan.batch.seq_len
    return round(samples * job.windows.store.tokens / max(len(job.windows), 1))


def of_routers(spec: ModelSpec) -> str:
    """Return what is added to the loss: `` + 0.001 router_aux_loss``."""
    weights = zip(LOSSES, spec.experts.router_losses, strict=True)
    return "".join(f" + {weight:g} {name}" for name, weight in weights if weight and spec.experts)


def why_compute(recipe: Recipe, plan: Plan, device: str) -> str:
    """Return why it is computed in this dtype; on a CPU with bf16 instructions, what to pin to use them."""
    reasons = [plan.why[key]] if (key := "precision.compute") in plan.why else []
    if (recipe.precision.compute, plan.precision.compute, device) == ("auto", "fp32", "cpu") and cpu_has_bf16():
        reasons.append("`precision.compute=bf16` may be faster here")
    return f" ({'; '.join(reasons)})" if reasons else ""


def assumptions(plan: Plan, recipe: Recipe) -> str:
    """Return the values that fine-tuning takes where the recipe says nothing, and their keys; empty if it says all."""
    reasons = {key: plan.why[key].removeprefix("assumed: ") for key in KEYS if key in plan.why}
    if (epochs := "train.num_epochs") in reasons:
        reasons[epochs] = f"{recipe.train.num_epochs:g} ({reasons[epochs]})"
    if (why := plan.why.get("batch.global_batch_size", "")).startswith("assumed: "):
        reasons[BATCH] = f"{plan.batch.global_batch_size(plan.layout.dp)} ({why.removeprefix('assumed: ')})"
    return " · ".join(f"`{key}` {reason}" for key, reason in reasons.items())


def _kernels(job: Job) -> str:
    """The attention kernels, by kind of layer where they differ."""
    plan, recipe = job.plan, job.recipe
    case = attention.device_case(job.device, torch_dtype(plan.precision.compute), job.spec.attention.head_dim)
    case = replace(case, documents=recipe.data.mask_documents or recipe.method.spec.records)
    layers = kernel_choice.cases(job.spec, case, plan.batch.seq_len)
    return kernel_choice.described(layers, plan.attention, attention.present(job.device, plan.attention))


def execution(plan: Plan) -> str:
    """Return what each rank does with its batch, and what compiling costs."""
    batch = plan.batch
    batches = f"micro-batch {batch.micro_batch_size} x {batch.seq_len}, accumulation {batch.accumulation}"
    outside = "".join(f", {words}" for words in plan.offload.words)
    return f"{batches}, recompute {plan.remat.mode}{outside}{COMPILED if plan.compile else ''}"


def strategy(job: Job) -> str:
    """``ZeRO-3 over 8 ranks, 2 replicas``."""
    layout, name = job.plan.layout, NAMES[job.plan.shard.strategy]
    words = job.plan.model_words
    tensor = f", {words}" if words else ""
    if layout.size("loss") == 1:
        return words or "one process"
    if job.plan.shard.strategy == "ddp":
        return f"{name} over {layout.size('loss')} ranks{tensor}"
    replicas = f", {layout.dp_replicate} replicas" if layout.dp_replicate > 1 else ""
    return f"{name} over {layout.fsdp} ranks{replicas}{tensor}"
