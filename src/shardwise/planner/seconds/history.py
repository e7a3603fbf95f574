"""A history of what earlier runs on this machine took beside what was predicted, one JSON line a run in
``steps.jsonl``, and the predictions that follow from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from shardwise.data.whole import write_whole
from shardwise.spec.cluster import Cluster
from shardwise.spec.files import NOTE_BYTES, read_regular, regular
from shardwise.spec.host import cores, total_memory_bytes
from shardwise.spec.plan import Plan, Seconds
from shardwise.spec.record import from_json

FILE = "steps.jsonl"
PREDICTOR = 5
"""Raised when predictions change: ratios to those of an earlier predictor do not correct the next one's."""
KEPT_LINES = 300
WITHIN, WITHIN_LORA = 0.06, 0.13
"""How far four predictions in five are off, in logarithms, once one step of the machine is known."""
_LATEST = 20
"""Only so many of the latest runs count: software and drivers change."""
_QUANTILE = 1.4826 * 1.2816
"""Of a normal distribution, what holds four values in five, in median absolute deviations."""


ALIKE_SIZES = 4
"""How many times as many parameters a model has at most that is like another of its family."""


@dataclass(frozen=True)
class About:
    """Facts of what a run trained: a model of which family, and of how many parameters; and ``expert_imbalance``, how
    many times its share of the rows the fullest of ranks with different experts got. Empty, or 0, where that is not
    known."""

    family: str = ""
    parameters: int = 0
    expert_imbalance: float = 0.0


@dataclass(frozen=True)
class PastRun:
    """A run: on which machine, of which model, split how, and the seconds of a step; the rest as :class:`About`."""

    predictor: int
    machine: str
    model: str
    strategy: str
    tp: int
    predicted_s: float
    measured_s: float
    expert_imbalance: float = 0.0
    family: str = ""
    parameters: int = 0

    def like(self, model: str, about: About) -> bool:
        """Return whether it trained this model, or one of the same family that is not much larger or smaller."""
        sizes = sorted((self.parameters, about.parameters))
        alike = self.family == about.family and 0 < sizes[1] <= ALIKE_SIZES * sizes[0]
        return self.model == model or alike

    @property
    def log_ratio(self) -> float:
        return math.log(self.measured_s / self.predicted_s)


@dataclass(frozen=True)
class PastRuns:
    """The runs of a machine, the latest last, and how many lines of the file could not be read."""

    runs: tuple[PastRun, ...] = ()
    unread: int = 0


@dataclass(frozen=True)
class Calibration:
    """``ratio`` of measured to predicted seconds, the median of ``runs`` runs, of models like the plan's if ``alike``;
    four steps in five are expected within ``band`` (in logarithms) of what it leads to."""

    ratio: float
    band: float
    runs: int
    alike: bool = False
    unread: int = 0

    def __str__(self) -> str:
        runs = f"{self.runs} earlier run{'s' * (self.runs != 1)}{' like it' * self.alike} on this machine"
        unread = f" ({self.unread} line{'s' * (self.unread != 1)} of {FILE} could not be read)" if self.unread else ""
        return f"{runs}: {self.ratio:.3g} x what the model says{unread}"


def machine_of(cluster: Cluster) -> str:
    """Return a name for what stays the same of a machine; free memory does not. Predictions from rates that were
    measured are kept apart from those of the table."""
    device = cluster.device
    if cluster.kind == "cpu":
        size = f"{cores()} cores, {total_memory_bytes() / 2**30:.0f} GiB"
    else:
        size = f"{device.memory_bytes / 2**30:.0f} GiB"
    measured = ", measured" if cluster.measured else ""
    return f"{cluster.nodes}x{cluster.devices_per_node}x{device.name} ({cluster.kind}, {size}{measured})"


def remember(
    plan: Plan,
    cluster: Cluster,
    predicted_s: float,
    measured_s: float,
    directory: Path,
    about: About = About(),
) -> None:
    """Add a run to the file in ``directory``. Several processes may do so at a time. Raises OSError."""
    if not all(value > 0 and math.isfinite(value) for value in (predicted_s, measured_s)):
        return
    split = plan.shard.strategy, plan.layout.tp
    run = PastRun(PREDICTOR, machine_of(cluster), plan.model, *split, predicted_s, measured_s, **asdict(about))
    path = directory / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    text = read_regular(path, NOTE_BYTES)
    begun = b"\n" * (text[-1:] not in (b"", b"\n"))  # what another process left of a line stays a line of its own
    with open(path, "ab", buffering=0, opener=regular) as file:
        file.write(begun + json.dumps(asdict(run)).encode() + b"\n")
    if text.count(b"\n") >= 2 * KEPT_LINES:
        lines = read_regular(path, NOTE_BYTES).decode(errors="replace").splitlines(keepends=True)
        write_whole(path, "".join(lines[-KEPT_LINES:]))


def past_runs(cluster: Cluster, directory: Path) -> PastRuns:
    """The runs on a machine like this one. Raises OSError if the file is there and cannot be read."""
    try:
        lines = read_regular(directory / FILE, NOTE_BYTES).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return PastRuns()
    runs = [_run_of(line) for line in lines if line]
    asked = PREDICTOR, machine_of(cluster)
    return PastRuns(tuple(run for run in runs if run and (run.predictor, run.machine) == asked), runs.count(None))


def _run_of(line: bytes) -> PastRun | None:
    """The run of a line; None if it is torn, or was written by something else."""
    try:
        run = from_json(PastRun, line)
        return run if math.isfinite(run.log_ratio) else None
    except (ValueError, ArithmeticError):
        return None


def imbalance(past: PastRuns, model: str) -> float | None:
    """The highest that was measured in the latest runs of a model whose ranks had different experts; None without
    any."""
    known = [run.expert_imbalance for run in past.runs if run.model == model and run.expert_imbalance >= 1]
    return max(known[-_LATEST:], default=None)


def calibration(past: PastRuns, plan: Plan, about: About = About()) -> Calibration | None:
    """Return what earlier runs say of predictions for ``plan``, of a model of which ``about`` is known: those of
    the same model and split, else of models like it and the same split, else of models like it, else all. None
    without any."""
    split = plan.shard.strategy, plan.layout.tp
    alike = [run for run in past.runs if run.like(plan.model, about)]
    same = [run for run in alike if (run.strategy, run.tp) == split]
    own = [run for run in same if run.model == plan.model]
    ratios = [run.log_ratio for run in (own or same or alike or past.runs)[-_LATEST:]]
    if not ratios:
        return None
    middle = median(ratios)
    spread = _QUANTILE * median(abs(ratio - middle) for ratio in ratios)
    band = math.hypot(WITHIN if plan.lora is None else WITHIN_LORA, spread)
    return Calibration(math.exp(middle), band, len(ratios), bool(alike), past.unread)


def calibrated(seconds: Seconds, found: Calibration) -> Seconds:
    """``seconds`` and all parts of them times the ratio, once: what was calibrated before is begun anew."""
    factor, spread = found.ratio / seconds.scale, math.exp(found.band)
    kinds = ("compute_s", "products_s", "attention_s", "pointwise_s")
    whole = ("step_s", *kinds, "optimizer_s", "host_s", "offload_s", "copied_s")
    scaled = {name: vars(seconds)[name] * factor for name in whole}
    for name in ("exposed_s", "sent_s"):
        scaled[name] = {axis: value * factor for axis, value in vars(seconds)[name].items()}
    band = {"low_s": scaled["step_s"] / spread, "high_s": scaled["step_s"] * spread}
    return replace(seconds, **scaled, **band, scale=found.ratio, basis=str(found))
