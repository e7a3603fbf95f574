"""Shardwise: say what to train and on which machines; it splits the work, shows that it fits, trains, and reports.

Each name is imported when it is first asked for: planning waits for no torch, ``shardwise --help`` for nothing.
"""

from importlib import import_module

TYPE_CHECKING = False  # not typing's, which takes as long to load as all of this
if TYPE_CHECKING:
    from typing import Any

    from shardwise.cli.face import load_model_spec as load_model_spec
    from shardwise.cli.face import search as search
    from shardwise.cli.face import train as train
    from shardwise.distributed.meshes import Meshes as Meshes
    from shardwise.errors import Problem as Problem
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.models.attention import MaskSpec as MaskSpec
    from shardwise.models.config import ModelSpec as ModelSpec
    from shardwise.models.decoder import Decoder as Decoder
    from shardwise.prove.module import ModuleProof as ModuleProof
    from shardwise.prove.module import certify as certify
    from shardwise.runtime.build import load_weights as load_weights
    from shardwise.runtime.checkpoint.inflight import SaveResult as SaveResult
    from shardwise.runtime.own import Checkpoints as Checkpoints
    from shardwise.runtime.own import backward as backward
    from shardwise.runtime.own import clip_grad_norm as clip_grad_norm
    from shardwise.runtime.own import cut_rows as cut_rows
    from shardwise.runtime.own import make_plan as make_plan
    from shardwise.runtime.own import optimizer as optimizer
    from shardwise.runtime.own import parallelize as parallelize
    from shardwise.runtime.own import save_pretrained as save_pretrained
    from shardwise.runtime.own import world as world
    from shardwise.runtime.report.report import Report as Report
    from shardwise.spec.cluster import Cluster as Cluster
    from shardwise.spec.cluster import local_cluster as local_cluster
    from shardwise.spec.cluster import parse_cluster as parse_cluster
    from shardwise.spec.devices import Device as Device
    from shardwise.spec.load import dump_plan as dump_plan
    from shardwise.spec.load import dump_recipe as dump_recipe
    from shardwise.spec.load import load_plan as load_plan
    from shardwise.spec.load import load_recipe as load_recipe
    from shardwise.spec.plan import Plan as Plan
    from shardwise.spec.recipe import Checkpoint as Checkpoint
    from shardwise.spec.recipe import Recipe as Recipe

__version__ = "0.1.0"
_PLACES = {
    "cli.face": "load_model_spec search train",
    "distributed.meshes": "Meshes",
    "errors": "Problem ShardwiseError",
    "models.attention": "MaskSpec",
    "models.config": "ModelSpec",
    "models.decoder": "Decoder",
    "prove.module": "ModuleProof certify",
    "runtime.build": "load_weights",
    "runtime.checkpoint.inflight": "SaveResult",
    "runtime.own": "Checkpoints backward clip_grad_norm cut_rows make_plan optimizer parallelize save_pretrained world",
    "runtime.report.report": "Report",
    "spec.cluster": "Cluster local_cluster parse_cluster",
    "spec.devices": "Device",
    "spec.load": "dump_plan dump_recipe load_plan load_recipe",
    "spec.plan": "Plan",
    "spec.recipe": "Checkpoint Recipe",
}
"""The public names, by the module that has them; what is imported above is the same, for type checkers."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return vars(import_module(f"shardwise.{_MODULES[name]}"))[name]
