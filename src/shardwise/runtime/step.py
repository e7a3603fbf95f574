"""One optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods.loss import Further, Loss
from shardwise.models.blocks import spec_of
from shardwise.models.config import ModelSpec
from shardwise.runtime import expert_counts, layer_figures, passes, reduce
from shardwise.runtime.expert_counts import Counts, Dropped, Loads
from shardwise.runtime.layer_figures import LayerFigures, Sampled
from shardwise.runtime.passes import StepRules
from shardwise.runtime.state import TrainState
from shardwise.runtime.transfer import Figures
from shardwise.techniques import optim
from shardwise.techniques.tally import counting


@dataclass(frozen=True)
class StepStats:
    """The results of step number ``step``. ``loss`` is the mean over the supervised tokens of all ranks, ``grad_norm``
    the norm before clipping, ``tokens`` the input tokens of all ranks that are no padding, ``total_tokens`` those of
    the run so far. A ``skipped`` step changed no weight and no moment. ``pairs``: the mean is over so many pairs of
    answers; 0: over tokens. ``padding``: of the step's input tokens this share only fills windows up. ``loss_scale``:
    by what the loss was multiplied in fp16. ``figures``: what the method reports beside its loss, means as that is, and
    the losses of routers. ``loads``: how many tokens went to each expert, by layer, ``dropped`` which share of them
    found no room in it. ``layers``: what its layers came to, of a step that was sampled. ``end_s``: when it was done
    (``time.perf_counter``)."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    total_tokens: int
    supervised_tokens: int
    skipped: bool
    pairs: int = 0
    padding: float = 0.0
    loss_scale: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    loads: Loads = field(default_factory=dict)
    dropped: Dropped = field(default_factory=dict)
    layers: LayerFigures | None = None
    end_s: float = field(default_factory=time.perf_counter)

    @property
    def terms(self) -> int:
        """Return how many pairs or supervised tokens the loss is a mean over."""
        return self.pairs or self.supervised_tokens


@dataclass(frozen=True)
class Launched:
    """A step that was launched on the device: what the host knows already, the figures that it will read, how many of
    these are ``counts`` of experts, and what was ``sampled`` of its layers."""

    known: StepStats
    figures: Figures
    counts: Counts
    sampled: Sampled | None = None

    def wait(self, state: TrainState) -> StepStats:
        """Wait for the figures and count them in ``state``. Call it for steps in their order."""
        squares, loss, *rest = self.figures.read()
        told = dict(zip(self.known.figures, rest, strict=False))
        end = len(told) + self.counts.spec.expert_counts
        counted, scaling = rest[len(told) : end], rest[end:]
        skipped = not (math.isfinite(squares) and math.isfinite(loss))
        scale = state.scale.value
        state.book(skipped, loss, scaling)
        norm = (squares**0.5 if squares >= 0 else squares) / scale
        shown, end_s = scale if state.scale.enabled else None, self.figures.arrival_s
        told |= self.counts.losses(counted)
        loads, dropped = self.counts.loads(counted), self.counts.dropped(counted)
        known = replace(self.known, figures=told, loads=loads, dropped=dropped, loss_scale=shown, end_s=end_s)
        known = replace(known, layers=self.sampled.read(scale) if self.sampled else None)
        return replace(known, loss=loss, grad_norm=norm, skipped=skipped)


def step(state: TrainState, batches: Sequence[MicroBatch], supervised: int, rules: StepRules) -> StepStats:
    """:func:`launch` a step and wait for its figures."""
    return launch(state, batches, supervised, rules).wait(state)


def launch(
    state: TrainState,
    batches: Sequence[MicroBatch],
    supervised: int,
    rules: StepRules,
    tokens: tuple[int, int] | None = None,
    samples: bool = False,
) -> Launched:
    """Train on this rank's micro-batches of one optimizer step. Nothing here waits for a device: whether the step is
    skipped, and how far its gradients are clipped, is decided where they are.

    ``supervised`` counts the supervised tokens (or pairs) of all ranks and micro-batches: every loss is divided by it,
    so that gradients are sums and do not depend on the layout. ``tokens``: of all ranks the supervised ones, and those
    that are read; None: all are read, and ``supervised`` counts tokens. ``samples``: what its layers come to is
    gathered if it is its turn, which changes no number. A step with a non-finite loss or gradient is skipped by all
    ranks alike.
    """
    plan, meshes = rules.plan, rules.meshes
    if plan.lora is not None and plan.lora.dropout:
        draw_anew(rules.seed, state.step, meshes)
    samples = samples and rules.samples(state.step + 1)
    with counting(state.tally if samples else None):
        loss, counted = accumulate(state, batches, supervised, rules)
    rules.enter("clip")
    parameters, counted_ones = ([state.updated(each) for each in ones] for ones in (state.trained(), state.counted()))
    squares, device = reduce.local_squares(counted_ones, meshes.size("stage")), loss.value.device
    figures = reduce.combine(meshes, squares, loss.value, *loss.figures.values(), counted=counted)
    sampled = layer_figures.gather(state, plan, meshes, device) if samples else None
    finite = figures[:2].isfinite().all()
    scale = state.scale.on(device)[0].double()
    factor = reduce.clip_factor(figures[0].sqrt() / scale, rules.optim.max_grad_norm) / scale
    rules.enter("optimizer")
    rate = optim.learning_rate(rules.optim, state.step, rules.max_steps)
    optim.set_learning_rate(state.optimizer, rate, rules.optim)
    skip, kept_on = ~finite, "cpu" if state.host else device.type
    if state.host:  # the host takes part in the decision, so it waits for it
        skip, factor = skip.cpu(), factor.cpu()
    multiply = kept_on == "cpu" or plan.precision.weights == "fp64"
    if multiply:  # the kernel divides by 1 / factor in fp32, which rounds otherwise
        reduce.scale_gradients(parameters, factor)
    optim.update(state.optimizer, skip, None if multiply else factor)
    expert_counts.correct(state.parts, figures[2 + len(loss.figures) :], finite)
    let_go_of_gradients(state)
    figures = torch.cat([figures, state.scale.update(finite, figures[1].isfinite())])
    room = plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len
    learnt, read = tokens or (supervised, room)
    state.advance(read, learnt)
    figured, pairs = dict.fromkeys(loss.figures, math.nan), supervised if plan.method.pairs else 0
    known = StepStats(state.step, math.nan, math.nan, rate, read, state.tokens, learnt, False, pairs, 1 - read / room)
    known = replace(known, figures=figured)
    experts = Counts(spec_of(state.parts), expert_counts.rows_of(batches, plan))
    return Launched(known, Figures(figures), experts, sampled)


def sound(state: TrainState, batches: Sequence[MicroBatch], supervised: int, rules: StepRules) -> bool:
    """Return whether the weights are finite, and give a finite loss and finite gradients of these micro-batches: the
    same on all ranks. It takes a step's time without its update, and changes nothing. In fp16 the loss scale is 1, or
    what overflows could be its fault."""
    scale = state.scale
    state.scale = replace(scale, value=1.0, live=None)
    loss, _ = accumulate(state, batches, supervised, rules)
    state.scale = scale
    gradients = [state.updated(each) for each in state.counted()]
    squares = reduce.local_squares(gradients, rules.meshes.size("stage"))
    if not state.finite():
        squares = torch.full_like(squares, math.nan)
    figures = reduce.combine(rules.meshes, squares, loss.value)
    let_go_of_gradients(state)
    return bool(figures.isfinite().all())


def let_go_of_gradients(state: TrainState) -> None:
    """Free what a backward has left that no update follows, or that one has used."""
    state.optimizer.zero_grad(set_to_none=True)
    if state.host and not state.host.scratch:
        state.host.give_back()


def draw_anew(seed: int, number: int, meshes: Meshes) -> None:
    """Seed torch from the seed, the step, the tokens and the rank of a pipeline: a resumed run drops the same."""
    rows = (seed * 1_000_003 + number) * meshes.size("loss") + meshes.index("loss")
    torch.manual_seed((rows * meshes.size("pp") + meshes.index("pp")) % 2**63)


def accumulate(
    state: TrainState, batches: Sequence[MicroBatch], supervised: int, rules: StepRules
) -> tuple[Loss, Tensor]:
    """Forward and backward of every micro-batch: leaves the gradients, summed over all ranks, with what the optimizer
    updates, and returns this rank's share of the mean loss, detached, and of what is counted of experts
    (runtime/expert_counts.py)."""
    scale = state.scale.on(batches[0].ids.device)[0] if state.scale.enabled else None
    further = further_of(spec_of(state.parts), batches, rules.meshes)
    with expert_counts.counting(state.parts, batches, rules.plan, scale) as counted:
        loss = passes.train(state.parts, batches, rules, float(max(1, supervised)), scale, further)
    if state.host:
        state.host.take_rest()
    return loss, expert_counts.share(counted, rules.plan, rules.meshes)


def further_of(spec: ModelSpec, batches: Sequence[MicroBatch], meshes: Meshes) -> Further | None:
    """Return the part that a layer that predicts a further token has in the loss of a step of these micro-batches, over
    all ranks; None of a model without one."""
    if not spec.predictors:
        return None
    targets = reduce.count(meshes, sum(batch.further for batch in batches))
    return Further(spec.predictor_weight, float(max(1, targets)))
