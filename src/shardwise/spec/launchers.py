"""The table of launchers: how ranks are started, all that is asked of it before they are. A launcher is a row of
``LAUNCHERS`` and a module of ``shardwise/launch/`` that starts them; nobody else asks for its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from shardwise.errors import ConfigError, Problem
from shardwise.spec.outside import with_others
from shardwise.spec.records import LauncherSpec

AUTO = "auto"
_OURS = {
    spec.name: spec
    for spec in (
        LauncherSpec("local", "starts ranks on this machine, and waits for them", here=True),
        LauncherSpec("torchrun", "prints the line to run on each node"),
        LauncherSpec("slurm", "writes a script for sbatch"),
    )
}
LAUNCHERS = with_others("shardwise.launchers", LauncherSpec, _OURS)
"""All launchers by name; of each kind, here or not, the first is taken where a recipe names none."""
if TYPE_CHECKING:
    LauncherName: TypeAlias = str
else:  # what recipes may say, and their schema, follow from the table
    LauncherName = Literal[(AUTO, *LAUNCHERS)]


def launcher_of(name: str, nodes: int) -> LauncherSpec:
    """The launcher of this name, or the first that starts ranks on so many nodes. Raises ConfigError (CFG008) for one
    that cannot."""
    feasible = [spec for spec in LAUNCHERS.values() if spec.here == (nodes == 1) or not (spec.here or name == AUTO)]
    if name == AUTO:
        return feasible[0]
    if (asked := LAUNCHERS[name]) not in feasible:
        what = f"`run.launcher: {name}` {asked.title}, and `run.nodes` is {nodes}"
        fix = " or ".join(f"`run.launcher={spec.name}`" for spec in feasible)
        raise ConfigError(Problem("CFG008", what, "run.launcher", fix))
    return asked
