"""Shardwise: say what to train and on which machines; it splits the work, shows that it fits, trains, and reports.

Only what needs no torch is imported here, so that planning starts at once.
"""

from shardwise.errors import Problem, ShardwiseError
from shardwise.spec.cluster import Cluster, local_cluster, parse_cluster
from shardwise.spec.load import dump_plan, dump_recipe, load_plan, load_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Plan",
    "Problem",
    "Recipe",
    "ShardwiseError",
    "__version__",
    "dump_plan",
    "dump_recipe",
    "load_plan",
    "load_recipe",
    "local_cluster",
    "parse_cluster",
]
