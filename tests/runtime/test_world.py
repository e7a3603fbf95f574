"""Joining the world: its size, the mesh, ranks that do not belong together, what rank 0 tells the others."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import pbkdf2_hmac
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.distributed import torch_private
from shardwise.errors import ConfigError, Problem, UnavailableError
from shardwise.prove.pool import RankPool
from shardwise.runtime import world as world_module
from shardwise.runtime.agree import difference
from shardwise.runtime.world import device_of, from_first, process, take_device, told_by_first, world
from shardwise.spec.layout import Layout
from tests.runtime import rank_work
from tests.said import refusal, shows


def test_one_process_needs_no_launcher() -> None:
    with world(Layout(), "cpu", 10.0) as mesh:
        assert mesh.size("world") == 1 and not mesh.groups
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert not dist.is_initialized()


def test_an_error_inside_takes_the_group_down_as_well() -> None:
    with pytest.raises(ZeroDivisionError), world(Layout(), "cpu", 10.0):
        raise ZeroDivisionError
    assert not dist.is_initialized()


class Watcher:
    """A watch that only remembers, and how the process group stood when it was told."""

    nccl_timeout_s = 660.0

    def __init__(self) -> None:
        self.told: list[tuple[BaseException, bool]] = []

    def tell(self, error: BaseException) -> BaseException:
        self.told.append((error, dist.is_initialized()))
        return error


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """gloo takes the place of NCCL, which a build for CPUs lacks; how groups were taken down."""
    ends: list[str] = []
    join, abort, destroy = dist.init_process_group, torch_private.abort_groups, dist.destroy_process_group

    def init(backend: str, **named: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        join("gloo", **named)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr("shardwise.runtime.world.abort_groups", lambda: (ends.append("aborted"), abort()))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (ends.append("destroyed"), destroy()))
    monkeypatch.setattr(dist, "barrier", lambda: None)  # would want a device
    return ends


def nccl_timeout_s() -> float:
    group: Any = dist.group.WORLD
    seconds: float = group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    return seconds


def test_under_a_watch_nccl_waits_longer_than_all_else(as_cuda: list[str]) -> None:
    """NCCL ends the process from its own thread, where nobody can say why."""
    watch = Watcher()
    with world(Layout(), "cuda", 10.0, watch):
        assert nccl_timeout_s() == 660.0
    assert as_cuda == ["destroyed"] and not watch.told
    with world(Layout(), "cuda", 10.0):
        assert nccl_timeout_s() == 10.0


def test_an_error_is_told_before_groups_of_nccl_are_aborted_and_not_destroyed(as_cuda: list[str]) -> None:
    """Destroying would wait for a collective that a rank which failed never enters."""
    watch = Watcher()
    with pytest.raises(ZeroDivisionError) as raised, world(Layout(), "cuda", 10.0, watch):
        raise ZeroDivisionError
    assert watch.told == [(raised.value, True)]
    assert as_cuda == ["aborted"] and not dist.is_initialized()


def test_a_new_thread_takes_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    take_device()
    assert taken == [3], "and on a machine without GPUs none"


def test_a_plan_for_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as raised, world(Layout(dp_shard=8), "cpu", 10.0):
        pass
    [problem] = raised.value.problems
    assert problem.code == "RUN001" and raised.value.exit_code == 78
    assert "8 processes (dp_shard 8)" in problem.what and " 4 " in problem.what
    assert "start 8 processes" in problem.fix


def test_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SHARDWISE_FAULT", "data:1:0")
    me = process()
    assert (me.rank, me.local_rank, me.world_size, me.local_world_size, me.threads) == (5, 1, 8, 4, 3)
    assert me.fault == "data:1:0"
    assert device_of("cuda") == torch.device("cuda", 1)


def test_ranks_with_another_recipe_are_refused_by_every_rank(ranks: RankPool) -> None:
    for code, what in ranks.run(rank_work.disagree, {"optim": {"learning_rate": 1e-4}}, world=3):
        assert code == "RUN002"
        assert "rank 2" in what and "`optim.learning_rate` 0.0003 on rank 0, 0.0001 there" in what


def test_ranks_that_agree_go_on(ranks: RankPool) -> None:
    assert ranks.run(rank_work.disagree, {}, world=2) == [[], []]


def test_another_version_is_named_before_anything_else() -> None:
    first = {"host": "a", "digest": "1f3a", "versions": {"torch": "2.13.0"}, "recipe": {}, "plan": {}}
    other = {"host": "b", "digest": "9c02", "versions": {"torch": "2.12.1"}, "recipe": {"x": 1}, "plan": {}}
    problem = difference(first, other, 3)
    assert problem.code == "RUN003"
    assert shows(problem.what, "torch 2.13.0 on rank 0", "host a", "2.12.1 on rank 3", "host b")
    assert problem.fix.endswith("pip install torch==2.13.0")


def test_a_difference_in_the_plan_names_the_key() -> None:
    same = {"host": "a", "digest": "1f3a", "versions": {}, "recipe": {"a": 1}}
    problem = difference(same | {"plan": {"batch.accumulation": 1}}, same | {"plan": {"batch.accumulation": 2}}, 1)
    assert problem.code == "RUN002" and "`batch.accumulation` 1 on rank 0, 2 there" in problem.what


def test_the_first_tells_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the group is joined afterwards through the same rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert told_by_first(lambda: "measured: 2 \u00d7") == "measured: 2 \u00d7"
    with world(Layout(), "cpu", 20.0):
        assert from_first(lambda: 3) == 3


@pytest.mark.parametrize(("taken", "said"), [(True, "in use"), (False, "1/2")])
def test_ranks_that_cannot_meet_say_where(monkeypatch: pytest.MonkeyPatch, taken: bool, said: str) -> None:
    """The first node's port is another program's; or it is free, and the other node does not come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not taken:
            server.close()
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(world_module, "rendezvous", partial(rendezvous, timeout=timedelta(seconds=1)))
        with pytest.raises(
            UnavailableError, match=refusal("NET004", f"127.0.0.1:{port}", said, fix="--port")
        ) as raised:
            world_module._store.__wrapped__()
    assert raised.value.exit_code == 69 and "frame" not in str(raised.value)


def test_a_node_that_says_nothing_has_said_the_empty_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr(world_module, "_store", lambda: store)
    monkeypatch.setattr(world_module, "TOLD_S", 0.0)
    monkeypatch.setattr(world_module, "HEARD_S", 0)
    assert world_module.told_by_nodes(lambda: "first", lambda told: "/".join([*told, "judged"])) == "first//judged"


def test_compiled_code_is_kept_where_no_other_user_can_put_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the home directory cannot be written; by torch it would then go where anybody can guess."""

    def kept(**more: str) -> Path:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        world_module._keep_to_ourselves(replace(process(), **more))  # type: ignore[arg-type]
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept() == tmp_path / "home" / ".cache" / "shardwise" / "inductor"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    first, second = kept(), kept()
    assert first != second and first.stat().st_mode & 0o777 == 0o700 and first.stat().st_uid == os.getuid()
    assert kept(store=str(tmp_path / "store")) == tmp_path / "inductor", "ranks of one launcher share one"
    assert (tmp_path / "inductor").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    world_module._keep_to_ourselves(process())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    for made in (first, second):
        made.rmdir()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_users_mistake_is_shown_without_a_traceback_and_by_the_first_rank_before_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: int
) -> None:
    """torchrun ends the other ranks while they wait. What is no mistake of the user's keeps its traceback."""
    waited: list[float] = []
    usual = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", usual)  # put back afterwards
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(world_module.time, "sleep", waited.append)
    world_module.show_mistakes_once.__wrapped__()
    for error in (ConfigError(Problem("PLAN022", "a Linear", "parallelize", "tp=1")), ValueError("a defect")):
        try:
            raise error
        except type(error) as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
        said = capsys.readouterr().err
        assert ("Traceback" in said) is isinstance(error, ValueError)
        if isinstance(error, ConfigError):
            assert said.startswith("error[PLAN022]: a Linear") and f"called: {__file__}:" in said
    assert waited == [world_module.FIRST_RANK_SPEAKS_S] * local_rank


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_leaving_waits_for_gloos_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still works when the interpreter ends would end the process in SIGABRT. Here its place is taken by a
    thread of the same name that computes without the interpreter's lock."""
    ended = []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        pbkdf2_hmac("sha256", b"", b"", 300_000)
        ended.append(not dist.is_initialized())

    thread = threading.Thread(target=work)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (destroy(), thread.start()))
    with world(Layout(), "cpu", 10.0):
        pass
    assert ended == [True]
    thread.join()
