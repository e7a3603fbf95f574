"""What tensor-parallel ranks export of trained adapters: the file that one process writes of the same checkpoint, byte
by byte; and runs that begin from that file go on with the loss of the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shardwise.distributed.meshes import meshes
from shardwise.models.config import ModelSpec
from shardwise.models.peft import CONFIG, WEIGHTS
from shardwise.models.tensorfile import entries
from shardwise.prove import parity, workload
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import random_everywhere
from shardwise.runtime.build import build
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.export import export_adapter
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.step import step
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.spec.recipe import Checkpoint, LoraSection, Method, Recipe, Run
from tests.parity.test_tp import plan
from tests.parity.test_tp_adapters import BIASED, WIDE

STEPS = 2
"""Before the adapters are saved and exported."""
KEPT_IN_FP32 = Precision("fp64", "fp32", "fp64")
"""As adapters are exported, so that no bit is lost; computed in fp64, so that other layouts have the same loss."""
LORAS = {
    "adapters": (BIASED, Lora(4, 8.0, frozen="fp32")),
    "magnitudes": (BIASED, Lora(4, 8.0, ("k", "o", "up", "down"), frozen="fp32", dora=True)),
    "four bits": (WIDE, Lora(4, 8.0, frozen="fp32", nf4=True)),
}


@dataclass(frozen=True)
class Job:
    spec: ModelSpec
    plan: Plan
    directory: str

    def layout(self, strategy: str, dp: int, tp: int) -> Job:
        """The same elsewhere."""
        other = plan(strategy, dp, tp, sequence=tp > 1)
        return replace(self, plan=replace(other, precision=KEPT_IN_FP32, lora=self.plan.lora))


def trained(rank: int, world: int, job: Job) -> float:
    """Trains and saves; exports into ``trained``. The loss of the step that would come next."""
    return run(job, "trained", save=True)


def resumed(rank: int, world: int, job: Job, name: str) -> float:
    """Exports what was saved into ``name``; the loss of the next step."""
    return run(job, name)


def reloaded(rank: int, world: int, job: Job) -> float:
    """Begins with the adapter that was exported; the loss of the next step."""
    return run(job, None)


def run(job: Job, name: str | None, *, save: bool = False) -> float:
    of, directory = job.plan, Path(job.directory)
    assert of.lora is not None
    work, groups = parity.job_of(job.spec, of, STEPS + 1), meshes(of.layout, "cpu")
    adapter = LoraSection(rank=of.lora.rank, path=str(directory / "trained") if name is None else None)
    recipe = Recipe(optim=workload.OPTIM, run=Run(seed=work.seed), lora=adapter)
    state = build(recipe, job.spec, of, groups, torch.device("cpu"), random_everywhere)
    rules = StepRules(of, groups, workload.OPTIM, parity.MAX_STEPS, finish_of(Method(), of))

    def go(number: int) -> float:
        batches = parity.share_of_rank(work.batch(number), groups, of)
        tokens, _ = count_supervised(groups, sum(batch.supervised_tokens() for batch in batches))
        return step(state, batches, tokens, rules).loss

    checkpoints = RunCheckpoints(directory / "saved", Checkpoint(asynchronous=False), "run")
    if save:
        for number in range(STEPS):
            go(number)
        checkpoints.save(state.tensors(), state.facts(), STEPS)
        assert [event.kind for event in checkpoints.wait()][:1] == ["committed"]
    elif name is not None:
        assert checkpoints.resume(state.tensors(), log=lambda line: None) is not None
    if name is not None:
        parameters = {key: parameter.detach() for key, parameter in state.parameters().items()}
        export_adapter(parameters, of.lora, job.spec, "base", directory / name)
    return go(STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "sequence"), list(zip(LORAS, (True, False, True), strict=True)))
def test_an_exported_adapter(ranks: RankPool, tmp_path: Path, kind: str, sequence: bool) -> None:
    """Ranks of one layout have one loss, to the bit, before and after; those of others to 1e-9, but with magnitudes to
    1e-7: the sizes of rows are computed in the type of the adapters, fp32, and added over tensor-parallel ranks."""
    spec, lora = LORAS[kind]
    of = replace(plan("ddp", 1, 2, sequence=sequence), precision=KEPT_IN_FP32, lora=lora)
    job = Job(spec, of, str(tmp_path))
    first, *others = ranks.run(trained, job, world=2)
    assert others == [first]
    assert all(entry.read().any() for entry in entries(tmp_path / "trained" / WEIGHTS).values())
    assert ranks.run(reloaded, job, world=2) == [first] * 2
    for strategy, dp, tp in (("ddp", 1, 1), ("zero3", 2, 2), ("ddp", 1, 4)):
        elsewhere, name = job.layout(strategy, dp, tp), f"{strategy}-{tp}"
        losses = ranks.run(resumed, elsewhere, name, world=elsewhere.plan.layout.world)
        assert losses == pytest.approx([first] * len(losses), rel=1e-7 if lora.dora else 1e-9)
        assert ranks.run(reloaded, elsewhere, world=elsewhere.plan.layout.world) == losses
        for file in (WEIGHTS, CONFIG):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "trained" / file).read_bytes(), (name, file)
