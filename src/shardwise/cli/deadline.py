"""The machines that end a run before a deadline: the fewest, the cheapest, and what more of them pay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.cli.decide import cluster_of
from shardwise.cli.length import show_duration
from shardwise.cli.options import misused
from shardwise.cli.questions import Asking, PlanRow, known, per_token, sizes_of
from shardwise.models.config import active_parameter_count
from shardwise.models.resolve import resolve
from shardwise.planner.length import read_amount, read_prices
from shardwise.spec.cluster import Cluster
from shardwise.spec.recipe import Recipe

MOST_GPUS = 16_384
PAYS, HELPS = 0.6, 0.1
"""Of its share, what another node is to add: less is not worth it, and where less than the other is added before the
deadline is met, more nodes are no help."""
_SUPERLINEAR = 1.05
"""More nodes do at most so much more than their share: what would need more is not looked at."""
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]+)?) ?(min|h|d|w)")
_SECONDS = {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Curve:
    """The machines that were looked at, from the fewest GPUs on, and of those from the second on by name what share of
    what their further GPUs would add at best they do add."""

    deadline_s: float
    budget: float | None
    rows: list[PlanRow]
    pays: dict[str, float]

    @property
    def meeting(self) -> list[PlanRow]:
        """The rows whose run ends in time."""
        return [row for row in self.rows if meets(row, self.deadline_s)]

    @property
    def surely(self) -> list[PlanRow]:
        """The rows that end in time at the slow end of the band too."""
        return [row for row in self.meeting if _within(row, "high_s", self.deadline_s)]

    @property
    def affordable(self) -> list[PlanRow]:
        """The rows that end in time and within the budget, if there is one."""
        limit = float("inf") if self.budget is None else self.budget
        return [row for row in self.meeting if _within(row, "dollars", limit)]


def meets(row: PlanRow, deadline_s: float) -> bool:
    """Return whether the run of a row that can run ends in time."""
    return row.runs and _within(row, "seconds", deadline_s)


def _within(row: PlanRow, figure: str, limit: float) -> bool:
    """Return whether a figure of the length of a run is known, and no more than the limit."""
    found = vars(row.length)[figure] if row.length else None
    return found is not None and found <= limit


def curve(about: Asking, text: str, budget_text: str | None) -> Curve:
    """Return the curve of more and more machines with the GPU of ``--cluster``, from those that are too few on to where
    another node pays too little. Raises UsageError (CLI001), and what a plan raises."""
    duration = _DURATION.fullmatch(text.strip())
    deadline_s = float(duration[1]) * _SECONDS[duration[2]] if duration else 0.0
    if not deadline_s:
        raise misused(f"`{text}` is no time above 0, in min, h, d or w", "--deadline 14d, 36h or 2w", "--deadline")
    cluster = about.machines and cluster_of(about.read([], None), about.machines)
    if not cluster or cluster.kind == "cpu":
        raise misused("`--deadline` asks for a number of GPUs, and none are named", "--cluster H100", "--cluster")
    prices = read_prices(about.prices, cluster)
    budget = None if budget_text is None else float(read_amount(budget_text.strip().removeprefix("$")))
    if budget is not None and not budget:
        raise misused(f"`{budget_text}` is no number of dollars above 0", "--budget 50k", "--budget")
    if budget and not prices:
        fix = f"--price {cluster.device.name.replace(' ', '-')}=2.5"
        raise misused("`--budget` needs the price of a GPU-hour", fix, "--budget")
    rows, pays = list[PlanRow](), dict[str, float]()
    for row in _tried(about, cluster, prices, deadline_s):
        before = next((one for one in reversed(rows) if one.runs), None)
        rows.append(row)
        if before and meets(before, deadline_s) and not row.plan:
            break  # nor will there be one on twice as many
        if before and row.runs:
            pays[row.name] = _paid(before, row)
            if pays[row.name] < (PAYS if meets(before, deadline_s) else HELPS):
                break
    if not rows:
        most, limit = f"{MOST_GPUS:,} of the {cluster.device.name}", show_duration(deadline_s)
        what = f"even {most} at their peak take longer than {limit}"
        raise misused(what, "a longer --deadline, fewer --tokens, or a faster GPU", "--deadline")
    return Curve(deadline_s, budget, known(rows), pays)


def _tried(about: Asking, cluster: Cluster, prices: dict[str, float], deadline_s: float) -> Iterator[PlanRow]:
    """Yield the rows of the ladder from what may be enough on, to the first that is; then of the fewest nodes between
    it and the one before that are; then of twice as many each time."""
    recipe, enough = about.read([], about.machines), _least_gpus(about, cluster, deadline_s)

    def row(nodes: int, each: int) -> PlanRow:
        return _row(about, recipe, cluster.resized(nodes, each), prices)

    last: PlanRow | None = None
    sizes = sizes_of(cluster, MOST_GPUS, (1, 3))
    for nodes, each in sizes:
        if nodes * each < enough:
            continue
        found = row(nodes, each)
        if not meets(found, deadline_s):
            yield found
            last = found
            continue
        first = last.cluster.nodes if last else nodes
        if last and last.runs and last.length and last.length.seconds:
            first = max(first, int(first * last.length.seconds / deadline_s / _SUPERLINEAR))
        fewer = (row(between, each) for between in range(first + 1, nodes))
        least = next((other for other in fewer if meets(other, deadline_s)), found)
        yield least
        nodes, each = least.cluster.nodes, least.cluster.devices_per_node
        full = sizes[-1][1]
        while 2 * nodes * each <= MOST_GPUS:
            nodes, each = (nodes, 2 * each) if nodes == 1 and 2 * each <= full else (2 * nodes, each)
            yield row(nodes, each)
        return


def _row(about: Asking, recipe: Recipe, cluster: Cluster, prices: dict[str, float]) -> PlanRow:
    row = about.row(str(cluster), recipe, cluster, prices)
    if row.length and row.length.set_by in ("unknown", "the default"):
        raise misused("`--deadline` needs the length of the run", "--tokens 1T, or train.max_steps=10k", "--tokens")
    return row


def _least_gpus(about: Asking, cluster: Cluster, deadline_s: float) -> float:
    """Return a number of GPUs that is not more than enough: at their peak, with products forward and for gradients of
    activations alone, in float8 if that is asked for."""
    recipe = about.read([], about.machines)
    spec, faster = resolve(recipe), 1 if recipe.precision.products == "compute" else 2
    weights = active_parameter_count(spec) - spec.vocab_size * spec.hidden_size
    peak = faster * cluster.device.bf16_flops * deadline_s
    return 4 * weights * (about.tokens or 0) / peak if peak else 0.0


def _paid(before: PlanRow, row: PlanRow) -> float:
    """Return which share of what more GPUs would add, if all were as useful, they do add."""
    gained = per_token(before, "seconds") / per_token(row, "seconds") - 1
    return gained / (row.cluster.world / before.cluster.world - 1)
