"""After a run: what was measured beside what the plan predicted, and what to do next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwise.errors import DataError, Problem
from shardwise.runtime.report.results import Memory, Preference, Validation
from shardwise.spec.files import NOTE_BYTES, read_regular, regular_lines
from shardwise.spec.plan import Estimate, Traffic
from shardwise.spec.record import Numbered, from_json
from shardwise.spec.units import clock, columns, counted, show_bytes, show_payload, typed

STATE = ("weights", "moments")
"""Memory categories that can be measured from the tensors of the state."""


KEPT = "report.json"


@dataclass(frozen=True)
class _StepLoss(Numbered):
    """The loss in a line of metrics.jsonl."""

    loss: float | None = None


@dataclass(frozen=True)
class Report:
    """A run's results, in ``seconds`` since step ``since``, beside the plan's ``estimate``. ``step_s``: the seconds of
    a typical step; ``traffic``: what rank 0 sent in one, by axis and kind; ``memory``: its bytes. Parts that were not
    measured, because the run was too short, are 0, None or empty. ``unsaved``: why the last step has no checkpoint;
    None if it has one. ``expert_imbalance``: how many times its share of rows the fullest of ranks with different
    experts got at most; 0 where there are none. Of ``tokens`` so many are ``supervised``, and ``padding`` are not among
    them. ``pairs``: what training on pairs of answers has come to over the last steps."""

    directory: Path
    steps: int
    tokens: int
    seconds: float
    step_s: float
    estimate: Estimate
    validation: Validation | Preference | None = None
    memory: Memory | None = None
    traffic: tuple[Traffic, ...] = ()
    before: str = ""
    after: str = ""
    skipped: int = 0
    unsaved: str | None = None
    chat: bool = False
    adapter: bool = False
    since: int = 0
    expert_imbalance: float = 0.0
    supervised: int = 0
    padding: int = 0
    pairs: dict[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Where it was planned again, slow ranks, why it ended before its last step, which checkpoint is the best."""

    @property
    def losses(self) -> dict[int, float]:
        """Return the loss of each step, in nats, by the step's number from 1, as metrics.jsonl has them; of steps whose
        loss was not finite there is none. Raises OSError where that file is gone."""
        lines = (from_json(_StepLoss, line) for line in regular_lines(self.directory / "metrics.jsonl"))
        return {line.step: line.loss for line in lines if line.loss is not None}

    def keep(self) -> None:
        """Write report.json, which :func:`read_report` reads."""
        facts = {**asdict(self), "directory": str(self.directory)}
        (self.directory / KEPT).write_text(json.dumps(facts), encoding="utf-8")

    @property
    def took(self) -> str:
        """The time that the run took, in words."""
        return clock(self.seconds) + (f" since step {self.since}" if self.since else "")

    @property
    def shares(self) -> str:
        """Return, of records, how many tokens were trained on, and what padding took."""
        return f" ({self.supervised:,} supervised, {self.padding:,} more of padding)" if self.chat else ""

    @property
    def warning(self) -> str:
        """The words about a run whose last checkpoint is missing."""
        return f"the checkpoint of step {self.steps:,} is not there" + (f": {self.unsaved}" if self.unsaved else "")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, predicted, measured, difference) for the table."""
        whole = [("memory per rank", self._predicted_bytes(), self.memory.peak_bytes)] if self.memory else []
        rows = [_row(*figures) for figures in [*self.memory_figures(), *whole]]
        rows += _traffic_rows(self.estimate, self.traffic)
        if self.step_s:
            predicted_s = self.estimate.seconds.step_s if self.estimate.seconds else None
            rows.append(_row("step time", predicted_s or None, self.step_s, "{:.3f} s".format))
        return rows

    def memory_figures(self) -> list[tuple[str, int | None, int]]:
        """(what, predicted, measured) of the parts of a rank's memory, in bytes; nothing where it was not measured."""
        predicted, memory = self.estimate.memory, self.memory
        if memory is None:
            return []
        known = [*STATE, *["offloaded"] * bool(memory.state.get("offloaded"))]
        figures = [(f"memory: {name}", predicted.get(name), memory.state.get(name, 0)) for name in known]
        whole = self._predicted_bytes()
        rest = None if whole is None else whole - sum(predicted.get(name, 0) for name in known)
        return [*figures, ("memory: all else at the peak", rest, memory.categories()["the rest"])]

    def _predicted_bytes(self) -> int | None:
        return self.estimate.allocated_bytes if self.estimate.memory else None

    def text(self) -> str:
        """The table as plain lines."""
        rows = self.rows()
        lines = columns([("", "predicted", "measured", ""), *rows], "<>>>") if rows else []
        if self.memory:
            lines.append(f"(torch's allocations on rank 0; the whole process {show_bytes(self.memory.resident_bytes)})")
        else:
            lines.append("(memory is measured in the third step after a start; there were fewer)")
        return "\n".join(lines)

    def told(self) -> list[str]:
        """What the run came to: a line each."""
        lines = [f"{counted(self.steps, 'step')}, {self.tokens:,} tokens{self.shares} in {self.took}."]
        if self.unsaved is not None:
            lines.append(f"**Not saved: {self.warning}.** The exported model is complete.")
        if self.skipped:
            why = "loss or gradients were not finite (metrics.jsonl says why)"
            were = "was" if self.skipped == 1 else "were"
            lines.append(f"{counted(self.skipped, 'step')} {were} skipped: {why}.")
        if self.validation:
            lines.append(f"Validation: {self.validation}.")
        if self.pairs:
            means = ", ".join(f"{name} {value:.3f}" for name, value in self.pairs.items())
            lines.append(f"Training pairs, mean of the last steps: {means}.")
        return [*lines, *self.notes]

    def markdown(self) -> str:
        """The content of report.md."""
        lines = [
            f"# {self.directory.name}",
            "",
            *self.told(),
            "",
            "| | predicted | measured | |",
            "|---|---:|---:|---:|",
        ]
        lines += [f"| {' | '.join(row)} |" for row in self.rows()]
        if self.memory:
            resident = show_bytes(self.memory.resident_bytes)
            lines += ["", f"Memory is torch's allocations on rank 0; the process takes {resident}."]
        for when, text in (("before", self.before), ("after", self.after)):
            if text:
                lines += ["", f"Sample {when} training:", "", *(f"    {line}" for line in text.splitlines())]
        lines += ["", "Next:", "", *(f"    {line}" for line in self.next_steps())]
        return "\n".join(lines) + "\n"

    def next_steps(self) -> list[str]:
        """Return what to type next."""
        merge = [f"shardwise export {typed(self.directory)}"]  # the adapter and what it was trained on, as one model
        return [
            *merge * self.adapter,
            f'shardwise generate {typed(self.directory)} {"--chat " * self.chat}--prompt "..."',
            f"shardwise train {typed(self.directory / 'recipe.yaml')} --run NEW_NAME data.path=YOUR_DATA",
            f"shardwise plan --plan {typed(self.directory / 'plan.yaml')}",
        ]


def read_report(directory: Path) -> Report:
    """The report of the run in ``directory``. Raises OSError where there is none, DataError (REP002) for a damaged
    one."""
    path = directory / KEPT
    try:
        return from_json(Report, read_regular(path, NOTE_BYTES))
    except ValueError as error:
        fix = "report.md has the same in words"
        raise DataError(Problem("REP002", f"the report cannot be read: {error}", str(path), fix)) from None


def _traffic_rows(estimate: Estimate, traffic: tuple[Traffic, ...]) -> list[tuple[str, str, str, str]]:
    measured = {(item.axis, item.kind): item.bytes for item in traffic}
    if not measured:
        return []
    predicted: Counter[tuple[str, str]] = Counter()
    for item in estimate.traffic:
        predicted["control" if item.category == "control" else item.axis, item.kind] += item.bytes
    rows = []
    for axis, kind in sorted({*predicted, *measured}):
        sent = measured.get((axis, kind), 0)
        expected = predicted[axis, kind] if estimate.traffic else None
        what = f"{kind.replace('_', '-')} " + ("of control messages" if axis == "control" else f"over {axis}")
        rows.append(_row(what, expected, sent, show_payload))
    return rows


def _row(
    what: str, predicted: float | None, measured: float, size: Callable[[float], str] = show_bytes
) -> tuple[str, str, str, str]:
    if predicted is None:
        return what, "-", size(measured), ""
    if predicted == measured:
        return what, size(predicted), size(measured), "0"
    share = f"{100 * (measured - predicted) / predicted:+.1f} %" if predicted else "unforeseen"
    return what, size(predicted), size(measured), share
