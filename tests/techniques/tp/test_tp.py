"""What tensor parallelism cuts, which sums gradients need, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise import techniques
from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.slices import local
from shardwise.models.config import ModelSpec, parameter_shapes, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.lookup import load_spec
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Dtype, Lora, Optim, Plan, Precision
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.techniques import lora, tp
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.states import Division, State, division, state, whole_shape
from tests.models import hf_models
from tests.parity.cases import GEMMA, QWEN, TIED, UNTIED
from tests.parity.mixers import DEEPSEEK
from tests.said import shows

LLAMA = load_spec("Llama-3-8B")
CLUSTER = parse_cluster("8xH100")
ONLY = "`parallel.tp=1`"


def states(
    spec: ModelSpec, ranks: int, adapters: Lora | None = None, *, sequence_parallel: bool = False
) -> dict[str, State]:
    names = [*parameter_shapes(spec), *(lora.adapters(spec, adapters) if adapters else ())]
    how = Division(ranks, spec.attention.num_key_value_heads, sequence_parallel=sequence_parallel)
    return {name.removeprefix("layers.0."): state(name, how) for name in names}


def summed(found: dict[str, State]) -> set[str]:
    return {name for name, state in found.items() if state.partial and "layers." not in name}


def test_every_dim_that_is_cut_is_one_that_a_parameter_has() -> None:
    for spec in (UNTIED, TIED, GEMMA, QWEN, LLAMA):
        for name, shape in parameter_shapes(spec).items():
            dim = state(name, Division(2, spec.attention.num_key_value_heads)).dim
            assert dim is None or dim < len(shape), name


def test_which_gradients_are_summed_follows_from_where_a_parameter_is_used() -> None:
    """Norms of the stream only where ranks hold their own tokens; those of heads always; what is cut never."""
    biased = replace(QWEN, mlp_bias=True)
    heads = {"attention.q_norm.weight", "attention.k_norm.weight"}
    stream = {"attention_norm.weight", "mlp_norm.weight", "norm.weight", "mlp.down.bias"}
    assert summed(states(biased, 2)) == heads
    assert summed(states(biased, 2, sequence_parallel=True)) == heads | stream
    whole = {f"attention.{layer}.{word}" for layer in "kv" for word in ("weight", "bias")}
    assert summed(states(biased, 4)) == heads | whole  # two key heads


def test_of_an_adapter_what_is_not_cut_is_summed() -> None:
    found = states(UNTIED, 2, Lora(4, 8.0))
    assert (found["attention.q.lora_a.weight"].dim, found["attention.q.lora_b.weight"].dim) == (None, 0)
    assert (found["mlp.down.lora_a.weight"].dim, found["mlp.down.lora_b.weight"].dim) == (1, None)
    columns = {
        f"{layer}.lora_a.weight" for layer in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    }
    rows = {"attention.o.lora_b.weight", "mlp.down.lora_b.weight"}
    assert summed(found) == columns | rows
    whole = states(UNTIED, 4, Lora(4, 8.0))  # two key heads
    assert (whole["attention.k.lora_b.weight"].dim, whole["attention.v.lora_a.weight"].dim) == (None, None)


@pytest.mark.parametrize(
    ("spec", "ranks", "what"),
    [
        (LLAMA, 3, ["3", "32 query heads", "3", "8 key heads", "3"]),
        (with_fields(UNTIED, num_key_value_heads=4, num_attention_heads=12), 6, ["6", "4 key heads"]),
        (UNTIED, 2, ["2", "`intermediate_size` 27"]),
        (replace(UNTIED, vocab_size=5, intermediate_size=28), 4, ["vocabulary of 5", "4"]),
        (
            with_fields(LLAMA, qk_norm="projection"),
            16,
            ["16", "8 key heads", "normalised together"],
        ),
        (hf_models.spec_of("gpt2"), 2, ["transformers' own modules"]),
    ],
)
def test_what_cannot_be_shared_is_refused(spec: ModelSpec, ranks: int, what: list[str]) -> None:
    found = tp.check(spec, Plan(Layout(tp=ranks)), CLUSTER)
    assert [problem.code for problem in found] == ["PLAN022"]
    assert shows(found[0].what, *what)
    assert not tp.check(spec, Plan(), CLUSTER)


@pytest.mark.parametrize(
    ("spec", "ranks", "devices", "fix"),
    [
        (LLAMA, 3, "3x8xH100", "one of 1, 2, 4, 8"),
        (LLAMA, 3, "3x1xH100", ONLY),
        (with_fields(LLAMA, num_attention_heads=6, num_key_value_heads=3), 4, "2x8xH100", ONLY),
        (
            with_fields(LLAMA, num_attention_heads=6, num_key_value_heads=3, intermediate_size=90),
            4,
            "3x4xH100",
            "one of 1, 3, 6",
        ),
    ],
)
def test_the_fix_names_every_number_of_ranks_that_serves(spec: ModelSpec, ranks: int, devices: str, fix: str) -> None:
    """The model as well as the devices; and each of them is then accepted."""
    cluster = parse_cluster(devices)
    [problem] = tp.check(spec, Plan(Layout(dp_shard=cluster.world // ranks, tp=ranks)), cluster)
    assert problem.fix == fix or (fix == ONLY and shows(problem.fix, ONLY, f"{cluster.world} devices"))
    for legal in map(int, fix.removeprefix("one of ").split(", ") if fix.startswith("one of") else "1"):
        assert cluster.world % legal == 0
        assert not tp.check(spec, Plan(Layout(dp_shard=cluster.world // legal, tp=legal)), cluster)


def test_without_a_cluster_the_plan_says_how_many_devices() -> None:
    [problem] = tp.check(LLAMA, Plan(Layout(dp_shard=4, tp=3)))
    assert problem.fix == "one of 1, 2, 4"


@pytest.mark.parametrize(("queries", "sequence"), [(9, True), (9, False), (None, True), (None, False)])
def test_gradients_of_latents_are_summed_where_ranks_make_them_of_their_own_tokens(
    queries: int | None, sequence: bool
) -> None:
    """And where each makes those of all tokens, for its own heads: of queries without a latent."""
    spec = with_fields(DEEPSEEK, q_lora_rank=queries)
    how = division(spec, Plan(Layout(tp=2), sequence_parallel=sequence))
    names = [name for name in parameter_shapes(spec) if "_a." in name or "_a_norm." in name]
    adapters = ["layers.1.attention.kv_a.lora_a.weight", "layers.1.attention.kv_a.lora_b.weight"]
    assert len(names) == (18 if queries else 9)
    for name in (*names, *adapters):
        assert state(name, how) == State(None, partial=sequence or queries is None), name


def test_magnitudes_are_cut_as_their_layers_outputs_are() -> None:
    found = states(UNTIED, 2, Lora(4, 8.0, dora=True))
    assert found["attention.q.lora_m"].dim == 0
    assert found["mlp.down.lora_m"].dim is None
    assert found["mlp.down.lora_m"].partial


def test_norms_over_whole_projections_are_cut_with_them() -> None:
    assert state("layers.0.attention.q_norm.weight", Division(2, 8, heads_apart=False)) == State(0)
    assert state("layers.0.attention.q_norm.weight", Division(2, 8)) == State(None, partial=True)


def test_of_rows_in_four_bits_each_rank_has_whole_blocks() -> None:
    small = Plan(Layout(tp=4), lora=Lora(nf4=True))
    assert not tp.check(LLAMA, small, CLUSTER)
    [problem] = tp.check(replace(LLAMA, intermediate_size=14_400), small, CLUSTER)
    assert shows(problem.what, "`down`", "3600 columns")


def test_of_moments_in_eight_bits_each_rank_has_whole_blocks() -> None:
    """Of what is trained and large enough: 14,336 columns of `down` are 56 blocks of 256, which 8 ranks share and 16 do
    not; the A of an adapter counts in the place of a frozen layer."""
    packed = Plan(Layout(tp=16), optim=Optim("adamw8bit"))
    assert not tp.check(LLAMA, replace(packed, layout=Layout(tp=8)), CLUSTER)
    [problem] = tp.check(LLAMA, packed, CLUSTER)
    assert shows(problem.what, "blocks of 256", "`down`", "896 columns")
    assert problem.fix == "one of 1, 2, 4, 8"
    assert not tp.check(LLAMA, replace(packed, frozen=("*.down.weight",)), CLUSTER)
    assert not tp.check(LLAMA, replace(packed, lora=Lora(4, 8.0, ("q", "v"))), CLUSTER)
    assert tp.check(LLAMA, replace(packed, lora=Lora(4, 8.0)), CLUSTER)


def test_the_whole_shape_of_a_piece_on_paper() -> None:
    """Of every weight of a sheet as it is cut for the last rank of eight, adapters and an odd vocabulary among them."""
    spec = replace(LLAMA, num_hidden_layers=1, vocab_size=128_257)
    plan = Plan(Layout(tp=8), lora=Lora(4, 8.0))
    sheet = sheet_of(spec, plan, rank_kind_of(7, plan.layout, [range(1)]))
    shapes = parameter_shapes(spec) | lora.adapters(spec, Lora(4, 8.0))
    found = {weight.name: whole_shape(weight, sheet, plan.layout) for unit in sheet.units for weight in unit.weights}
    assert found == {name.removeprefix("layers.0."): shape for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["layers.0.attention.slopes", "layers.0.mlp.routers.weight", "layers.0.mlp_norm.bias"])
def test_an_unknown_parameter_is_refused(name: str) -> None:
    """With and without asserts: whole on every rank, its gradient would be too small and nobody would be told."""
    with pytest.raises(ValueError, match=rf"`{name}`: .*states.TABLE"):
        state(name, Division(2, 4))


@pytest.mark.parametrize(
    ("weights", "reduce", "total"), [("bf16", "fp32", 1 + 2**-6), ("bf16", "bf16", 1.0), ("fp32", "bf16", 1.0)]
)
def test_parts_of_a_gradient_are_added_in_the_dtype_of_reduction(
    weights: Dtype, reduce: Any, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank has 1, eight others 2^-9 each, which bf16 cannot add to 1; what cannot be told from a sum in fp32 must
    come from one. One message, whatever the dtypes."""
    spec = replace(UNTIED, intermediate_size=28)
    plan = Plan(Layout(tp=2), precision=Precision("bf16", weights, reduce), sequence_parallel=True)
    sent: list[tuple[torch.dtype, int]] = []

    def adds(flat: torch.Tensor, group: Any) -> None:
        sent.append((flat.dtype, flat.numel() * flat.element_size()))
        for _ in range(8):
            flat += 2**-9

    monkeypatch.setattr(torch.distributed, "all_reduce", adds)
    with fake_world(plan.layout) as groups:
        [model] = tp.apply([Decoder(spec).to(torch_dtype(weights))], plan, groups)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        tp.after_backward([model], plan, groups)
        norm, head = (local(model.get_parameter(f"{name}.weight").grad) for name in ("norm", "head"))
    assert norm.dtype == torch_dtype(weights) and set(norm.tolist()) == {total}
    assert set(head.flatten().tolist()) == {1.0}, "cut, so no part of a sum"
    costed = techniques.cost(sheet_of(spec, plan), plan)
    assert sent == [(torch_dtype(reduce), last.bytes) for last in costed.step if last.axis == "tp"]
