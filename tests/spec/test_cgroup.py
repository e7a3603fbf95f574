"""Limits of memory and kills for memory, on trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec import cgroup, host
from shardwise.spec.cgroup import memory_limits, oom_kills

GIB = 2**30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHERS = [
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw",
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
]


class Tree:
    """A root directory with /proc and the directories of control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def process(self, groups: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "\n".join((*OTHERS, *mounts)))

    def v2(self, path: str, limit: object, used: int, cached: int = 0) -> None:
        self.write(f"{path}/memory.max", limit)
        self.write(f"{path}/memory.current", used)
        self.write(f"{path}/memory.stat", f"anon 5\ninactive_file {cached}\nactive_file 7")

    def v1(self, path: str, limit: int, used: int, cached: int = 0) -> None:
        self.write(f"{path}/memory.limit_in_bytes", limit)
        self.write(f"{path}/memory.usage_in_bytes", used)
        self.write(f"{path}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    return Tree(tmp_path)


def test_version_2_counts_every_level(tree: Tree) -> None:
    """A job without a limit in a user's slice of 8 GiB: what the root allows says nothing."""
    tree.process("0::/user.slice/job 1.scope", V2_MOUNT)
    tree.v2("sys/fs/cgroup/user.slice/job 1.scope", "max", GIB)
    tree.v2("sys/fs/cgroup/user.slice", 8 * GIB, 3 * GIB, cached=GIB)
    assert memory_limits() == [(8 * GIB, 2 * GIB)]
    tree.v2("sys/fs/cgroup/user.slice/job 1.scope", 3 * GIB, GIB)
    assert memory_limits() == [(3 * GIB, GIB), (8 * GIB, 2 * GIB)]


def test_version_1_counts_every_level(tree: Tree) -> None:
    tree.process("9:name=systemd:/x\n4:cpu,cpuacct:/\n3:memory:/slurm/job_7/step_0\n0::/", V1_MOUNT)
    tree.v1("sys/fs/cgroup/memory/slurm/job_7/step_0", 2**63 - 4096, GIB)
    tree.v1("sys/fs/cgroup/memory/slurm/job_7", 6 * GIB, 2 * GIB, cached=GIB)
    tree.v1("sys/fs/cgroup/memory", 2**63 - 4096, 20 * GIB)
    assert min(memory_limits()) == (6 * GIB, GIB)
    assert len(memory_limits()) == 3


def test_both_versions_side_by_side(tree: Tree) -> None:
    """As systemd's hybrid layout has it: memory is version 1's, and version 2 has no files of it."""
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    tree.process("3:memory:/a\n0::/a", unified, V1_MOUNT)
    tree.v1("sys/fs/cgroup/memory/a", 5 * GIB, GIB)
    tree.write("sys/fs/cgroup/unified/a/cgroup.procs", 1)
    assert memory_limits() == [(5 * GIB, GIB)]


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/docker/abc", "/docker/abc"),
        ("/docker/abc/inner", "/docker/abc"),
        ("/", "/"),
        ("/../../other", "/"),
        ("/kubepods/pod", "/docker/abc"),
    ],
)
def test_inside_a_container(tree: Tree, group: str, root: str) -> None:
    """What is mounted is the container's own group, with or without a name space that hides its path."""
    tree.process(f"0::{group}", f"30 23 0:26 {root} /sys/fs/my\\040cgroup ro - cgroup2 cgroup2 rw")
    tree.v2("sys/fs/my cgroup", 2 * GIB, GIB)
    assert memory_limits() == [(2 * GIB, GIB)]


def test_the_memory_of_this_machine_is_what_the_groups_allow(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.process("0::/user.slice/job.scope", V2_MOUNT)
    tree.v2("sys/fs/cgroup/user.slice/job.scope", 3 * 2**20, 2**20)
    tree.v2("sys/fs/cgroup/user.slice", 4 * 2**20, 3 * 2**20, cached=2**19)
    assert (host.total_memory_bytes(), host.available_memory_bytes()) == (3 * 2**20, 2**20 + 2**19)
    tree.v2("sys/fs/cgroup/user.slice/job.scope", "max", 2**20)
    tree.v2("sys/fs/cgroup/user.slice", "max", 2**20)
    assert host.total_memory_bytes() > 2**28


def test_kills_are_those_of_the_own_group(tree: Tree) -> None:
    assert oom_kills() is None
    tree.write("proc/vmstat", "nr_free_pages 5\noom_kill 9")
    assert oom_kills() == 9
    tree.process("3:memory:/a/b", V1_MOUNT)
    tree.write("sys/fs/cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5")
    tree.write("sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert oom_kills() == 2
    tree.process("0::/a/b", V2_MOUNT)
    tree.write("sys/fs/cgroup/a/b/memory.events", "low 0\nhigh 4\nmax 3\noom 1\noom_kill 1\noom_group_kill 0")
    assert oom_kills() == 1


def test_what_the_kernel_does_not_show(tree: Tree) -> None:
    assert memory_limits() == []
    tree.process("0::/gone", V2_MOUNT)
    assert memory_limits() == []
