"""The ranges of a profiled step: passes of units and stages, and the optimizer, under the names that the trace of a
planned step has (spec/range_names.py). There are hooks for them only within profiled steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from shardwise.distributed.torch_private import at_end_of_backward
from shardwise.models.blocks import numbered
from shardwise.models.layers import Part
from shardwise.spec.range_names import OPTIMIZER, pass_name, sent_name, stage_name, unit_name

FSDP = re.compile(rb'"FSDP::(all_gather|post_backward_reduce)(?: \(([^)"]*)\))?(?: \[[^]"]*\])?(?=")')
"""The names that FSDP2 gives to what it sends, with that of a module in our models."""
SENT = {b"all_gather": ("all-gather", "weights"), b"post_backward_reduce": ("reduce-scatter", "gradients")}


class Lane:
    """Ranges that follow one another: each ends the one before it."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def enter(self, name: str) -> bool:
        """Begin a range, and return whether none was open."""
        first = self._open is None
        self.leave()
        self._open = record_function(name)
        self._open.__enter__()
        return first

    def leave(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class StepRanges:
    """The ranges of the steps of ``parts``; ``on`` within :meth:`recorded`."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts, self.on = parts, False
        self._phase, self._forward, self._backward = Lane(), Lane(), Lane()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A step within which there are ranges."""
        handles = [handle for part in self.parts for handle in self._watch(part)]
        self.on = True
        try:
            yield
        finally:
            self.on = False
            for handle in handles:
                handle.remove()
            for lane in (self._forward, self._backward, self._phase):
                lane.leave()

    def enter(self, phase: str) -> None:
        """The rank enters a phase of its step (runtime/faults/guard.py): passes of a pipeline's stages, and what comes
        after all passes, are ranges. ``reduce`` is told within a backward."""
        if not self.on or phase == "reduce" or phase == "optimizer":
            return
        word, _, at = phase.partition(" ")
        self._phase.leave()
        if phase == "clip":
            self._phase.enter(OPTIMIZER)
        elif word in ("forward", "backward") and at:
            self._phase.enter(stage_name(word, int(at.partition(".")[0])))

    def _watch(self, part: nn.Module) -> Iterator[RemovableHandle]:
        for unit, first, last in units(part):
            begin, end = (partial(watched, unit) for watched in (self._begin, self._end))
            yield first.register_forward_pre_hook(begin)
            yield last.register_forward_hook(end, prepend=True)  # before FSDP2's, which may gather for backward

    def _begin(self, unit: int | str, *_: Any) -> None:
        self._forward.enter(pass_name("forward", unit))

    def _end(self, unit: int | str, module: nn.Module, given: Any, out: Any) -> None:
        self._forward.leave()
        while isinstance(out, tuple) and out:
            out = out[0]
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(partial(self._turn, pass_name("backward", unit)))

    def _turn(self, name: str, _: Tensor) -> None:
        """Backward comes to what a unit has made: the unit after it is done."""
        if self._backward.enter(name):
            at_end_of_backward(self._backward.leave)


def units(part: nn.Module) -> Iterator[tuple[int | str, nn.Module, nn.Module]]:
    """Yield the units of a part, and of each the first and the last of its modules that run."""
    children = dict(part.named_children()) if isinstance(part, Part) else {}
    names = [name for name, child in children.items() if name == "layers" or [*child.parameters()]]
    middle = names.index("layers") if "layers" in names else 0
    for unit, own in (("embedding", names[:middle]), ("head", names[middle + 1 :])):
        if own:
            yield unit, children[own[0]], children[own[-1]]
    yield from ((number, block, block) for number, block in numbered(part))


def renamed(trace: bytes) -> bytes:
    """The text of a trace in which what FSDP2 sends is named by its unit."""

    def name(found: re.Match[bytes]) -> bytes:
        return f'"{sent_name(*SENT[found[1]], unit_of((found[2] or b"").decode()))}'.encode()

    return FSDP.sub(name, trace)


def unit_of(module: str) -> str:
    """The unit that has modules by these names in our models: ``layers.3.mlp.experts`` is ``experts of block 3``. What
    has no name is the root, whose weights are those of the two ends together."""
    parts = module.partition(",")[0].split(".")
    if "layers" in parts[:-1]:
        at = parts.index("layers") + 1
        inner = f"{parts[-1]} of " * (len(parts) > at + 1)
        return inner + unit_name(int(parts[at]))
    return "embedding" if "embed" in parts[-1] else "head"
