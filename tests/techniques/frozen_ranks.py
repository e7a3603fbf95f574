"""What the test of checkpoints with frozen weights runs on each rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.runtime import reduce
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import step
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Checkpoint, OptimSection
from tests.runtime.rank_work import ROWS, part, rows, rules_of, state_of

SETTINGS = OptimSection(learning_rate=1e-2, max_grad_norm=0.5)


def two_and_one(rank: int, ranks: int, plan: Plan, directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole state after three steps, and after two, a checkpoint, a resumed state and one more."""
    straight = state_of(plan, SETTINGS)
    train(straight, rank, plan, 0, 3)
    first = state_of(plan, SETTINGS)
    train(first, rank, plan, 0, 2)
    checkpoints = RunCheckpoints(directory, Checkpoint(), "run")
    checkpoints.save(first.tensors(), first.facts(), first.step)
    checkpoints.wait()
    second = state_of(plan, SETTINGS)
    facts = RunCheckpoints(directory, Checkpoint(), "run").resume(second.tensors(), log=lambda line: None)
    assert facts is not None
    second.load_facts(facts)
    train(second, rank, plan, 2, 3)
    return whole(straight), whole(second)


def train(state: TrainState, rank: int, plan: Plan, start: int, end: int) -> None:
    own, rules = ROWS // plan.layout.dp, rules_of(plan, SETTINGS)
    for number in range(start, end):
        batch = part(rows(number), rules.meshes.index("batch") * own, own)
        step(state, [batch], reduce.count_supervised(rules.meshes, batch.supervised_tokens())[0], rules)


def whole(state: TrainState) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in state.tensors().items()}
