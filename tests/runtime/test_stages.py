"""A model in stages, as pipeline parallelism will hold it, all of them in one process: the model's own names, and its
numbers, bit by bit. Layers take turns with and without a window, so that a block by another's number would be seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise import techniques
from shardwise.data.batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.models.decoder import Decoder
from shardwise.runtime.build import allocate, fill
from shardwise.runtime.passes import StepRules, finish_of, infer, score_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import step
from shardwise.spec.plan import Batch, Lora, Plan, Remat
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.techniques import optim
from tests.models.families import spec_of

KINDS = ("sliding_attention", "full_attention", "full_attention", "sliding_attention")
SPEC = replace(spec_of("gemma2"), num_hidden_layers=4, layer_types=KINDS, sliding_window=3, tie_word_embeddings=False)
WHOLE = [range(4)]
SETTINGS = OptimSection(learning_rate=1e-2)


def state_of(stages: list[range], plan: Plan) -> TrainState:
    with torch.device("meta"):
        parts = [Decoder(SPEC, stage) for stage in stages]
    applied = techniques.apply([*parts], plan, Meshes(), lambda parts: allocate(parts, SPEC, torch.device("cpu")))
    fill(applied, SPEC, Recipe(), plan)
    return TrainState(applied, optim.build(applied, SETTINGS, plan))


def rows(number: int) -> list[MicroBatch]:
    drawn = torch.Generator().manual_seed(number)
    ids, labels = (torch.randint(SPEC.vocab_size, (2, 12), generator=drawn) for _ in range(2))
    return [MicroBatch(ids[[row]], labels[[row]], torch.arange(12)[None], None, 12) for row in range(2)]


@pytest.mark.parametrize("stages", [[range(2), range(2, 4)], [range(1), range(1, 3), range(3, 4)]])
@pytest.mark.parametrize("plan", [Plan(), Plan(remat=Remat("full")), Plan(lora=Lora(2, 4.0))], ids=["", "full", "lora"])
def test_stages_train_and_score_as_the_whole_model(stages: list[range], plan: Plan) -> None:
    plan = replace(plan, batch=Batch(1, 2, 12, 8))
    one, cut = state_of(WHOLE, plan), state_of(stages, plan)
    assert len(cut.parts) == len(stages) and cut.parameters().keys() == one.parameters().keys()
    rules = StepRules(plan, Meshes(), SETTINGS, 3, finish_of(Method(), plan))
    for number in range(3):
        expected, found = (step(state, rows(number), 24, rules) for state in (one, cut))
        assert found.loss == expected.loss and found.grad_norm == expected.grad_norm
    for name, value in one.parameters().items():
        assert torch.equal(cut.parameters()[name], value), name
    batch = rows(9)[0]
    assert torch.equal(infer(cut.parts, batch, score_of(plan)), infer(one.parts, batch, score_of(plan)))


def test_a_stage_holds_its_own_blocks_by_the_models_numbers() -> None:
    first, last = ({name for name, _ in Decoder(SPEC, stage).named_parameters()} for stage in (range(1), range(1, 4)))
    assert "embed.weight" in first and not first & last
    assert {name.split(".")[1] for name in last if name.startswith("layers.")} == {"1", "2", "3"}
    assert {"norm.weight", "head.weight"} <= last
