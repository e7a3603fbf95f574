"""Which kernel is taken, and that what stands around those of CUDA gives them what they ask for: shapes and settings on
tensors without contents, numbers with stand-ins that lay out their results as the real operations do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.models import attention as module
from shardwise.models import blockwise, efficient, flash, flex, kernel_choice
from shardwise.models.blockwise import Rule, Saved
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.kernel_choice import Case, choose
from shardwise.models.layers import accumulation_dtype
from tests.parity.cases import FLASH, GEMMA, SEQ_LEN

B, H, HK, S, E = 2, 6, 2, 320, 16
BOUNDS = [0, 100, 101, 320, 500, 640]
DOCUMENTS = torch.tensor(BOUNDS, dtype=torch.int32)
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ALL = frozenset({"fa3", "cudnn"})
RULES = {
    "causal": Rule(None, None, None, True, None, S, None),
    "full": Rule(None, None, None, False, None, S, None),
    "documents": Rule(DOCUMENTS, None, None, True, None, 219, None, 0.6),
    "full documents": Rule(DOCUMENTS, None, None, False, None, 219, None),
    "window": Rule(None, None, None, True, 40, S, None),
    "full window": Rule(DOCUMENTS, None, None, False, 140, 219, None),
    "cap": Rule(None, None, None, True, None, S, 1.5),
    "cap, window, documents, sinks": Rule(DOCUMENTS, torch.linspace(-1, 1, H), None, True, 150, 219, 1.5, 0.4),
}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("cpu", "fp64", 12, documents=True), "flash"),
        (Case("cpu", "fp32", 64, window=True), "blockwise"),
        (Case("cuda", "fp16", 128, (7, 0), documents=True), "efficient"),
        (Case("cuda", "fp16", 128, (7, 5), window=True), "blockwise"),
        (Case("cuda", "bf16", 128, (7, 5)), "blockwise"),
        (Case("cuda", "bf16", 128, (8, 0), documents=True), "flash"),
        (Case("cuda", "bf16", 128, (8, 9), window=True), "flash"),
        (Case("cuda", "bf16", 224, (8, 0)), "flash"),
        (Case("cuda", "bf16", 224, (8, 9)), "efficient"),
        (Case("cuda", "bf16", 256, (12, 0)), "flash"),
        (Case("cuda", "bf16", 12, (9, 0)), "blockwise"),
        (Case("cuda", "bf16", 128, (9, 0)), "cudnn"),
        (Case("cuda", "bf16", 128, (9, 0), documents=True), "flash"),
        (Case("cuda", "bf16", 128, (9, 0), deterministic=True), "flash"),
        (Case("cuda", "bf16", 192, (10, 0)), "flash"),
        (Case("cuda", "bf16", 256, (9, 0), soft_cap=True, window=True), "flex"),
        (Case("cuda", "fp32", 64, (9, 0), documents=True), "efficient"),
        (Case("cuda", "fp32", 64, (9, 0), documents=True, deterministic=True), "flex"),
        (Case("cuda", "fp64", 64, (9, 0)), "blockwise"),
        (Case("cuda", "bf16", 64, (9, 0), positions=True), "blockwise"),
        (Case("rocm", "bf16", 128), "flash"),
        (Case("rocm", "bf16", 128, window=True), "flex"),
    ],
)
def test_the_first_that_serves_is_taken(case: Case, expected: str) -> None:
    assert choose(case, present=frozenset({"cudnn"})) == expected


def test_a_pin_is_taken_where_it_serves() -> None:
    dense, packed = (Case("cuda", "bf16", 128, (9, 0), documents=documents) for documents in (False, True))
    assert choose(dense, present=ALL) == "fa3" and choose(dense) == "flash", "what is not there is not taken"
    assert choose(dense, "cudnn", ALL) == "cudnn" and choose(packed, "cudnn", ALL) == "fa3"
    assert choose(dense, "efficient", ALL) == "efficient" and choose(dense, "blockwise", ALL) == "blockwise"


@pytest.mark.parametrize(
    ("capability", "pin", "expected"),
    [((9, 0), "auto", ["FA3"]), ((9, 0), "fa3", ["FA3"]), ((9, 0), "flash", []), ((8, 0), "auto", [])],
)
def test_flash_attention_3_is_for_hopper(
    capability: tuple[int, int], pin: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(module, "device_case", lambda *given: Case("cuda", "bf16", 0, capability))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    module.prepare(torch.device("cuda"), pin)
    assert activated == [], "it is not installed here"
    monkeypatch.setattr(module, "find_spec", lambda name: name == "flash_attn_interface" or None)
    module.prepare(torch.device("cuda"), pin)
    assert activated == expected


LOCAL = with_fields(GEMMA, head_dim=256, sliding_window=4096)


@pytest.mark.parametrize(
    ("spec", "case", "seq_len", "expected"),
    [
        (FLASH, Case("cpu", "fp32", 16, documents=True), 512, "flash"),
        (FLASH, Case("cuda", "bf16", 16, (8, 0), documents=True), 512, "flash"),
        (FLASH, Case("cuda", "bf16", 16, (9, 0), documents=True), 512, "flash, cudnn (rows of one document)"),
        (FLASH, Case("cuda", "bf16", 16, (9, 0)), 512, "cudnn"),
        (FLASH, Case("cuda", "bf16", 16, (9, 0), documents=True), 500, "flash"),
        (LOCAL, Case("cuda", "bf16", 256, (9, 0), documents=True), 8192, "flex"),
        (
            with_fields(LOCAL, attention_soft_cap=None),
            Case("cpu", "fp32", 256, documents=True),
            8192,
            "flash (full attention), blockwise (windows of 4,096)",
        ),
        (with_fields(LOCAL, attention_soft_cap=None), Case("cpu", "fp32", 256, documents=True), 4096, "flash"),
    ],
)
def test_a_run_says_what_computes_its_attention(spec: ModelSpec, case: Case, seq_len: int, expected: str) -> None:
    assert kernel_choice.described(kernel_choice.cases(spec, case, seq_len), "auto", frozenset({"cudnn"})) == expected


def test_bf16_on_several_gpus_is_proved_with_the_kernel_that_runs() -> None:
    """Heads of the model of tests/gpu/test_many_gpus.py, and its length, on every card that flash is for."""
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        case = Case("cuda", "bf16", FLASH.attention.head_dim, capability, documents=True, odd_length=SEQ_LEN % 64 != 0)
        assert choose(case, present=frozenset({"cudnn"})) == choose(replace(case, documents=False)) == "flash"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device are taken for those of a Hopper card. They hold nothing: to read one is an error."""

    def case(device: torch.device, dtype: torch.dtype, head_dim: int) -> Case:
        return Case("cuda", NAMES[dtype], head_dim, (9, 0))

    monkeypatch.setattr(module, "device_case", case)
    monkeypatch.setattr(module, "present", lambda device, pin: frozenset({"cudnn"}))


class Called(TorchDispatchMode):
    """Counts operations, and keeps the settings of the last call of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.settings: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removeprefix("_")
        self.count[name] += 1
        self.settings[name] = dict(kwargs or {})
        return func(*args, **kwargs or {})


def on_cuda(rule: Rule, dtype: torch.dtype, e: int = E) -> Called:
    """Forward and backward as a Hopper card would run them."""
    q, k, v = (torch.empty(B, S, heads, e, dtype=dtype, device="meta").transpose(1, 2) for heads in (H, HK, HK))
    if rule.documents is not None:
        rule = rule._replace(documents=torch.empty(len(rule.documents), dtype=torch.int32, device="meta"))
    with Called() as called:
        kernel, told = module._kernel(q, rule)
        out, lse = kernel.forward(q, k, v, told)
        grads = kernel.backward(out, Saved(q, k, v, out, lse), told)
    assert out.shape == q.shape and lse.shape == (B, H, S) and lse.dtype == accumulation_dtype(dtype)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]
    return called


OPERATIONS = {
    ("causal", torch.bfloat16): "scaled_dot_product_cudnn_attention",
    ("documents", torch.bfloat16): "flash_attention_forward",
    ("full window", torch.bfloat16): "flash_attention_forward",
    ("window", torch.float16): "flash_attention_forward",
    ("full", torch.float32): "efficient_attention_forward",
    ("full documents", torch.float32): "efficient_attention_forward",
}


@pytest.mark.parametrize(("name", "dtype"), OPERATIONS, ids=str)
def test_what_cuda_runs_and_what_it_is_told(hopper: None, name: str, dtype: torch.dtype) -> None:
    """Shapes by torch's own rules for these operations, windows as torch counts them, and nothing read back."""
    called = on_cuda(RULES[name], dtype)
    forward = OPERATIONS[name, dtype]
    backward = f"{forward.removesuffix('_forward')}_backward"
    assert called.count[forward] == called.count[backward] == 1
    for operation in (forward, backward):
        told = called.settings[operation]
        assert told.get("scale") == RULES[name].scale
        sides = {"window": (39, 0), "full window": (139, 139)}.get(name, (None, None))
        assert (told.get("window_size_left"), told.get("window_size_right")) == sides


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys", "apart"), [(4, 4, 4), (4, 8, 2), (8, 4, -3), (6, 6, 0)])
def test_a_window_of_tokens_apart_is_told_from_the_last_key(queries: int, keys: int, apart: int, causal: bool) -> None:
    """The kernel takes the last query to stand at the last key; the first query stands ``apart`` from the first key."""
    window = 3
    rule = Rule(None, None, None, causal, window, 0, None, apart=apart)
    told = flash._window(rule, queries, keys)
    left, right = told["window_size_left"], told["window_size_right"]
    for query, key in product(range(queries), range(keys)):
        at = query + keys - queries
        behind = apart + query - key
        if not causal:
            assert (at - left <= key <= at + right) == (abs(behind) < window)
        else:  # whose kernel sees nothing after its own place, where that is the same token
            assert (at - left <= key) == (behind < window)


def test_rows_of_one_document_are_dense(hopper: None) -> None:
    rows = Rule(torch.tensor([0, S, 2 * S], dtype=torch.int32), None, None, True, None, S, None)
    called = on_cuda(rows, torch.bfloat16)
    assert called.count["scaled_dot_product_cudnn_attention"] == 1
    called = on_cuda(rows._replace(kernel="flash"), torch.bfloat16)
    assert called.count["flash_attention_forward"] == 1 and called.count["scaled_dot_product_cudnn_attention"] == 0


@pytest.mark.parametrize(("name", "pairs"), {"causal": 6, "documents": 6, "window": 5, "full window": 9}.items())
def test_blocks_are_passed_over_without_a_look_at_the_device(
    hopper: None, name: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 x 3 blocks; two products a pair in forward and five in backward."""
    monkeypatch.setattr(blockwise, "BLOCK", 128)
    called = on_cuda(RULES[name], torch.float64 if name == "causal" else torch.bfloat16, 12)
    assert called.count["bmm"] + called.count["matmul"] == 7 * pairs


def laid_out(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Rule, list[Tensor]]:
    """Inputs, a rule, and what blockwise attention makes of them: out, lse and three gradients of a sum of squares."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, heads, E, dtype=dtype).transpose(1, 2) for heads in (H, HK, HK))
    rule = RULES[name]
    out, lse = blockwise.forward(q, k, v, rule)
    if rule.sinks is not None:
        out, lse = blockwise.with_sinks(out, lse, rule.sinks)
    return [q, k, v], rule, [out, lse, *blockwise.backward(out, Saved(q, k, v, out, lse), rule)]


def compare(kernel: Any, name: str) -> None:
    tensors, rule, right = laid_out(name)
    out, lse = kernel.forward(*tensors, rule)
    if rule.sinks is not None:
        out, lse = blockwise.with_sinks(out, lse, rule.sinks)
    grads = kernel.backward(right[0], Saved(*tensors, right[0], right[1]), rule)
    for found, expected in zip((out, lse, *grads), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Efficient:
    """The two operations as torch documents them in their shapes: [b,s,h,e] in and out, or one row of all documents;
    statistics a document, padded with infinity to 32 tokens, and just so in backward."""

    @staticmethod
    def rule(q: Tensor, *given: Any) -> tuple[Rule, int, int]:
        bounds, _, longest, _ = given
        rows = q.shape[0] if bounds is None else len(bounds) - 1
        longest = q.shape[1] if longest is None else longest
        return Rule(bounds, None, None, True, None, longest, None), rows, longest + -longest % 32

    @classmethod
    def _efficient_attention_forward(
        cls, q: Tensor, k: Tensor, v: Tensor, bias: None, *given: Any, **scale: Any
    ) -> Any:
        assert q.shape[2] == k.shape[2] and given[4:] in ((0.0, 1, True), (0.0, 0, True))
        rule, rows, padded = cls.rule(q, *given[:4])
        rule = rule._replace(causal=bool(given[5]), **scale)
        out, lse = blockwise.forward(*(x.transpose(1, 2) for x in (q, k, v)), rule)
        statistics = torch.full((rows, q.shape[2], padded), torch.inf)
        for row, (first, last) in enumerate(cls.spans(q, rule)):
            statistics[row, :, : last - first] = lse.transpose(0, 1).flatten(1)[:, first:last]
        return out.transpose(1, 2), statistics, None, None, 0, 0

    @staticmethod
    def spans(q: Tensor, rule: Rule) -> list[tuple[int, int]]:
        s = q.shape[1]
        bounds = [*range(0, q.shape[0] * s + 1, s)] if rule.documents is None else rule.documents.tolist()
        return [*pairwise(bounds)]

    @classmethod
    def _efficient_attention_backward(cls, grad: Tensor, *given: Any, **scale: Any) -> Any:
        q, k, v, bias, out, *bounds, statistics, dropout, _, _, causal, learnt = given
        assert (bias, dropout, learnt) == (None, 0.0, False)
        rule, rows, padded = cls.rule(q, *bounds)
        rule = rule._replace(causal=bool(causal), **scale)
        assert statistics.shape == (rows, q.shape[2], padded)
        lse = torch.cat([statistics[row, :, : b - a] for row, (a, b) in enumerate(cls.spans(q, rule))], 1)
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
        saved = Saved(*(x.transpose(1, 2) for x in (q, k, v, out)), lse)
        return *(x.transpose(1, 2) for x in blockwise.backward(grad.transpose(1, 2), saved, rule)), None


@pytest.mark.parametrize("name", ["causal", "full", "documents", "full documents"])
def test_efficient_is_given_heads_and_statistics_as_it_wants_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "aten", Efficient)
    compare(efficient, name)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """FlexAttention on a CPU, compiled without the code generation that a CPU lacks; the graphs that were compiled."""
    torch._dynamo.reset()
    seen: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False, fullgraph=True, backend=kept)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    yield seen
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.parametrize("name", RULES)
def test_flex_is_the_reference(name: str, graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the operation, where torch records no gradients of its own accord."""
    monkeypatch.setattr(module, "_kernel", lambda q, rule: (flex, rule))
    (q, k, v), rule, right = laid_out(name)
    out, lse = module.attention(q, k, v, *rule)
    grads = module.attention_backward(right[0], q, k, v, right[0], right[1], *rule)[:3]
    for found, expected in zip((out, lse, *grads), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_flex_is_compiled_once_for_all_documents(graphs: list[Any]) -> None:
    tensors, rule, _ = laid_out("documents")
    for cut in range(10, 100, 10):
        bounds = [0, cut, *range(320, 321 + cut, 10), 640]
        longest = max(last - first for first, last in pairwise(bounds))
        documents = torch.tensor(bounds, dtype=torch.int32)
        found, _ = flex.forward(*tensors, rule._replace(documents=documents, longest=longest))
        right, _ = blockwise.forward(*tensors, rule._replace(documents=documents, longest=longest))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize(("name", "share"), {"causal": 6 / 9, "window": 5 / 9, "full": 1.0}.items())
def test_flex_passes_over_blocks_out_of_reach(name: str, share: float) -> None:
    q = torch.empty(B, H, S, E)
    blocks = flex.block_mask(q, RULES[name])
    assert int(blocks.kv_num_blocks.sum()) == round(9 * share)
