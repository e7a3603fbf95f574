"""The log that a run writes while it runs: metrics.jsonl (one line a step, each step exactly once whatever was killed),
events.jsonl, and the line on the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from typing import Any, TextIO

import torch

from shardwise.errors import PreemptedError
from shardwise.models.config import ModelSpec, layer_kinds, parameter_shapes
from shardwise.models.mixers import mixer_of
from shardwise.models.roles import MULTIPLIED, is_expert
from shardwise.runtime.checkpoint.inflight import SaveResult
from shardwise.runtime.expert_counts import told
from shardwise.runtime.metrics.json_lines import Lines
from shardwise.runtime.metrics.measure import resident_bytes, return_freed_memory
from shardwise.runtime.metrics.preference import PreferenceWatch
from shardwise.runtime.metrics.stability import StabilityWatch
from shardwise.runtime.metrics.trackers import Outcome, Tracks
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.files import regular_lines
from shardwise.spec.plan import Plan
from shardwise.spec.record import Numbered, from_json
from shardwise.spec.units import clock
from shardwise.techniques import lora
from shardwise.techniques.states import frozen


def flops_per_token(spec: ModelSpec, plan: Plan) -> float:
    """Floating-point operations to train on one token: 6 for each trained parameter of a matrix product and 4 for each
    frozen one, which has no gradient of its own (the output layer is one, the embedding is a look-up, norms do not
    count, and of experts those do that a token goes to), and for causal attention half of 12 * layers * seq * heads *
    head_dim (Kaplan et al., arXiv 2001.08361; Chowdhery et al., arXiv 2204.02311), less where a window cuts what is
    seen; for gated delta nets three times the products of their rule. Recomputation is not counted."""
    shapes = parameter_shapes(spec)
    if not spec.tie_word_embeddings:
        del shapes["embed.weight"]
    if plan.lora is not None:
        shapes |= lora.adapters(spec, plan.lora)
    shapes = {key: shape for key, shape in shapes.items() if len(shape) == 2 and key.startswith(MULTIPLIED)}
    used = spec.experts.experts_per_token / spec.experts.num_experts if spec.experts else 1.0
    sizes = {name: prod(shape) * (used if is_expert(name) else 1) for name, shape in shapes.items()}
    matmul = sum((4 if frozen(name, plan) else 6) * size for name, size in sizes.items())
    kinds, order = layer_kinds(spec)
    seq_len = plan.batch.seq_len
    scores = 0.0
    for layer, kind in enumerate(order):
        window = min(kinds[kind].window or seq_len, seq_len)
        mixer = mixer_of(spec, layer)
        scores += window * (2 * seq_len - window) / seq_len * mixer.scores(spec) + 2 * mixer.state(spec)
    return matmul + 3.0 * scores


TRIM_S = 30.0
"""Seconds between two returns of freed memory to the system."""


BECAME = {
    "failed": "was not saved",
    "skipped": "was not saved",
    "maybe committed": "is there, but might not survive a power loss",
    "unverified": "was saved, but does not read back as it was written, so older ones stay",
    "undeleted": "was saved, but older ones could not be deleted",
}
"""What to say of each outcome of a save that is not a success."""


def memory_bytes(device: torch.device) -> int:
    """The peak of torch's allocations on a GPU; on a CPU, where torch keeps no count, the process's resident memory."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else resident_bytes()


@dataclass(frozen=True)
class Speed:
    """The basis of rates: operations a token and peak operations a second of all devices (0: unknown)."""

    flops_per_token: float
    peak_flops: float

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model flops utilisation, 0 to 1; None where the peak is unknown."""
        return self.flops_per_token * tokens_per_s / self.peak_flops if self.peak_flops else None


def keep_until(path: Path, step: int) -> str:
    """Drop the lines of steps after ``step``, which will be written again, and lines that cannot be read. Atomic. What
    is missing then, in words."""
    if not path.exists():
        return ""
    kept, unread = {}, 0
    for line in regular_lines(path):
        try:
            number = from_json(Numbered, line).step
        except ValueError:
            unread += line.endswith(b"\n")  # else the last one was being written when the run was killed
            continue
        if line.endswith(b"\n") and number <= step:
            kept[number] = line
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.writelines(kept.values())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    missing = [(a + 1, b - 1) for a, b in pairwise([*(sorted(kept) or [0]), step + 1]) if b - a > 1]
    told = [f"{unread} line{'s' * (unread > 1)} could not be read and {'were' if unread > 1 else 'was'} dropped"] * (
        unread > 0
    )
    shown = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in missing)
    several = len(missing) > 1 or "-" in shown
    told += [f"there is no line for step{'s' * several} {shown}"] * bool(missing)
    return "; ".join(told)


class Log(AbstractContextManager["Log"]):
    """Metrics and events of one rank; only rank 0's writes anything. ``first_step`` is the step a run resumes from.
    ``tracks`` get the same numbers, and are closed with the log. With ``log_steps`` (set after it is made) the screen
    and they get only every so many steps; metrics.jsonl has them all. ``expert_ranks`` (set likewise): how many ranks
    have different experts, of which the fullest got at most ``expert_imbalance`` times its share; 0: not known.
    ``unsaved``: why the last save failed. ``preference`` and ``stability`` (set likewise) watch what pairs of answers,
    and layers, come to. ``draw_page`` (set likewise) is called by rank 0 when a checkpoint is there."""

    def __init__(
        self,
        run_directory: Path,
        rank: int,
        first_step: int,
        max_steps: int,
        speed: Speed,
        tracks: Tracks | None = None,
    ) -> None:
        self.rank = rank
        self.first_step = first_step
        self.max_steps = max_steps
        self.speed = speed
        self.seconds: deque[float] = deque(maxlen=20)
        self.skipped = 0
        self.unsaved = ""
        self.log_steps: int | None = None
        self.expert_ranks, self.expert_imbalance = 1, 0.0
        self.preference, self.stability = PreferenceWatch(), StabilityWatch()
        self.draw_page: Callable[[], None] = lambda: None
        self._tracks = tracks or Tracks()
        self._start_s = self._begin_s = self._trimmed_s = time.perf_counter()
        if rank == 0:
            metrics = run_directory / "metrics.jsonl"
            missing = keep_until(metrics, first_step)
            self._metrics = Lines(metrics)
            self._events = Lines(run_directory / "events.jsonl")
            self._screen = Screen(max_steps)
            if missing:
                self.say(f"warning[LOG001]: {metrics}: {missing}; the checkpoints are not affected")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = kind is not None and issubclass(kind, PreemptedError)
        self.close("finished" if kind is None else "stopped" if stopped else "failed")

    def start_clock(self) -> None:
        """Start the clock of the next step, so that saving or evaluation before it does not count."""
        self._begin_s = time.perf_counter()

    def step(self, state: TrainState, stats: StepStats, device: torch.device, typical: bool = True) -> None:
        """Write the line of a step, the newest that ``state`` knows the figures of. One that is not ``typical`` (it was
        measured, or is the first) does not count for the average time."""
        elapsed_s = stats.end_s - self._begin_s
        if typical:
            self.seconds.append(elapsed_s)
        self.skipped += stats.skipped
        rate = stats.tokens / elapsed_s
        mfu = self.speed.mfu(rate)
        record: dict[str, Any] = {
            "step": stats.step,
            "tokens": stats.total_tokens,
            "loss": stats.loss,
            **stats.figures,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "tokens_per_s": round(rate, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_bytes": memory_bytes(device),
            "seconds": round(elapsed_s, 4),
            "read_tokens": stats.tokens,
            "supervised_tokens": stats.supervised_tokens,
            "padding": round(stats.padding, 4),
            **({"pairs": stats.pairs} if stats.pairs else {}),
            "skipped": stats.skipped,
        }
        record |= told(stats.loads, self.expert_ranks, stats.dropped)
        self.expert_imbalance = max(self.expert_imbalance, record.get("expert_imbalance", 0.0))
        record |= stats.layers.told() if stats.layers else {}
        if stats.loss_scale is not None:
            record["loss_scale"] = stats.loss_scale
        if stats.skipped:
            record["reason"] = unfit(stats, state.scale.value)
        else:
            for warning in (
                self.preference.add(stats.figures),
                self.stability.add(stats.step, stats.loss, stats.layers),
            ):
                if warning:
                    self.say(warning)
        due = None if self.log_steps is None else stats.step % self.log_steps == 0 or stats.step == self.max_steps
        if self.rank == 0:
            self._metrics.write(record)
            if due is not False:
                self._tracks.row(stats.step, "train", record)
            for line in self._tracks.complaints():
                self.say(line)
            self._screen.show(record, self.left_s(stats.step), due)
        if time.perf_counter() - self._trimmed_s > TRIM_S:
            return_freed_memory()
            self._trimmed_s = time.perf_counter()
        self._begin_s = stats.end_s

    def left_s(self, step: int) -> float | None:
        """Seconds left at the recent pace; None before there is one."""
        return (self.max_steps - step) * self.step_s() if self.seconds or step == self.max_steps else None

    def step_s(self) -> float:
        """The median of recent step times; 0 before the first."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    def run_s(self) -> float:
        """Seconds since the log was opened."""
        return time.perf_counter() - self._start_s

    def follow(self, saves: Iterable[SaveResult]) -> None:
        """Log the outcomes of saves; failures are also printed."""
        committed = False
        for save in saves:
            committed |= save.kind == "committed"
            self.event(f"checkpoint {save.kind}", step=save.step, what=save.what, seconds=round(save.seconds, 3))
            if save.kind in ("committed", "failed", "skipped"):
                self.unsaved = "" if save.kind == "committed" else save.what
            if save.kind in BECAME:
                self.say(f"warning[CKPT018]: the checkpoint of step {save.step} {BECAME[save.kind]}: {save.what}")
        if committed and self.rank == 0:
            self.draw_page()

    def event(self, kind: str, **facts: Any) -> None:
        """Write one line to events.jsonl."""
        if self.rank == 0:
            self._events.event(kind, **facts)
            if kind == "validation":
                self._tracks.row(facts["step"], kind, facts)
            elif kind == "task":
                self._tracks.row(facts["step"], kind, {facts["task"]: facts["score"]})

    def progress(self, what: str, done: int, total: int) -> None:
        """A bar for what comes between steps."""
        if self.rank == 0:
            self._screen.bar(what, done, total)

    def say(self, text: str) -> None:
        """A line for people, above the progress line."""
        if self.rank == 0:
            self._screen.say(text)

    def close(self, outcome: Outcome = "finished") -> None:
        if self.rank == 0:
            for line in self._tracks.close(outcome):
                self.say(line)
            self._metrics.close()
            self._events.close()
            self._screen.close()


class Screen:
    """The live line: redrawn in place on a terminal, else a plain line every few seconds, or for the steps ``due``."""

    def __init__(self, max_steps: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.max_steps = max_steps
        self.live = self.stream.isatty()
        self._drawn = False
        self._last_s = self._bar_s = 0.0

    def show(self, record: Mapping[str, Any], left_s: float | None, due: bool | None = None) -> None:
        if due is None:
            due = time.monotonic() - self._last_s >= 5.0 or record["step"] in (1, self.max_steps)
        self._draw(progress_line(record, self.max_steps, left_s), due or bool(record["skipped"]))

    def bar(self, what: str, done: int, total: int) -> None:
        """``validation 12/75 ===-------------  0:10 left``."""
        now = time.monotonic()
        if done == 0:
            self._bar_s = self._last_s = now
        left = clock((now - self._bar_s) / done * (total - done)) if done else "-:--"
        text = f"{what} {done:>{len(str(total))}}/{total} {bar(done, total)}  {left} left"
        self._draw(text, now - self._last_s >= 5.0)

    def _draw(self, text: str, due: bool) -> None:
        if self.live:
            self._put("\r\x1b[2K" + text[: shutil.get_terminal_size().columns - 1])
            self._drawn = True
        elif due:
            self._put(text + "\n")
            self._last_s = time.monotonic()

    def say(self, text: str) -> None:
        self.close()
        self._put(text + "\n")

    def close(self) -> None:
        if self._drawn:
            self._put("\n")
            self._drawn = False

    def _put(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # the terminal was closed, or the reader of the pipe has ended: the run goes on silently
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def bar(done: int, total: int) -> str:
    """``======----------``."""
    full = round(16 * done / max(1, total))
    return "=" * full + "-" * (16 - full)


def progress_line(record: Mapping[str, Any], max_steps: int, left_s: float | None) -> str:
    """``step 120/320 ======----  loss 5.31  lr 2.8e-03  grad_norm 0.74  8,120 tok/s  MFU 24 %  0.6 GiB  1:41 left``."""
    parts = [
        f"step {record['step']:>{len(str(max_steps))}}/{max_steps} {bar(record['step'], max_steps)}",
        f"loss {record['loss']:.3f}",
        *([f"accuracy {100 * record['rewards/accuracies']:.0f} %"] if "rewards/accuracies" in record else []),
        *([f"margin {record['rewards/margins']:+.2f}"] if "rewards/margins" in record else []),
        f"lr {record['learning_rate']:.1e}",
        f"grad_norm {record['grad_norm']:.2f}",
        *([f"experts {_fullness(record)}"] if "experts" in record else []),
        f"{record['tokens_per_s']:,.0f} tok/s",
        *([] if record["mfu"] is None else [f"MFU {100 * record['mfu']:.0f} %"]),
        f"{record['memory_bytes'] / 2**30:.2f} GiB",
        f"{clock(left_s) if left_s is not None else '-:--'} left",
    ]
    if record["skipped"]:
        parts.append(f"skipped: {record['reason']}")
    return "  ".join(parts)


def _fullness(record: Mapping[str, Any]) -> str:
    """``1.8x``: the fullest has so many times its even share; ``1.8x, 3 dead``: as many got no token; ``1.8x, 2.0 %
    dropped``: with a capacity so much found no room."""
    dropped = [f"{100 * record['expert_dropped']:.1f} % dropped"] if "expert_dropped" in record else []
    dead = [f"{record['dead_experts']:.0f} dead"] * (record["dead_experts"] > 0)
    return ", ".join([f"{record['expert_fullest']:.1f}x", *dead, *dropped])


def unfit(stats: StepStats, next_scale: float) -> str:
    """Return why a step was skipped; in fp16 that may be part of the search for a loss scale."""
    found = {"the loss": stats.loss, "the gradient norm": stats.grad_norm}
    why = " and ".join(f"{name} is {value}" for name, value in found.items() if not isfinite(value))
    if stats.loss_scale is None:
        return why
    why += f" at loss scale {stats.loss_scale:,.0f}"
    search = f"; halved to {next_scale:,.0f}, which is how fp16 finds its scale"
    return why + search * (next_scale < stats.loss_scale)
