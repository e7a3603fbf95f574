"""A published measurement as the planner sees it: model, plan, cluster and the habits of its software, read from a row
of a CSV file; or why the row cannot be compared.

What a row leaves blank is filled in by what its framework usually does (traits.csv) and named in ``guessed``. A name or
column that is not known never fails: the row is skipped, with a reason that is counted."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise import techniques
from shardwise.errors import ShardwiseError
from shardwise.models import known
from shardwise.models.config import ModelSpec, from_hf, model_spec, parameter_count, problems
from shardwise.spec.cluster import Cluster
from shardwise.spec.devices import Device, find_device
from shardwise.spec.layout import Layout, least_dp_shard
from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.pp import even

WITHOUT_SEQUENCE_PARALLELISM = ("megatron21", "bigscience")
"""Eras that had none."""
FINE_TUNING = ("sft", "lora", "qlora", "full-ft")
MOST_MICRO_BATCH = 16
"""A micro-batch that is not stated is a rank's share of the batch, if that is at most so large, else 1."""
LARGEST, MOST_LAYERS = 2**30, 1000
SAME_CHIP = {"a800": "A100", "h800": "H100"}
"""GPUs that are another one with slower links between them."""
EXPORT_LINK_BYTES_PER_S = 200e9
"""Of these, one way."""
STRATEGIES = {
    "no_shard|^ddp$": "ddp",
    "zero-1|distributed optimizer": "zero1",
    "grad_op|zero-2": "zero2",
    "full_shard|hybrid_shard|fsdp|zero-3": "zero3",
}
"""By words of ``sharding``, the first that match."""
PURE = ("pure bf16", "bf16-true", "all states bf16", "as torch_dtype", "none (bfloat16)", "bf16 optimizer states")
"""Words for weights in 16 bits, without fp32 masters."""
CHUNKED = re.compile("chunked|fused linear|no full logits|no logits|linear.cross.entropy", re.IGNORECASE)
"""Words for a loss that never has all logits."""
CHUNK_TOKENS = 1024
"""Tokens that it takes at a time."""
EIGHT_BITS = ("fp8", "mxfp8")
Text = Mapping[str, str]


class _Skipped(Exception):
    """Why a row cannot be compared."""


@dataclass(frozen=True)
class Habits:
    """What is known of a software stack. ``era`` is its generation; ``fusion`` 0 for eager blocks, 1 for fused, 2 for
    compiled ones. ``recompute`` and ``shard`` are what it does where a row does not say.

    Of memory: ``logit_bytes`` that a logit takes while the loss is computed, ``step_copies`` of a moment that the
    update makes, ``low_copy`` whether 16-bit weights stand beside their fp32 masters on every rank, ``whole_model``
    whether all weights are gathered at once, ``half_products`` whether selective recomputation keeps every second
    product only, ``wide_inputs`` whether layers in 4 bits keep their inputs in fp32. Of time: ``broadcast_s`` that each
    rank's slice of the updated weights takes where they are broadcast one after another."""

    era: str
    attention: str
    fusion: int
    tp_overlap: int
    reduce_bytes: int
    recompute: str
    shard: str
    logit_bytes: float
    step_copies: int
    low_copy: int
    whole_model: int
    half_products: int
    wide_inputs: int
    broadcast_s: float


@dataclass(frozen=True)
class Measurement:
    """One row. ``guessed`` names what it does not say, or what its ``inferred_fields`` say its source does not say."""

    text: Text
    spec: ModelSpec
    plan: Plan
    cluster: Cluster
    habits: Habits
    guessed: tuple[str, ...]

    @property
    def source(self) -> str:
        """Where it was published: its group, or what names its source first."""
        return said(self.text, "group") or re.split(r"[@\s]", said(self.text, "source"))[0] or "unnamed"


def said(text: Text, column: str) -> str:
    """What a row has in a column; nothing where it has no such column."""
    return (text.get(column) or "").strip()


def number(text: Text, column: str) -> float | None:
    """The number in a column, above zero and not larger than any that could be meant, or None."""
    try:
        value = float(said(text, column).replace(",", ""))
    except ValueError:
        return None
    return value if 1 / LARGEST < value <= LARGEST else None


def whole(text: Text, column: str) -> int | None:
    """The whole number in a column, or None."""
    value = number(text, column)
    return int(value) if value is not None and value == int(value) else None


def read(text: Text) -> Measurement | str:
    """The row, or in a few words why it is skipped."""
    try:
        return _read(text)
    except _Skipped as why:
        return str(why)


def _read(text: Text) -> Measurement:
    _refuse(text)
    device = _device(text)
    spec = _model(text)
    habits = habits_of(said(text, "framework"), device, said(text, "source"))
    guessed: list[str] = []
    plan = _plan(text, spec, habits, guessed)
    cluster = _cluster(text, device, plan.layout)
    plan = replace(plan, model=spec.name, layout=replace(plan.layout, ranks_per_node=cluster.devices_per_node))
    # What other systems multiply in 8 bits is theirs to say: the rest of the plan has to be one of ours.
    in_16_bits = replace(plan, precision=replace(plan.precision, products="compute"))
    if found := [*problems(spec), *techniques.check(spec, in_16_bits, cluster)]:
        raise _Skipped(f"its plan would be refused ({found[0].code})")
    return Measurement(text, spec, plan, cluster, habits, tuple(guessed))


def _refuse(text: Text) -> None:
    """What the planner does not price, or nobody could compare."""
    names = ("notes", "task", "offload", "model", "optimizer")
    notes, task, offload, model, optimizer = (said(text, name).lower() for name in names)
    program, precision = said(text, "framework").lower(), said(text, "precision").lower()
    sized = whole(text, "num_experts") and whole(text, "moe_ffn")
    rules: dict[str, object] = {
        "a reference, not a measurement": "reference" in (said(text, "verified"), said(text, "kind")),
        "a schedule that overlaps other stages": re.search("dualpipe|zero.?bubble", f"{notes} {program}"),
        "4-bit products": re.match(r"(mx|nv)?fp4|int8", precision),
        "8-bit products of experts": precision in EIGHT_BITS and sized,
        "experts of which not all sizes are told": not sized and re.search(r"\bmoe\b|-a\d+b|\d+x\d+b", model),
        "experts that tensor parallelism cuts": (number(text, "etp") or 1) > 1,
        "a hybrid of attention and other blocks": re.search("hybrid model|mamba|nemotron-?h", f"{notes} {model}"),
        "another model than its sizes say": "different flops" in notes,
        "latent attention": said(text, "mla").lower() not in ("", "0", "no", "false"),
        "offloading": offload not in ("", "none", "no"),
        "adapters other than LoRA": task == "adapter",
        "an unknown task": task not in ("pretrain", "adapter", *FINE_TUNING),
        "fine-tuning on samples that are not packed": task != "pretrain"
        and re.search("unpacked|variable.length", notes),
        "an optimizer other than Adam": "adam" not in (optimizer or "adam") or "muon" in optimizer,
    }
    for reason, refused in rules.items():
        if refused:
            raise _Skipped(reason)


def _device(text: Text) -> Device:
    name, memory = said(text, "gpu"), number(text, "gpu_mem_gb")
    if not name:
        raise _Skipped("no GPU named")
    named = SAME_CHIP.get(re.sub("-.*", "", name.lower()), name)
    links = "-PCIe" if re.match("PCIe", said(text, "interconnect")) else ""
    sized = f"{named}-{memory:g}GB" if memory else named
    for tried in (*[f"{named}{links}"] * bool(links), sized, named):
        with suppress(ShardwiseError):
            device = find_device(tried)
            return device if named is name else replace(device, peer_bytes_per_s=EXPORT_LINK_BYTES_PER_S)
    raise _Skipped("unknown GPU")


def _model(text: Text) -> ModelSpec:
    sizes = {name: whole(text, name) for name in ("layers", "hidden", "heads", "ffn", "vocab")}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise _Skipped(f"architecture not told ({missing[0]})")
    layers, hidden, heads, ffn, vocab = (int(size or 0) for size in sizes.values())
    if layers > MOST_LAYERS or (hidden % heads and not whole(text, "head_dim")):
        raise _Skipped("an impossible architecture")
    key_heads, head_dim = whole(text, "kv_heads") or heads, whole(text, "head_dim") or hidden // heads
    if said(text, "mlp_gated") in ("0", "no", "false"):
        # The blocks here have a gate: as many weights and as much to compute, in sizes that 64 divides as theirs do.
        ffn = max(64, round(ffn / 96) * 64)
    model = said(text, "model") or "unnamed"
    experts = _experts(text, layers)
    shape = (vocab, hidden, ffn, layers, heads, key_heads, head_dim)
    if (found := known.find(re.sub(r"[\s_]+", "-", model))) is not None:
        spec = from_hf(found[1], found[0])
        dims = (spec.hidden_size, spec.num_hidden_layers, spec.attention.num_attention_heads, spec.intermediate_size)
        if dims == (hidden, layers, heads, ffn):
            return spec
    either = [model_spec(model, *shape, tie_word_embeddings=tied, **experts) for tied in (False, True)]
    parameters = (number(text, "params_b") or 1e6) * 1e9
    return min(either, key=lambda spec: abs(parameter_count(spec) - parameters))


def _experts(text: Text, layers: int) -> dict[str, Any]:
    """The fields of a model that has experts."""
    count, width = whole(text, "num_experts") or 1, whole(text, "moe_ffn")
    if count == 1 or width is None:
        return {}
    return {
        "num_experts": count,
        "experts_per_token": whole(text, "top_k") or 1,
        "expert_size": width,
        "shared_expert_size": (whole(text, "shared_experts") or 0) * width,
        "dense_layers": tuple(range(min(layers, whole(text, "dense_layers") or 0))),
    }


def _plan(text: Text, spec: ModelSpec, habits: Habits, guessed: list[str]) -> Plan:
    world, (tp, pp, cp) = whole(text, "num_gpus"), (whole(text, axis) or 1 for axis in ("tp", "pp", "cp"))
    if world is None or world % (tp * pp * cp):
        raise _Skipped("number of GPUs not told" if world is None else "tp x pp x cp does not divide the GPUs")
    layout_columns = ("tp", "pp", "dp", "fsdp_shard", "zero_stage", "sharding")
    if world > 1 and not any(said(text, column) for column in layout_columns):
        raise _Skipped("layout not told")
    dp = world // (tp * pp * cp)
    strategy: Any = _strategy(text, habits, guessed) if dp * cp > 1 else "ddp"
    ep, shard = whole(text, "ep") or 1, dp
    if strategy == "ddp":
        shard = least_dp_shard(Layout(cp=cp, tp=tp, ep=ep))
    elif (stated := whole(text, "fsdp_shard")) and dp % stated == 0 and stated > 1:
        shard = stated
    elif found := re.search(r"over (\d+) ranks", said(text, "sharding")):
        shard = int(found[1]) if dp % int(found[1]) == 0 else dp
    if dp % shard or shard * cp * tp % ep:
        raise _Skipped("ep does not divide dp x cp x tp")
    layout = Layout(dp // shard, shard, pp, cp, tp, ep)  # cp as a ring, Megatron's default
    return Plan(
        layout,
        _batch(text, (dp, cp), guessed),
        Shard(strategy),
        _precision(text, habits),
        _remat(text, habits, guessed),
        compile=said(text, "compile").lower() in ("yes", "1", "true"),
        sequence_parallel=tp > 1
        and habits.era not in WITHOUT_SEQUENCE_PARALLELISM
        and said(text, "sp").lower() not in ("0", "no"),
        optim=Optim("adamw8bit" if "8bit" in said(text, "optimizer").lower() else "adamw"),
        expert_imbalance=1.0,  # routing was forced to be even, as benchmarks do
        lora=_lora(text),
        pipeline=_pipeline(text, spec, pp),
    )


def _pipeline(text: Text, spec: ModelSpec, ranks: int) -> Pipeline:
    """Stages of as many blocks each, as Megatron cuts them; where that does not come out even, as they are cut here."""
    told = re.search(r"\bvpp (\d+)", said(text, "notes"))
    each = whole(text, "vpp") or (int(told[1]) if told else 1)
    if ranks == 1:
        return Pipeline()
    if ranks * each > spec.num_hidden_layers:
        raise _Skipped("more stages than blocks")
    count, rest = divmod(spec.num_hidden_layers, ranks * each)
    counts = even(spec, whole(text, "seq_len") or 1, ranks * each) if rest else (count,) * (ranks * each)
    return Pipeline("interleaved" if each > 1 else "1f1b", each, counts)


def _strategy(text: Text, habits: Habits, guessed: list[str]) -> Any:
    stage, words = said(text, "zero_stage"), said(text, "sharding").lower()
    if stage == "2" and (whole(text, "pp") or 1) > 1:
        return "zero1"  # no pipeline reduces gradients after every micro-batch
    if stage in ("0", "1", "2", "3"):
        return "ddp" if stage == "0" else f"zero{stage}"
    for word, strategy in STRATEGIES.items():
        if re.search(word, words):
            return strategy
    guessed.append("sharding")
    return habits.shard


def _batch(text: Text, ranks: tuple[int, int], guessed: list[str]) -> Batch:
    """``ranks``: with different rows, and with different tokens of the same."""
    dp, cp = ranks
    seq_len, micro, total = whole(text, "seq_len"), whole(text, "mbs"), whole(text, "gbs")
    if seq_len is None:
        raise _Skipped("sequence length not told")
    if micro is None and total is None and dp > 1:
        raise _Skipped("several GPUs with neither micro-batch nor batch told")
    guessed += ["mbs"] * (micro is None) + ["gbs"] * (total is None)
    share = max(1, (total or 0) // dp)
    micro = micro or (share if share <= MOST_MICRO_BATCH else 1)
    if micro * seq_len > LARGEST or (total is not None and total < micro * dp):
        raise _Skipped("an impossible batch")
    accumulation = round(total / (micro * dp)) if total else whole(text, "grad_accum") or 1
    chunked = CHUNKED.search(said(text, "notes")) is not None
    return Batch(micro, accumulation, seq_len, CHUNK_TOKENS if chunked else max(1, micro * seq_len // cp))


def _remat(text: Text, habits: Habits, guessed: list[str]) -> Remat:
    mode: Any = said(text, "ac").lower()
    if mode not in ("none", "selective", "full"):
        guessed.append("recompute")
        mode = habits.recompute
    second = "2nd" in said(text, "ac_detail") or said(text, "ac_detail") == "layer"
    return Remat("full", 2) if mode == "selective" and second else Remat(mode)


def _precision(text: Text, habits: Habits) -> Precision:
    """Weights in 16 bits where the row says so: of all that is trained."""
    named = said(text, "precision")
    compute: Any = "bf16" if named in ("", *EIGHT_BITS) else named
    if compute not in ("bf16", "fp16", "fp32"):
        raise _Skipped("an unknown precision")
    detail = f"{said(text, 'precision_detail')} {said(text, 'notes')}".lower()
    pure = any(word in detail for word in PURE)
    low = "=pure" in detail or (habits.reduce_bytes == 2 and "=default" not in detail and "fp32 reduce" not in detail)
    weights: Any = "bf16" if pure and compute == "bf16" else "fp32"
    found = Precision(compute, weights, "bf16" if low else "fp32")
    return replace(found, products="float8", scales="row") if named in EIGHT_BITS else found


def _lora(text: Text) -> Lora | None:
    if said(text, "task").lower() not in ("lora", "qlora"):
        return None
    words = f"{said(text, 'precision_detail')} {said(text, 'notes')}".lower()
    rank = re.search(r"\b(?:r|rank[ -]?)(\d{1,3})\b", words)
    small = said(text, "task").lower() == "qlora" or "nf4" in words
    return Lora(int(rank[1]) if rank else 16, frozen="bf16", nf4=small)


def _cluster(text: Text, device: Device, layout: Layout) -> Cluster:
    links = said(text, "interconnect")
    if re.match("PCIe", links) and "NVLink;" not in links:
        device = replace(device, peer_bytes_per_s=0.0)
    each = min(whole(text, "gpus_per_node") or device.per_node, layout.world)
    each = each if layout.world % each == 0 else layout.world
    network = _network_bytes_per_s(links, each) or device.nic_bytes_per_s * each
    link = device.peer_bytes_per_s or device.host_link_bytes_per_s
    return Cluster(device, layout.world // each, each, link, network, 1000 * 2**30)


def _network_bytes_per_s(links: str, each: int) -> float | None:
    """What ``8x200Gb/s HDR IB per node``, ``4 NICs OmniPath 100Gb/s each per node``, ``1600 Gbps/node`` or ``400 Gb/s
    RDMA per GPU`` say of a whole node."""
    found = re.search(
        r"(?:(\d+)\s*(?:x|NICs \w+)\s*)?(\d+(?:\.\d+)?)\s*([GT])b(?:ps|/s)?[^;]*?(?:per |/)(node|gpu)", links, re.I
    )
    if found is None:
        return None
    rate = int(found[1] or 1) * float(found[2]) * (1e12 if found[3] in "Tt" else 1e9) / 8
    return rate * (each if found[4].lower() == "gpu" else 1)


@cache
def _table() -> tuple[tuple[str, Habits], ...]:
    with Path(__file__).with_name("traits.csv").open(encoding="utf-8") as stream:
        rows = [*csv.DictReader(stream)]
    return tuple((row.pop("framework"), Habits(**{name: _value(text) for name, text in row.items()})) for row in rows)


def _value(text: str) -> Any:
    return text if text[0].isalpha() else float(text) if "." in text else int(text)


def habits_of(framework: str, device: Device, source: str = "") -> Habits:
    """The habits of the first line of the table whose words are part of the framework's name; the last has none. What
    runs on Hopper and later is not the Megatron of 2021, nor is what a paper of 2023 and later measured."""
    words, paper = framework.lower(), re.search(r"arxiv:? ?(\d\d)\d\d\.", source.lower())
    if "megatron" in words and (device.capability or (0, 0)) >= (9, 0):
        words += " megatron-core"
    elif words == "megatron-lm" and paper is not None and int(paper[1]) >= 23:
        words += " of 2022"
    return next(habits for name, habits in _table() if name in words)
