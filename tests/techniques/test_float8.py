"""Products in float8: which layers, what is refused and why, the codes, and how far they are from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import hypot, prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, model_spec, parameter_count, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec
from shardwise.planner.search import choose
from shardwise.planner.seconds.kernels import _product
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Offload, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import GROUPED, SCALED
from shardwise.spec.units import show_payload
from shardwise.techniques import float8
from shardwise.techniques.float8 import gathers
from shardwise.techniques.float8.codes import (
    E4M3,
    WeightCodes,
    _compiled_codes,
    _compiled_values,
    coded,
    codes_of,
    values_of,
)
from shardwise.techniques.float8.scaled import Scaling, linear
from tests.said import shows

SPEC = model_spec("float8", 601, 256, 512, 4, 4, 2, 128)
BF16 = Precision("bf16", products="float8", exclude=("first", "last"))
PLAN = Plan(precision=BF16)
ROWS, LENGTH, IDS = 4, 48, 128


def wrong(plan: Plan, spec: ModelSpec = SPEC, cluster: str = "1xH100") -> dict[str, str]:
    """What is refused, by key."""
    return {one.where: one.what for one in float8.check(spec, plan, parse_cluster(cluster))}


# Which layers --------------------------------------------------------------------------------------------------------


def test_linear_layers_of_the_blocks_between_the_ends() -> None:
    found = float8.layers(SPEC, BF16)
    attention, mlp = ("q", "k", "v", "o"), ("gate", "up", "down")
    names = [f"attention.{name}" for name in attention] + [f"mlp.{name}" for name in mlp]
    assert [*found] == [f"layers.{block}.{name}" for block in (1, 2) for name in names]
    assert found["layers.1.mlp.gate"] == (512, 256)
    assert len(float8.layers(SPEC, replace(BF16, exclude=()))) == 28
    assert {*float8.layers(SPEC, replace(BF16, exclude=("first", "*.down", "layers.2.*")))} == {
        f"layers.{block}.{name}" for block in (1, 3) for name in names[:-1]
    }
    assert not float8.layers(SPEC, Precision("bf16"))


def test_experts_are_among_them_and_no_router_or_latent_that_is_narrow() -> None:
    """And those of which 128 is no divisor stay as they are by default, as the plan says; on a GPU, which multiplies
    them one after another, narrow experts too."""
    spec = load_spec("DeepSeek-V3")
    recipe = Recipe.model_validate({"precision": {"products": "float8"}})
    (plan,) = float8.choices(recipe, spec, parse_cluster("8xH100"), Plan(precision=Precision("bf16")))
    assert plan.precision.exclude == ("first", "last", "*.kv_a", "*.expert_*")
    assert shows(plan.why["precision.exclude"], "*.kv_a", 128, "experts", "4,096")
    (plan,) = float8.choices(recipe, spec, parse_cluster("8xCPU"), Plan(precision=Precision("bf16")))
    assert plan.precision.exclude == ("first", "last", "*.kv_a")
    roles = {name.rpartition(".")[2] for name in float8.layers(spec, plan.precision)}
    assert roles == {"q_a", "q_b", "kv_b", "o", "gate", "up", "down", "expert_gate", "expert_up", "expert_down"}
    assert float8.layers(spec, plan.precision)["layers.5.mlp.experts.expert_down"] == (7168, 2048), "of one"
    few = float8.layers(spec, replace(plan.precision, exclude=("*.expert_*",)))
    assert few and not any(".experts." in name for name in few)


def test_the_modules_that_multiply_so() -> None:
    model = Decoder(SPEC)
    techniques.apply_inside([model], PLAN, meshes=None)  # type: ignore[arg-type]
    changed = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "scaled" in getattr(vars(module).get("forward"), "multiply", len).__module__
    }
    assert changed == {*float8.layers(SPEC, BF16)}


# The recipe ----------------------------------------------------------------------------------------------------------


def chosen(**precision: Any) -> Plan:
    recipe = Recipe.model_validate({"precision": precision})
    (plan,) = float8.choices(recipe, SPEC, parse_cluster("8xH100"), Plan(precision=Precision("bf16")))
    return plan


def test_it_is_there_only_where_it_is_asked_for() -> None:
    assert chosen().precision == Precision("bf16")
    asked = chosen(products="float8")
    assert asked.precision == BF16 and asked.why["precision.products"] == "pinned"
    assert chosen(products="float8", exclude=[]).precision.exclude == ()
    assert chosen(products="float8", scales="row", exclude=["*.q"]).precision.scales == "row"


def test_a_plan_agrees_with_the_recipe_that_it_was_made_for_only() -> None:
    plan = chosen(products="float8")
    for precision, agrees in (
        ({"products": "float8"}, True),
        ({"products": "float8", "exclude": ["first", "last"]}, True),
        ({"products": "float8", "exclude": []}, False),
        ({"products": "float8", "scales": "row"}, False),
        ({}, False),
    ):
        pairs = float8.pins(Recipe.model_validate({"precision": precision}), plan).values()
        assert all(asked in ("auto", planned) for planned, asked in pairs) == agrees, precision


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["block", "row", "mx"])
@pytest.mark.parametrize(
    ("device", "able"),
    [("A100", ()), ("L40S", ()), ("H100", ("block", "row")), ("H200", ("block", "row")), ("B200", ("row", "mx"))],
)
def test_devices(device: str, able: tuple[str, ...], scales: Any) -> None:
    found = wrong(replace(PLAN, precision=replace(BF16, scales=scales)), cluster=f"1x{device}")
    assert (not found) == (scales in able)
    if device == "A100":
        assert "H100-SXM-80GB" in found["precision.products"] and "8.0" in found["precision.products"]
    if able and scales not in able:
        others = {"B200": "H100", "H100": "B200", "H200": "B200"}
        assert others[device] in found["precision.scales"] and device in found["precision.scales"]


def test_a_cpu_emulates_in_every_dtype_and_a_gpu_multiplies_in_bf16() -> None:
    for dtype in ("fp32", "bf16", "fp64"):
        plan = replace(PLAN, precision=replace(BF16, compute=dtype))
        assert not wrong(plan, cluster="1xCPU") and bool(wrong(plan)) == (dtype != "bf16")


def test_an_old_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_cublas", lambda: (12, 8))
    assert "12.8" in wrong(PLAN)["precision.scales"]
    assert not wrong(replace(PLAN, precision=replace(BF16, scales="row")))
    monkeypatch.setattr(float8, "_cublas", lambda: (13, 0))
    assert not wrong(PLAN)


def test_layouts_that_would_change_results() -> None:
    """A cut within a block, a key head that ranks share; not rows that are cut, whose maxima ranks tell each other."""
    tp = replace(PLAN, layout=Layout(tp=2))
    assert not wrong(tp)
    assert (
        "512 rows"
        in wrong(replace(PLAN, layout=Layout(tp=8)), with_fields(SPEC, num_key_value_heads=8, num_attention_heads=8))[
            "parallel.tp"
        ]
    )
    shared = replace(PLAN, layout=Layout(tp=4))
    found = float8.check(SPEC, shared, parse_cluster("4xH100"))
    assert "of the sum" in found[0].what and "'*.k', '*.v'" in found[0].fix
    apart = replace(shared, precision=replace(BF16, exclude=("first", "last", "*.k", "*.v")))
    assert not wrong(apart)
    rows = replace(tp, precision=replace(BF16, scales="row"))
    assert not wrong(rows)
    assert "whole blocks of 16" in wrong(rows, with_fields(SPEC, intermediate_size=16 * 33))["parallel.tp"]


@pytest.mark.parametrize(
    ("key", "changes", "fields"),
    [
        ("precision.exclude", {"precision": replace(BF16, exclude=("*",))}, {}),
        ("precision.exclude", {"precision": replace(BF16, exclude=("*.nothing",))}, {}),
        ("precision.exclude", {}, {"hidden_size": 320}),
        ("precision.modules", {"precision": replace(BF16, modules=(("*norm", "fp32"),))}, {}),
        ("precision.products", {"lora": Lora(nf4=True)}, {}),
        ("parallel.schedule", {"layout": Layout(pp=2), "pipeline": Pipeline("zbv", 2, (1, 1, 1, 1))}, {}),
    ],
    ids=["nothing is left", "no such layer", "sizes", "modules", "four bits", "a backward in two"],
)
def test_what_it_cannot_be_beside(key: str, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    assert [*wrong(replace(PLAN, **changes), with_fields(SPEC, **fields))] == [key]


def test_known_models_fit() -> None:
    """Of the models that ship, at one device and over two ranks of tensor parallelism."""
    whole, halves, every = 0, 0, 0
    recipe = Recipe.model_validate({"precision": {"products": "float8"}})
    for name in configs():
        spec = load_spec(name)
        (plan,) = float8.choices(recipe, spec, parse_cluster("8xH100"), Plan(precision=Precision("bf16")))
        every += 1
        whole += not float8.check(spec, plan, parse_cluster("8xH100"))
        halves += not float8.check(spec, replace(plan, layout=Layout(tp=2)), parse_cluster("8xH100"))
    assert whole > 0.9 * every and halves > 0.6 * every, (whole, halves, every)


def test_a_search_refuses_before_anything_runs() -> None:
    recipe = Recipe.model_validate({"precision": {"products": "float8"}, "train": {"seq_len": 512}})
    with pytest.raises(ConfigError) as refused:
        choose(recipe, SPEC, parse_cluster("1xA100"))
    assert {"PLAN012"} == {problem.code for problem in refused.value.problems}


# Weights gathered as codes -------------------------------------------------------------------------------------------


GATHERED = Plan(Layout(dp_shard=2), shard=Shard("zero3"), precision=replace(BF16, gather="float8"))
"""Of whose ranks each has whole blocks of all weights."""


def test_a_recipe_asks_for_it_and_a_plan_says_what_it_comes_to() -> None:
    asked = chosen(products="float8", gather="float8")
    assert asked.precision.gather == "float8" and chosen(products="float8").precision.gather == "compute"
    pairs = float8.pins(Recipe.model_validate({"precision": {"products": "float8"}}), asked)
    assert pairs["precision.gather"] == ("float8", "compute")
    assert not wrong(GATHERED, cluster="2xH100") and not wrong(GATHERED, cluster="2xCPU")
    words = float8.reasons(SPEC, GATHERED)["precision.gather"]
    numbers, every = sum(map(prod, float8.layers(SPEC, BF16).values())), parameter_count(SPEC)
    after = 2 * (every - numbers) + numbers + 4 * numbers // 128**2
    assert shows(words, 14, show_payload(after), show_payload(2 * every)) and "blocks" not in words
    assert not float8.reasons(SPEC, PLAN)


def test_layers_of_which_ranks_have_no_whole_blocks_stay_as_they_are() -> None:
    """Over four ranks those with fewer than 512 rows; what a plan says, and whether code takes both paths."""
    four, mixed = replace(GATHERED, layout=Layout(dp_shard=4)), "a weight in float8 of which ranks have no whole blocks"
    coded_layers, others = gathers.divided(SPEC, four, float8.layers(SPEC, BF16))
    assert {name.rpartition(".")[2] for name in coded_layers} == {"q", "gate", "up"}
    assert {name.rpartition(".")[2] for name in others} == {"k", "v", "o", "down"}
    assert "down, k, o, v" in float8.reasons(SPEC, four)["precision.gather"]
    assert float8.regimes(SPEC, four, {}) == {mixed: True} and float8.regimes(SPEC, GATHERED, {}) == {mixed: False}
    found = float8.check(SPEC, replace(GATHERED, layout=Layout(dp_shard=8)), parse_cluster("8xH100"))
    assert [one.where for one in found] == ["precision.gather"]
    assert shows(found[0].what, 8, 512, "1,024") and "dp_shard: 4" in found[0].fix
    few = replace(GATHERED, precision=replace(GATHERED.precision, exclude=("*.mlp.*", "*.q", "*.o")))
    narrow = with_fields(SPEC, num_key_value_heads=1)
    (refused,) = float8.check(narrow, few, parse_cluster("2xH100"))
    assert "dp_shard" not in refused.fix, "fewer than two ranks gather nothing"


def test_experts_are_gathered_so_where_each_rank_has_whole_ones_or_whole_blocks() -> None:
    spec = with_fields(SPEC, num_experts=4, experts_per_token=2, expert_size=128)
    own = replace(GATHERED, layout=Layout(dp_shard=4, ep=2))
    coded_layers, others = gathers.divided(spec, own, float8.layers(spec, BF16))
    assert "layers.1.mlp.experts.expert_gate" in coded_layers, "512 rows, of which two ranks share half"
    alone = replace(own, layout=Layout(dp_shard=4, ep=4))
    coded_layers, others = gathers.divided(spec, alone, float8.layers(spec, BF16))
    assert not any("expert" in name for name in (*coded_layers, *others)), "they are not gathered"


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("precision.gather", {"shard": Shard("zero2")}),
        ("precision.gather", {"layout": Layout()}),
        ("precision.gather", {"precision": replace(GATHERED.precision, scales="row")}),
        ("precision.gather", {"precision": replace(GATHERED.precision, compute="fp16")}),
        ("precision.gather", {"lora": Lora(4, 8.0, dora=True)}),
        ("precision.gather", {"offload": Offload("host")}),
        ("parallel.reshard_after_forward", {"layout": Layout(dp_shard=4), "shard": Shard("zero3", 2)}),
    ],
    ids=["zero2", "one rank", "rows", "fp16", "DoRA", "the host", "groups of ranks"],
)
def test_what_codes_cannot_be_gathered_beside(key: str, changes: dict[str, Any]) -> None:
    assert [*wrong(replace(GATHERED, **changes), cluster="4xCPU")] == [key]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_weight_made_of_codes_has_codes_that_stand_for_the_same(dtype: torch.dtype) -> None:
    """To the bit, at both ends of the range too, with zeros of both signs, and where something is not finite."""
    weight = torch.randn(256, 512) * torch.logspace(-45, 38, 512)
    weight[:128, :128] = 0.0
    weight[7, 300], weight[200, 500], weight[9, 9] = torch.inf, torch.nan, -0.0
    right = coded(weight.to(dtype), 128, 128)
    form, pieces = WeightCodes(nn.Identity()), weight.chunk(2)
    sent = [form.sent(piece, dtype) for piece in pieces]
    gathered_parts = [torch.cat(each) for each in zip(*sent, strict=True)]
    assert gathered_parts[0].dtype == torch.uint8 and gathered_parts[0].shape == weight.shape
    room = torch.full(weight.shape, 3.0, dtype=dtype)
    made = form.values(gathered_parts, dtype, None)
    assert form.values(gathered_parts, dtype, room) is room and made.dtype == dtype
    values = right.values(torch.float64)
    for found in (made, room):
        assert torch.equal(found.double().nan_to_num(nan=7.0), values.nan_to_num(nan=7.0))
        again = coded(found, 128, 128).values(torch.float64)
        assert torch.equal(again.nan_to_num(nan=7.0), values.nan_to_num(nan=7.0))
        assert torch.equal(again.signbit()[9, 9], values.signbit()[9, 9])


@pytest.mark.big
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
def test_compiled_kernels_make_the_same_weights() -> None:
    """Of several sizes."""
    for size in ((256, 256), (384, 128), (128, 512)):
        weight = torch.randn(size).bfloat16()
        codes, scales = codes_of(weight)
        fused_codes, fused_scales = _compiled_codes()(weight)
        assert torch.equal(codes.view(torch.uint8), fused_codes.view(torch.uint8)) and torch.equal(scales, fused_scales)
        plain, fused = torch.zeros_like(weight), torch.zeros_like(weight)
        values_of(codes, scales, plain)
        _compiled_values()(codes, scales, fused)
        assert torch.equal(plain, fused) and plain.count_nonzero() > 0


# Codes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_codes_stand_for_the_nearest_values(dtype: torch.dtype) -> None:
    """Nothing is above the largest, nothing is farther than half a step, and the least scale that does is taken."""
    matrix = (torch.randn(256, 384) * torch.logspace(-30, 20, 256)[:, None]).to(dtype)
    found = coded(matrix, 128, 128)
    assert found.codes.dtype == E4M3 and found.scales.shape == (2, 3)
    blocks = matrix.double().view(2, 128, 3, 128).abs().amax((1, 3)) / found.scales.double()
    assert ((blocks > 224) & (blocks <= 448)).all()
    values, scales = (
        found.values(torch.float64),
        found.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1),
    )
    room = torch.maximum(matrix.double().abs() / 16, scales * 2**-10) * (1 + 1e-6)
    assert ((values - matrix.double()).abs() <= room).all()
    assert torch.equal(found.values(dtype).double(), values)  # exact in any dtype


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
def test_compiled_kernels_make_the_same_codes() -> None:
    """Which on GPUs make them where blocks are compiled; that one is not finite may be told by another NaN."""
    matrix = (torch.randn(128, 256) * torch.logspace(-30, 20, 128)[:, None]).bfloat16()
    plain, fused = coded(matrix, 1, 128), coded(matrix, 1, 128, fused=True)
    assert torch.equal(plain.codes.view(torch.uint8), fused.codes.view(torch.uint8))
    assert torch.equal(plain.scales, fused.scales)


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (128, 128)])
def test_a_piece_has_the_codes_of_the_whole(rows: int, columns: int) -> None:
    matrix = torch.randn(256, 256)
    whole = coded(matrix, rows, columns).values(torch.float32)
    assert torch.equal(coded(matrix[128:], rows, columns).values(torch.float32), whole[128:])
    assert torch.equal(coded(matrix[:, 128:], rows, columns).values(torch.float32), whole[:, 128:])
    if rows > 1:
        turned = coded(matrix.t(), rows, columns).values(torch.float32)
        assert torch.equal(turned, coded(matrix, rows, columns).transposed().values(torch.float32))
    with pytest.raises(ValueError, match="whole blocks"):
        coded(matrix[:, 64:], rows, columns)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 3e38])
def test_zeros_and_ends_of_the_range(scale: float) -> None:
    matrix = torch.full((1, 128), scale)
    found = coded(matrix, 1, 128).values(torch.float32)
    assert torch.allclose(found, matrix, rtol=0.07, atol=1e-40)


# Compiled blocks -----------------------------------------------------------------------------------------------------


EXACT = replace(BF16, compute="fp64", weights="fp64")
COMPILED = [Plan(precision=EXACT, compile=True, remat=remat) for remat in (Remat(), Remat("selective"))]


def a_step(plan: Plan) -> Tensor:
    """Its loss and all gradients, of a model of which each block is one graph where the plan compiles."""
    torch.manual_seed(0)
    model, ids = Decoder(SPEC), torch.randint(IDS, (ROWS, LENGTH))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.06) if parameter.ndim > 1 else nn.init.ones_(parameter)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        techniques.apply_inside([model], plan, meshes=None)  # type: ignore[arg-type]
    logits = model(ids, torch.arange(LENGTH).expand(ROWS, LENGTH), MaskSpec())
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    return torch.cat([loss.view(1), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)]).detach()


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
def test_compiled_blocks_compute_the_same() -> None:
    """With and without recomputation, in float64: in bf16 norms round otherwise there, and codes with them."""
    right = a_step(Plan(precision=EXACT))
    for plan in COMPILED:
        found = a_step(plan)
        assert float((found - right).norm() / right.norm()) < 1e-12


# Accuracy ------------------------------------------------------------------------------------------------------------


def rowwise(matrix: Tensor) -> Tensor:
    """As torchao's recipe for rows has it: the scale of a row is its largest value over 448, whatever that is."""
    scales = matrix.abs().amax(1, keepdim=True).double().clamp(min=1e-12) / 448
    return (matrix / scales).float().to(E4M3).double() * scales


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rowwise(x) @ rowwise(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # torchao's rowwise_with_gw_hp too leaves the gradient of the weight in high precision.
        return rowwise(grad) @ rowwise(weight.t().contiguous()).t(), grad.t() @ x


def gradients(multiply: Callable[[Tensor, Tensor], Tensor] | None, seed: int) -> dict[str, Tensor]:
    """Of a step of a model of four blocks, in float64, whose linear layers multiply so."""
    torch.manual_seed(seed)
    spec = with_fields(SPEC, vocab_size=IDS)
    model, ids = Decoder(spec).double(), torch.randint(IDS, (ROWS, LENGTH))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.06) if parameter.ndim > 1 else nn.init.ones_(parameter)
    for name in float8.layers(spec, replace(BF16, exclude=())) if multiply else ():
        layer: Any = model.get_submodule(name)
        layer.forward = partial(lambda layer, x: multiply(x, layer.weight), layer)
    logits = model(ids, torch.arange(LENGTH).expand(ROWS, LENGTH), MaskSpec())
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_rows(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _Rowwise.apply(x.flatten(0, 1), weight)
    return out.unflatten(0, x.shape[:2])


@pytest.mark.prove
@pytest.mark.parametrize("scales", ["block", "mx"])
def test_gradients_of_a_step_are_as_near_as_with_rowwise_scales(scales: str) -> None:
    """Their error beside float64 without float8, relative to each gradient, over all of them."""
    ratios = []
    for seed in range(3):
        right, errors = gradients(None, seed), []
        for multiply in (partial(linear, how=Scaling(scales)), in_rows):
            found = gradients(multiply, seed)
            each = [float((found[name] - one).norm() / one.norm()) for name, one in right.items()]
            errors.append(hypot(*each) / len(each) ** 0.5)
        assert 0.03 < errors[1] < 0.5
        ratios.append(errors[0] / errors[1])
    assert max(ratios) <= 1.05, ratios


# Seconds -------------------------------------------------------------------------------------------------------------


def test_two_products_of_three_are_faster_on_a_gpu_and_none_on_a_cpu() -> None:
    traits = own_traits()
    for cluster, faster in (("1xA100", 1.0), ("1xCPU", 1.0)):
        assert rates_of(Plan(precision=Precision("bf16")), parse_cluster(cluster), traits).scaled == faster
    rates = rates_of(PLAN, parse_cluster("1xH100"), traits)
    assert 1.2 < rates.scaled < 2.0 and rates_of(PLAN, parse_cluster("1xCPU"), traits).scaled == 1.0
    plain = rates_of(replace(PLAN, precision=Precision("bf16")), parse_cluster("1xH100"), traits)
    assert rates.best_flops_per_s == pytest.approx(plain.best_flops_per_s * rates.scaled)  # a bound is one still


def test_experts_one_after_another_pay_where_they_are_few_and_wide() -> None:
    """Beside one grouped product in bf16: eight of Mixtral's size compiled; 128 of Qwen3-30B-A3B's are launches."""
    rates = rates_of(replace(PLAN, compile=True), parse_cluster("1xH100"), own_traits())
    for dims, pays in (((8, 32_768, 14_336, 4_096), True), ((128, 65_536, 768, 2_048), False)):
        narrow, wide = (_product(name, dims, rates) for name in (SCALED[0], GROUPED))
        assert (narrow.device_ns < wide.device_ns) == pays
        assert narrow.host_ns - wide.host_ns >= 1e9 * dims[0] * rates.launch_s
