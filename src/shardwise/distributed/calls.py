"""The operations of torch that are collectives, each with its group and how much it sends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "allreduce_coalesced_": "all_reduce",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "recv_any_source_": "recv",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
"""Of torch's collectives: those of process groups, and the functional ones, with which a DTensor is redistributed. Any
other is known by its own name, so that nothing is sent unseen."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan"}
SILENT |= {"mesh_get_process_group"}
"""Operations among them that send nothing of the program's."""
OWN = {"shardwise::exchange": "all_to_all", "shardwise::start_rows": "all_to_all"}
"""Operations of ours that are one collective each, and what is done to send it."""


def collective(func: Any) -> str | None:
    """The kind of collective that an operation is; None for one that is none."""
    name: str = func._schema.name
    if func.namespace not in COLLECTIVES:
        return OWN.get(name)
    called = name.partition("::")[2]
    return None if called in SILENT else KINDS.get(called, called)


def group_name(args: tuple[Any, ...]) -> str:
    """The name of the process group among an operation's arguments, of which it is the last that could be one; empty
    if there is none."""
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return str(value.group_name)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().qualified_name():
            return str(dist.ProcessGroup.unbox(value).group_name)
        if isinstance(value, str):
            return value
    return ""


def payload_bytes(args: tuple[Any, ...], out: Any = None) -> int:
    """The larger of input and output: arguments, or what a functional collective returns. Tensors are these themselves,
    or in lists, or in lists of lists."""
    sizes = [_bytes(value) for value in (*args, out) if isinstance(value, (Tensor, list))]
    return max(sizes, default=0)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value) if isinstance(value, list) else 0
