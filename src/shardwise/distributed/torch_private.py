"""The only place that uses torch's private names. Each use says what it is for, and what breaks without the name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from weakref import proxy

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.distributed_c10d import GroupName


def forget_sharding() -> None:
    """Empty DTensor's caches of propagated and changed shardings.

    They hold meshes, and through them the names of process groups. After the default group is destroyed and made again
    the same names mean other groups, so that a cached answer would send to the wrong ranks; and groups that are held
    keep their threads, which wake a hundred times a second.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # torch 2.13


def is_strided(placement: object) -> bool:
    """Return whether a dim was cut by an axis of the mesh after it had been cut by a later axis, as FSDP2 cuts what
    tensor parallelism has cut. In torch 2.13 this placement is no ``Shard``; without its name such a cut would be
    overlooked, and each rank would be taken to hold more than it does."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def fake_store() -> Any:
    """A store for the ``fake`` backend, whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fresh_sharding_propagation() -> AbstractContextManager[Any]:
    """Makes DTensor propagate shardings in a fake mode of its own instead of the caller's, where its temporaries of
    global shape would be counted as memory of this rank."""
    from torch.distributed.tensor import _sharding_prop

    return patch.object(_sharding_prop, "detect_fake_mode", lambda *args, **kwargs: None)


def outside_modes() -> AbstractContextManager[Any]:
    """Within it operations compute with real tensors, whatever mode is active: a module that is first imported under
    fake tensors would else make its tables without values."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast("AbstractContextManager[Any]", _disable_current_modes())


def watch_resizes(resized: Callable[[torch.UntypedStorage, int], None]) -> AbstractContextManager[Any]:
    """Calls ``resized(storage, bytes)`` at every ``UntypedStorage.resize_``: so FSDP2 frees and refills weights."""
    import torch

    resize = torch.UntypedStorage.resize_

    def watched(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        resized(self, size)
        return result

    return patch.object(torch.UntypedStorage, "resize_", watched)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorders on this process's collectives, oldest first; they have among
    others ``profiling_name``, ``collective_seq_id``, ``is_p2p``, ``state`` and ``retired``. NCCL has a recorder of its
    own, which builds without NCCL lack; releases after 2.13 may show one entry in both. Without them a hang under NCCL
    could be neither seen nor told by its collective."""
    from torch._C import _distributed_c10d

    found: dict[tuple[int, str, str, int], dict[str, Any]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if name not in vars(_distributed_c10d):
            continue
        trace = json.loads(vars(_distributed_c10d)[name](includeCollectives=True, onlyActive=False))
        for entry in trace.get("entries") or []:
            made = (entry["time_created_ns"], entry["process_group"][0], entry["profiling_name"])
            found[*made, entry["collective_seq_id"]] = entry
    return [found[key] for key in sorted(found)]


def deduplicated(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans of a checkpoint's ranks, where what several have is written by one: by that which writes least.
    Without it all would write it."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans

    return dedup_save_plans(plans)


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """The process group of this name: the way in which an operation of one's own is told of one."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast("GroupName", name))


def set_timeout(group: Any, timeout_s: float, nccl_timeout_s: float | None = None) -> None:
    """Have collectives of this group fail after ``timeout_s``, and those of its NCCL, if it has any, after
    ``nccl_timeout_s`` where that is given. torch gives the groups of a mesh with several axes half an hour, whatever
    the default group has; without these names a hang inside one of them would last as long."""
    import torch
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=timeout_s), group)
    if nccl_timeout_s is not None:
        group._get_backend(torch.device("cuda"))._set_default_timeout(timedelta(seconds=nccl_timeout_s))


def settle_senders(at_most_s: float = 2.0) -> None:
    """Wait until gloo's threads sleep, so that none still holds a tensor of a finished collective. To let go of it,
    such a thread asks for the interpreter's lock; if the interpreter ends meanwhile, Python before 3.14 ends the thread
    inside C++, and the process in SIGABRT ("terminate called without an active exception"). Groups that modules of FSDP
    or a mesh refer to keep their threads after ``destroy_process_group``. Nothing is done where there is no /proc."""
    tasks = Path("/proc/self/task")
    asleep = 0
    until = time.monotonic() + at_most_s
    while asleep < 3 and time.monotonic() < until:
        time.sleep(0.001)  # the lock is free for whoever asks
        with suppress(OSError):  # a thread has ended meanwhile
            states = [(task / "stat").read_text().rpartition(")") for task in tasks.glob("*")]
            awake = any("(pt_gloo_runloop" in name and state.split()[0] == "R" for name, _, state in states)
            asleep = 0 if awake else asleep + 1


def abort_groups() -> None:
    """Give up all process groups, and what NCCL has begun in them. ``destroy_process_group`` would wait for it, and
    where a rank is lost it never ends."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def keep_memory_history(on: bool) -> None:
    """Have the CUDA allocator remember who allocates what, or stop. Documented by torch though underscored; without it
    there is no memory snapshot."""
    import torch

    torch.cuda.memory._record_memory_history("all" if on else None)


def write_memory_history(path: str) -> None:
    """Write what the allocator remembers, for pytorch.org/memory_viz."""
    import torch

    torch.cuda.memory._dump_snapshot(path)


def _parameter_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the group of parameters that FSDP2 gathers and reduces as one, of each unit of a module that has some of
    its own."""
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule) and (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
            yield group


def complete_accumulated(module: torch.nn.Module) -> None:
    """Give parameters that were not used yet zeros to accumulate onto, before the last backward of a step under FSDP2.
    What has accumulated unreduced is kept in the type of reduction; a parameter first used now would come in the type
    of compute, and FSDP2 refuses two types in one reduction. Without these names zero1 could not compute in bf16 where
    parameters are used in some micro-batches only."""
    import torch

    for group in _parameter_groups(module):
        members = group.fsdp_params
        if any(member.unsharded_accumulated_grad is not None for member in members):
            for member in members:
                if member.unsharded_accumulated_grad is None and member.unsharded_param.requires_grad:
                    zeros = torch.zeros_like(member.unsharded_param, dtype=member.reduce_dtype)
                    member.unsharded_accumulated_grad = zeros


def differentiable_inside_operations() -> AbstractContextManager[Any]:
    """Records gradients within an operation of our own, where torch has switched that off. Without it an operation
    could not ask autograd for the backward of what it calls."""
    import torch

    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def begin_sharding(module: torch.nn.Module) -> None:
    """Have FSDP2 set itself up for a root, which it does by itself at its first forward, and before which it gathers
    nothing. Without the name stages could not gather their first weights while they wait."""
    from torch.distributed.fsdp import fully_shard

    vars(fully_shard)["state"](module)._lazy_init()


def sum_gradients_in(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have FSDP2 give the sums of a module's gradients in this dtype, whatever its shards are stored in. By itself it
    rounds them to the dtype of the shards, each time that it looks at these: what is updated elsewhere, in a wider one,
    would lose what was summed."""

    def looks(own: Callable[[Any], None], group: Any) -> None:
        own(group)
        if group._orig_dtype is not None:  # something is trained
            group._orig_dtype = dtype

    for group in _parameter_groups(module):
        own = type(group)._init_mp_dtypes
        group._init_mp_dtypes = partial(looks, own, proxy(group))


def gather_as(module: torch.nn.Module, forms: Mapping[torch.nn.Module, Any]) -> None:
    """Have FSDP2 gather the weights of these layers of a module, of which each rank has as many rows, in another form:
    ``sent(shard, dtype)`` gives the tensors that are gathered for a weight used in this dtype, ``values(gathered,
    dtype, out)`` makes it of all ranks', in the memory of ``out`` where that is given. It asks the shards for that,
    which are made anew when they are allocated: they are told when it sets itself up. It would keep what was gathered
    as long as the weight; that is freed at once. Without these names its interface would ask for a subclass of
    Tensor."""

    def sets_up(own: Callable[[Any], None], group: Any) -> None:
        own(group)
        for member in group.fsdp_params:
            form = forms.get(member._module_info.module)
            if form is not None and member._module_info.param_name == "weight":
                shard = member._sharded_local_tensor
                shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = _gather_hooks(proxy(member), form)
                member._init_extensions()

    for group in _parameter_groups(module) if forms else ():
        own = type(group)._init_mp_dtypes
        group._init_mp_dtypes = partial(sets_up, own, proxy(group))


def _gather_hooks(member: Any, form: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what FSDP2 calls before it gathers a parameter, and after. Autograd, which has saved a weight, would
    refuse another version of it: ``data`` counts its own."""
    from torch.distributed.tensor import DTensor

    def before(mesh: Any, size: Any, stride: Any, layer: Any, policy: Any) -> tuple[Any, None]:
        return form.sent(member._sharded_local_tensor, policy.param_dtype), None

    def after(gathered: Sequence[Any], told: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        held = out._local_tensor if isinstance(out, DTensor) else out
        values = form.values(gathered, dtype, None if held is None else held.data)
        for tensor in gathered:
            tensor.untyped_storage().resize_(0)
        return (values, (values,)) if out is None else None

    return before, after


def end_backward(module: torch.nn.Module) -> None:
    """Have FSDP2 do what it does by itself at the end of a backward: reduce gradients, or keep them. It has no public
    way where gradients of weights are made apart from those of inputs; torch's own pipeline stages use the same names.
    Without them zero-bubble schedules could not shard."""
    from torch.distributed.fsdp import fully_shard

    state = vars(fully_shard)["state"](module)
    for unit in reversed(state._state_ctx.all_states):
        group = unit._fsdp_param_group
        if group is not None:
            for member in group.fsdp_params:  # some were kept in the type of reduction, others have just been made
                member.accumulate_unsharded_grad_if_needed()
                member.to_accumulated_grad_if_needed()
            group.post_backward()
    state._root_post_backward_final_callback()


def keep_sharded_memory(module: torch.nn.Module) -> None:
    """Have FSDP2 leave the memory of a module's shards as it is now, which has been allocated: at the first forward it
    would look again and, where ranks have different numbers of rows, copy it. Without the name weights that are on the
    host by then could not be cut unevenly."""
    for group in _parameter_groups(module):
        group._reset_sharded_params = True


def gather_stream(module: torch.nn.Module) -> torch.cuda.Stream | None:
    """The stream in which FSDP2 reads the shards of a module that it is about to gather; None where it shards nothing.
    It waits for nothing else that computes, so that without the name shards could be read before they have come."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return None
    return cast("torch.cuda.Stream", module._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream)


def placed_as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` as this rank's piece of a tensor that is cut as ``like`` is, wherever they are: ``DTensor.from_local``
    would move them to the devices of the mesh. Without it nothing of a sharded weight could stay on the host."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return values
    spec, meta = like._spec, like._spec.tensor_meta
    if meta is not None and meta.dtype != values.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=values.dtype))
    return DTensor(values, spec, requires_grad=False)


def fused_adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    settings: dict[str, Any],
) -> None:
    """One update of one piece of a parameter, in place: the kernel of ``torch.optim.AdamW(fused=True)``, whose class
    wants all of a parameter in memory. ``step`` counts this update; ``settings`` are those of a group."""
    import torch

    known = {"lr": settings["lr"], "weight_decay": settings["weight_decay"], "eps": settings["eps"]}
    known |= {"beta1": settings["betas"][0], "beta2": settings["betas"][1], "amsgrad": False, "maximize": False}
    torch._fused_adamw_([weight], [gradient], [moments[0]], [moments[1]], [], [step], **known)


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread, so that a forward is one that recomputation runs again.
    What counts in forward would else count twice."""
    import torch

    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd call this at the end of the backward that runs, in the thread that ends it: FSDP2 does so. Without
    it, what the first unit of a model does in backward would have no end in a trace."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_profile(name: str) -> AbstractContextManager[object]:
    """A range of a trace while torch's profiler records, else nothing. Without the name of whether it does, each use of
    this would pay for a range in every step."""
    import torch

    enabled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(name) if enabled else nullcontext()
