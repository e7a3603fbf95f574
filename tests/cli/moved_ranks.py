"""What ranks do for the tests of runs that are exported, and write texts, under another layout (test_tp_run.py)."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.data.tokens import open_directory
from shardwise.distributed.meshes import meshes
from shardwise.models.resolve import resolve
from shardwise.runtime.build import build
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.export import export
from shardwise.runtime.generate import Sampling, generate, prompt_ids
from shardwise.runtime.job import read_run
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Plan
from shardwise.techniques.dtypes import torch_dtype

CPU = torch.device("cpu")


def load_and_export(rank: int, world: int, run: str, plan: Plan, target: str, prompt: str, tokens: int) -> str:
    """Load the run's checkpoint into the layout of ``plan`` as a start of it does, export it to ``target`` as its end
    does; what the model writes after ``prompt``, always the most likely token."""
    directory = Path(run)
    recipe, identity = load_recipe(directory / "recipe.yaml"), read_run(directory)
    spec, tokenizer = resolve(recipe), open_directory(directory / "tokenizer")
    state = build(recipe, spec, plan, meshes(plan.layout, "cpu"), CPU)
    assert identity is not None
    checkpoints = RunCheckpoints(directory / "checkpoints", recipe.checkpoint, identity["run_id"])
    facts = checkpoints.resume(state.tensors(), log=lambda line: None)
    assert facts is not None
    state.load_facts(facts)
    assert state.step == recipe.train.max_steps
    export(state.parameters(), spec, tokenizer, Path(target), torch_dtype(plan.precision.weights))
    sampling = Sampling(tokens, eot_id=tokenizer.eot_id)
    return tokenizer.decode(generate(state.parts, prompt_ids(tokenizer, prompt), sampling, CPU))
