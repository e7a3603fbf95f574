"""A plan that was not chosen beside the one that was: where its time and its memory differ, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.cli.render import same_split
from shardwise.cli.step_time import parts
from shardwise.planner.comparison import MARGIN, TIE, peak_share, seconds
from shardwise.spec.plan import Plan
from shardwise.spec.units import columns, show_bytes, show_payload, show_seconds
from shardwise.techniques import simplicity

TOLD = 0.01
"""A difference below this share of a step, or of the memory, is left out of the words."""
PHRASES = {
    "computes": "computes {} {more}",
    "waits for pp": "idles {} {more} while the pipeline fills and drains",
    "optimizer": "updates weights for {} {more}",
    "waits for copies": "waits {} {more} for copies to the host and back",
    "host": "leaves {} {more} to the host",
}
"""What a step does so much longer, or less long; other parts wait for an axis."""
TOTALS = ("a step", "in all")
Pair = tuple[float, float]


@dataclass(frozen=True)
class PlanPair:
    """``other`` beside the ``chosen`` plan. Seconds are for as many tokens as a step of the chosen one has."""

    chosen: Plan
    other: Plan

    @property
    def same(self) -> bool:
        """Return whether both are one plan."""
        return same_split(self.chosen, self.other)

    @cached_property
    def differences(self) -> dict[str, dict[str, Pair]]:
        """The parts of a step in seconds, the memory of the fullest rank in bytes, and what a rank sends by axis, each
        of the chosen plan and of the other."""
        sizes = [
            plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len for plan in (self.chosen, self.other)
        ]
        scale = sizes[0] / sizes[1]
        steps = [{**dict(parts(seconds(plan))), "a step": seconds(plan).step_s} for plan in (self.chosen, self.other)]
        steps[1] = {name: scale * part for name, part in steps[1].items()}
        sent = [_sent(self.chosen), {axis: scale * size for axis, size in _sent(self.other).items()}]
        memory = [plan.estimate.memory | {"in all": plan.estimate.peak_bytes} for plan in (self.chosen, self.other)]
        return {"seconds": _paired(*steps), "memory": _paired(*memory), "sent": _paired(*sent)}

    def words(self, name: str) -> list[str]:
        """Say what is different with the settings ``name``, and why it was not taken, with tables of both."""
        if self.same:
            return [f"the chosen plan has {name}"]
        found = {kind: dict(pairs) for kind, pairs in self.differences.items()}
        whole, memory = found["seconds"].pop("a step"), found["memory"].pop("in all")
        longer = [self._longer(part, pair) for part, pair in _largest(found["seconds"], TOLD * whole[0])]
        held = [f"{part} {_more(pair, show_bytes)}" for part, pair in _largest(found["memory"], TOLD * memory[0])]
        change = f"{abs(whole[1] / whole[0] - 1):.1%} {'more' if whole[1] > whole[0] else 'less'}"
        lines = [
            f"with {name} {self._taken(whole)}",
            f"time    {show_seconds(whole[1])} instead of {show_seconds(whole[0])} a step, {change}: {_listed(longer)}",
            f"memory  {_more(memory, show_bytes)} on the fullest rank: {_listed(held)}",
        ]
        shows = {"seconds": show_seconds, "memory": show_bytes, "sent": show_payload}
        heads = {"seconds": "a step", "memory": "memory of the fullest rank", "sent": "sent by a rank in a step"}
        for kind, pairs in self.differences.items():
            show = shows[kind]
            shown = ((part, show(pair[0]), show(pair[1]), _signed(pair, show)) for part, pair in pairs.items())
            rows = [row for row in shown if row[1] != row[2]]
            lines += ["", *columns([(heads[kind], "chosen", "with it", "difference"), *rows], "<>>>")] if rows else []
        return lines

    def _longer(self, part: str, pair: Pair) -> str:
        """Say how much longer a part takes, with what explains it."""
        more = "more" if pair[1] > pair[0] else "less"
        axis = part.removeprefix("waits for ")
        phrase = PHRASES.get(part, f"waits {{}} {{more}} for {axis}").format(
            show_seconds(abs(pair[1] - pair[0])), more=more
        )
        sent = self.differences["sent"].get(axis, (0, 0))
        if part not in PHRASES and sent[0] != sent[1]:
            phrase += f" (a rank sends {show_payload(sent[1])} there instead of {show_payload(sent[0])})"
        modes = self.chosen.remat.mode, self.other.remat.mode
        if part == "computes" and modes[0] != modes[1]:
            phrase += f" (recompute {modes[1]} instead of {modes[0]})"
        return phrase

    def _taken(self, whole: Pair) -> str:
        """Say why the chosen plan was taken."""
        share = peak_share(self.other)
        if share > 1:
            return f"it does not fit: the smallest such plan needs {share:.0%} of the memory"
        if share > MARGIN:
            return f"it takes {share:.0%} of the memory, and what stays below {MARGIN:.0%} goes before it"
        if whole[1] > (1 + TIE) * whole[0]:
            return "it fits, and is slower"
        speed = "faster" if whole[0] > (1 + TIE) * whole[1] else f"as fast within {TIE:.0%}, as runs of one plan differ"
        if whole[1] > whole[0] / (1 + TIE) and simplicity(self.chosen) < simplicity(self.other):
            return f"it fits, and is {speed}; the chosen one is simpler"
        budgets = self.chosen.remat.mode == "budget", self.other.remat.mode == "budget"
        if budgets == (False, True) and self.other.layout.pp > 1:
            return f"it fits, and is {speed}: of pipelines, only the fastest one's degrees are tried with a budget"
        return f"it fits, and is {speed}: the recipe says otherwise, or it changes what is trained"


def _sent(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in plan.estimate.traffic:
        if one.category != "control":
            found[one.axis] = found.get(one.axis, 0) + one.bytes
    return found


def _paired(chosen: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Pair]:
    names = sorted(dict.fromkeys([*chosen, *other]), key=lambda name: name in TOTALS)
    both = {name: (chosen.get(name, 0), other.get(name, 0)) for name in names}
    return {name: pair for name, pair in both.items() if any(pair)}


def _largest(pairs: dict[str, Pair], least: float) -> list[tuple[str, Pair]]:
    """The pairs that differ by more than ``least``, the largest difference first."""
    found = [(name, pair) for name, pair in pairs.items() if abs(pair[1] - pair[0]) > least]
    return sorted(found, key=lambda one: -abs(one[1][1] - one[1][0]))


def _more(pair: Pair, show: Callable[[float], str]) -> str:
    return f"{show(abs(pair[1] - pair[0]))} {'more' if pair[1] > pair[0] else 'less'}"


def _signed(pair: Pair, show: Callable[[float], str]) -> str:
    return f"{'+' if pair[1] >= pair[0] else '-'}{show(abs(pair[1] - pair[0]))}"


def _listed(words: list[str]) -> str:
    return ", ".join(words) or "no part of it differs much"
