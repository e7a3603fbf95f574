"""The acts of techniques between the units of a model, on paper: the calls of planner/schedule.py as it plays a step.

The classes of a technique that acts there are in its ``paper.py``; techniques/__init__ says in which order they act.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from shardwise.spec.sheet import Tensor
from shardwise.techniques.events import ExpertsRun, TensorKey, UnitName


class Between:
    """One thing that is done between units, as events of a log. What a class does not override does nothing."""

    def before_forward(self, name: UnitName, at: TensorKey) -> None: ...
    def after_forward(self, name: UnitName, at: TensorKey) -> None: ...
    def before_backward(self, name: UnitName, at: TensorKey) -> None: ...

    def end(self) -> None:
        """A backward of a micro-batch is over, or half of one."""

    def end_step(self) -> None:
        """The last backward of a step is over; of a pipeline, that of all stages of the rank."""


class Gradients(Between):
    """The way of a stage's gradients once they are whole."""

    def whole(self, unit: UnitName, key: Hashable, size: int, *, last: bool, summed: Hashable = None) -> None:
        """A gradient is whole, where others add to it behind the mark ``summed``, in the ``last`` backward of a step or
        an earlier one. ``size``: its bytes without padding. ``unit``: the block that it is in, or "embedding" for the
        embedding and the head alike."""

    def flattened(self, bucket: Hashable, keys: tuple[Hashable, ...]) -> None:
        """Gradients, by their keys, have been copied into a bucket."""

    def kept(self) -> Hashable:
        """Return what is known of them, for :meth:`restore`."""

    def restore(self, kept: Any) -> None: ...


class Weights(Between):
    """The weights of a stage and their gradients, which a data-parallel strategy has whole or sharded."""

    def before_waiting(self, names: Iterable[UnitName]) -> None:
        """A step begins with waiting for another stage."""

    def begin(self, *, last: bool, half: bool = False) -> None:
        """``half``: the first half of a backward begins, whose second half is the step's ``last``."""

    def after_backward(self, name: UnitName) -> None: ...
    def after_weight_gradients(self, name: UnitName) -> None: ...
    def gradient(self, weight: Tensor, name: UnitName) -> None: ...
    def head_gradient(self) -> None: ...
    def add_tied(self) -> None: ...
    def experts(self, run: ExpertsRun, name: UnitName) -> None: ...

    def kept(self) -> Hashable:
        """Return where all is, for :meth:`restore`. It decides what a pass does: sizes too, of what is scattered."""

    def restore(self, kept: Any) -> None: ...


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage's passes of a micro-batch, by kind of action. ``waiting_s``: of what is done before the first
    message comes. ``opening_s`` and ``closing_s``: how much longer its first forward takes, before which weights may be
    gathered, and its last backward, after which gradients are reduced. ``after_s``: how long its backward goes on when
    the gradient of its input is there, and its last."""

    each_s: dict[str, float]
    waiting_s: float
    opening_s: float
    closing_s: float
    after_s: tuple[float, float]
