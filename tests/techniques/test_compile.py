"""Compiled blocks meet the batches of a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.ir import FallbackKernel
from torch.fx import GraphModule

from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, layer_kinds, with_fields
from shardwise.prove import parity
from shardwise.prove.drift import predict
from shardwise.prove.pool import RankPool
from shardwise.runtime.generate import Sampling, generate
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Batch, Lora, Offload, Plan, Precision, Remat
from shardwise.techniques import compile, lora, remat
from tests.drift.compiled import compiler
from tests.models.families import random_model, spec_of
from tests.parity.cases import FP64, UNTIED
from tests.parity.experts import DEEP
from tests.parity.mixers import DENSE as LATENT
from tests.said import shows

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, about its own tracing
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # likewise
]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The compiler's come back afterwards."""
    config = torch.compiler.config
    before = config.recompile_limit, config.dynamic_sources
    yield
    config.recompile_limit, config.dynamic_sources = before


@pytest.mark.prove
def test_every_kind_of_layer_meets_every_kind_of_batch() -> None:
    """Windows beside full attention, training and evaluation, one row and several, documents of any number and
    length: more graphs than torch makes by default, and no more once each has been met."""
    spec, length, draw = spec_of("gemma3_text"), 32, Random(0)

    def read(rows: int, learn: bool) -> None:
        starts = draw.sample(range(1, rows * length), draw.randint(1, 4))  # one is longer than the window
        bounds = sorted({*starts, *range(0, rows * length + 1, length)})
        longest = max(last - first for first, last in pairwise(bounds))
        positions = torch.arange(length).expand(rows, length)
        mask = MaskSpec(documents=torch.tensor(bounds, dtype=torch.int32), longest=longest)
        with torch.set_grad_enabled(learn):
            model(torch.zeros_like(positions), positions, mask)

    with compiler("eager") as graphs:
        [model] = compile.apply([random_model(spec)], Plan(compile=True), None)
        kinds = [(2, True), (1, True), (3, True), (2, False), (3, False), (1, False)]
        for rows, learn in kinds * 3:
            read(rows, learn)
        met = graphs["eager"]
        for rows, learn in kinds * 3:
            read(rows, learn)
    assert 8 < met == graphs["eager"]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["selective", "none", "full"])
def test_the_first_step_compiles_for_documents_of_any_length(mode: Any) -> None:
    """One graph a kind of layer, made in the first step: what came later would come in the middle of a run, on each
    rank at a step of its own."""
    spec, length = spec_of("gemma3_text"), 32
    kinds, _ = layer_kinds(spec)
    positions = torch.arange(length).expand(2, length)
    plan = Plan(compile=True, remat=Remat(mode))
    with compiler("eager") as graphs:
        [model] = compile.apply(remat.apply([random_model(spec)], plan, None), plan, None)
        for inner in ([16, 32], [7, 20, 30, 32], [32], [3, 32, 40]):
            bounds = [0, *inner, 2 * length]
            longest = max(last - first for first, last in pairwise(bounds))
            mask = MaskSpec(documents=torch.tensor(bounds, dtype=torch.int32), longest=longest)
            model(torch.zeros_like(positions), positions, mask).sum().backward()
            assert graphs["eager"] == len(kinds) == 2


@pytest.mark.prove
def test_blocks_of_different_numbers_of_products_are_compiled() -> None:
    """A number that differs from block to block would become one that the compiler does not know, which the contexts
    of a checkpoint cannot be. Each kind of block saves by its own count."""
    spec, plan = DEEP, Plan(compile=True, remat=Remat("selective"))
    positions = torch.arange(8).expand(2, 8)

    def gradients(of: Plan) -> list[torch.Tensor]:
        [model] = compile.apply(remat.apply([random_model(spec).double()], of, None), of, None)
        model(torch.zeros_like(positions), positions, MaskSpec()).sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    with compiler("aot_eager") as graphs:
        compiled = gradients(plan)
    assert graphs["aot_eager"] == 2
    for ours, eager in zip(compiled, gradients(replace(plan, compile=False)), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.matrix
@pytest.mark.parametrize("adapters", [None, Lora(3, 6.0, frozen="fp64")], ids=["all weights", "adapters"])
def test_what_compiled_blocks_make_again_of_latents(adapters: Lora | None) -> None:
    """Forward saves the latents, which are 7 and 15 wide, and not the heads made of them, 40 and 64, whether an adapter
    adds to these or not; the gradients are those of eager code."""
    spec, positions, saved = with_fields(LATENT, q_lora_rank=7), torch.arange(8).expand(2, 8), set[int]()

    def forward(graph: GraphModule, _: Any) -> Any:
        [output] = graph.graph.find_nodes(op="output")
        saved.update(
            node.meta["val"].shape[-1]
            for node in output.args[0]
            if "mm" in str(node.target) or "two_products" in str(node.target)
        )
        return make_boxed_func(graph.forward)

    def gradients(of: Plan) -> list[torch.Tensor]:
        torch.manual_seed(0)
        [model] = lora.apply([random_model(spec)], of, None)
        model.double().requires_grad_(of.lora is None)
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                nn.init.normal_(weight.requires_grad_(), std=0.3)
        [model] = compile.apply(remat.apply([model], of, None), of, None)
        model(torch.zeros_like(positions), positions, MaskSpec()).sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plan = Plan(compile=True, remat=Remat("selective"), lora=adapters)
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        compiled = gradients(plan)
    assert saved == {7, 15, spec.hidden_size, spec.intermediate_size} | ({3} if adapters else set())
    for ours, eager in zip(compiled, gradients(replace(plan, compile=False)), strict=True):
        torch.testing.assert_close(ours, eager)


def test_what_the_user_made_dynamic_stays_so() -> None:
    torch.compiler.config.dynamic_sources = "L['x']"
    for _ in range(2):
        compile.apply([], Plan(compile=True), None)
    assert torch.compiler.config.dynamic_sources == f"L['x'],{compile.DYNAMIC}"


def test_a_text_is_written_uncompiled() -> None:
    """Of every length that it has on the way a graph would be made."""
    with compiler("eager") as graphs:
        [model] = compile.apply([random_model(spec_of("llama"))], Plan(compile=True), None)
        generate([model], [1, 2, 3], Sampling(max_new_tokens=2), torch.device("cpu"))
        assert not graphs
        positions = torch.arange(8)[None]
        model(torch.zeros_like(positions), positions, MaskSpec())
        assert graphs["eager"] == 1


def test_what_a_machine_lacks_is_said_before_the_start() -> None:
    cluster, spec = parse_cluster("1xV100"), spec_of("llama")
    assert compile.check(spec, Plan(compile=True), cluster) == []
    without = replace(cluster, device=replace(cluster.device, no_compiler="triton"))
    assert compile.check(spec, Plan(), without) == []
    [problem] = compile.check(spec, Plan(compile=True), without)
    assert (problem.code, problem.where) == ("PLAN021", "compile") and problem.fix.startswith("false, ")
    assert shows(problem.what, "triton")
    older = replace(cluster, device=replace(cluster.device, name="P100", capability=(6, 0)))
    [problem] = compile.check(spec, Plan(compile=True), older)
    assert shows(problem.what, "7.0", "P100", "6.0")


@pytest.mark.prove
@pytest.mark.parametrize(("mode", "tier"), [("full", "host"), ("none", "nvme")])
def test_compiled_blocks_fetch_their_frozen_weights(ranks: RankPool, mode: Any, tier: Any) -> None:
    """Loss and norm of two steps are those with all weights in place; 1e-9 in fp64 is the order of sums."""
    plan = Plan(batch=Batch(2, 1, 16, 24), precision=FP64, remat=Remat(mode), lora=Lora(4, 8.0), compile=True)
    found = ranks.run(both, UNTIED, plan, Offload(weights=tier), world=1)[0]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def both(rank: int, world: int, spec: ModelSpec, plan: Plan, elsewhere: Offload) -> list[list[float]]:
    """Losses and norms of two steps with all weights in place, and with what is ``elsewhere``."""
    with compiler("aot_eager"):
        each = [parity.take_steps(rank, spec, replace(plan, offload=offload), 2) for offload in (Offload(), elsewhere)]
    return [[*trace.losses, *trace.norms] for trace in each]


@pytest.mark.parametrize("adapters", [None, Lora(frozen="bf16")], ids=["all weights", "adapters"])
def test_a_recomputed_gate_is_held_until_its_gradients_are_made(adapters: Lora | None) -> None:
    """As on an H100, whose step of an 8B with adapters took what the plan says and one tensor of the MLP's width."""
    spec = replace(spec_of("llama"), hidden_size=64, intermediate_size=4096, vocab_size=64)
    plan = Plan(batch=Batch(2, 1, 512, 8), precision=Precision("bf16"), lora=adapters)
    one = 2 * 512 * spec.intermediate_size * 2
    for mode, more in (("full", one), ("none", 0)):
        each = [replace(plan, remat=Remat(mode), compile=compiled) for compiled in (False, True)]  # type: ignore[arg-type]
        eager, compiled = (predict(spec, other, device="cuda").peak_bytes for other in each)
        assert compiled - eager == more


def test_inductor_can_call_our_operations() -> None:
    """It hands on arguments by name, beside its own: one of the same name ends every compiled run in its first step."""
    taken = set(signature(FallbackKernel.create).parameters)
    for operation in (torch.ops.shardwise.attention, torch.ops.shardwise.attention_backward):
        assert taken.isdisjoint(argument.name for argument in operation.default._schema.arguments)
