# ruff: noqa: E501 - the arithmetic stands in the lines of the page
"""One plan worked out by hand: every number of docs/by-hand.md from the model's sizes, the table of hardware and the
constants, with nothing of the planner; and the planner's own numbers beside them.

``python -m tests.planner.test_by_hand > docs/by-hand.md`` writes the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from unittest.mock import patch

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import seconds
from shardwise.planner.search import choose
from shardwise.planner.seconds import rates
from shardwise.planner.seconds.constants import shipped
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.devices import devices
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe, Recompute, Train

ROOT = Path(__file__).parents[2]
WORDS = "strategy=zero3 tp=1 recompute=full micro_batch_size=1 gradient_accumulation_steps=1 seq_len=4096"
GIB = 2**30


@dataclass(frozen=True)
class Llama8B:
    """Llama 3.1 8B on eight H100 under ZeRO-3, a sequence of 4,096 tokens a rank, with full recomputation."""

    d: int = 4096
    f: int = 14_336
    layers: int = 32
    heads: int = 32
    e: int = 128
    kv: int = 1024
    vocabulary: int = 128_256
    tokens: int = 4096
    ranks: int = 8
    chunk: int = 2048

    def of(self, name: str) -> float:
        return shipped()[name]

    # What is stored.

    @cached_property
    def products(self) -> int:
        return 2 * self.d * self.d + 2 * self.kv * self.d + 3 * self.d * self.f

    @cached_property
    def block(self) -> int:
        return self.products + 2 * self.d

    @cached_property
    def parameters(self) -> int:
        return self.layers * self.block + 2 * self.vocabulary * self.d + self.d

    @cached_property
    def weights_bytes(self) -> int:
        return 4 * self.parameters // self.ranks

    @cached_property
    def moments_bytes(self) -> int:
        tensors = 9 * self.layers + 3
        return 2 * self.weights_bytes + 4 * tensors

    @property
    def row(self) -> int:
        """The hidden states of a rank in bf16."""
        return 2 * self.tokens * self.d

    @cached_property
    def activations_bytes(self) -> int:
        tables, statistics = 2 * 2 * self.tokens * self.e // 2, 4 * self.tokens
        return (self.layers + 2) * self.row + tables + statistics

    @cached_property
    def logits_bytes(self) -> int:
        return self.row + 4 * self.end + (2 + 4 + 4) * self.chunk * self.vocabulary

    @cached_property
    def head_bytes(self) -> int:
        return 2 * (self.end + self.d)

    @cached_property
    def peak_bytes(self) -> int:
        batch, channel = 8 * 3 * self.tokens, 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * 2**20
        overhead = 2 * 32 * 2**20 + 3 * 24 * channel + 3 * 22 * 2**20 + 512 * (9 * self.layers + 3) + 3 * 2**29
        states = self.weights_bytes + self.moments_bytes
        return states + self.activations_bytes + self.logits_bytes + 2 * self.head_bytes + batch + overhead

    # What is sent.

    @cached_property
    def end(self) -> int:
        return self.vocabulary * self.d

    @cached_property
    def gathered_bytes(self) -> int:
        return 2 * (self.end + 2 * self.layers * self.block + self.end + self.d)

    @cached_property
    def reduced_bytes(self) -> int:
        return 4 * self.parameters

    @cached_property
    def link(self) -> float:
        return devices()["H100-SXM-80GB"].ring_bytes_per_s * self.of("NVLink")

    def gather_s(self, numbers: int) -> float:
        return self.of("latency node_s") + 2 * numbers * 7 / 8 / self.link

    def reduce_s(self, numbers: int) -> float:
        return self.of("latency node_s") + 4 * numbers * 7 / 8 / self.link

    @cached_property
    def sent_s(self) -> float:
        gathers = (
            self.gather_s(self.end) + self.gather_s(self.end + self.d) + 2 * self.layers * self.gather_s(self.block)
        )
        reduces = self.reduce_s(self.end) + self.reduce_s(self.end + self.d) + self.layers * self.reduce_s(self.block)
        return gathers + reduces

    # What is computed.

    @cached_property
    def forward_flops(self) -> int:
        return 2 * self.products * self.tokens

    @cached_property
    def attention_flops(self) -> int:
        return 4 * self.heads * self.e * self.tokens**2 // 2

    @cached_property
    def flops(self) -> int:
        recomputed = self.forward_flops - 2 * self.d * self.f * self.tokens
        products = 3 * self.forward_flops + recomputed
        attention = (1 + 1 + 2.5) * self.attention_flops
        head = 3 * 2 * self.end * self.tokens
        return self.ranks * int(self.layers * (products + attention) + head)

    @cached_property
    def rate(self) -> float:
        device = devices()["H100-SXM-80GB"]
        return device.bf16_flops * self.of("best product:H100-SXM-80GB") * self.of("own era")

    @cached_property
    def memory_rate(self) -> float:
        return devices()["H100-SXM-80GB"].hbm_bytes_per_s * self.of("memory") * self.of("own era")

    def product_s(self, m: int, n: int, k: int) -> float:
        best = 0.0
        for rows, columns, share in ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.78), (64, 64, 0.55)):
            tiles = ceil(m / rows) * ceil(n / columns)
            best = max(best, share * m * n / (rows * columns) / (132 * ceil(tiles / 132)))
        return 2 * m * n * k / (self.rate * best * k / (k + self.of("fill k"))) + self.of("gap_s")

    def pointwise_s(self, *moved: float) -> float:
        return sum(each * self.of("bytes compiled") / self.memory_rate + self.of("gap_s") for each in moved)

    @cached_property
    def linear(self) -> dict[str, tuple[int, int]]:
        d, f, kv = self.d, self.f, self.kv
        return {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}

    @cached_property
    def forward_s(self) -> float:
        return sum(self.product_s(self.tokens, n, k) for n, k in self.linear.values())

    @cached_property
    def backward_s(self) -> float:
        inputs = sum(self.product_s(self.tokens, k, n) for n, k in self.linear.values())
        return inputs + sum(self.product_s(n, k, self.tokens) for n, k in self.linear.values())

    @cached_property
    def recomputed_s(self) -> float:
        return self.forward_s - self.product_s(self.tokens, *self.linear["down"])

    @cached_property
    def head_s(self) -> float:
        chunks = self.tokens // self.chunk
        once = 2 * self.chunk * self.end / self.product_rate_of_head
        return 3 * chunks * (once + self.of("gap_s"))

    @cached_property
    def product_rate_of_head(self) -> float:
        seconds_ = self.product_s(self.chunk, self.vocabulary, self.d) - self.of("gap_s")
        return 2 * self.chunk * self.end / seconds_

    @cached_property
    def copied_bytes(self) -> int:
        """Read and written for the flat buffers of blocks: weights in bf16, gathered twice, and gradients in fp32."""
        return 2 * self.layers * 2 * 2 * self.block + self.layers * 2 * 4 * self.block

    @cached_property
    def copies_s(self) -> float:
        return self.copied_bytes / (self.memory_rate * self.of("flat copy"))

    @cached_property
    def products_s(self) -> float:
        return self.layers * (self.forward_s + self.backward_s + self.recomputed_s) + self.head_s

    @cached_property
    def attention_s(self) -> float:
        rate = devices()["H100-SXM-80GB"].bf16_flops * self.of("attention flash2 hopper") * self.of("own era")
        return self.layers * (4.5 * self.attention_flops / rate + (1 + 1 + 3) * self.of("gap_s"))

    @cached_property
    def fused(self) -> dict[str, tuple[float, ...]]:
        """Bytes of the fused kernels of a block, in rows of hidden states: what each reads and writes."""
        wide, keys = self.f / self.d, self.kv / self.d
        forward = (2, 2 * (1 + keys), 4, 3 * wide, 3)
        backward = (5 * wide, 5, 4, 2 * (1 + keys), 3, 5, 4)
        return {"forward": forward, "again": forward[:-1], "backward": backward}

    @cached_property
    def block_s(self) -> dict[str, float]:
        """Seconds of a block in each of its passes."""
        gap_s, attention_s = self.of("gap_s"), self.attention_s / self.layers - 5 * self.of("gap_s")
        moved = {name: self.pointwise_s(*(self.row * rows for rows in kernels)) for name, kernels in self.fused.items()}
        once = attention_s / 4.5
        return {
            "forward": self.forward_s + moved["forward"] + once + gap_s,
            "again": self.recomputed_s + moved["again"] + once + gap_s,
            "backward": self.backward_s + moved["backward"] + 2.5 * once + 3 * gap_s,
        }

    @cached_property
    def optimizer_s(self) -> float:
        moved = self.parameters // self.ranks * (4 + 2 * 4 + 4 * 4 + 4)
        kernels = 4 * ceil((9 * self.layers + 3) / 64)
        return moved / self.memory_rate + kernels * (self.of("launch_s") + self.of("gap_s"))


HAND = Llama8B()


def test_the_page_says_so(plan: Plan) -> None:
    assert (ROOT / "docs/by-hand.md").read_text() == page(plan), (
        "python -m tests.planner.test_by_hand > docs/by-hand.md"
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def planned() -> Plan:
    asked = Recipe(
        train=Train(seq_len=4096, micro_batch_size=1, gradient_accumulation_steps=1),
        parallel=Parallel(strategy="zero3", tp=1),
        recompute=Recompute(mode="full"),
    )
    with patch.object(rates, "measured_on", lambda name: None):
        return choose(asked, load_spec("meta-llama/Llama-3.1-8B"), parse_cluster("8xH100"))


def test_memory(plan: Plan) -> None:
    memory = plan.estimate.memory
    assert (memory["weights"], memory["moments"]) == (HAND.weights_bytes, HAND.moments_bytes)
    assert (memory["activations"], memory["logits"]) == (HAND.activations_bytes, HAND.logits_bytes)
    assert (memory["gather buffers"], memory["buffers"]) == (HAND.head_bytes, 24 * HAND.tokens)
    assert plan.estimate.peak_bytes == HAND.peak_bytes


def test_traffic(plan: Plan) -> None:
    sent = {(t.axis, t.kind): (t.bytes, t.count) for t in plan.estimate.traffic if t.category != "control"}
    assert sent == {
        ("dp_shard", "all_gather"): (HAND.gathered_bytes, 2 * HAND.layers + 2),
        ("dp_shard", "reduce_scatter"): (HAND.reduced_bytes, HAND.layers + 2),
    }
    assert seconds(plan).sent_s["dp_shard"] == pytest.approx(HAND.sent_s, rel=1e-6)


def test_operations(plan: Plan) -> None:
    assert plan.estimate.flops_per_step == HAND.flops


def test_seconds(plan: Plan) -> None:
    """To a nanosecond a kernel, to which the planner rounds."""
    found = seconds(plan)
    assert found.products_s == pytest.approx(HAND.products_s, rel=1e-5)
    assert found.attention_s == pytest.approx(HAND.attention_s, rel=1e-5)
    assert found.optimizer_s == pytest.approx(HAND.optimizer_s, rel=1e-6)
    first_and_last_s = HAND.gather_s(HAND.end) + HAND.gather_s(HAND.block) + HAND.reduce_s(HAND.end)
    assert first_and_last_s < found.exposed_s["dp_shard"] < first_and_last_s + HAND.reduce_s(HAND.block)
    blocks_s = HAND.layers * sum(HAND.block_s.values())
    busy_s = found.products_s + found.attention_s + found.pointwise_s
    ends_s = busy_s - blocks_s  # the ends of the model, the loss, and copies into and out of flat buffers
    assert HAND.head_s + HAND.copies_s < ends_s < HAND.head_s + 1.5 * HAND.copies_s
    whole = found.compute_s + sum(found.exposed_s.values()) + found.optimizer_s + found.host_s
    assert found.step_s == pytest.approx(whole)


def page(plan: Plan) -> str:
    """The page, with the numbers."""
    hand, found = HAND, seconds(plan)
    ms = {name: f"{1e3 * part:.2f}" for name, part in hand.block_s.items()}
    linear = {name: f"{1e3 * hand.product_s(hand.tokens, n, k):.3f}" for name, (n, k) in hand.linear.items()}
    moved = {name: f"{hand.row * sum(rows) / 1e6:,.0f}" for name, rows in hand.fused.items()}
    exposed = found.exposed_s["dp_shard"]
    return f"""# One plan worked out by hand

    shardwise plan --model meta-llama/Llama-3.1-8B --cluster 8xH100 {WORDS} --explain time

Every number below follows from the sizes of the model (hidden size d = {hand.d:,}, feed-forward f = {hand.f:,}, L =
{hand.layers} blocks, {hand.heads} query heads of e = {hand.e}, keys and values of {hand.kv:,}, V = {hand.vocabulary:,} ids), from
`src/shardwise/spec/hardware.csv` and from `src/shardwise/planner/seconds/constants.csv`. `tests/planner/test_by_hand.py`
does this arithmetic apart from the planner, compares each number with the plan's, and writes this page. It is for a
device of which nothing was measured: of an H100 the planner knows more (`planner/seconds/devices.json`), and its plan
takes products, attention and memory from there.

## Parameters

A block has 2 d^2 (q, o) + 2 x {hand.kv:,} d (k, v) + 3 d f (gate, up, down) + 2 d (norms) = {hand.block:,}. With embedding and
output layer (V d = {hand.end:,} each) and the last norm the model has {hand.parameters:,}.

## Memory of a rank at the peak, which is in the loss

| what | how | bytes |
|---|---|---|
| weights | 4 a parameter, an eighth | {hand.weights_bytes:,} |
| moments | twice that, and 4 for each of {9 * hand.layers + 3} tensors | {hand.moments_bytes:,} |
| gradients | none yet | 0 |
| gathered | norm and output layer in bf16: 2 (V d + d) | {hand.head_bytes:,} |
| activations | {hand.layers + 2} rows of hidden states (the inputs of {hand.layers} blocks, the head's input and its norm), {hand.row:,} each; rotation tables; a number a token of the norm | {hand.activations_bytes:,} |
| logits | the gradient of hidden states; that of the output weight in fp32; a chunk of {hand.chunk:,} x V in bf16, fp32, and as log-probabilities | {hand.logits_bytes:,} |
| gather buffers | what norm and output layer were gathered into | {hand.head_bytes:,} |
| buffers | ids, labels and positions | {24 * hand.tokens:,} |
| outside of tensors | cuBLAS 64 MiB; NCCL 3 x 24 x 9.2 MiB; segments of 3 streams; 1.5 GiB assumed | the rest |
| sum | | {hand.peak_bytes:,} ({hand.peak_bytes / GIB:.1f} GiB of {plan.estimate.capacity_bytes / GIB:.1f}) |

## Traffic of a rank in a step

ZeRO-3 gathers the embedding once, every block twice (forward and backward) and the head once, in bf16:
2 (2 V d + d + 2 L x {hand.block:,}) = {hand.gathered_bytes:,} bytes in {2 * hand.layers + 2} calls. Every gradient is reduced once in fp32:
{hand.reduced_bytes:,} bytes in {hand.layers + 2} calls.

The ring of a node moves {devices()["H100-SXM-80GB"].ring_bytes_per_s / 1e9:g} GB/s, of which training reaches {hand.of("NVLink"):.3g}: {hand.link / 1e9:.0f} GB/s. 7/8 of the payload passes a
rank: a block is gathered in {1e3 * hand.gather_s(hand.block):.2f} ms and reduced in {1e3 * hand.reduce_s(hand.block):.2f} ms, the embedding in {1e3 * hand.gather_s(hand.end):.2f} and {1e3 * hand.reduce_s(hand.end):.2f} ms. Together
{1e3 * hand.sent_s:.0f} ms.

## Operations

Forward, a block's products are 2 x {hand.products:,} a token, attention 4 x {hand.heads} x {hand.e} x 4,096^2 / 2. Backward is twice the
products and 2.5 times attention; what is recomputed is forward without the last product (down), whose result no gradient
needs. The output layer is multiplied three times. Over 8 ranks: {hand.flops:,}.

## Seconds

The best products of an H100 reach 989 TFLOP/s x {hand.of("best product:H100-SXM-80GB"):.3g}, this software {hand.of("own era"):.3g} of that: {hand.rate / 1e12:.0f} TFLOP/s; memory
3.35 TB/s x {hand.of("memory"):.3g} x {hand.of("own era"):.3g} = {hand.memory_rate / 1e12:.2f} TB/s. A product pays for its last wave of tiles over 132 multiprocessors, and
k / (k + {hand.of("fill k"):.0f}).

| forward | q | k | v | o | gate | up | down |
|---|---|---|---|---|---|---|---|
| ms | {linear["q"]} | {linear["k"]} | {linear["v"]} | {linear["o"]} | {linear["gate"]} | {linear["up"]} | {linear["down"]} |

Fused, a block's pointwise kernels move {moved["forward"]} MB forward, {moved["again"]} again and {moved["backward"]} backward: two rows of hidden states
for the norm (read, written), one and a quarter twice for the rotation, four for sum and norm, three of width f for the
gate, three for the last sum; backward accordingly, and what the gradient of a norm's weight reads once more.

| a block | products | with attention and pointwise |
|---|---|---|
| forward | {1e3 * hand.forward_s:.2f} ms | {ms["forward"]} ms |
| recomputed | {1e3 * hand.recomputed_s:.2f} ms | {ms["again"]} ms |
| backward | {1e3 * hand.backward_s:.2f} ms | {ms["backward"]} ms |

{hand.layers} blocks take {1e3 * hand.layers * sum(hand.block_s.values()):.0f} ms. The rest of what is computed is the output layer ({1e3 * hand.head_s:.0f} ms) with its passes over logits,
the ends, copies of {hand.copied_bytes / 1e9:.0f} GB into and out of flat buffers, and {hand.of("contention"):.2f} of what is sent beside kernels, which slows them: {1e3 * found.compute_s:.0f} ms in
all.

A block's gather ({1e3 * hand.gather_s(hand.block):.2f} ms) is shorter than a block's forward, and its gather and reduction are shorter than its backward: they
are hidden. What is not: the gathers of the embedding and of the first block, before anything can be computed, and the
reductions of the first block, in part, and of the embedding, when all is computed: {1e3 * exposed:.1f} ms.

AdamW reads and writes 32 bytes a parameter: {1e3 * hand.optimizer_s:.1f} ms. The host takes {1e3 * found.host_s:g} ms once.

**A step: {1e3 * found.compute_s:.0f} + {1e3 * exposed:.1f} + {1e3 * hand.optimizer_s:.1f} + {1e3 * found.host_s:g} = {1e3 * found.step_s:.0f} ms**, {hand.ranks * hand.tokens / found.step_s:,.0f} tokens a second.
"""


if __name__ == "__main__":
    print(page(planned()), end="")
