"""Questions around a plan, each answered by the search that `plan` makes, of other machines or of other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import hypot, isfinite, log
from typing import Any

from shardwise.cli.decide import cluster_of, with_measured_experts
from shardwise.cli.length import Asked
from shardwise.cli.options import misused
from shardwise.cli.pins import PINNING, pins_of
from shardwise.cli.planned import planned
from shardwise.errors import ConfigError, Problem
from shardwise.models.resolve import resolve
from shardwise.planner.comparison import MARGIN, fits, seconds, tokens_per_s
from shardwise.planner.length import Length, read_prices
from shardwise.planner.search import Search, could_fit, fastest_pipelines
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.cluster_file import LOCAL
from shardwise.spec.complaints import unknown_key
from shardwise.spec.devices import devices, rented, sold_on
from shardwise.spec.explain import fit, label
from shardwise.spec.keys import SIZES, describe, keys_of
from shardwise.spec.load import recipe_schema
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OffloadSection, Recipe
from shardwise.spec.units import read_size

MOST_ROWS = 32
"""Machines, or values of a key, of one question."""
MOST_GPUS = 1024
"""Machines that are looked at for the least that holds a run have no more."""
_LEAN = ["offload.weights=host", "offload.activations=host", "recompute.mode=full"]
OFFLOADED = (["offload.optimizer=auto"], ["offload.optimizer=host", *_LEAN])
"""Settings that need less of the device, where all weights are trained; where only adapters are, the last is these."""


@dataclass(frozen=True)
class PlanRow:
    """The plan that `plan` chooses under ``name``, which is what to type, and the length of its run; or why there is
    none."""

    name: str
    cluster: Cluster
    plan: Plan | None = None
    length: Length | None = None
    refused: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether there is a plan, and its memory stays below the margin."""
        return self.plan is not None and fits(self.plan)

    @property
    def runs(self) -> bool:
        """Return whether there is a plan that `train` would run, tight ones included."""
        return self.plan is not None and self.plan.estimate.share <= 1

    def as_json(self) -> dict[str, Any]:
        """The row for a program."""
        found: dict[str, Any] = {"name": self.name, "fits": fit(self.plan.estimate)[0] if self.plan else "refused"}
        if self.plan is None or self.length is None:
            return found | {"refused": [asdict(problem) for problem in self.refused]}
        step = seconds(self.plan)
        found |= {"step_s": step.step_s, "low_s": step.low_s, "high_s": step.high_s}
        found |= {"tokens_per_s": tokens_per_s(self.plan), "split": label(self.plan)}
        return found | {"length": asdict(self.length), "plan": asdict(self.plan)}


@dataclass(frozen=True)
class Asking:
    """The subject of a question: ``read`` gives the recipe on the machines of a text, with more settings; ``machines``
    are those of ``--cluster``. Prices are by ``--price``."""

    read: Callable[[list[str], str | None], Recipe]
    machines: str | None
    tokens: int | None
    prices: list[str]

    def row(
        self, name: str, recipe: Recipe, cluster: Cluster, prices: dict[str, float], *, here: bool = False
    ) -> PlanRow:
        """The row of a recipe on these machines; ``here``: on this one, whose earlier runs correct its seconds."""
        try:
            spec = resolve(recipe)
            if here:
                recipe, _ = with_measured_experts(recipe, spec, cluster)
            answer = planned(recipe, spec, cluster, Asked(self.tokens, prices), here=here)
            return PlanRow(name, cluster, answer.best, answer.length)
        except ConfigError as error:
            return PlanRow(name, cluster, refused=tuple(dict.fromkeys(error.problems)))

    def own(self, *words: str, name: str = "") -> PlanRow:
        """The row of the recipe with the settings of ``words``, on the machines of ``--cluster``. What the recipe
        contradicts is why there is none; raises ConfigError for a key that is unknown, or a value that is none."""
        before = cluster_of(self.read([], self.machines), self.machines)
        prices, here = read_prices(self.prices, before), self.machines in (None, LOCAL)
        try:
            recipe = self.read([*words], self.machines)
        except ConfigError as error:
            if any(problem.code != "CFG008" for problem in error.problems):
                raise
            return PlanRow(name, before, refused=error.problems)
        return self.row(name, recipe, cluster_of(recipe, self.machines), prices, here=here)


def compared(about: Asking, text: str) -> list[PlanRow]:
    """Return the plan on each of the machines of ``text``, with commas between; what is beside the GPUs of a node
    (``host=1TB``) belongs to those before it. Raises UsageError (CLI001), and what names of machines raise."""
    names = list[str]()
    for part in text.split(","):
        if "=" in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    if about.machines is not None:
        what = f"`--cluster {about.machines}` and `--compare` both name machines"
        raise misused(what, f"`--compare {about.machines},{text}`", "--cluster")
    if len(names) < 2 or len(names) > MOST_ROWS or not all(names):
        what = f"`{text}`: what is compared are from 2 to {MOST_ROWS} machines, with commas between"
        raise misused(what, "--compare 8xH100,8xH200,2x8xA100+400Gb/node", "--compare")
    try:
        recipes = [about.read([], name) for name in names]
        clusters = [cluster_of(recipe, name) for recipe, name in zip(recipes, names, strict=True)]
    except ConfigError as error:
        named = (replace(one, where="--compare" if one.where == "--cluster" else one.where) for one in error.problems)
        raise ConfigError(*named) from None
    if twice := next((name for i, name in enumerate(names) if clusters[i] in clusters[:i]), None):
        raise misused(f"`{twice}` is named twice", "drop one of the two", "--compare")
    prices = read_prices(about.prices, *clusters)
    each = zip(names, recipes, clusters, strict=True)
    rows = known(about.row(name, recipe, found, prices, here=name == LOCAL) for name, recipe, found in each)
    return sorted(rows, key=lambda row: (not row.fits, not row.runs, row.plan is None, per_token(row, "seconds")))


def beside(about: Asking, pins: list[str]) -> tuple[PlanRow, PlanRow]:
    """Return the chosen plan, and the best with all of ``pins``, of which one text may have several with commas
    between. Raises UsageError (CLI001) for what is no setting, and what a plan raises."""
    words = list[str]()
    for part in (part.strip() for text in pins for part in text.split(",")):
        if "=" not in part and words:
            words[-1] += f",{part}"
        else:
            words.append(part)
    if unread := next((word for word in words if not all(word.partition("="))), None):
        raise misused(f"`{unread}` is not key=value", "--why-not parallel.tp=8", "--why-not")
    (chosen,) = known([about.own(name="chosen")])
    return chosen, about.own(*words, name=" ".join(words))


def freed(about: Asking) -> list[PlanRow]:
    """Return the plan as the recipe is, without each of its pins alone, and without all of them. Raises UsageError
    (CLI001) where it pins nothing, and what a plan raises."""
    recipe = about.read([], about.machines)
    # without a global batch, that of a step follows from the micro-batch
    sections = [each for each in PINNING if each != "train" or recipe.train.global_batch_size is not None]
    if not (pins := pins_of(recipe, *sections)):
        what = f"the recipe pins nothing of {', '.join(PINNING)}: the plan is the fastest that is found"
        raise misused(what, "leave it out, or pin something: parallel.tp=8", "--pins")
    rows = [about.own(name="as it is"), *(about.own(pin.free, name=f"without {pin.given}") for pin in pins)]
    return known([*rows, about.own(*(pin.free for pin in pins), name="without any")] if pins[1:] else rows)


def swept(about: Asking, text: str) -> list[PlanRow]:
    """Return the plan for each value of a key that takes numbers: ``train.seq_len=4k..128k`` doubles, and commas make a
    list. Raises UsageError (CLI001) for what is none, and ConfigError (CFG001) for an unknown key."""
    keys, (name, _, values) = keys_of(recipe_schema()), text.partition("=")
    name = name.strip().replace("-", "_")
    key = keys.meant(name)
    if key is None:
        raise ConfigError(unknown_key(name, "--sweep", keys))
    if not keys.types(key) & {"integer", "number"}:
        what = f"`{key}` is {describe(keys.leaves[key], recipe_schema())}; only keys that take a number can be swept"
        fix = "--sweep train.seq_len=4k..128k; or --why-not, for a plan with one other value"
        raise misused(what, fix, "--sweep")
    found = list[float]()
    for part in values.split(","):
        first, dots, last = part.partition("..")
        ends = [_number(end, key) for end in ([first, last] if dots else [first])]
        if None in ends or (dots and not 0 < (ends[0] or 0) <= (ends[-1] or 0)):
            what = f"`{part}` is no number, nor two of which the second is the larger: 4k..128k"
            raise misused(what, f"--sweep {key}=1..8, or a list: --sweep {key}=1,2,4", "--sweep")
        value, end = ends[0] or 0, ends[-1] or 0
        while value < end and len(found) <= MOST_ROWS:
            found.append(value)
            value *= 2
        found.append(end)
    if len(found) > MOST_ROWS:
        raise misused(f"`{values}` are more than {MOST_ROWS} values", "fewer of them", "--sweep")
    names = [f"{key}={value}" for value in dict.fromkeys(found)]
    return known(about.own(each, name=each) for each in names)


def _number(text: str, key: str) -> float | None:
    size = read_size(text, SIZES[key]) if key in SIZES else None
    with suppress(ValueError):
        return size if size is not None else int(text)
    with suppress(ValueError):
        return float(text) if isfinite(float(text)) else None
    return None


@dataclass(frozen=True)
class LeastMachines:
    """The least machines with any of the GPUs ``devices`` that hold a run, by the settings that are added to its
    recipe; None where none do. ``cluster`` is one GPU of them, that with the least memory."""

    devices: tuple[str, ...]
    cluster: Cluster
    machines: dict[str, Cluster | None]


def smallest(about: Asking) -> list[LeastMachines]:
    """Return the least of every GPU that is rented, or of that of ``--cluster``, the largest first; those are one that
    have as many GiB, on hosts alike, and of which as many do. Raises UsageError (CLI001) for machines without GPUs, and
    ConfigError where every GPU refuses the recipe."""
    recipes, given = variants(about), about.machines and cluster_of(about.read([], None), about.machines)
    if given and given.kind == "cpu":
        raise misused(f"{given} has no GPUs, of which fewer could do", "--cluster H100, or leave it out", "--cluster")
    known = sorted(devices().values(), key=lambda device: -device.memory_bytes)
    starts = [given] if given else [parse_cluster(device.name) for device in known if device.name in rented()]
    alike: dict[object, list[Cluster]] = {}
    for one in starts:
        alike.setdefault((*_row_of(one), one.device.capability), []).append(one)
    found, largest = list[LeastMachines](), list[Cluster]()
    for several in alike.values():
        sizes = [several[-1].resized(*size) for size in sizes_of(several[-1], MOST_GPUS)]
        least = {words: _least(recipe, sizes, found, words) for words, recipe in recipes.items()}
        found.append(LeastMachines(tuple(one.device.name for one in several), sizes[0], least))
        largest.append(sizes[-1])
    if not any(one for each in found for one in each.machines.values()):
        refusals = [_refusal(recipes[""], cluster) for cluster in largest]
        if all(refusals):
            raise ConfigError(*refusals[0])
    return _joined(found)


def _row_of(cluster: Cluster) -> tuple[object, ...]:
    """Return the figures that GPUs of one row have in common."""
    device = cluster.device
    return round(device.memory_bytes / 2**30), sold_on(device), device.computes_bf16, device.per_node


def _joined(found: list[LeastMachines]) -> list[LeastMachines]:
    """GPUs of one row as one, where as many of each do."""
    rows: dict[object, LeastMachines] = {}
    for each in found:
        sizes = [one and (one.nodes, one.devices_per_node) for one in each.machines.values()]
        row = rows.setdefault((*_row_of(each.cluster), *sizes), each)
        if row is not each:
            least = min(row, each, key=lambda one: one.cluster.device.memory_bytes)
            rows[(*_row_of(each.cluster), *sizes)] = replace(least, devices=row.devices + each.devices)
    return list(rows.values())


def variants(about: Asking) -> dict[str, Recipe]:
    """The recipe as it is, and by the words that are added to it: without what it has on the host, with more there, and
    each with adapters, or without the recipe's own, where it is a fine-tune."""
    first = about.read([], about.machines)
    whole, adapted = [[], *OFFLOADED], [[], _LEAN]
    own, other = (adapted, whole) if first.lora.rank else (whole, adapted)
    if first.offload != OffloadSection():
        own = [[], [f"offload.{key}=none" for key in ("optimizer", "weights", "activations")], *own[1:]]
    trained = first.model.config is None and first.model.init != "random"
    changed = "lora.rank=null" if first.lora.rank else "lora.rank=16"
    tuned = first.lora.rank or (first.method.spec.records and trained)
    found = dict[str, Recipe]()
    for words in [*own, *([changed, *more] for more in (other if tuned else ()))]:
        with suppress(ConfigError):  # not with what else the recipe says
            recipe = about.read(words, about.machines)
            if recipe not in found.values():
                found[" ".join(words)] = recipe
    return found


def sizes_of(cluster: Cluster, most: int, factors: tuple[int, ...] = (1,)) -> list[tuple[int, int]]:
    """Nodes and GPUs of each, up to ``most`` in all: 1, 2, 4 and so on within a node, then nodes: the powers of two,
    each times the ``factors``. A node is as large as those of several that are given, else as it is sold."""
    full = cluster.devices_per_node if cluster.nodes > 1 else max(cluster.devices_per_node, cluster.device.per_node)
    within = [(1, 2**power) for power in range(full.bit_length()) if 2**power < full]
    nodes = {factor * 2**power for factor in factors for power in range((most // full).bit_length())}
    return [*within, *((count, full) for count in sorted(nodes) if count * full <= most)]


def _least(recipe: Recipe, sizes: list[Cluster], found: list[LeastMachines], words: str) -> Cluster | None:
    """Return the first of ``sizes`` that holds the recipe of these ``words``. It has as many GPUs as what was ``found``
    for GPUs with more memory; where those of one capability have none, smaller ones of it have none either. What
    another refuses may be served."""
    device, most = sizes[0].device, 1
    for each in found:
        larger, least = each.cluster, each.machines[words]
        if larger.host_memory_bytes < sizes[0].host_memory_bytes or larger.device.computes_bf16 < device.computes_bf16:
            continue
        if least is None and larger.device.capability == device.capability:
            return None
        most = max(most, least.world if least else 1)
    if (refusal := _refusal(recipe, sizes[0])) and refusal == _refusal(recipe, sizes[-1]):
        return None  # the same words: it is the GPU, not their number
    return next((cluster for cluster in sizes if cluster.world >= most and _holds(recipe, cluster)), None)


def _refusal(recipe: Recipe, cluster: Cluster) -> tuple[Problem, ...]:
    """Return why no plan of the recipe is legal there; nothing where one is."""
    try:
        Search(recipe, resolve(recipe), cluster)
    except ConfigError as error:
        return error.problems
    return ()


def _holds(recipe: Recipe, cluster: Cluster) -> bool:
    """Return whether a plan of the recipe stays below the margin of the memory."""
    with suppress(ConfigError):
        search = Search(recipe, resolve(recipe), cluster)
        if could_fit(search, MARGIN):
            return fits(search.known.smallest(search.all)) or bool(fastest_pipelines(search))
    return False


def known(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Return the rows. Raises ConfigError where none has a plan."""
    found = list(rows)
    if not any(row.plan for row in found):
        raise ConfigError(*dict.fromkeys(problem for row in found for problem in row.refused))
    return found


def per_token(row: PlanRow, what: str) -> float:
    """Return ``seconds``, ``gpu_hours`` or ``dollars`` of the run by the tokens that it reads; infinite where they
    are not known, or the plan cannot run."""
    of_run = vars(row.length)[what] if row.length and row.runs else None
    return float("inf") if of_run is None or row.length is None else of_run / row.length.tokens


def apart(one: PlanRow, other: PlanRow, what: str) -> bool:
    """Return whether the bands of two rows leave no doubt which takes less of ``what``: of two errors that know nothing
    of each other, each within its band four times in five, their ratio is so often within the width taken here. So
    it is too where nothing is known of one."""
    less, more = sorted((one, other), key=lambda row: per_token(row, what))
    if not (less.plan and more.plan and isfinite(per_token(more, what))):
        return True
    below, above = seconds(less.plan), seconds(more.plan)
    width = hypot(log(below.high_s / below.step_s), log(above.step_s / above.low_s))
    return log(per_token(more, what) / per_token(less, what)) > width


def least_of(rows: Sequence[PlanRow], what: str) -> tuple[PlanRow, list[PlanRow]] | None:
    """Return the row that takes least of ``what``, and those that the bands cannot tell from it; None where nothing is
    known."""
    best = min(rows, key=lambda row: per_token(row, what), default=None)
    if best is None or per_token(best, what) == float("inf"):
        return None
    return best, [row for row in rows if row is not best and row.runs and not apart(best, row, what)]
