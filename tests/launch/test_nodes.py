"""Several nodes: lines that torchrun itself understands; what a start by torchrun opens is told."""

from __future__ import annotations

import inspect
import shlex
import socket

import pytest
from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import config_from_args, get_args_parser

from shardwise.launch.nodes import exposure
from shardwise.launch.torchrun import lines
from shardwise.launch.worker import LAUNCHER
from tests.said import refuses


def test_each_node_has_its_line() -> None:
    found = lines(2, 8, ["train", "runs/a b/recipe.yaml", "--plan", "runs/a b/plan.yaml"], port=1234)
    assert len(found) == 2
    for node, line in enumerate(found):
        safe, gloo, nccl, torchrun, *words = shlex.split(
            line.replace("$FIRST_NODE", "host-a").replace("$INTERFACE", "ib0")
        )
        assert (gloo, nccl, torchrun) == ("GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME==ib0", "torchrun")
        assert safe == "PYTHONSAFEPATH=1", "or `-m` would run what lies where the command is given"
        parsed = get_args_parser().parse_args(words)
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("2", "8", node)
        assert (parsed.module, parsed.training_script) == (True, "shardwise")
        assert parsed.training_script_args == ["train", "runs/a b/recipe.yaml", "--plan", "runs/a b/plan.yaml"]
        config, _, _ = config_from_args(parsed)
        assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "host-a:1234")


def test_the_rendezvous_of_those_lines_unpickles_nothing() -> None:
    """Which is why it is not c10d; should torch change that, this must be known."""
    for module in (static_tcp_rendezvous, local_elastic_agent, api):
        assert "pickle" not in inspect.getsource(module)


@pytest.mark.parametrize(
    ("rank", "local_world", "address", "values"),
    [
        (0, 2, "127.0.0.1", ["torchrun listens", "port 29500", "every", "without authentication"]),
        (1, 2, "127.0.0.1", None),
        (0, 1, "8.8.8.8", ["8.8.8.8 is 8.8.8.8", "public address", "port 29500"]),
        (0, 1, "10.0.0.7", None),
        (0, 1, "no such name.", None),
    ],
)
def test_torchrun_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_world: int, address: str, values: list[str] | None
) -> None:
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local_world, "MASTER_PORT": 29500}
    for name, value in {**given, "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, str(value))
    if " " in address:
        monkeypatch.setattr(socket, "getaddrinfo", fail)
    found = exposure()
    assert found is None if values is None else refuses(found, "NET001", *values, as_warning=True)
    monkeypatch.setenv(LAUNCHER, "1")
    assert exposure() is None


def fail(*_: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")
