"""A step in the making: :class:`StepLog` keeps every event and raises where one cannot be true, :class:`Folding` keeps
spans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache

from shardwise.planner.spans import Span
from shardwise.planner.unit_passes import Pass, Passes
from shardwise.spec.sheet import KEPT_UNITS, Tier, Unit
from shardwise.techniques.events import Begin, Event, EventLog, Free, Key, Make, TensorKey, WeightsCall

Piece = Event | Span | WeightsCall


class StepLog(EventLog):
    """The log of a step whose passes are played event by event."""

    def ended(self) -> None:
        """All passes have been played. Raises KeyError where a tensor of one is still alive."""
        if left := [key for key in self.alive if isinstance(key, TensorKey)]:
            raise KeyError(f"{left[0]} is still alive after the last pass")

    def pieces(self, which: Pass, passes: Passes, unit: Unit) -> Iterable[Piece]:
        """Return what is played of this pass of a unit."""
        return which(passes, unit)

    def play(self, piece: Event | Span, at: TensorKey) -> None:
        """Add one event of the pass of a unit, whose tensors get keys like ``at``. Raises ValueError where something is
        freed as what it is not."""
        assert not isinstance(piece, Span)
        if not isinstance(piece, Make | Free):
            self.add(piece)
            return
        assert isinstance(piece.key, tuple)
        offset, tensor = piece.key
        key, made = at._replace(unit=at.unit + offset, tensor=tensor), piece[1:]
        if isinstance(piece, Make):
            self.make(key, *made)
        elif self.alive.get(key, made) != made:
            raise ValueError(f"{key} is freed as {made}, but it is {self.alive[key]}")
        else:
            self.free(key)


class Folding(StepLog):
    """One span for the pass of each unit, by direction and unit, and one under "" for what is before the first. What
    a pass comes to is folded once for all plans that share it; whether what it frees is alive, only a
    :class:`StepLog` checks."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: dict[Hashable, Span] = {}
        self.known: dict[tuple[Pass, Passes, Unit], Iterable[Piece]] = {}  # of one step's passes
        self.through = False  # one span for all units
        self.taken()

    def taken(self) -> dict[Hashable, Span]:
        """The spans since it was last asked, in order."""
        taken, self.span = self.spans, Span()
        self.spans = {"": self.span}
        return taken

    def add(self, event: Event) -> None:
        if isinstance(event, Begin):
            if self.through:
                return
            self.span = self.spans[event.direction, event.unit] = Span()
        else:
            self.span.adds(event)

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        self.span.on(tier).moves(category, size)

    def comes(self, key: TensorKey, size: int) -> None:
        self.change(key, "activations", size, "device")

    def leaves(self, key: TensorKey, size: int) -> None:
        self.change(key, "activations", -size, "device")

    def record(self, stream: str, mark: Hashable) -> None:
        """Nothing: a span does not say what waits for what."""

    def wait(self, stream: str, mark: Hashable) -> None:
        """Nothing, likewise."""

    def spanned(self, run: Callable[[], None]) -> Span:
        """Call ``run``, and return what it adds, apart from all else."""
        before, self.span = self.span, Span()
        run()
        added, self.span = self.span, before
        return added

    def pieces(self, which: Pass, passes: Passes, unit: Unit) -> Iterable[Piece]:
        key = which, passes, unit
        if key not in self.known:
            self.known[key] = folded_pass(which, passes, unit)
        return self.known[key]

    def play(self, piece: Event | Span, at: TensorKey) -> None:
        assert isinstance(piece, Span)
        self.span.goes_on(piece)


@lru_cache(maxsize=32 * KEPT_UNITS)
def folded_pass(which: Pass, passes: Passes, unit: Unit) -> tuple[WeightsCall | Span, ...]:
    """Calls, and a span for the events between two of them. Plans share them: they are not to be changed."""
    span = Span()
    found: list[WeightsCall | Span] = [span]
    for piece in which(passes, unit):
        if isinstance(piece, WeightsCall):
            span = Span()
            found += (piece, span)
        else:
            span.adds(piece)
    return tuple(piece for piece in found if piece != Span())
