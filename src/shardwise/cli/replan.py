"""A run that ran out of memory goes on with the next plan by memory: by itself, once, and it says so.

All that is known then is that the plan needs more than it was predicted to. The next is searched as if there were less
memory than that: the same batch, samples, precision and processes, what the recipe pins as it is; first with the ranks
split as before, so that recomputation or smaller micro-batches give way, then in every way.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.cli.decide import plan_of
from shardwise.cli.pins import pins_of
from shardwise.errors import ConfigError, Problem
from shardwise.launch import rundir
from shardwise.launch.launchers import Ended
from shardwise.models.config import ModelSpec
from shardwise.planner.search import choose
from shardwise.runtime.faults.outcome import read_exit
from shardwise.runtime.metrics.json_lines import Lines
from shardwise.runtime.report.run_files import PLANNED_AGAIN, since_begun
from shardwise.spec.batch import batch
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import WORDS
from shardwise.spec.keys import dotted
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Estimate, Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes

BELOW = 0.95
"""Of what the plan that ran out was predicted to need, so much is there for the next one; of that the planner leaves
its usual margin free, if it can."""
ONCE = "it was once already"
AS_BEFORE = "as in the plan that ran out of memory"
_SPLIT = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")


@dataclass(frozen=True)
class RunPlan:
    """What ranks are started with."""

    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    plan: Plan


def kept_plan(directory: Path, recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan | None:
    """Return the plan with which the run in ``directory`` went on after memory ran out: a later start of the same
    recipe, on as many devices of the same kind, takes it too. None for all others, which are planned as any run is."""
    again = [event for event in since_begun(directory) if event["event"] == PLANNED_AGAIN]
    if not again or again[-1]["device"] != cluster.device.name or rundir.changes(directory, recipe):
        return None
    with suppress(ConfigError, OSError):
        return plan_of(recipe, spec, cluster, load_plan(directory / "plan.yaml"), directory)
    return None


def next_by_memory(ended: Ended, failed: RunPlan, barred: str) -> RunPlan | Ended:
    """Return what to start in place of ``failed``, whose ranks ran out of memory; or where nothing is left, or it is
    ``barred`` for the reason given, their end, which then says so."""
    if failed.recipe.run.certificate == "require":
        barred = barred or "`run.certificate: require` asks for one of the plan that runs"
    reason, on_host = barred, ended.ran_out == "host" and failed.cluster.kind == "cuda"
    if not reason and on_host and not failed.plan.estimate.host_bytes:
        reason = "the host's memory ran out, of which the plan asks for nothing"
    if not reason:
        cluster = _with_less(failed, on_host=on_host)
        if (plan := _smaller(failed, cluster)) is not None:
            return replace(failed, cluster=cluster, plan=plan)
        needed = failed.plan.estimate.host_bytes if on_host else failed.plan.estimate.peak_bytes
        reason = f"no plan of this batch needs less than {BELOW:.0%} of the {show_bytes(needed)} that were predicted"
        if pins := pins_of(failed.recipe):
            reason += f" with {', '.join(f'`{pin.given}`' for pin in pins)}, which the recipe gives"
    return not_again(ended, reason)


def not_again(ended: Ended, reason: str) -> Ended:
    """Return the end of ranks, which then says why the run is not planned again."""
    problem = ended.problem or Problem("MEM001", "out of memory")
    return replace(ended, problem=replace(problem, what=f"{problem.what}; not planned again: {reason}"))


def difference(old: RunPlan, new: RunPlan) -> str:
    """Return in words what the new plan does otherwise, and what both are predicted to need."""
    changed = changed_settings(old.plan, new.plan)
    one, other = old.plan.estimate, new.plan.estimate
    if new.cluster.device.memory_bytes == old.cluster.device.memory_bytes:
        sizes = f"{show_bytes(one.host_bytes)} -> {show_bytes(other.host_bytes)} of the host"
    else:
        sizes = f"{show_bytes(one.peak_bytes)} -> {show_bytes(other.peak_bytes)} a rank"
    return ", ".join([*changed, f"predicted {sizes}"])


def changed_settings(old: Plan, new: Plan) -> list[str]:
    """Return in words each setting that the new plan has otherwise."""
    before, after = (_settings(each) for each in (old, new))
    names = {key: WORDS.get(key, key) for key in before | after if before.get(key) != after.get(key)}
    return [f"{name} {before.get(key)} -> {after.get(key)}" for key, name in names.items()]


def record(ended: Ended, old: RunPlan, new: RunPlan, directory: Path) -> str:
    """Write the new plan, and into the run's events that it is planned again, and why; returns the words. Raises
    OSError, as of a full disk."""
    step, told = rundir.newest_step(directory), read_exit(directory)
    goes_on = (
        "begins anew, since there is no checkpoint"
        if step is None
        else f"goes on from the newest checkpoint, of step {step}"
    )
    words = f"{difference(old, new)}; it {goes_on}"
    why = ended.problem.what if ended.problem else "out of memory"
    why = f"rank {told.rank}: {why}" if told and ended.ran_out == "device" else why
    lines = Lines(directory / "events.jsonl")
    at = {"step": told.step if told else 0, "device": new.cluster.device.name}
    lines.event(PLANNED_AGAIN, **at, what=f"{why}; {words}")
    lines.close()
    (directory / "plan.yaml").write_text(dump_plan(new.plan), encoding="utf-8")
    return f"warning[MEM002]: {why}\nplanned again: {words}"


def _with_less(failed: RunPlan, *, on_host: bool) -> Cluster:
    cluster, estimate = failed.cluster, failed.plan.estimate
    if on_host:
        return replace(cluster, host_memory_bytes=int(BELOW * estimate.host_bytes))
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(BELOW * estimate.peak_bytes)))


def _smaller(failed: RunPlan, cluster: Cluster) -> Plan | None:
    """Return the plan to go on with on a ``cluster`` with less memory, of the same batch; None where there is none."""
    recipe, layout, plan = failed.recipe, failed.plan.layout, failed.plan
    whole = plan.batch.global_batch_size(layout.dp)
    precision = recipe.precision.model_copy(update={"compute": plan.precision.compute})
    asked = recipe.model_copy(update={"precision": precision})
    strategy = {} if layout.size("loss") == 1 else {"strategy": plan.shard.strategy}
    split = recipe.parallel.model_copy(update={key: vars(layout)[key] for key in _SPLIT} | strategy)
    for tried in (asked.model_copy(update={"parallel": split}), asked):
        with suppress(ConfigError):
            made = choose(tried, failed.spec, cluster)
            own = made.layout.tp * made.layout.cp  # devices that read the same rows
            sizes = made.batch.global_batch_size(made.layout.dp), batch(recipe.train, made.layout.dp, own)[2]
            if made.estimate.share <= 1 and sizes == (whole, whole):
                fixed = [key for key, why in made.why.items() if why == "pinned" != plan.why.get(key)]
                return replace(made, why={**made.why, **dict.fromkeys(fixed, AS_BEFORE)})
    return None


def _settings(plan: Plan) -> dict[str, object]:
    return dotted(asdict(replace(plan, estimate=Estimate(), why={})))


def check_on_loss(recipe: Recipe, started: str) -> None:
    """Raise ConfigError (RUN009) where nobody would do what ``run.on_loss`` says: ranks that are ``started`` so."""
    asked = recipe.run.on_loss
    if asked != "stop":
        what = f"`run.on_loss: {asked}` is for several nodes with `shardwise train` on each, and these are {started}"
        fix = "PET_NNODES, PET_NODE_RANK and so on for `shardwise train` on each node (docs/launch.md), or `stop`"
        raise ConfigError(Problem("RUN009", what, "run.on_loss", fix))
