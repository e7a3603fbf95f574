"""Shardwise: say what to train and on which machines; it splits the work, shows that it fits, trains, and reports.

Only what needs no torch is imported here, so that planning starts at once; what a loop of one's own is made of
(shardwise/runtime/own.py) is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem, ShardwiseError
from shardwise.spec.cluster import Cluster, local_cluster, parse_cluster
from shardwise.spec.load import dump_plan, dump_recipe, load_plan, load_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

if TYPE_CHECKING:
    from shardwise.runtime.own import Checkpoints, backward, clip_grad_norm, optimizer, parallelize, plan, world

__version__ = "0.1.0"
_OWN_LOOP = ("Checkpoints", "backward", "clip_grad_norm", "optimizer", "parallelize", "plan", "world")
__all__ = [
    "Checkpoints",
    "Cluster",
    "Plan",
    "Problem",
    "Recipe",
    "ShardwiseError",
    "__version__",
    "backward",
    "clip_grad_norm",
    "dump_plan",
    "dump_recipe",
    "load_plan",
    "load_recipe",
    "local_cluster",
    "optimizer",
    "parallelize",
    "parse_cluster",
    "plan",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _OWN_LOOP:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from shardwise.runtime import own

    return vars(own)[name]
