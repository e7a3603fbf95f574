"""A model in parts, as pipeline parallelism will hold it, all of them in one process: the model's own names, and its
numbers, bit by bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.data import tokens
from shardwise.data.stream import EvaluationBatch
from shardwise.distributed.meshes import Meshes
from shardwise.models.blocks import numbered
from shardwise.models.hf_model import model_of
from shardwise.planner.sheets import sheet_of
from shardwise.prove.pool import RankPool
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.evaluate import evaluate, evaluate_pairs
from shardwise.runtime.export import export, export_adapter, merge
from shardwise.runtime.generate import Sampling, generate
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan, Precision, Remat, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Checkpoint, Method, Recipe
from shardwise.techniques import shard
from tests.covering import pairwise
from tests.models import hf_models
from tests.runtime.part_ranks import (
    BATCH,
    ENDS_ALONE,
    SPEC,
    THREE,
    TWO,
    WHOLE,
    Stages,
    compare,
    differences,
    rows,
    said,
    spec_for,
    state_of,
    trained,
    weights,
)

CPU = torch.device("cpu")
LORAS = (None, Lora(2, 4.0, dora=True))
REMATS = (Remat(), Remat("full", every=2), Remat("selective", every=2))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokens.Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokens.train_tokenizer(["what a run exports " * 9], 300, directory)
    return tokens.load(str(directory), directory)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("stages", "tied", "lora", "remat", "loss"),
    pairwise((TWO, THREE, ENDS_ALONE), (False, True), LORAS, REMATS, ("cross_entropy", "dpo")),
)
def test_parts_are_the_whole_model(
    tmp_path: Path, tokenizer: tokens.Tokenizer, stages: Stages, tied: bool, lora: Lora | None, remat: Remat, loss: Any
) -> None:
    """Training, validation, generation, a checkpoint and an export."""
    spec, plan = spec_for(tied=tied), Plan(batch=BATCH, lora=lora, remat=remat, loss=loss)
    one, cut = (state_of(spec, each, plan, Meshes()) for each in (WHOLE, stages))
    assert len(cut.parts) == len(stages) and [*cut.parameters()] == [*one.parameters()]
    assert not differences(weights(one), weights(cut)), "as they begin"
    (expected, right), (found, gradients) = (trained(state, plan, Meshes()) for state in (one, cut))
    assert said(found) == said(expected) and right and not differences(right, gradients)
    assert not differences(weights(one), weights(cut)), "after two steps"

    recipe = Recipe(method=Method(name="dpo") if loss == "dpo" else Method())
    job: Any = SimpleNamespace(plan=plan, recipe=recipe, device=CPU, meshes=Meshes())
    batches = [EvaluationBatch(row, 12, 30.0) for row in rows(9)]
    for measure in (evaluate, *[evaluate_pairs] * (loss == "dpo")):
        assert measure(job, cut.parts, batches) == measure(job, one.parts, batches)
    assert generate(cut.parts, [3, 1, 4], Sampling(5), CPU) == generate(one.parts, [3, 1, 4], Sampling(5), CPU)

    checkpoints = RunCheckpoints(tmp_path / "run", Checkpoint(), "run")
    checkpoints.save(cut.tensors(), {"step": 2}, 2)
    assert [event.kind for event in checkpoints.wait()] == ["committed"]
    for state in (state_of(spec, each, plan, Meshes()) for each in (WHOLE, stages)):
        assert differences(weights(one), weights(state))
        assert RunCheckpoints(tmp_path / "run", Checkpoint(), "run").resume(state.tensors()) is not None
        assert not differences(weights(one), weights(state))

    if lora is not None:
        for state, name in ((one, "one"), (cut, "cut")):
            export_adapter(dict(state.parameters()), lora, spec, None, tmp_path / name)
            assert merge(state.parts, lora).startswith("28 adapters merged")
        assert not differences(*(loaded(tmp_path / name, "adapter_model") for name in ("one", "cut")))
    for state, name in ((one, "one"), (cut, "cut")):
        export(dict(state.parameters()), spec, tokenizer, tmp_path / name, torch.float32)
    assert not differences(*(loaded(tmp_path / name, "model") for name in ("one", "cut")))
    read = state_of(spec, stages, Plan(), Meshes(), Recipe.model_validate({"model": {"path": str(tmp_path / "cut")}}))
    assert not differences(dict(read.parameters()), dict(one.parameters()))


def loaded(directory: Path, name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / f"{name}.safetensors")


def test_a_part_has_its_blocks_by_the_models_numbers_and_its_own_ends() -> None:
    first, middle, last = (
        {name for name, _ in model_of(SPEC, blocks, embedding=embedding, head=head).named_parameters()}
        for blocks, embedding, head in (((0,), True, False), ((1, 2), False, False), ((3,), False, True))
    )
    assert [
        {name.split(".")[1] for name in names if name.startswith("layers.")} for names in (first, middle, last)
    ] == [
        {"0"},
        {"1", "2"},
        {"3"},
    ]
    ends = [{name for name in names if not name.startswith("layers.")} for names in (first, middle, last)]
    assert ends == [{"embed.weight"}, set(), {"norm.weight", "head.weight"}]
    with pytest.raises(ValueError, match="cut into parts"):
        model_of(hf_models.spec_of("gpt2"), (0,), head=False)


@pytest.mark.parametrize("stages", [WHOLE, TWO, THREE])
def test_every_second_block_of_the_model_recomputes_in_program_and_on_paper(stages: Stages) -> None:
    plan, last = Plan(remat=Remat("full", every=2), batch=BATCH), len(stages) - 1
    state, runs = state_of(SPEC, stages, plan, Meshes()), Counter[int]()
    for part in state.parts:
        for number, block in numbered(part):
            mlp = block.mlp
            assert isinstance(mlp, nn.Module)
            mlp.register_forward_hook(lambda *_, number=number: runs.update([number]))
    trained(state, plan, Meshes())
    assert runs == {0: 8, 1: 4, 2: 8, 3: 4}, "two steps of two micro-batches"
    for number, blocks in enumerate(stages):
        paper = sheet_of(SPEC, plan, RankKind(blocks=tuple(blocks), embedding=number == 0, head=number == last))
        order = techniques.cost(paper, plan)
        assert [block for block, kind in zip(blocks, order.order, strict=True) if order.blocks[kind].recompute] == [
            block for block in blocks if block % 2 == 0
        ]


SHARDED = Plan(Layout(dp_shard=2), BATCH, shard=Shard("zero3"), precision=Precision("fp64", "fp64", "fp64"))
CUT = replace(SHARDED, layout=Layout(tp=2), shard=Shard("ddp"), sequence_parallel=True)
UNTIED = {
    "zero3": SHARDED,
    "zero1": replace(SHARDED, shard=Shard("zero1")),
    "tp, recomputed": replace(CUT, remat=Remat("selective", every=2), lora=Lora(2, 4.0, frozen="fp64")),
}
TIED = {
    "ddp": replace(SHARDED, layout=Layout(dp_replicate=2), shard=Shard("ddp")),
    "tp with sequence parallelism": CUT,
    "tp without": replace(CUT, sequence_parallel=False),
}


@pytest.mark.prove
@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_the_whole_model_on_two_ranks(ranks: RankPool, tied: bool) -> None:
    plans = TIED if tied else UNTIED
    for found in ranks.run(compare, list(plans.values()), THREE, tied, world=2):
        assert dict(zip(plans, found, strict=True)) == {name: [] for name in plans}


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_backward_ends_in_the_part_where_nothing_trained_lies_before(trained: int) -> None:
    """By the plan's names, for what is trained may be in a part on another rank."""
    plan = Plan(frozen=("embed.*", *(f"layers.{number}.*" for number in range(trained))))
    for stages in (TWO, THREE):
        found = [
            number
            for part in state_of(spec_for(tied=False), stages, plan, Meshes()).parts
            for number, block in numbered(part)
            if block in shard._without_backward(part)
        ]
        assert found == list(range(trained))


def test_fully_sharded_parts_cannot_share_a_weight(ranks: RankPool) -> None:
    with pytest.raises(Exception, match="two parts have"):
        ranks.run(compare, [SHARDED], TWO, True, world=2)
