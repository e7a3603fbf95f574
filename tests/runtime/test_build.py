"""From a plan to weights: the same for every layout, read or drawn; and out again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.distributed.meshes import Meshes
from shardwise.models import attention, hf
from shardwise.models.blockwise import Rule
from shardwise.models.decoder import Decoder
from shardwise.models.init import fill
from shardwise.prove.pool import RankPool
from shardwise.runtime import build
from shardwise.runtime.generate import Sampling, choose, generate
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan, Precision, Shard
from shardwise.spec.recipe import Recipe
from shardwise.techniques.nf4 import fourbit
from shardwise.techniques.quantised import NF4_PARTS
from tests.models import hf_models
from tests.parity.cases import TIED, UNTIED
from tests.runtime import rank_work

LAYOUTS = [
    (1, Layout(), "ddp"),
    (2, Layout(dp_replicate=2), "ddp"),
    (3, Layout(dp_shard=3), "zero3"),
    (4, Layout(dp_replicate=2, dp_shard=2), "zero1"),
    (2, Layout(tp=2), "ddp"),
    (4, Layout(dp_shard=2, tp=2), "zero3"),
]


def plan_of(layout: Layout, strategy: str, precision: Precision = Precision()) -> Plan:  # noqa: B008
    return Plan(layout=layout, shard=Shard(strategy=strategy), precision=precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("pin", ["auto", "blockwise"])
def test_a_pinned_kernel_computes_attention(kind: str, pin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = UNTIED if kind == "llama" else hf_models.spec_of(kind)
    asked: list[str] = []
    chosen = attention._kernel

    def kept(q: torch.Tensor, rule: Rule) -> tuple[Any, Rule]:
        asked.append(rule.kernel)
        return chosen(q, rule)

    monkeypatch.setattr(attention, "_kernel", kept)
    [model] = build.build_parts(spec, Plan(attention=pin), Meshes(), torch.device("cpu"))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(ids, ids, attention.MaskSpec()).sum().backward()
    assert asked == [pin] * 2 * spec.num_hidden_layers


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("world", "layout", "strategy"), LAYOUTS)
def test_initial_weights_do_not_depend_on_the_layout(
    ranks: RankPool, world: int, layout: Layout, strategy: str
) -> None:
    expected = {
        name: fill(name, parameter.shape, [slice(0, size) for size in parameter.shape], 0, TIED)
        for name, parameter in Decoder(TIED).named_parameters()
    }
    for weights in ranks.run(rank_work.whole_weights, plan_of(layout, strategy), world=world):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("world", "layout", "strategy"), LAYOUTS)
def test_trained_weights_are_read_and_written_in_any_layout(
    ranks: RankPool, tmp_path: Path, world: int, layout: Layout, strategy: str
) -> None:
    model = Decoder(UNTIED)
    parameters = dict(model.named_parameters())
    hf.write_weights(tmp_path / "in", UNTIED, lambda name: parameters[name].detach())
    plan = plan_of(layout, strategy)
    ranks.run(rank_work.copy_model, str(tmp_path / "in"), str(tmp_path / "out"), plan, world=world)
    assert (tmp_path / "in" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("world", "layout", "strategy"), LAYOUTS)
def test_every_rank_tells_what_one_found_in_its_slice(
    ranks: RankPool, tmp_path: Path, world: int, layout: Layout, strategy: str
) -> None:
    """The last row of an embedding, which under zero3 only the last rank reads."""
    values = {name: value.detach().clone() for name, value in Decoder(UNTIED).named_parameters()}
    values["embed.weight"][-1, 0] = torch.nan
    hf.write_weights(tmp_path, UNTIED, values.__getitem__)
    told = ranks.run(rank_work.why_not_read, str(tmp_path), plan_of(layout, strategy), world=world)
    assert len(set(told)) == 1 and len(told) == world
    assert told[0].startswith("error[MOD006]: `model.embed_tokens.weight` holds 1 NaN of ")


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "layout", "strategy"), LAYOUTS[2::-1])
def test_weights_that_the_files_have_turned_are_read_and_written_in_any_layout(
    ranks: RankPool, tmp_path: Path, world: int, layout: Layout, strategy: str
) -> None:
    hf_models.theirs_of("gpt2").save_pretrained(tmp_path / "in")
    paths = str(tmp_path / "in"), str(tmp_path / "out")
    ranks.run(rank_work.copy_model, *paths, plan_of(layout, strategy), hf_models.spec_of("gpt2"), world=world)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_turned_weights_in_four_bits_and_their_magnitudes(tmp_path: Path) -> None:
    """Blocks of 64 are of an output's row, and so are the norms."""
    theirs = hf_models.theirs_of("gpt2")
    theirs.save_pretrained(tmp_path)
    recipe = Recipe.model_validate({"model": {"path": str(tmp_path)}})
    plan = Plan(lora=Lora(4, 8.0, nf4=True, dora=True))
    state = build.build(recipe, hf_models.spec_of("gpt2"), plan, Meshes(), torch.device("cpu"))
    found = state.parameters()
    for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        kept = fourbit.quantise(theirs.get_parameter(f"transformer.h.1.{layer}.weight").detach().T.contiguous())
        assert all(
            torch.equal(found[f"layers.1.{layer}.{word}"], part) for word, part in zip(NF4_PARTS, kept, strict=True)
        )
        norms = torch.linalg.vector_norm(fourbit.dequantise(*kept, torch.float32), dim=1)
        torch.testing.assert_close(found[f"layers.1.{layer}.lora_m"].detach(), norms)


def test_weights_have_the_type_that_the_plan_says(ranks: RankPool) -> None:
    for world, layout, strategy in LAYOUTS[:3]:
        plan = plan_of(layout, strategy, Precision(compute="bf16", weights="bf16"))
        for weights in ranks.run(rank_work.whole_weights, plan, world=world):
            assert {value.dtype for value in weights.values()} == {torch.bfloat16}


@pytest.mark.prove
def test_a_sharded_model_writes_what_a_whole_one_writes(ranks: RankPool) -> None:
    """Greedy and sampled, in fp64; weights are shards again afterwards."""
    model = Decoder(TIED).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, parameter.shape, [slice(0, size) for size in parameter.shape], 0, TIED))
    fp64 = Precision("fp64", "fp64", "fp64")
    for sampling in (Sampling(6), Sampling(6, temperature=1.0, seed=3)):
        expected = generate([model], [1, 2, 3], sampling, torch.device("cpu"))
        for strategy in ("zero2", "zero3"):
            plan = plan_of(Layout(dp_shard=2), strategy, fp64)
            assert ranks.run(rank_work.generated, plan, sampling, world=2) == [(expected, True)] * 2
        for layout, strategy in ((Layout(tp=2), "ddp"), (Layout(dp_shard=2, tp=2), "zero3")):
            for sequence_parallel in (False, True):  # of texts that two ranks do not divide
                plan = replace(plan_of(layout, strategy, fp64), sequence_parallel=sequence_parallel)
                found = ranks.run(rank_work.generated, plan, sampling, world=layout.world)
                assert found == [(expected, True)] * layout.world


def test_generation_ends_at_the_end_of_text() -> None:
    model = Decoder(TIED)
    first = generate([model], [1], Sampling(3), torch.device("cpu"))[0]
    assert generate([model], [1], Sampling(3, eot_id=first), torch.device("cpu")) == []


def test_temperature() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert choose(logits, Sampling(), torch.Generator()) == 1
    draw = torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits, Sampling(temperature=0.5), draw) for _ in range(2000)])
    shares = torch.bincount(drawn, minlength=3) / 2000
    torch.testing.assert_close(shares, torch.softmax(logits / 0.5, 0), atol=0.04, rtol=0)  # four standard errors
