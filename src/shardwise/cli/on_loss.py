"""``shardwise train`` on one of several nodes: it starts the ranks of this one, and does what ``run.on_loss`` says when
another is lost.

Ranks of several nodes make their own plan, all the same. The plan that is made here, for as many nodes as are left, is
theirs too: it says whether there is one, of the same batch, and what it does otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from shardwise.cli.decide import cluster_of_ranks, plan_of
from shardwise.cli.options import add_command
from shardwise.cli.replan import changed_settings
from shardwise.cli.show import note
from shardwise.cli.start import How, named
from shardwise.cli.train import Options, asked_for
from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.launch import elastic, node, rundir
from shardwise.launch.meeting import Rules
from shardwise.launch.node import PLACE, Node
from shardwise.models.resolve import resolve
from shardwise.runtime.metrics.json_lines import Lines
from shardwise.runtime.report.run_files import NODES_CHANGED
from shardwise.spec.explain import label
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes

ALL = "`run.on_loss: replan`"


def run_node(words: Sequence[str], place: Node) -> int:
    """Run the ranks of this node; the exit code. Raises ConfigError: RUN007 for a range of nodes, RUN009 for a recipe,
    with which nothing can be planned again."""
    options = _options(words)
    loaded, how = asked_for(options)
    on_loss = loaded.recipe.run.on_loss
    if place.least and on_loss != "replan":
        what = f"`{PLACE['nodes']}` is {place.least}:{place.nodes}, and `run.on_loss` is {on_loss}"
        fix = f"{PLACE['nodes']}: {place.nodes}; or `run.on_loss=replan`, which trains on as many as are there"
        raise ConfigError(Problem("RUN007", what, "the environment", fix))
    if on_loss == "stop":
        return node.run(words, place)
    recipe = named(loaded.recipe, how, several=True)
    if on_loss == "replan":
        _check(recipe, how)
    directory = Path(recipe.run.out) / recipe.run.name
    if done := rundir.nothing_to_do(directory, recipe):  # a node that comes back after the end
        note(done, as_json=options.json)
        return 0
    rules = Rules(
        on_loss=on_loss,
        nodes=place.nodes,
        begins=place.least or place.nodes,
        least=place.least or (1 if on_loss == "replan" else place.nodes),
        replan=PlanOfFewer(recipe, directory, place).words,
        step=lambda: rundir.newest_step(directory) or 0,
        record=partial(_record, directory),
        say=partial(note, as_json=options.json),
    )
    return elastic.stay(elastic.OwnRanks(words), place, directory, rules)


@dataclass(frozen=True)
class PlanOfFewer:
    """What plans a run again for other numbers of nodes than ``place`` has."""

    recipe: Recipe
    directory: Path
    place: Node

    def words(self, nodes: int) -> str:
        """Return what the plan for so many ``nodes`` does otherwise than the one before. Raises ShardwiseError where
        there is none, or it would have another batch (RUN009)."""
        plan, before = self._plan(nodes), None
        with suppress(ShardwiseError, OSError):
            before = load_plan(self.directory / "plan.yaml")
        with suppress(ShardwiseError):
            before = before or self._plan(self.place.nodes)
        if before is None:
            return label(plan)
        old, new = (each.batch.global_batch_size(each.layout.dp) for each in (before, plan))
        if old != new:
            what = f"its batch would be of {new} sequences, and not of {old}"
            raise ConfigError(Problem("RUN009", what, "train", f"`train.global_batch_size={old}`"))
        one, other = before.estimate.peak_bytes, plan.estimate.peak_bytes
        sizes = [f"predicted {show_bytes(one)} -> {show_bytes(other)} a rank"] if one != other else []
        return ", ".join([*changed_settings(before, plan), *sizes]) or "the same plan"

    def _plan(self, nodes: int) -> Plan:
        recipe = rundir.as_begun(self.directory, self.recipe)
        run = recipe.run.model_copy(update={"nodes": nodes, "nproc": self.place.nproc})
        recipe = recipe.model_copy(update={"run": run})
        resumed = self.directory if rundir.newest_step(self.directory) else None
        return plan_of(recipe, resolve(recipe), cluster_of_ranks(recipe), None, resumed)


def _check(recipe: Recipe, how: How) -> None:
    """Raise ConfigError (RUN009) where nothing can be planned again."""
    train, problems = recipe.train, []
    if how.plan is not None:
        what = f"the plan is given, with --plan, and {ALL} makes another"
        problems.append(Problem("RUN009", what, "--plan", "leave out --plan, or `run.on_loss=wait`"))
    if recipe.run.certificate == "require":
        what = f"`run.certificate: require` asks for one of the plan that runs, and {ALL} makes another"
        problems.append(Problem("RUN009", what, "run.certificate", "`run.certificate=tell`, or `run.on_loss=wait`"))
    if train.global_batch_size is None and (train.micro_batch_size or train.gradient_accumulation_steps):
        what = f"the batch would follow from the number of nodes, and {ALL} keeps the batch"
        problems.append(Problem("RUN009", what, "train", "`train.global_batch_size`, in sequences"))
    if problems:
        raise ConfigError(*problems)


def _record(directory: Path, what: str) -> None:
    """Keep among the run's events that its nodes have changed, and why. Training goes on where a disk refuses it: the
    ranks will say so."""
    with suppress(OSError):
        lines = Lines(directory / "events.jsonl")
        lines.event(NODES_CHANGED, step=rundir.newest_step(directory) or 0, what=what)
        lines.close()


def _options(words: Sequence[str]) -> Options:
    """Return what the command line of ``train`` says."""
    found = list[Options]()
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    add_command(alone, Options, found.append, words[0])
    typer.main.get_command(alone)(args=list(words[1:]), prog_name="shardwise train", standalone_mode=False)
    return found[0]
