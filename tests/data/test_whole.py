"""Directories that are there whole or not at all, and what is left of those whose makers were killed."""

from __future__ import annotations

from pathlib import Path

from shardwise.data.whole import becoming, lock, once


def make(directory: Path) -> None:
    (directory / "file").touch()


def test_what_a_killed_process_left_is_removed_by_a_later_one_and_never_what_is_being_made(tmp_path: Path) -> None:
    for name in ("dead", "alive", "foreign"):
        make_dir = tmp_path / f".{name}.tmp"
        make_dir.mkdir()
        make(make_dir)
    with lock(tmp_path / "dead"):
        (tmp_path / ".dead.old").mkdir()
    with lock(tmp_path / "alive"):
        once(tmp_path / "new", make)
        assert {path.name for path in tmp_path.iterdir()} == {
            "new", ".new.lock", ".dead.lock", ".alive.tmp", ".alive.lock", ".foreign.tmp",
        }  # fmt: skip
    once(tmp_path / "alive", make)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"new", "alive", ".foreign.tmp"}


def test_a_link_to_a_directory_is_replaced_each_time_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    make(elsewhere)
    target = tmp_path / "target"
    target.symlink_to(elsewhere)
    for name in ("first", "second"):
        with becoming(target) as directory:
            (directory / name).touch()
        assert [path.name for path in target.iterdir()] == [name]
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "target"}
    assert [path.name for path in elsewhere.iterdir()] == ["file"]
