# ruff: noqa: E501 - rows of a table stand in lines of their own
"""Which strategy, and how much: what the field says, and what plans say. Every number of docs/which.md is a search's or
the planner's own arithmetic.

``python -m tests.planner.test_which > docs/which.md`` writes the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import fits, kind, peak_share, seconds
from shardwise.planner.search import Search, best_of_kinds
from shardwise.planner.seconds.network import network_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import fit, label
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import markdown_table, show_bytes, show_payload, show_seconds

PAGE = Path(__file__).parents[2] / "docs" / "which.md"
SHARDED = ("zero3", "hybrid")
FULL: dict[str, Any] = {"train": {"seq_len": 4096, "global_batch_size": 64}}
ACCUMULATED: dict[str, Any] = {
    "train": {"seq_len": 4096, "micro_batch_size": 1, "gradient_accumulation_steps": 16, "global_batch_size": None}
}
GIB = 2**30


@dataclass(frozen=True)
class Branch:
    """A question of the field's decision trees. ``folk``: the answer, and the kinds of plans that are it; none where it
    is that nothing fits. ``why``: the arithmetic, in a sentence."""

    question: str
    model: str
    cluster: str
    folk: str
    kinds: tuple[str, ...]
    why: str
    sections: dict[str, Any] = field(default_factory=lambda: FULL)

    @cached_property
    def search(self) -> Search:
        recipe = Recipe.model_validate({**FULL, **self.sections})
        return Search(recipe, load_spec(self.model), parse_cluster(self.cluster))

    @cached_property
    def folks(self) -> Plan | None:
        """The best plan of the kinds that the field would take; one that fits, if there is one."""
        found = [plan for plan in best_of_kinds(self.search) if self.meant(plan)]
        return min(found, key=lambda plan: (not fits(plan), seconds(plan).step_s), default=None)

    def meant(self, plan: Plan) -> bool:
        """Whether a plan is of those kinds, or has such an axis beside others."""
        return kind(plan) in self.kinds or any(vars(plan.layout).get(axis, 1) > 1 for axis in self.kinds)

    @property
    def reproduced(self) -> bool:
        """Whether the plan is what the field says, or nothing fits."""
        chosen = self.search.chosen
        return self.meant(chosen) and fits(chosen) if self.kinds else peak_share(chosen) > 1


BRANCHES = (
    Branch(
        "All weights of a 1B on one GPU that holds them",
        "Llama-3.2-1B",
        "1xH100",
        "nothing",
        ("ddp",),
        "What fits takes no technique.",
    ),
    Branch(
        "The same on eight",
        "Llama-3.2-1B",
        "8xH100",
        "DDP",
        ("ddp", "zero1"),
        "Replicas; sharded moments where gathers in bf16 are less than an all-reduce in fp32.",
    ),
    Branch(
        "LoRA whose frozen weights fit each GPU",
        "Llama-3.1-8B",
        "8xH100",
        "DDP",
        ("ddp",),
        "Only gradients of adapters are sent.",
        {"lora": {"rank": 16}},
    ),
    Branch(
        "QLoRA on cards of 24 GB",
        "Llama-3.1-8B",
        "8xRTX-4090",
        "DDP",
        ("ddp",),
        "5 GB of frozen weights a card.",
        {"lora": {"rank": 16, "frozen": "nf4"}},
    ),
    Branch(
        "All weights of an 8B on eight cards of 32 GB, 16 micro-batches",
        "Llama-3.1-8B",
        "8xRTX-5090",
        "full shard",
        SHARDED,
        "16 bytes a parameter are 15.0 GiB of each card, and nothing else leaves room for activations.",
        ACCUMULATED,
    ),
    Branch(
        "The same on cards of 96 GB without NVLink",
        "Llama-3.1-8B",
        "8xRTX-PRO-6000",
        "full shard",
        SHARDED,
        "Full shard gathers all weights twice a micro-batch; what fits with fewer gathers sends them once a step.",
        ACCUMULATED,
    ),
    Branch(
        "An 8B on four nodes with 100 Gb/s between them",
        "Llama-3.1-8B",
        "4x8xA100-80GB+100Gb/node",
        "hybrid: shard in the node, replicate across",
        ("hybrid",),
        "Over a slow network stages send activations in place of gradients.",
    ),
    Branch(
        "A 70B on eight H100",
        "Llama-3.1-70B",
        "8xH100",
        "does not fit: offload, or LoRA",
        (),
        "16 bytes a parameter are 1,129 GB, and the cards have 680.",
    ),
    Branch(
        "LoRA of it there",
        "Llama-3.1-70B",
        "8xH100",
        "full shard",
        SHARDED,
        "Frozen weights alone are 141 GB in bf16 and have to be split; stages and tensor-parallel ranks need not gather them.",
        {"lora": {"rank": 16}},
    ),
    Branch(
        "All its weights there, with AdamW in the host's memory",
        "Llama-3.1-70B",
        "8xH100,host=1536GiB",
        "full shard with offload",
        SHARDED,
        "The host holds 1,051 GiB; one micro-batch a step.",
        {"train": {"seq_len": 4096, "global_batch_size": 8}, "offload": {"optimizer": "host"}},
    ),
    Branch(
        "A 70B on eight nodes with NVLink and 400 Gb/s",
        "Llama-3.1-70B",
        "8x8xH100+400Gb/node",
        "TP in the node, PP across",
        ("pp x tp",),
        "Only stages send over the network.",
        {"train": {"seq_len": 4096, "global_batch_size": 256}},
    ),
    Branch(
        "405B on 64 H100 with 8-way TP and PP",
        "Llama-3.1-405B",
        "8x8xH100+3.2Tb/node",
        "fits: exactly one replica",
        ("pp x tp",),
        "16 bytes a parameter are 94.5 GiB of a card of 80, and 126 blocks are no eight alike stages.",
        {"train": {"seq_len": 8192, "global_batch_size": 2048}, "parallel": {"tp": 8, "pp": 8}},
    ),
    Branch(
        "A mixture of 30B, 3B of them active, on eight H100",
        "Qwen3-30B-A3B",
        "8xH100",
        "experts spread over the node",
        ("ep",),
        "Rows are sent to experts over NVLink; what is left of the weights is sharded and cut.",
    ),
    Branch(
        "An 8B with rows of 131,072 tokens on eight H200",
        "Llama-3.1-8B",
        "8xH200",
        "context parallelism",
        ("cp",),
        "Ranks share rows, and hold an eighth of the activations each.",
        {"train": {"seq_len": 131_072, "global_batch_size": 16}, "precision": {"compute": "bf16"}},
    ),
)


def answered(plan: Plan) -> str:
    """The plan in a cell."""
    word = fit(plan.estimate)[0]
    told = f"{show_bytes(plan.estimate.peak_bytes)} of {show_bytes(plan.estimate.capacity_bytes)}"
    return f"{label(plan)}: {show_seconds(seconds(plan).step_s)}, {told}" + f" ({word})" * (word != "fits")


def strategies() -> str:
    rows = []
    for branch in BRANCHES:
        chosen, beside = branch.search.chosen, branch.folks
        told = answered(chosen)
        if not branch.reproduced:
            told = f"**not so**: {told}"
            if beside is not None and not branch.meant(chosen):
                told += f"; theirs: {answered(beside)}"
        rows.append((branch.question, branch.cluster, branch.folk, told, branch.why))
    return markdown_table(("question", "machines", "the field says", "the plan", "because"), rows)


# How much ------------------------------------------------------------------------------------------------------------


def state_gib(spec: ModelSpec, ranks: int) -> float:
    """16 bytes a parameter over so many ranks."""
    return 16 * parameter_count(spec) / ranks / GIB


def faster(words: dict[str, Any]) -> float:
    """How many times as fast as in bf16 and eager a step of an 8B over 8 H100 is with these settings of precision, its
    blocks compiled."""
    shared = {
        "train": {"seq_len": 8192, "global_batch_size": 64},
        "parallel": {"strategy": "zero2"},
        "recompute": {"mode": "selective"},
    }
    found = []
    for each in ({"compile": False}, {"compile": True, "precision": words}):
        recipe = Recipe.model_validate({**shared, **each})
        found.append(seconds(Search(recipe, load_spec("Llama-3.1-8B"), parse_cluster("8xH100")).chosen).step_s)
    return found[0] / found[1]


def all_reduce_s(spec: ModelSpec, gbit: int) -> float:
    """Of gradients in bf16 between two nodes of one rank."""
    layout = Layout(dp_replicate=2, ranks_per_node=1)
    network = network_of(layout, parse_cluster(f"2x1xH100+{gbit}Gb/node"), share=1.0)
    return network.seconds("all_reduce", "loss", 2 * parameter_count(spec))


def over_pcie(device: str) -> float:
    """How many times as long an all-reduce of tensor parallelism takes on eight such cards as on eight H100."""
    layout = Layout(tp=8, ranks_per_node=8)
    slow, quick = (
        network_of(layout, parse_cluster(f"8x{each}")).seconds("all_reduce", "tp", 2**28) for each in (device, "H100")
    )
    return slow / quick


def figures() -> str:
    eight, seventy, most = (load_spec(f"Llama-3.1-{size}") for size in ("8B", "70B", "405B"))
    sent = ", ".join(show_payload(2 * parameter_count(spec)) for spec in (eight, seventy, most))
    took = "; ".join(
        ", ".join(show_seconds(all_reduce_s(spec, gbit)) for spec in (eight, seventy, most)) for gbit in (400, 200, 100)
    )
    plain, narrow = faster({}), faster({"products": "float8", "scales": "row"})
    rows = [
        (
            "a DDP replica of an 8B is comfortable on 32 GB",
            f"16 bytes a parameter: {state_gib(eight, 1):.0f} GiB; such a card holds the state of 2 B",
        ),
        (
            "70B to 405B: hybrid shard over 2 to 4 nodes of eight",
            f"state at shard 8: {state_gib(seventy, 8):.0f} GiB of each card, and {state_gib(most, 8):.0f}",
        ),
        ("gradients of an 8B, 70B, 405B in bf16: 16, 140, 810 GB", sent),
        (
            "an all-reduce of them at 50, 25, 12.5 GB/s: 0.3, 2.8, 16; 0.6, 5.6, 32; 1.3, 11, 65 s",
            f"between two nodes of one rank each: {took}",
        ),
        (
            "ZeRO-1, 2, 3 take a 4th, an 8th, an Nth of DDP's memory",
            "with weights and gradients of 2 bytes and 12 of the optimizer: of 8 ranks "
            + ", ".join(f"{16 / (16 - cut + cut / 8):.1f}" for cut in (12, 14, 16))
            + " times less; of 64 "
            + ", ".join(f"{16 / (16 - cut + cut / 64):.1f}" for cut in (12, 14, 16)),
        ),
        ("ZeRO-1, 2, 3 send 1, 1, 1.5 times what DDP does", "with m micro-batches a step 1, (1 + m) / 2, 1.5 m times"),
        (
            "hybrid shard of a 70B over two nodes sends 70 GB, 3 s",
            f"{show_payload(2 * parameter_count(seventy))} out of each node in bf16: {show_seconds(2 * parameter_count(seventy) / 25e9)} at 25 GB/s",
        ),
        (
            "a pipeline idles (p-1) / (m v + p-1)",
            f"of the whole; of what is computed (p-1) / (m v): of 8 ranks, 16 micro-batches {7 / 23:.0%} and {7 / 16:.0%}",
        ),
        (
            "TP over PCIe is 14 times slower than over NVLink",
            f"by the links: {over_pcie('RTX-PRO-6000'):.0f} times on PCIe 5, {over_pcie('L40S'):.0f} on PCIe 4",
        ),
        (
            "float8 with compilation is up to 1.5 times as fast on Hopper",
            f"an 8B on eight H100: {narrow:.2f} times an eager step in bf16, of which compilation alone is {plain:.2f}",
        ),
    ]
    return markdown_table(("the field says", "exactly"), rows)


def page() -> str:
    return f"""# Which strategy?

What is commonly said, beside what `shardwise plan` finds. Every line is a search (`python -m tests.planner.test_which`
writes this page), with rows of 4,096 tokens and 64 a step unless another line says more; what is not as the field says
has the field's own plan beside it. Ask with your model and your machines: these answers hold for these lines alone.

{strategies()}

## How much?

{figures()}

The fewest GPUs, the cheapest, and where another node stops paying: [`--smallest` and `--deadline`](questions.md). What
speaks against one setting: `--why-not parallel.tp=8`.
"""


@pytest.mark.prove
def test_the_page() -> None:
    assert PAGE.read_text() == page(), "python -m tests.planner.test_which > docs/which.md"


@pytest.mark.prove
def test_12_sequences_are_parallel_wherever_tensors_are_and_long_rows_are_shared() -> None:
    """Of every plan with tensor parallelism that a search keeps, on links of either kind."""
    for cluster in ("8x8xH100+400Gb/node", "2x8xL40S+100Gb/node"):
        recipe = Recipe.model_validate({"train": {"seq_len": 4096, "global_batch_size": 256}})
        found = best_of_kinds(Search(recipe, load_spec("Llama-3.1-70B"), parse_cluster(cluster)))
        split = [plan for plan in found if plan.layout.tp > 1]
        assert split and all(plan.sequence_parallel for plan in split if plan.lora is None)


@pytest.mark.prove
def test_33_float8_and_compilation_are_worth_up_to_half_as_much_again() -> None:
    """Overruled in what does it: most of it is the compiler's."""
    plain, narrow = faster({}), faster({"products": "float8", "scales": "row"})
    assert 1.0 < plain < narrow < 1.6


if __name__ == "__main__":
    print(page(), end="")
