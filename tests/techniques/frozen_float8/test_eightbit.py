"""Matrices in float8: values against a rule that is written twice, pieces against the whole, and what a file holds."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwise import techniques
from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.slices import local, local_slice
from shardwise.models.config import model_spec
from shardwise.models.hf_names import locations
from shardwise.prove.plain_linear import rounded
from shardwise.runtime.build import build
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan, Precision, Shard
from shardwise.spec.recipe import Model, Recipe
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.quantised import FLOAT8_BLOCK, blocks, float8_shapes, from_float8_bytes, rows_at_once
from shardwise.techniques.share import MatrixPiece
from shardwise.techniques.stored_matrix import store_as
from tests.models.test_float8 import deepseek
from tests.techniques.test_workspaces import SMALL_BYTES, held_bytes

SHAPES = [(128, 256), (300, 500), (7, 9), (1100, 4096)]
"""Whole blocks, smaller ones at the edges, one that is smaller both ways, and more elements than a round has."""
LORA = Lora(4, 8.0, frozen="bf16", float8=True)


def matrix(shape: tuple[int, int]) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    weight *= torch.logspace(-4, 0, shape[0]).unsqueeze(1)
    weight[:130, :120] = 0.0  # a block of zeros
    return weight


def as_values(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    whole = pad(weight, (0, -columns % FLOAT8_BLOCK, 0, -rows % FLOAT8_BLOCK))
    return rounded(whole, FLOAT8_BLOCK, FLOAT8_BLOCK)[:rows, :columns]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_rounded_once(shape: tuple[int, int]) -> None:
    """In every dtype the same numbers, which coded again stand for themselves."""
    weight = matrix(shape)
    kept, right = eightbit.coded(weight), as_values(weight)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(eightbit.dequantise(kept, dtype), right.to(dtype))
    assert torch.equal(eightbit.dequantise(eightbit.coded(right), torch.float32), right)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_piece_has_the_values_of_the_whole(shape: tuple[int, int]) -> None:
    """Wherever it is cut: within a block, between two, along rows and along columns."""
    rows, columns = shape
    kept, right = eightbit.coded(matrix(shape)), as_values(matrix(shape))
    for top, left in ((0, 0), (rows // 3, 0), (0, columns // 3), (rows // 2, columns // 2), (rows - 1, columns - 1)):
        for below, beyond in ((rows, columns), (min(rows, top + 5), min(columns, left + 140))):
            piece = MatrixPiece(top, left, columns)
            codes = kept.codes[top:below, left:beyond]
            found = eightbit.dequantise(eightbit.KeptCodes(codes, kept.scales), torch.float32, piece)
            assert torch.equal(found, right[top:below, left:beyond]), (top, below, left, beyond)


@pytest.mark.parametrize("first", [0, 128, 300])
def test_each_expert_has_blocks_of_its_own(first: int) -> None:
    """Whichever rows of the stack they are coded from; here of four of 300 rows each, some a thousand times larger."""
    each = [matrix((300, 200)) * 10.0**-power for power in range(4)]
    right = torch.cat([as_values(one) for one in each])
    kept = eightbit.coded_each(torch.cat(each)[first:], first, 300)
    assert torch.equal(eightbit.dequantise_each(kept, torch.float32, first, 300), right[first:])
    if first % 300 == 0:
        found = eightbit.dequantise(kept, torch.bfloat16, experts=4 - first // 300)
        assert torch.equal(found, right[first:].bfloat16())


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_codes_of_a_file_are_found_again(shape: tuple[int, int]) -> None:
    """To the bit, from their values and scales of any kind."""
    codes = eightbit.coded(matrix(shape)).codes
    scales = torch.rand(blocks(shape[0]), blocks(shape[1])) * 1e-3
    scales[0, 0] = 0.0 if not codes.view(torch.float8_e4m3fn)[:128, :128].float().any() else 3e-4
    kept = eightbit.KeptCodes(codes, scales.view(-1, 1).view(torch.uint8))
    again = eightbit.coded(eightbit.dequantise(kept, torch.float32), scales)
    assert torch.equal(again.codes, codes) and torch.equal(again.scales, kept.scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantisation_holds_what_plans_say(shape: tuple[int, int]) -> None:
    """On a CPU a product of two dtypes converts both to fp32 apart, for some rows at a time, and on a GPU within its
    kernel, as plans say."""
    kept, told = eightbit.coded(matrix(shape)), from_float8_bytes(*shape)
    at_once = rows_at_once(*shape)
    assert (at_once < shape[0]) == (shape == SHAPES[-1])
    held = held_bytes(lambda: eightbit.dequantise(kept, torch.float32))
    assert held == told
    apart = held_bytes(lambda: eightbit.dequantise(kept, torch.bfloat16)) - held
    assert 0 < apart <= 2 * 4 * at_once * shape[1] + SMALL_BYTES


LAYOUTS = {
    "one": (Layout(), "ddp"),
    "zero3": (Layout(dp_shard=3), "zero3"),
    "tp": (Layout(tp=2), "ddp"),
    "ep": (Layout(dp_shard=4, ep=2), "zero3"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [False, True])
def test_codes_and_scales_of_a_file_are_kept_to_the_bit(tmp_path: Path, layout: str, fused: bool) -> None:
    """Of a DeepSeek-V3 that transformers has quantised, with scales that are no powers of two."""
    spec, written = deepseek(tmp_path, fused=fused)
    ranks, strategy = LAYOUTS[layout]
    plan = Plan(ranks, shard=Shard(strategy), precision=Precision("bf16"), lora=LORA)  # type: ignore[arg-type]
    for rank in range(ranks.world):
        with fake_world(ranks, rank) as groups:
            recipe = Recipe(model=Model(path=str(tmp_path)))
            parameters = build(recipe, spec, plan, groups, torch.device("cpu")).parameters()
            for name, (codes, scales) in in_files(spec, written).items():
                for word, whole in (("e4m3", codes), ("scales", scales)):
                    own = parameters[f"{name}.{word}"]
                    assert torch.equal(local(own.detach()), whole[local_slice(own)]), (name, word, rank)


def in_files(spec, written) -> dict[str, tuple[Tensor, Tensor]]:  # type: ignore[no-untyped-def]
    """By layer the codes and scales that it should have, whole, as bytes."""
    found = {}
    for name, parts in locations(spec, written).items():
        if all(written[part.tensor].dtype == torch.float8_e4m3fn for part in parts):
            codes, scales = list[Tensor](), list[Tensor]()
            for part in parts:
                own = [written[part.tensor + word] for word in ("", "_scale_inv")]
                code, scale = own if part.expert is None else [one[part.expert] for one in own]
                codes.append(code.view(torch.uint8)[part.places.start : part.places.stop : part.places.step])
                scales.append(scale[part.places.start // 128 : -(-part.places.stop // 128)])
            of_blocks = torch.cat(scales).float().reshape(-1, 1).contiguous().view(torch.uint8)
            found[name.removesuffix(".weight")] = torch.cat(codes), of_blocks
    assert len(found) > 10
    return found


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any matrix can be stored so, and any cut of one; but older releases of torch do not shard bytes."""
    spec, cluster = model_spec("odd", 97, 36, 62, 2, 4, 2, 9), parse_cluster("2xH100")
    for plan in (Plan(Layout(tp=2), lora=LORA), Plan(Layout(dp_shard=2), shard=Shard("zero3"), lora=LORA)):
        assert not techniques.check(spec, plan, cluster)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")
    sharded = Plan(Layout(dp_shard=2), lora=LORA, shard=Shard("zero3"))
    (problem,) = techniques.frozen_float8.check(spec, sharded, cluster)
    assert problem.where == "lora.frozen" and "float8" in problem.what
    assert not techniques.frozen_float8.check(spec, replace(sharded, shard=Shard("ddp")), cluster)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own
def test_the_compiler_keeps_no_matrix_for_backward() -> None:
    """Of a compiled layer what is saved is what the layer saves otherwise: codes and scales."""
    layer = nn.Sequential(nn.Linear(256, 384, bias=False), nn.SiLU())
    store_as(layer[0], float8_shapes(384, 256), eightbit.restore)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        parameter.data.zero_()
    saved = [set[tuple[torch.Size, torch.dtype]](), set[tuple[torch.Size, torch.dtype]]()]
    for run, seen in zip((layer, torch.compile(layer)), saved, strict=True):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, seen=seen: seen.add((tensor.shape, tensor.dtype)) or tensor, lambda tensor: tensor
        ):
            run(torch.zeros(8, 256, requires_grad=True)).sum().backward()
    assert saved[0] == saved[1] and ((384, 256), torch.uint8) in saved[0]
