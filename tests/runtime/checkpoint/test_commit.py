from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import OutputError
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Manifest,
    Rejected,
    Slice,
    TensorRecord,
    candidates,
    check,
    check_coverage,
    chunk_hashes,
    dump,
    parse,
)
from shardwise.runtime.checkpoint.retention import Keep, expendable, expire
from tests.runtime.checkpoint.commit_once import save
from tests.runtime.checkpoint.faults import faulty
from tests.runtime.nursery import Ask
from tests.said import refusal


def steps(root: Path) -> list[int]:
    return [step for step, _ in candidates(root)]


def violations(root: Path, allowed: tuple[int, ...]) -> list[str]:
    """What a reader must never see: a step that does not verify, or a newest one that is not among ``allowed``."""
    wrong = []
    for step, path in candidates(root):
        try:
            check(path)
        except Rejected as error:
            wrong.append(f"step {step}: {error}")
    if not steps(root) or steps(root)[0] not in allowed:
        wrong.append(f"the newest of {steps(root)} is not in {allowed}")
    return wrong


def enumerate_kills(ask: Ask, tmp_path: Path, naive: bool) -> tuple[int, list[str]]:
    """Die at every system call in turn. (number of deaths, violations)"""
    first = tmp_path / "first"
    save(first, 1, commit.DISK)
    control = shutil.copytree(first, tmp_path / "control")
    deaths, wrong = 0, []
    (done,) = ask("tests.runtime.checkpoint.commit_once:run", 1, str(control), naive)
    assert done.status == 0 and not violations(control, (2,))
    for at, name in enumerate(done.result, start=1):
        for fault in ("kill", "torn") if name == "write" else ("kill",):
            root = shutil.copytree(first, tmp_path / f"{fault}-{at}")
            (child,) = ask("tests.runtime.checkpoint.commit_once:run", 1, str(root), naive, fault, at)
            assert child.status == -9, "the fault must fire"
            deaths += 1
            wrong += violations(root, (1, 2))
            save(root, 3, commit.DISK)
            assert steps(root)[0] == 3 and not [n for n in os.listdir(root) if n.startswith((".tmp-", ".trash-"))]
    return deaths, wrong


@pytest.mark.prove
def test_no_death_leaves_a_torn_checkpoint(ask: Ask, tmp_path: Path) -> None:
    deaths, wrong = enumerate_kills(ask, tmp_path, naive=False)
    assert deaths >= 20 and wrong == []


@pytest.mark.prove
def test_without_temporary_directory_and_rename_the_same_deaths_do(ask: Ask, tmp_path: Path) -> None:
    _, wrong = enumerate_kills(ask, tmp_path, naive=True)
    assert len(wrong) >= 5


if shutil.which("strace"):

    def traced(directory: Path, trace: Path, *expressions: str) -> str:
        """Save under strace; what strace wrote."""
        root = Path(__file__).parents[3]
        options = [option for expression in expressions for option in ("-e", expression)]
        command = ["strace", "-qq", "-f", "-o", str(trace), *options]
        program = [sys.executable, "-m", "tests.runtime.checkpoint.commit_once", str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        subprocess.run([*command, *program], capture_output=True, timeout=60, cwd=root, env=environment)
        return trace.read_text()

    @pytest.mark.prove
    def test_system_calls_as_the_kernel_sees_them(tmp_path: Path) -> None:
        """The seam might miss a call; strace does not."""
        save(tmp_path / "first", 1, commit.DISK)
        trace = tmp_path / "trace"
        control = shutil.copytree(tmp_path / "first", tmp_path / "control")
        lines = traced(control, trace, "trace=write,fsync,rename,mkdir").splitlines()
        made = [line.split("(")[0].split()[-1] for line in lines]
        assert made.count("fsync") == 5 and made.count("rename") == 1 and not violations(control, (2,))
        for call in sorted(set(made)):
            for n in range(1, made.count(call) + 1):
                root = shutil.copytree(tmp_path / "first", tmp_path / f"{call}-{n}")
                said = traced(root, trace, f"trace={call}", f"inject={call}:signal=SIGKILL:when={n}")
                assert "killed by SIGKILL" in said, "the fault must fire"
                assert violations(root, (1, 2)) == []


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def test_a_failing_call_is_raised_and_nothing_torn_is_left(tmp_path: Path, error: str) -> None:
    save(tmp_path / "control", 1, commit.DISK)
    calls: list[str] = []
    save(tmp_path / "control", 2, faulty(commit.DISK, "", 0, calls))
    for at in range(1, len(calls) + 1):
        root = tmp_path / f"root-{at}"
        save(root, 1, commit.DISK)
        with pytest.raises((OSError, commit.MaybeCommitted)):
            save(root, 2, faulty(commit.DISK, error, at, []))
        assert violations(root, (1, 2)) == []


def test_short_writes_are_finished(tmp_path: Path) -> None:
    slow = commit.Disk(write=lambda descriptor, data: os.write(descriptor, data[:1000]))
    save(tmp_path, 1, slow)
    assert violations(tmp_path, (1,)) == []


def test_an_unconfirmed_rename_is_maybe_committed(tmp_path: Path) -> None:
    calls: list[str] = []
    save(tmp_path / "control", 1, faulty(commit.DISK, "", 0, calls))
    with pytest.raises(commit.MaybeCommitted):
        save(tmp_path / "root", 1, faulty(commit.DISK, "EIO", len(calls), []))
    assert violations(tmp_path / "root", (1,)) == []


def test_an_existing_step_is_never_touched(tmp_path: Path) -> None:
    save(tmp_path, 1, commit.DISK)
    path = tmp_path / "step-00000001"
    before = {name: ((path / name).stat().st_ino, (path / name).read_bytes()) for name in os.listdir(path)}
    with pytest.raises(OutputError, match="step-00000001 exists"):
        save(tmp_path, 1, commit.DISK)
    assert before == {name: ((path / name).stat().st_ino, (path / name).read_bytes()) for name in os.listdir(path)}


def test_a_damaged_step_makes_way_to_quarantine(tmp_path: Path) -> None:
    save(tmp_path, 1, commit.DISK)
    (tmp_path / "step-00000001" / "a").write_bytes(b"short")
    save(tmp_path, 1, commit.DISK)
    assert violations(tmp_path, (1,)) == []
    assert (tmp_path / "quarantine" / "step-00000001-g2" / "a").read_bytes() == b"short"


def test_an_older_generation_can_not_commit(tmp_path: Path) -> None:
    old = commit.claim(tmp_path)
    attempt = commit.begin(tmp_path, 1, old, 0)
    assert commit.claim(tmp_path) == old + 1
    manifest = Manifest("run", 1, old, 1, {}, {})
    with pytest.raises(OutputError, match=refusal("OUT005", "generation 2", 1)):
        commit.publish(attempt, manifest)
    with pytest.raises(OutputError, match="a newer process"):
        commit.begin(tmp_path, 2, old, 0)
    assert steps(tmp_path) == []


def test_leftovers_go_unless_a_living_process_owns_them(tmp_path: Path) -> None:
    attempt = commit.begin(tmp_path, 1, commit.claim(tmp_path), 0)
    commit.sweep(tmp_path, attempt.generation + 1)
    assert attempt.path.is_dir()
    attempt.release()
    commit.sweep(tmp_path, attempt.generation + 1)
    assert os.listdir(tmp_path) == [".generation-1"]


def test_no_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    generation = commit.claim(tmp_path)
    with pytest.raises(OutputError, match=r"OUT003.*step 5 .*1050000000.000 GB"):
        commit.begin(tmp_path, 5, generation, 10**18)
    assert os.listdir(tmp_path) == [".generation-1"]


def test_hashes_do_not_depend_on_how_the_bytes_come() -> None:
    data = memoryview(os.urandom(CHUNK_BYTES + 5))
    whole = chunk_hashes([data])
    assert len(whole.chunks) == 2 and whole.bytes == len(data)
    assert chunk_hashes([data[:7], data[7 : CHUNK_BYTES + 1], data[CHUNK_BYTES + 1 :]]) == whole


def test_a_manifest_survives_the_round_trip_and_no_flipped_bit() -> None:
    slices = (Slice((0, 0), (2, 3), "a", 8), Slice((2, 0), (1, 3), "a", 32))
    record = chunk_hashes([memoryview(b"x" * 44)])
    manifest = Manifest("run", 7, 3, 2, {"a": record}, {"w": TensorRecord((3, 3), "F32", slices)})
    data = dump(manifest)
    assert parse(data, "here") == manifest
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Rejected):
            parse(bytes(flipped), "here")


@pytest.mark.parametrize("name", ["../../x", "/dev/zero", "a/b", ".hidden", ""])
def test_a_file_outside_of_the_directory_is_refused(name: str) -> None:
    manifest = Manifest("run", 7, 3, 1, {name: chunk_hashes([])}, {})
    with pytest.raises(Rejected, match="SEC006"):
        parse(dump(manifest), "here")


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path, 1, commit.DISK)
    path = tmp_path / "step-00000001" / "a"
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(Rejected, match="a cannot be"):
        check(path.parent)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Slice]]:
    """A shape, and boxes that tile it: each dim cut at random places."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        pieces = list(pairwise(edges))
        boxes = [((*o, low), (*n, high - low)) for o, n in boxes for low, high in pieces]
    return shape, [Slice(o, n, "f", 0) for o, n in draw(st.permutations(boxes))]


@settings(max_examples=200, deadline=None)
@given(cuts(), st.data())
def test_coverage_is_exact(cut: tuple[tuple[int, ...], list[Slice]], data: st.DataObject) -> None:
    shape, slices = cut
    check_coverage({"w": TensorRecord(shape, "F32", tuple(slices))})
    victim = data.draw(st.sampled_from(slices))
    rest = [s for s in slices if s is not victim]
    moved = Slice(tuple(o + 1 for o in victim.offsets), victim.sizes, "f", 0)
    for wrong in (rest, [*slices, victim], [*rest, moved] if shape else rest):
        with pytest.raises(Rejected, match="CKPT015"):
            check_coverage({"w": TensorRecord(shape, "F32", tuple(wrong))})


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 50), min_size=1), st.integers(1, 4), st.none() | st.integers(1, 10), st.data())
def test_retention_keeps_what_it_must(found: set[int], last: int, every: int | None, data: st.DataObject) -> None:
    verified = data.draw(st.sampled_from(sorted(found)))
    best = data.draw(st.none() | st.sampled_from(sorted(found)))
    gone = expendable(list(found), Keep(last, every, best), verified)
    left = sorted(found - set(gone))
    assert gone == sorted(gone) and verified in left and all(step < verified for step in gone)
    assert sorted(found)[-last:] == left[-min(last, len(found)) :]
    assert every is None or all(step % every for step in gone)
    superfluous = [s for s in sorted(found)[:-last] if s < verified and s != best and (not every or s % every)]
    assert gone == superfluous


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, commit.DISK)
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    assert expire(tmp_path, Keep(2), 4) == [1]
    assert steps(tmp_path) == [4, 3, 2]


def test_another_runs_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, commit.DISK)
    manifest = tmp_path / "step-00000001" / MANIFEST
    manifest.write_bytes(dump(replace(check(manifest.parent), run_id="other")))
    assert expire(tmp_path, Keep(2), 4) == [2]
    assert steps(tmp_path) == [4, 3, 1]


def test_a_checkpoint_behind_a_link_stays_where_it_is(tmp_path: Path) -> None:
    """On another disk, to which somebody moved it: the link goes, and nothing behind it."""
    here, other = tmp_path / "here", tmp_path / "other"
    for step in (1, 2, 3):
        save(here, step, commit.DISK)
    other.mkdir()
    shutil.move(here / "step-00000001", other)
    shutil.copytree(other / "step-00000001", other / "left")
    (here / "step-00000001").symlink_to(other / "step-00000001")
    (here / ".trash-step-00000000").symlink_to(other / "left")
    before = {path: sorted(os.listdir(path)) for path in other.iterdir()}
    assert expire(here, Keep(1), 3) == [1, 2]
    save(here, 4, commit.DISK)
    assert {path: sorted(os.listdir(path)) for path in other.iterdir()} == before and len(before) == 2
    assert not [name for name in os.listdir(here) if name.startswith(".trash") or name == "step-00000001"]


def test_what_decides_about_a_checkpoint_does_not_import_torch() -> None:
    """So that the command line can look at checkpoints in no time."""
    modules = "commit, locate, manifest, retention"
    program = f"import sys; from shardwise.runtime.checkpoint import {modules}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0
