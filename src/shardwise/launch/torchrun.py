"""Several nodes: the exact line of torchrun to run on each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shardwise.launch.launchers import DEFAULT_PORT, Launch
from shardwise.spec.safe_path import SAFE_PATH
from shardwise.spec.units import counted


def launch(asked: Launch) -> list[str]:
    """The lines, and what must be known to run them."""
    return [
        f"\n{counted(asked.nodes, 'node')}: run one of these lines on each; all must see this directory and the data.",
        "FIRST_NODE is the first node's address in the network between them, INTERFACE the name of its interface there",
        f"(`ip route get $FIRST_NODE`). Keep strangers away from port {asked.port} of the first node: docs/security.md",
        "",
        *(f"  {line}" for line in lines(asked.nodes, asked.nproc, asked.words, asked.port)),
    ]


def lines(nodes: int, nproc: int, words: Sequence[str], port: int = DEFAULT_PORT) -> list[str]:
    """One ``torchrun`` line a node. The first node's address stands for ``FIRST_NODE``, the network between the nodes
    for ``INTERFACE``. The rendezvous is torch's static one, because the other, c10d, unpickles what is in its store."""
    head = " ".join(f"{name}={value}" for name, value in SAFE_PATH.items())
    head += ' GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="=$INTERFACE" torchrun '
    head += f'--nnodes {nodes} --nproc-per-node {nproc} --master-addr "$FIRST_NODE" --master-port {port}'
    return [f"{head} --node-rank {node} -m shardwise {shlex.join(words)}" for node in range(nodes)]
