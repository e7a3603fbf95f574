"""Inside one rank: train, and write the cause of a failure where the launcher looks for it."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.certified import told_of_run
from shardwise.cli.decide import as_first, cluster_of_ranks, plan_of, suited
from shardwise.cli.replan import check_on_loss
from shardwise.cli.show import defect, note, out_of_memory, print_error, say
from shardwise.cli.start import How
from shardwise.data.tasks import check_tasks
from shardwise.errors import UNWRITABLE, PreemptedError, ShardwiseError
from shardwise.launch import nodes, rundir, worker
from shardwise.models.config import parameter_count
from shardwise.models.resolve import resolve
from shardwise.planner.seconds.history import About, remember
from shardwise.runtime import owner
from shardwise.runtime.faults.outcome import Kind, clear_exit, failed, read_exit, write_exit
from shardwise.runtime.metrics.trackers import check_installed
from shardwise.runtime.owner import Claim
from shardwise.runtime.report.warn import only_reports
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster, crowding
from shardwise.spec.recipe import Recipe

if TYPE_CHECKING:
    from shardwise.runtime.report.report import Report


def work(recipe: Recipe, how: How) -> Report | ShardwiseError | None:
    """Train as this rank of the run; its report, none where nothing was left to do, or why it failed: that is written
    to ``exit.json``, where the first cause stays, and printed once, by our launcher, or without it by the rank that
    wrote the cause."""
    directory = Path(recipe.run.out) / recipe.run.name
    if not worker.meets_again():
        check_on_loss(recipe, "started by torchrun or a scheduler")
    world, local_world = worker.started()
    if world > local_world:
        from shardwise.runtime.node_facts import check_nodes

        check_nodes(recipe, directory)
    recipe = recipe if worker.by_our_launcher() else rundir.as_begun(directory, recipe)
    if how.resume and not worker.by_our_launcher() and (done := rundir.nothing_to_do(directory, recipe)):
        say(done) if worker.rank() == 0 else None
        return None
    with _claimed(directory, recipe, how.resume) as claim:  # raises before anything is written into another's directory
        try:
            return _train(recipe, how, claim)
        except ShardwiseError as error:
            if how.debug:
                traceback.print_exc()
            return _leave(directory, error, "preempted" if isinstance(error, PreemptedError) else "error", claim)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                return _leave(directory, rundir.filled(directory, error), "error", claim)
            if lacking := out_of_memory(error):
                return _leave(directory, lacking, "memory", claim)
            return _leave(directory, _defect(directory, error, how.debug), "crash", claim)


@contextmanager
def _claimed(directory: Path, recipe: Recipe, resume: bool) -> Iterator[Claim | None]:
    """The claim under which this rank may write into the run's directory. Our launcher holds it for its ranks, and has
    made all checks. Of the ranks that torchrun started, rank 0 makes the claim and the others follow it."""
    if worker.by_our_launcher():
        yield owner.standing(directory)
        return
    if warning := nodes.exposure():
        note(warning)
    check_installed(recipe)
    check_tasks(recipe)
    if worker.rank():
        rundir.check_standing(directory, recipe, resume=resume)
        yield owner.follow(directory, worker.start_name(), recipe.run.timeout_s)
        return
    with rundir.owned(directory, note, worker.start_name()) as claim:
        standing = rundir.check_standing(directory, recipe, resume=resume)
        if standing is not None:
            note(rundir.resuming(directory, standing, recipe), as_json=False)
        clear_exit(directory)
        yield claim


def on_started(recipe: Recipe, *, planned: bool = False) -> tuple[Recipe, Cluster]:
    """The recipe on the processes that were started, and their machines as all of them see them, who make the same plan
    of them, unless it is ``planned``."""
    world, local_world = worker.started()
    run = recipe.run.model_copy(update={"nproc": local_world, "nodes": world // local_world})
    recipe = recipe.model_copy(update={"run": run})
    cluster = cluster_of_ranks(recipe)
    return recipe, cluster if planned or world == 1 else as_first(cluster)


def _train(recipe: Recipe, how: How, claim: Claim | None) -> Report:
    from shardwise.runtime.begin import Start
    from shardwise.runtime.job import count_windows
    from shardwise.runtime.loop import train

    recipe, cluster = on_started(recipe, planned=how.plan is not None)
    run = recipe.run
    if not worker.by_our_launcher() and worker.rank() == 0 and (warning := crowding(cluster)):
        note(warning)
    directory = Path(run.out) / run.name
    resumed = directory if rundir.newest_step(directory) else None
    spec = resolve(recipe)
    plan = plan_of(recipe, spec, cluster, how.plan, resumed)
    if resumed is None and not worker.by_our_launcher() and finetune.batch_is_open(recipe):
        if how.plan is None:
            again = partial(plan_of, spec=spec, cluster=cluster, given=None)
            recipe, plan = suited(recipe, plan, count_windows(recipe), again)
        else:
            recipe, plan = suited(recipe, plan, None, None)
    if run.certificate == "require" and not worker.by_our_launcher():  # which has asked for its ranks
        told_of_run(recipe, spec, plan, [run.name], shlex.join(["shardwise", "prove", *how.words]))
    recipe = recipe.model_copy(update={"run": run.model_copy(update={"device": cluster.kind})})
    report = train(recipe, plan, start=Start(allow_fresh_start=how.fresh, claim=claim, spec=spec))
    if worker.rank() == 0 and (seconds := plan.estimate.seconds) is not None:
        with only_reports("keeping the step's time for later plans"):
            predicted_s = seconds.step_s / seconds.scale
            about = About(spec.family, parameter_count(spec), report.expert_imbalance)
            remember(plan, cluster, predicted_s, report.step_s, worker.state_directory(), about)
    return report


def _defect(directory: Path, error: Exception, debug: bool) -> ShardwiseError:
    text = "".join(traceback.format_exception(error))
    kept = directory / f"traceback-rank-{worker.rank()}.txt"
    with suppress(OSError):
        kept.write_text(text, encoding="utf-8")
    if debug or not kept.is_file():
        sys.stderr.write(text)
    return defect(error, kept, "report it with that file")


def _leave(directory: Path, error: ShardwiseError, kind: Kind, claim: Claim | None) -> ShardwiseError:
    """Write the cause, unless one is there already (the guard writes failures while it watches, but cannot explain
    each) or the directory now belongs to another start; and print it if nobody else will. In case the run's disk is
    full, it is written to the launcher's directory."""
    unwritten = False
    lost = claim is not None and not claim.held()
    standing = None if lost else read_exit(directory)
    if not lost and directory.is_dir() and (standing is None or standing.kind == "crash"):
        unwritten = True
        for where in filter(None, (directory, worker.launcher_directory())):
            with suppress(OSError):
                write_exit(where, failed(kind, error, worker.rank()))
                unwritten = False
                break
    standing = None if lost else read_exit(directory)
    mine = unwritten or worker.rank() == (standing.rank if standing else 0)
    if not mine:
        worker.speak_in_turn()  # torchrun would end the rank that is about to tell the cause
    if mine and (unwritten or not worker.by_our_launcher()):
        print_error(error, as_json=False, prefix=f"[rank {worker.rank()}] " if worker.rank() else "")
    return error
