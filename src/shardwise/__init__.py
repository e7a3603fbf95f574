"""Shardwise: say what to train and on which machines; it splits the work, shows that it fits, trains, and reports.

Each name is imported when it is first asked for: planning waits for no torch, ``shardwise --help`` for nothing.
"""

from importlib import import_module

TYPE_CHECKING = False  # not typing's, which takes as long to load as all of this
if TYPE_CHECKING:
    from typing import Any

    from shardwise.errors import Problem, ShardwiseError
    from shardwise.prove.module import certify
    from shardwise.runtime.build import load_weights
    from shardwise.runtime.own import (
        Checkpoints,
        backward,
        clip_grad_norm,
        cut_rows,
        optimizer,
        parallelize,
        plan,
        save_pretrained,
        world,
    )
    from shardwise.spec.cluster import Cluster, local_cluster, parse_cluster
    from shardwise.spec.load import dump_plan, dump_recipe, load_plan, load_recipe
    from shardwise.spec.plan import Plan
    from shardwise.spec.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["Problem", "ShardwiseError", "__version__"]
__all__ += ["Checkpoints", "backward", "clip_grad_norm", "cut_rows", "load_weights", "optimizer", "parallelize"]
__all__ += ["certify", "plan", "save_pretrained", "world"]
__all__ += ["Cluster", "Plan", "Recipe", "local_cluster", "parse_cluster"]
__all__ += ["dump_plan", "dump_recipe", "load_plan", "load_recipe"]
_PLACES = {
    "errors": ("Problem", "ShardwiseError"),
    "prove.module": ("certify",),
    "runtime.build": ("load_weights",),
    "spec.cluster": ("Cluster", "local_cluster", "parse_cluster"),
    "spec.load": ("dump_plan", "dump_recipe", "load_plan", "load_recipe"),
    "spec.plan": ("Plan",),
    "spec.recipe": ("Recipe",),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    place = next((place for place, names in _PLACES.items() if name in names), "runtime.own")
    return vars(import_module(f"shardwise.{place}"))[name]
