"""Optimizers of a user's own training loop: the one that ``shardwise.optimizer`` makes, and which others may step."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.errors import ConfigError, Problem
from shardwise.runtime import world as processes
from shardwise.techniques.optim import fresh_moments

ON_SLICES: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad),
    *(optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.RMSprop),
)
"""Those that compute element by element, with operations that torch has for slices of weights: shown to be those of
one process by tests/runtime/test_own_optim.py. Of torch's others, Adafactor and Rprop have none (2.13), and Muon's
products of slices differ by 2e-3 after four steps."""
IN_ONE_PROCESS: tuple[type[Optimizer], ...] = (optim.LBFGS, optim.SparseAdam)
"""LBFGS decides on a loss, and each rank has its own; SparseAdam takes sparse gradients, which are not summed."""
_modules: WeakSet[nn.Module] = WeakSet()


def optimizer(
    module: nn.Module,
    *,
    learning_rate: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> Optimizer:
    """Fused AdamW over the trained parameters of a parallelized module; vectors (norms, biases) are not decayed. Others
    of torch's, made after ``parallelize``, serve as well: ``ON_SLICES`` under every strategy, any but
    ``IN_ONE_PROCESS`` under ddp."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in sorted(trained, key=lambda parameter: parameter.ndim <= 1):
        decay = weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, isinstance(parameter, DTensor)), []).append(parameter)  # the kernel takes no mixture
    given = [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()]
    made = optim.AdamW(given, lr=learning_rate, betas=betas, eps=eps, fused=True)
    for parameter in trained:  # so that a checkpoint can be loaded into it before a first step
        made.state[parameter] = fresh_moments(parameter)
    return made


def watch(module: nn.Module) -> None:
    """Refuse, from now on, an optimizer of this module that is not known to compute what it does in one process, before
    it takes a step: ConfigError OWN003 from its ``step``. Of optimizers that are not torch's, warn once."""
    _modules.add(module)
    _register()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(asked: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    kind = type(asked)
    if kind in ON_SLICES or processes.process().world_size == 1:
        return
    ours = {id(parameter) for module in _modules for parameter in module.parameters()}
    given = [parameter for group in asked.param_groups for parameter in group["params"] if id(parameter) in ours]
    sliced = any(isinstance(parameter, DTensor) for parameter in given)
    if not given or not (sliced or kind in IN_ONE_PROCESS):
        return
    known = f"one of {', '.join(each.__name__ for each in ON_SLICES)}"
    if kind not in vars(optim).values():
        what = f"{kind.__name__} is not known to compute on slices of weights what it does on whole ones"
        warnings.warn(f"{what}: compare its first losses with those of one process, or take {known}", stacklevel=3)
        return
    if kind in IN_ONE_PROCESS:
        raise ConfigError(Problem("OWN003", f"{kind.__name__} does not work on several ranks", "optimizer", known))
    what = f"{kind.__name__} does not compute on slices of weights what it does on whole ones"
    fix = f"{known}; or strategy ddp with tp=1, under which every rank holds whole weights"
    raise ConfigError(Problem("OWN003", what, "optimizer", fix))
