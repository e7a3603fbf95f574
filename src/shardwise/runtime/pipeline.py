"""Runs this rank's part of a pipeline: its list of actions (techniques/pp/actions.py), one after another.

What flows between ranks is hidden states and their gradients, of shapes that every rank knows from its own copy of the
micro-batches: nothing is negotiated, and micro-batches may differ in shape. Of a stage and a micro-batch there is kept,
from forward to backward, its input and where its backward begins. Where the last block predicts a further token, the
embeddings that it reads go from stage to stage behind the hidden states, and their gradient comes back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.methods.loss import Loss
from shardwise.models.blocks import spec_of
from shardwise.techniques import pp
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.pp.actions import Action, Message, Way, forward_actions
from shardwise.techniques.pp.later import LaterProduct
from shardwise.techniques.states import trained_stages

Made = TypeVar("Made")
Passed = tuple[Tensor, ...]
"""What a stage takes from the stage before or after: hidden states or their gradient, and what goes behind them."""
Run = Callable[[nn.Module, MicroBatch, Passed], Any]
"""A stage of a micro-batch, from what the stage before has passed on: what it passes on, or of the last stage what it
comes to."""


@dataclass
class Kept:
    """The things that are kept of a stage and a micro-batch until its backward: its input where that has a gradient,
    and where its backward begins; between the two halves of a backward, the products that make gradients of weights."""

    inputs: Passed
    roots: list[GradientEdge]
    later: list[LaterProduct] = field(default_factory=list)


@dataclass
class Sending:
    """A tensor of a message on its way: its memory must stay until it has left."""

    work: dist.Work
    tensor: Tensor
    action: Action

    def left(self) -> bool:
        return self.work.is_completed()


class PipelineRank(Generic[Made]):
    """``run`` computes a stage, ``enter`` is told what this rank is about to do."""

    def __init__(
        self, parts: Sequence[nn.Module], line: pp.Line, run: Run, enter: Callable[[str], None] = lambda phase: None
    ) -> None:
        self.line = line
        self.run = run
        self.enter = enter
        self.parts = {stage.number: part for stage, part in zip(line.rank_kind.stages, parts, strict=True)}
        self.spec, self.last = spec_of(parts), len(line.plan.pipeline.split) - 1
        self.trained = trained_stages(self.spec, line.plan)
        self.kept: dict[tuple[int, int], Kept] = {}
        self.posted: dict[Message, list[tuple[dist.Work, Tensor, int]]] = {}
        self.here: dict[Message, Passed] = {}
        self.sending: list[Sending] = []
        self.backwards: dict[Message, Action] = {}
        self.made: list[Made] = []
        self.at = Action("F", 0, 0)

    def train(self, batches: Sequence[MicroBatch], scale: Tensor | None) -> list[Made]:
        """Forward and backward of all micro-batches of a step, their losses times ``scale``. Returns what the last
        stage came to, micro-batch by micro-batch; nothing where this rank does not have it."""
        order = pp.orders(self.line.plan, self.trained)[self.line.meshes.index("pp")]
        closing = {action.stage: action.micro for action in order if action.kind in "BIW"}
        trained = {action.stage for action in order if action.kind in "BI"}
        self.backwards = {action.gives: action for action in order if action.kind == "SEND_B" and action.gives}
        if self.line.meshes.index("pp") > 0:
            techniques.before_waiting([*self.parts.values()], self.line.plan)
        for action in order:
            self.at = action
            last = closing.get(action.stage) == action.micro
            if action.kind == "SEND_F":
                self._send(action)
            elif action.kind == "SEND_B":
                assert action.gives not in self.backwards, "the gradient of a stage's input was not made"
            elif action.kind.startswith("RECV"):
                self._post(action, batches[action.micro])
            elif action.kind == "F":
                self._forward(action, batches[action.micro], scale, trains=action.stage in trained)
            elif action.kind == "W":
                self._weights(action, last=last)
            else:
                self._backward(action, last=last)
        self._settle()
        techniques.after_inference([part for stage, part in self.parts.items() if stage not in trained], self.line.plan)
        return self.made

    def infer(self, batch: MicroBatch) -> Made | None:
        """Forward alone of one micro-batch: what the last stage came to, None where this rank does not have it."""
        asked, layout = self.line.plan.pipeline, self.line.plan.layout
        orders = forward_actions(asked.schedule, layout.pp, asked.stages_per_rank, 1)
        for action in orders[self.line.meshes.index("pp")]:
            self.at = action
            if action.kind.startswith("SEND"):
                self._send(action)
            elif action.kind.startswith("RECV"):
                self._post(action, batch)
            else:
                self._forward(action, batch, None, trains=False)
        self._settle()
        return self.made.pop() if self.made else None

    def _forward(self, action: Action, batch: MicroBatch, scale: Tensor | None, *, trains: bool) -> None:
        part = self.parts[action.stage]
        before: Passed = () if action.stage == 0 else self._take("F", action)
        self.enter(f"forward {action.stage}.{action.micro}")
        read = before if action.stage == self.last else before[:1]  # what goes behind, stages between pass on as it is
        inputs = [each.requires_grad_() for each in read if trains and part.input_trained]
        with torch.set_grad_enabled(trains):
            out = self.run(part, batch, before)
        if action.stage == self.last:
            made: Any = out.detached() if isinstance(out, Loss) else out
            self.made.append(made)
            root = out.value if isinstance(out, Loss) else out
            roots = [root if scale is None or not trains else root * scale]
        else:
            self.here["F", action.stage + 1, action.micro] = tuple(each.detach() for each in out)
            roots = [each for each in out if each.requires_grad]
        if trains:
            self.kept[action.stage, action.micro] = Kept(tuple(inputs), [get_gradient_edge(root) for root in roots])

    def _backward(self, action: Action, *, last: bool) -> None:
        """The whole backward, or the half of it that the stage before waits for."""
        part = self.parts[action.stage]
        kept = self.kept[action.stage, action.micro]
        plan = self.line.plan
        later = self.line.later
        if action.kind == "I" and not self.trained[action.stage]:
            later = None  # no second half follows
        taken = self._take("B", action) if action.stage < self.last else ()
        own, passed = taken[: len(kept.roots)] or None, taken[len(kept.roots) :]
        self.enter(f"backward {action.stage}.{action.micro}")
        if later is None:
            techniques.before_micro_batch([part], plan, last=last)
        else:
            techniques.before_input_gradients([part], plan, last=last)
        for each in kept.inputs[1:]:
            each.register_post_accumulate_grad_hook(_takes_its_place)
        for each in kept.inputs:
            each.register_post_accumulate_grad_hook(lambda _: self._give_back(action, kept.inputs, passed))
        with nullcontext() if later is None else later.collecting(kept.later):
            torch.autograd.backward(kept.roots, own)
        techniques.after_micro_batch([part], plan)
        kept.inputs, kept.roots = (), []
        if later is None:
            del self.kept[action.stage, action.micro]
        elif action.kind == "B":
            self._weights(action, last=last)

    def _give_back(self, action: Action, inputs: Passed, passed: Passed) -> None:
        """Keep the gradients of ``inputs`` and what is ``passed`` on, and send the stage before what it waits for as
        soon as all is there: before this rank waits for the sums of its weights' gradients."""
        message: Message = "B", action.stage - 1, action.micro
        found = [each.grad for each in inputs if each.grad is not None]
        if len(found) < len(inputs):
            return
        self.here[message] = (*found, *passed)
        if send := self.backwards.pop(message, None):
            self._send(send)

    def _weights(self, action: Action, *, last: bool) -> None:
        """The other half: the gradients of weights."""
        part, kept = self.parts[action.stage], self.kept.pop((action.stage, action.micro))
        self.enter(f"backward {action.stage}.{action.micro}")
        techniques.before_micro_batch([part], self.line.plan, last=last)
        assert self.line.later is not None
        self.line.later.run(kept.later)
        techniques.after_weight_gradients([part], self.line.plan, last=last)

    def _take(self, letter: Way, action: Action) -> Passed:
        """Return what this action needs from another stage, once it is there."""
        message: Message = letter, action.stage, action.micro
        if message in self.here:
            return self.here.pop(message)
        posted, before = self.posted.pop(message), action.stage + (-1 if letter == "F" else 1)
        what = f"waited for {'the output' if letter == 'F' else 'the gradient'} of stage {before}"
        for work, _, source in posted:
            self._wait(work, what, source)
        return tuple(tensor for _, tensor, _ in posted)

    def _send(self, action: Action) -> None:
        assert action.gives is not None
        me = self.line.meshes.index("pp")
        channel = self.line.meshes.channels[me, action.peer]
        self.sending = [one for one in self.sending if not one.left()]
        for each in self.here.pop(action.gives):
            tensor = each.contiguous()
            work = dist.isend(tensor, group=channel, group_dst=int(action.peer > me))
            assert work is not None
            self.sending.append(Sending(work, tensor, action))

    def _post(self, action: Action, batch: MicroBatch) -> None:
        me = self.line.meshes.index("pp")
        channel = self.line.meshes.channels[action.peer, me]
        assert action.takes is not None
        posted = self.posted[action.takes] = []
        for _ in range(1 + (batch.following is not None)):
            tensor = self._hidden(batch)
            work = dist.irecv(tensor, group=channel, group_src=int(action.peer > me))
            assert work is not None
            posted.append((work, tensor, action.peer))

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Room for hidden states of a micro-batch: [b,s,d], or with sequence parallelism this rank's tokens [n,d]."""
        plan, (b, s) = self.line.plan, batch.ids.shape
        rows = (-(-b * s // plan.layout.tp),) if plan.sequence_parallel else (b, s)
        dtype = torch_dtype(plan.precision.compute)
        return torch.empty(*rows, self.spec.hidden_size, dtype=dtype, device=batch.ids.device)

    def _settle(self) -> None:
        for one in self.sending:
            self.at = one.action
            self._wait(one.work, "waited for its message to be taken", one.action.peer)
        self.sending.clear()
        assert not (self.kept or self.posted or self.here), "the list of actions left something undone"

    def _wait(self, work: dist.Work, what: str, peer: int) -> None:
        layout = self.line.plan.layout
        me = self.line.meshes.rank
        at = self.at
        other = me + (peer - self.line.meshes.index("pp")) * (layout.size("stage"))
        self.enter(f"waits {other} {at.stage}.{at.micro}")
        try:
            work.wait()
        except RuntimeError as error:
            told = f"stage {at.stage}, micro-batch {at.micro}: {what}, from rank {other}: {error}"
            raise RuntimeError(told) from error


def _takes_its_place(read: Tensor) -> None:
    """Let go of what went behind hidden states, which nothing reads again once its gradient is there."""
    assert read.grad is not None
    read.data = read.grad
