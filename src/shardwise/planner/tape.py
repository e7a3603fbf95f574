"""A step in the making: :class:`Tape` keeps every event and raises where one cannot be true, :class:`Folding` keeps
spans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache

from shardwise.planner.events import Begin, Event, Free, Key, Make, Record, TensorKey, Wait, WeightsCall
from shardwise.planner.passes import Pass, Passes
from shardwise.planner.spans import Span
from shardwise.spec.sheet import KEPT_UNITS, Tier, Unit

Piece = Event | Span | WeightsCall


class Tape:
    """The events so far, and category, bytes and tier of what is alive; what has no bytes makes no event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.alive: dict[Key, tuple[str, int, Tier]] = {}
        self.marks: set[Hashable] = set()

    def add(self, event: Event) -> None:
        self.events.append(event)

    def record(self, stream: str, mark: Hashable) -> None:
        self.marks.add(mark)
        self.add(Record(stream, mark))

    def wait(self, stream: str, mark: Hashable) -> None:
        """Raises KeyError where ``mark`` has not been recorded: it would be waited for in vain."""
        if mark not in self.marks:
            raise KeyError(f"{stream} waits for {mark}, which has not been recorded")
        self.add(Wait(stream, mark))

    def make(self, key: Key, category: str, size: int, tier: Tier = "device") -> None:
        """Raises KeyError where ``key`` is alive already."""
        if key in self.alive:
            raise KeyError(f"{key} is made, but it is alive already")
        self.alive[key] = (category, size, tier)
        if size:
            self.change(key, category, size, tier)

    def hold(self, key: Key, category: str, size: int) -> None:
        """Make ``key``, unless it is there already: what is added to."""
        if key not in self.alive:
            self.make(key, category, size)

    def free(self, key: Key) -> None:
        """Raises KeyError where ``key`` is not alive: whoever frees it has counted wrong."""
        if key not in self.alive:
            raise KeyError(f"{key} is freed, but it is not alive")
        category, size, tier = self.alive.pop(key)
        if size:
            self.change(key, category, -size, tier)

    def drop(self, key: Key) -> None:
        """Free ``key``, if it is there."""
        if key in self.alive:
            self.free(key)

    def comes(self, key: TensorKey, size: int) -> None:
        """A tensor of a pass has come from another rank, or from the host."""
        self.make(key, "activations", size)

    def leaves(self, key: TensorKey, size: int) -> None:
        """One has left for another rank, or for the host."""
        self.free(key)

    def ended(self) -> None:
        """All passes have been played. Raises KeyError where a tensor of one is still alive."""
        if left := [key for key in self.alive if isinstance(key, TensorKey)]:
            raise KeyError(f"{left[0]} is still alive after the last pass")

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        """Make so many bytes; free them, where ``size`` is negative."""
        self.add(Make(key, category, size, tier) if size > 0 else Free(key, category, -size, tier))

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


class Apart(Tape):
    """The part of a tape that is one stage's: its weights have keys, and its streams marks, of their own."""

    def __init__(self, whole: Tape, stage: int) -> None:
        super().__init__()
        self.whole, self.stage = whole, stage

    def add(self, event: Event) -> None:
        self.whole.add(event)

    def record(self, stream: str, mark: Hashable) -> None:
        self.whole.record(stream, (self.stage, mark))

    def wait(self, stream: str, mark: Hashable) -> None:
        self.whole.wait(stream, (self.stage, mark))

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        self.whole.change((self.stage, key), category, size, tier)


class Folding(Tape):
    """One span for the pass of each unit, by direction and unit, and one under "" for what is before the first. What
    a pass comes to is folded once for all plans that share it; whether what it frees is alive, only a :class:`Tape`
    checks."""

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
