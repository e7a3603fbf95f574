"""Several nodes: the exact line to run on each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

DEFAULT_PORT = 29500


def lines(
    nodes: int, nproc: int, train_arguments: Sequence[str], port: int = 0, run_id: str = "shardwise"
) -> list[str]:
    """One ``torchrun`` line a node. The first node's name stands for ``FIRST_NODE``. The variable keeps restarted
    ranks from reading the addresses of dead ones in the launcher's store."""
    endpoint = f"$FIRST_NODE:{port or DEFAULT_PORT}"
    head = f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes {nodes} --nproc-per-node {nproc}"
    tail = f'--rdzv-backend c10d --rdzv-endpoint "{endpoint}" --rdzv-id {shlex.quote(run_id)} -m shardwise train'
    command = shlex.join(train_arguments)
    return [f"{head} --node-rank {node} {tail} {command}" for node in range(nodes)]
