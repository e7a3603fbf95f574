"""The way from a recipe to what will run: the machines and the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from math import gcd
from pathlib import Path

from shardwise import techniques
from shardwise.cli.kept_rates import with_kept
from shardwise.cli.render import remedy_words
from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.launch.compiler import compiler_lacks
from shardwise.launch.worker import by_our_launcher, state_directory
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.planner.comparison import fits
from shardwise.planner.remedy import remedies
from shardwise.planner.search import choose
from shardwise.planner.seconds.history import About, calibrated, calibration, imbalance, past_runs
from shardwise.spec import finetune
from shardwise.spec.batch import batch
from shardwise.spec.cluster import Cluster, local_cluster
from shardwise.spec.cluster_file import LOCAL, machines
from shardwise.spec.host import cpu_has_bf16, total_memory_bytes
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe
from shardwise.spec.record import from_json
from shardwise.spec.units import show_bytes


def cluster_of(recipe: Recipe, text: str | None = None, memory_bytes: int | None = None) -> Cluster:
    """The machines that ``text`` describes, or the file that it names; without it, or where it is "local",
    :func:`this_machine` with the rates that ``shardwise doctor`` measured on it, if it did."""
    if text is not None and text != LOCAL:
        return machines(text)
    return with_kept(this_machine(recipe, memory_bytes), state_directory())


def this_machine(recipe: Recipe, memory_bytes: int | None = None) -> Cluster:
    """Return this machine, or as many like it as ``run.nodes``, with ``memory_bytes`` of memory
    (:func:`local_cluster`) and the rates of the table."""
    found = local_cluster(recipe.run.nproc, recipe.run.device, recipe.run.nodes, memory_bytes)
    return replace(found, device=replace(found.device, no_compiler=compiler_lacks(found.kind)))


def as_first(cluster: Cluster) -> Cluster:
    """The machines with what rank 0 lacks to compile, and the rates that it knows: ranks that torchrun started must all
    make the same plan, and ``shardwise doctor`` leaves rates on the first machine alone."""
    from shardwise.runtime.world import told_by_first

    first = from_json(Cluster, told_by_first(lambda: json.dumps(asdict(cluster))))
    return replace(
        cluster,
        device=replace(cluster.device, no_compiler=first.device.no_compiler),
        link_bytes_per_s=first.link_bytes_per_s,
        network_bytes_per_s=first.network_bytes_per_s,
        measured=first.measured,
    )


def cluster_of_ranks(recipe: Recipe) -> Cluster:
    """This machine as every rank sees it alike. Ranks that torchrun started each make the plan; memory that is free
    changes from one moment to the next, and what they hold themselves is no longer free, so on CPUs they count what the
    machine has."""
    found = cluster_of(recipe, memory_bytes=total_memory_bytes())
    return found if found.kind == "cuda" else replace(found, assumptions=())


def plan_of(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, given: Path | Plan | None, resumed: Path | None = None
) -> Plan:
    """The plan that is ``given``, or its file, as it stands (RUN001 if it is for other machines, PLAN019 if for another
    recipe), else the planner's choice, with the compute dtype of the run that is ``resumed``. PLAN010 if it cannot
    fit."""
    kept = _kept(recipe, resumed) if resumed else {}
    asked = recipe.model_copy(update={"precision": recipe.precision.model_copy(update=kept)})
    file = None if given is None else given if isinstance(given, Path) else Path("the plan")
    plan = given if isinstance(given, Plan) else load_plan(given) if given else choose(asked, spec, cluster)
    if given is None:
        reasons = dict.fromkeys((f"precision.{key}" for key in kept), "as when the run was started")
        plan = replace(plan, why={**plan.why, **reasons})
    if not by_our_launcher():  # which has written all that it assumed into the recipe
        plan = with_reasons(plan, recipe)
    if plan.layout.world != cluster.world:
        what = f"{file or 'the plan'} is for {plan.layout.world} processes, but {cluster.world} will be started"
        nproc = plan.layout.world // cluster.nodes
        fix = f"`run.nproc={nproc}`, or leave out --plan to plan again for {cluster.world}"
        raise ConfigError(Problem("RUN001", what, str(file or "WORLD_SIZE"), fix))
    if file and (
        problems := [*_other_recipe(plan, recipe, spec, file, resumed), *techniques.check(spec, plan, cluster)]
    ):
        raise ConfigError(*problems)
    estimate = plan.estimate
    if estimate.capacity_bytes and estimate.peak_bytes > estimate.capacity_bytes:
        parts = ", ".join(f"{name} {show_bytes(count)}" for name, count in estimate.memory.items() if count)
        peak, capacity = show_bytes(estimate.peak_bytes), show_bytes(estimate.capacity_bytes)
        what = f"needs {peak} per rank, {capacity} available: {parts}"
    elif estimate.host_capacity_bytes and estimate.host_bytes > estimate.host_capacity_bytes:
        held, capacity = show_bytes(estimate.host_bytes), show_bytes(estimate.host_capacity_bytes)
        what = f"needs {held} of a node's memory beside its GPUs, {capacity} available"
    elif estimate.disk_capacity_bytes and estimate.disk_bytes > estimate.disk_capacity_bytes:
        held, capacity = show_bytes(estimate.disk_bytes), show_bytes(estimate.disk_capacity_bytes)
        what = f"needs {held} of a node's disks, {capacity} available"
    else:
        what = ""
    if what:
        fix = "leave out --plan to plan again" if file else remedy_words(remedies(recipe, spec, cluster, plan))
        raise ConfigError(Problem("PLAN010", what, "the plan", fix))
    return plan


def with_measured_experts(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> tuple[Recipe, str | None]:
    """The recipe with the imbalance of experts that earlier runs of its model on this machine measured, where it leaves
    that open, and a line about it. Of a machine whose runs cannot be read nothing is known."""
    if not spec.experts or recipe.parallel.expert_imbalance is not None:
        return recipe, None
    try:
        found = imbalance(past_runs(cluster, state_directory()), spec.name)
    except OSError:
        found = None
    if found is None:
        return recipe, None
    said = f"experts: in an earlier run of {spec.name} the fullest rank got {found:g} times its share of rows; so much"
    parallel = recipe.parallel.model_copy(update={"expert_imbalance": found})
    return recipe.model_copy(update={"parallel": parallel}), f"{said} is reserved with ep (parallel.expert_imbalance)"


def by_history(like: Plan, cluster: Cluster, spec: ModelSpec) -> Callable[[Plan], Plan]:
    """Return what corrects the seconds of plans so, by the runs that resemble ``like``, read once: all figures of a
    page are of one clock, whatever ends meanwhile."""
    found, unread = None, ""
    try:
        found = calibration(past_runs(cluster, state_directory()), like, About(spec.family, parameter_count(spec)))
    except OSError as error:
        unread = f"; earlier runs cannot be read: {error.strerror}"

    def corrected(plan: Plan) -> Plan:
        if (seconds := plan.estimate.seconds) is None:
            return plan
        seconds = replace(seconds, basis=seconds.basis + unread) if found is None else calibrated(seconds, found)
        return replace(plan, estimate=replace(plan.estimate, seconds=seconds))

    return corrected


def suited(
    recipe: Recipe, plan: Plan, windows: int | None, planned: Callable[[Recipe], Plan] | None
) -> tuple[Recipe, Plan]:
    """The recipe and the plan of a run that begins, with a batch that suits data of so many ``windows`` (None: they are
    not known yet) where fine-tuning leaves it open. ``planned`` makes the plan of another recipe; without it ``plan``
    is the user's, and stands. The recipe then names the batch, so that the run is resumed with the same."""
    if not finetune.batch_is_open(recipe):
        return recipe, plan
    dp, whole = plan.layout.dp, plan.batch.global_batch_size(plan.layout.dp)
    if planned is None:
        usual = batch(recipe.train, dp, plan.layout.tp * plan.layout.cp)[2]
        return (recipe if whole == usual else finetune.with_values(recipe, {finetune.BATCH: whole})), plan
    size = whole if windows is None else finetune.suited_batch(windows, dp)
    while size < whole:
        with suppress(ConfigError):  # a pipeline needs more than one micro-batch
            smaller = finetune.with_values(recipe, {finetune.BATCH: size})
            made = planned(smaller)
            if fits(made) or not fits(plan):
                return smaller, _assuming(made, windows)
        size *= 2
    return recipe, _assuming(plan, windows)


def _assuming(plan: Plan, windows: int | None) -> Plan:
    return replace(plan, why={**plan.why, "batch.global_batch_size": finetune.why_batch(windows)})


def with_reasons(plan: Plan, recipe: Recipe) -> Plan:
    """The plan with why fine-tuning takes what the recipe leaves open."""
    others = {key: why for key, why in plan.why.items() if key not in finetune.KEYS}
    return replace(plan, why={**others, **finetune.assumed(recipe)})


def _kept(recipe: Recipe, run: Path) -> dict[str, str]:
    """The compute dtype with which ``run`` was started, where the recipe leaves it open: it must not change, whatever
    the machine."""
    if recipe.precision.compute != "auto":
        return {}
    try:
        return {"compute": load_plan(run / "plan.yaml").precision.compute}
    except ShardwiseError:
        return {}


def far(plan: Plan, asked: Parallel) -> str | None:
    """A warning of tensor or expert parallelism that crosses nodes, or of heads that are exchanged between them, where
    that was ``asked`` for: what a search chose was faster than what stays on a node, or is all that fits."""
    tp = plan.layout.tp
    each = plan.layout.ranks_per_node
    exchanging = plan.layout.ulysses
    if asked.ep and plan.layout.ep > 1 and each % plan.layout.ep and plan.layout.world > each:
        what = f"warning: the {plan.layout.ep} ranks that have different experts are on several nodes, and wait for the"
        return f"{what} network in every layer; `parallel.ep={gcd(plan.layout.ep, each)}` keeps them on one"
    if asked.tp and each % tp:
        what = f"warning: the {tp} ranks of a tensor-parallel group are on several nodes, and wait for the network"
        return f"{what} twice in every layer; `parallel.tp={gcd(tp, each)}` keeps them on one"
    if asked.cp_kind != "auto" and each % (tp * exchanging):
        what = f"warning: {exchanging} ranks exchange tokens for heads between nodes, and wait for the network"
        ring = "nested" if gcd(exchanging, each // tp) > 1 else "ring"
        return f"{what} twice in every layer; `parallel.cp_kind={ring}` has a ring across nodes instead"
    return None


def beyond(recipe: Recipe, spec: ModelSpec) -> str | None:
    """A warning of sequences longer than the model's positions reach (learned ones, which end there, are refused)."""
    longest, asked = spec.max_position_embeddings, recipe.train.seq_len
    if asked <= longest or recipe.model.rope_theta is not None:
        return None
    what = f"warning: `train.seq_len` is {asked:,}, but the positions of {spec.name} reach {longest:,} tokens"
    if recipe.model.config is not None:
        return f"{what}; `train.seq_len={longest}`, or `model.config.max_position_embeddings={asked}`"
    yarn = {"rope_type": "yarn", "factor": asked / longest, "original_max_position_embeddings": longest}
    stretched = "" if spec.positions.rope_scaling else f", or stretch them: `model.rope_scaling={json.dumps(yarn)}`"
    return f"{what}, and it knows nothing of longer text; `train.seq_len={longest}`{stretched}"


def slower(plan: Plan, cluster: Cluster) -> str | None:
    """A warning of bf16 where another type is faster."""
    if plan.precision.compute != "bf16":
        return None
    if not cluster.device.computes_bf16:
        return f"warning: the {cluster.device.name} emulates bf16, slowly; `precision.compute=fp16`"
    if cluster.kind == "cpu" and not cpu_has_bf16():
        return "warning: this CPU has no bf16 instructions, and emulates them slowly; `precision.compute=fp32`"
    return None


def _other_recipe(plan: Plan, recipe: Recipe, spec: ModelSpec, file: Path, resumed: Path | None) -> list[Problem]:
    """Return what shows that a plan is another recipe's. What is trained is the recipe's to say, and export and
    generate read it there; and a pin always wins."""
    dp, devices = plan.layout.dp, plan.layout.tp * plan.layout.cp
    follows = resumed is None and finetune.batch_is_open(recipe)  # the data, when the plan was made
    wanted_batch = "auto" if follows else batch(recipe.train, dp, devices)[2]
    asked: dict[str, tuple[object, object]] = {
        **techniques.pins(recipe, plan),
        "loss": (plan.loss, recipe.method.spec.loss),
        "method.entropy": (plan.entropy, recipe.method.entropy),
        "train.seq_len": (plan.batch.seq_len, recipe.train.seq_len),
        "train.global_batch_size": (plan.batch.global_batch_size(dp), wanted_batch),
        "run.deterministic": (plan.deterministic, recipe.run.deterministic),
        "attention": (plan.attention, recipe.attention),
        "model": (plan.model or spec.name, spec.name),
    }
    fix = f"the recipe that {file} was made for, or leave out --plan to plan again"
    return [
        Problem("PLAN019", f"the plan has `{key}` {_show(planned)}, the recipe {_show(wanted)}", str(file), fix)
        for key, (planned, wanted) in asked.items()
        if wanted not in ("auto", planned)
    ]


def _show(value: object) -> str:
    """A setting in words: nothing, or as it is written."""
    return "none" if not value else str(value)
