"""``shardwise.search``, ``shardwise.train``: from Python what ``shardwise plan`` and ``shardwise train`` do.

recipe = shardwise.load_recipe("recipe.yaml", ["train.max_steps=100"])
plan = shardwise.search(recipe)                    # of this machine; or "8xH100", of machines elsewhere
print(plan.explain())
report = shardwise.train(recipe, plan)
print(report.text(), report.losses)
"""

from __future__ import annotations

from pathlib import Path

from shardwise.cli.decide import cluster_of, with_measured_experts
from shardwise.cli.length import Asked
from shardwise.cli.planned import planned
from shardwise.cli.start import How, named, start
from shardwise.cli.work import on_started, work
from shardwise.errors import ConfigError, Problem, ShardwiseError, TrainingError
from shardwise.launch.worker import is_worker, set_up_torch
from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.models.resolve import resolve, with_adapter
from shardwise.runtime.report.report import Report, read_report
from shardwise.spec.cluster import Cluster
from shardwise.spec.cluster_file import LOCAL
from shardwise.spec.launchers import launcher_of
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

STEM = "run"
"""What names of runs begin with, where a recipe names none."""


def load_model_spec(source: str, revision: str | None = None) -> ModelSpec:
    """The dimensions of a model: of a directory with a ``config.json``, of a built-in model, or of one on the Hub, at
    ``revision`` of it, tried in that order. Nothing but ``config.json`` is downloaded, and no torch is imported. Raises
    MissingInputError (MOD002) for a model that is nowhere, DataError for a config that describes none,
    UnavailableError without the Hub."""
    return load_spec(source, revision)


def search(recipe: Recipe, cluster: Cluster | str | None = None) -> Plan:
    """The fastest plan that fits for ``recipe`` on ``cluster``: machines, in words as :func:`parse_cluster` reads them
    (``8xH100``), or this machine. Where none fits, the smallest one: ``plan.estimate.share`` is then above 1. Its
    estimate is in bytes and seconds a step, of the rank that takes most, and ``plan.explain()`` says why each setting
    is as it is. Neither weights nor data are read, and no torch is imported for models that the decoder makes. Raises
    ConfigError with everything that makes the recipe, or its pins, illegal, and those of :func:`load_model_spec`."""
    asked = with_adapter(recipe)
    here = cluster is None or cluster == LOCAL
    if here and is_worker():
        asked, found = on_started(asked)
    else:
        found = cluster if isinstance(cluster, Cluster) else cluster_of(asked, cluster)
    spec = resolve(asked)
    if here:
        asked, _ = with_measured_experts(asked, spec, found)
    return planned(asked, spec, found, Asked(), here=here).chosen


def train(recipe: Recipe, plan: Plan | None = None, *, resume: bool = False) -> Report:
    """Train ``recipe`` as ``plan`` splits it, or by a plan of this machine, and return what was measured beside what
    was predicted. In a plain process as many ranks as the plan needs are started on this machine, and waited for; they
    print as under ``shardwise train``. In a script that ``torchrun`` started, each process becomes one rank and gets
    the report of its own measurements.

    Everything of the run is in ``report.directory``: ``runs/NAME``, a new one each time unless the recipe names it.
    With ``resume`` the run goes on from its newest checkpoint. Raises ConfigError: RUN001 for a plan of another number
    of processes, PLAN010 for one that cannot fit, PLAN019 for one of another recipe; PreemptedError when it was asked
    to stop, after saving; and any other ShardwiseError, whose problem names its rank."""
    run = recipe.run
    if plan is not None and run.nproc is None and not is_worker():
        update = {"nproc": plan.layout.world // run.nodes}
        recipe = recipe.model_copy(update={"run": run.model_copy(update=update)})
    how = How(plan, None if "name" in run.model_fields_set else STEM, resume=resume)
    if is_worker():
        set_up_torch(deterministic=run.deterministic)
        recipe = named(recipe, how)
        done = work(recipe, how)
        if isinstance(done, ShardwiseError):
            raise done
        return done or _report(Path(run.out) / recipe.run.name)
    if not (launcher := launcher_of(run.launcher, run.nodes)).here:
        what = f"`run.nodes` is {run.nodes}: the launcher {launcher.title}, and a plain process waits for its ranks"
        raise ConfigError(Problem("RUN001", what, "run.nodes", "start this script with torchrun, on each node"))
    directory, ended = start(recipe, how)
    if ended is not None and ended.exit_code:
        if ended.problem is None:  # a second Ctrl-C
            raise KeyboardInterrupt
        kinds = {kind.exit_code: kind for kind in ShardwiseError.__subclasses__()}
        raise kinds.get(ended.exit_code, TrainingError)(ended.problem)
    return _report(directory)


def _report(directory: Path) -> Report:
    return read_report(directory)
