"""Do documents that share rows stay apart? Rows of several documents, of each of which one is trained on, twice on the
plan's ranks: the second time every token of the other documents is another one. What is trained on stays, so that its
loss and every gradient stay too, to the bit: a key that is masked has no weight at all, and what is multiplied by it
adds nothing. The plain loop of parity shares masks and modules with the run, and cannot see that.

With experts the others' tokens decide which rows are multiplied together, and products of other sizes round otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from shardwise.data.pack import IGNORE, Sample
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.slices import local
from shardwise.models.blocks import spec_of
from shardwise.models.config import ModelSpec
from shardwise.models.moe import MoE
from shardwise.prove.distance import Worst, differences, farthest
from shardwise.prove.parity import CPU, share_of_rank
from shardwise.prove.workload import MAX_STEPS, OPTIM, Setting, Workload, job_of, texts
from shardwise.runtime import passes
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import further_of
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, Recipe, Run

OF_EXPERTS = 1e-11
"""Relative, of a layer with experts: rounding is a thousandth of it, and what leaks a thousand million times it."""


@dataclass(frozen=True)
class Unmoved:
    """The findings of a rank: how many ``tensors`` it compared that are not zero, which of them changed, and by how
    much they may at ``most``."""

    tensors: int
    changed: list[Worst]
    most: float

    def leaks(self) -> list[str]:
        """A line for each that changed by more."""
        moved = [one for one in self.changed if not one.error <= self.most]
        of, most = "changes with the tokens of another", f"at most {self.most:g}"
        return [f"{one.what} {of}: {one.values} (relative error {one.error:.1e}, {most})" for one in moved]


def packed_rows(job: Workload, *, changed: bool) -> list[Sample]:
    """Rows of three documents, the second longer than a window of the small model and cut where ranks share rows. Of
    every other row the second is trained on, of the others the third. ``changed``: with other tokens in all others."""
    rows = []
    for index, row in enumerate(texts(job, 0)):
        length, first = job.seq_len, job.seq_len // 4 + index % 2
        ends = np.array([first, first + length // 2, length])
        begin, end = (int(ends[place]) for place in ((1, 2) if index % 2 else (0, 1)))
        ids, labels = row.ids.copy(), np.full_like(row.labels, IGNORE)
        labels[begin : end - 1] = ids[begin + 1 : end]
        if changed:
            others = np.r_[0:begin, end:length]
            ids[others] = (ids[others] + 1 + others) % job.spec.vocab_size
        segments = tuple(np.diff(ends, prepend=0).tolist())
        positions = np.concatenate([np.arange(size, dtype=np.int64) for size in segments])
        rows.append(Sample(ids, labels, positions, segments, masked=True))
    return rows


def prove_on_rank(rank: int, world: int, spec: ModelSpec, plan: Plan, setting: Setting) -> Unmoved:
    """Run a rank of the proof: both passes, with the loss of tokens, and the comparison of what it holds. (Losses of
    pairs are of two documents; which ones parity shows.)"""
    plan = replace(plan, loss=Plan.loss, entropy=False)
    job, groups = job_of(spec, plan, 1, setting), meshes(plan.layout, "cpu")
    state = build(Recipe(optim=OPTIM, run=Run(seed=job.seed)), spec, plan, groups, CPU, setting.draw)
    known, found = (_gradients(state, packed_rows(job, changed=changed), groups, plan) for changed in (False, True))
    errors = {name: error for name, error in differences(known, found).items() if error}
    worst = [Worst(error, name, rank, *farthest(known.get(name), found.get(name))) for name, error in errors.items()]
    worst.sort(key=lambda one: (not one.what.startswith("the loss"), -one.error))
    routed = spec.hf_model is not None or any(isinstance(each, MoE) for part in state.parts for each in part.modules())
    return Unmoved(sum(bool(value.any()) for value in known.values()), worst, OF_EXPERTS if routed else 0.0)


def _gradients(state: TrainState, rows: list[Sample], groups: Meshes, plan: Plan) -> dict[str, Tensor]:
    """This rank's share of the loss, and what it holds of each gradient; the losses of routers, which are of all
    tokens, are left out."""
    rules = StepRules(plan, groups, OPTIM, MAX_STEPS, finish_of(Method(), plan))
    spec = spec_of(state.parts)
    batches = share_of_rank(rows, groups, plan, ahead=spec.predictors > 0)
    terms, _ = count_supervised(groups, sum(batch.terms() for batch in batches))
    further = further_of(spec, batches, groups)
    loss = passes.train(state.parts, batches, rules, float(max(1, terms)), None, further)
    if state.host:
        state.host.take_rest()
    found = {"the loss of a document": loss.value.detach().clone()}
    for name, parameter in state.parameters().items():
        gradient = state.updated(parameter).grad
        if gradient is not None and (own := local(gradient.detach())).numel():
            found[f"the gradient of a document by {name}"] = own.clone()
    state.optimizer.zero_grad(set_to_none=True)
    if state.host and not state.host.scratch:
        state.host.give_back()
    return found
