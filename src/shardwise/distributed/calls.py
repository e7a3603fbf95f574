"""Which operations of torch are collectives, over which group, and how much they send."""

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
}


OWN = {"shardwise::exchange": "all_to_all", "shardwise::start_rows": "all_to_all"}
"""Operations of ours that are one collective each, and what is done to send it."""


def collective(func: Any) -> str | None:
    """The kind of collective that an operation is; None for one that is none."""
    name: str = func._schema.name
    return KINDS.get(name.partition("::")[2]) if func.namespace == "c10d" else OWN.get(name)


def group_name(args: tuple[Any, ...]) -> str:
    """The name of the process group among an operation's arguments; empty if there is none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().qualified_name():
            return str(dist.ProcessGroup.unbox(value).group_name)
        if isinstance(value, str):
            return value
    return ""


def payload_bytes(args: tuple[Any, ...]) -> int:
    """The larger of input and output. Tensors are arguments themselves, or in lists, or in lists of lists."""
    sizes = [_bytes(value) for value in args if isinstance(value, (Tensor, list))]
    return max(sizes, default=0)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value) if isinstance(value, list) else 0
