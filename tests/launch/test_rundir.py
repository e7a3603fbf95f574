"""Run directories: names (B-78), another's run (B-69), what cannot be written (B-70), a full disk (B-71)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwise.errors import DataError, MissingInputError, OutputError, ShardwiseError
from shardwise.launch import rundir, writable
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint.manifest import STATE, Manifest
from shardwise.runtime.faults.outcome import Exit, clear_exit, write_exit
from shardwise.spec.load import dump_recipe, load_recipe
from shardwise.spec.plan import Estimate, Offload, Plan
from tests.bad_input.test_damaged_runs import make
from tests.said import shows


def refused(error: ShardwiseError) -> tuple[str, int, str, str]:
    (problem,) = error.problems
    return problem.code, error.exit_code, problem.what, problem.fix


def make_run(directory: Path, *overrides: str, step: int = 400) -> None:
    (directory / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for stray in (".tmp-step-00000999-g1", "step-5000", "step-00000999-copy", "step-last"):
        (directory / "checkpoints" / stray).mkdir()
    (directory / "recipe.yaml").write_text(dump_recipe(load_recipe(None, overrides)))


@pytest.mark.parametrize(
    "name", ["../../x", "a\nb", "x" * 101, "é", "\U0001f600", "-rf", "", ".", "..", "a/b", ".hidden", "a b"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(OutputError) as caught:
        rundir.check_name(name)
    code, exit_code, what, fix = refused(caught.value)
    assert (code, exit_code, fix) == ("OUT006", 73, "`--run my-run-1`")
    assert "at most 100" in what
    assert what.isprintable()


def test_names_that_are_fine(tmp_path: Path) -> None:
    for name in ("quickstart-1", "a", "2026.01_x", "x" * 100):
        assert rundir.check_name(name) == name
    assert rundir.free_name(tmp_path, "my recipe") == "my-recipe-1"
    (tmp_path / "my-recipe-1").mkdir()
    (tmp_path / "my-recipe-10").mkdir()
    assert rundir.free_name(tmp_path, "my recipe") == "my-recipe-2"
    for stem in ("my-recipe", "my recipe"):
        assert rundir.newest_run(tmp_path, stem) == tmp_path / "my-recipe-10"


def test_another_recipes_run_is_never_touched(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "optim.learning_rate=1")
    with pytest.raises(OutputError) as caught:
        rundir.check_standing(tmp_path / "a", load_recipe(None), resume=False)
    code, exit_code, what, fix = refused(caught.value)
    rate = load_recipe(None).optim.learning_rate
    assert (code, exit_code) == ("OUT001", 73) and what.endswith(f": optim.learning_rate {rate} (was 1.0)")
    assert shows(what, tmp_path / "a", 'run "a"', "step 400", "another recipe")
    assert shows(fix, "`--resume`", "`--run`", "`--out`", "nothing is overwritten")
    assert rundir.check_standing(tmp_path / "a", load_recipe(None), resume=True) == 400


def test_its_own_unfinished_run_goes_on_and_a_finished_one_does_not(tmp_path: Path) -> None:
    make_run(tmp_path / "a", step=20)
    same = load_recipe(None, ["run.nproc=2", "parallel=zero3", "run.name=other", "save_steps=7"])
    assert rundir.check_standing(tmp_path / "a", same, resume=False) == 20
    write_exit(tmp_path / "a", Exit("done", 0, "done"))
    with pytest.raises(OutputError) as caught:
        rundir.check_standing(tmp_path / "a", same, resume=False)
    code, exit_code, what, _ = refused(caught.value)
    assert (code, exit_code) == ("OUT001", 73) and shows(what, tmp_path / "a", 'run "a"', "step 20", "finished")
    assert "recipe" not in what


def test_a_run_goes_on_with_other_settings_but_not_with_its_data_in_another_order(tmp_path: Path) -> None:
    make_run(tmp_path / "a", step=20)
    other = load_recipe(None, ["optim.learning_rate=1", "parallel=zero3", "run.nproc=2"])
    assert rundir.check_standing(tmp_path / "a", other, resume=True) == 20
    assert rundir.changes(tmp_path / "a", other) == {
        "parallel.strategy": "zero3 (was auto)",
        "optim.learning_rate": f"1.0 (was {load_recipe(None).optim.learning_rate})",
    }
    moved = load_recipe(None, ["train.seq_len=77", "run.seed=3"])
    with pytest.raises(DataError) as caught:
        rundir.check_standing(tmp_path / "a", moved, resume=True)
    code, exit_code, what, _ = refused(caught.value)
    assert (code, exit_code) == ("CKPT022", 65) and "train.seq_len 77 (was 2048), run.seed 3 (was 0)" in what


def test_a_setting_that_an_older_version_did_not_have_is_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a", step=20)
    settings = rundir._settings(load_recipe(None))
    older = {key: value for key, value in settings.items() if key != "parallel.sequence_parallel"}
    monkeypatch.setattr(rundir, "_facts", lambda directory: {"settings": older})
    assert rundir.changes(tmp_path / "a", load_recipe(None)) == {}
    off = load_recipe(None, ["parallel.sequence_parallel=false"])
    assert rundir.changes(tmp_path / "a", off) == {"parallel.sequence_parallel": "False (was True)"}


def test_a_run_that_is_finished_has_nothing_to_do(tmp_path: Path) -> None:
    run = tmp_path / "a"
    make_run(run, "train.max_steps=20", step=20)
    same = load_recipe(None, ["train.max_steps=20"])
    assert rundir.nothing_to_do(run, same) is None  # it was stopped before its end
    write_exit(run, Exit("done", 0, "done", step=20))
    said = rundir.nothing_to_do(run, same)
    assert shows(said, "nothing to do", run, "finished", "step 20", "larger train.max_steps")
    assert rundir.nothing_to_do(run, load_recipe(None, ["train.max_steps=20", "parallel=zero3"])) == said
    for longer in ("train.max_steps=21", "train.num_epochs=3"):
        assert rundir.nothing_to_do(run, load_recipe(None, [longer])) is None
    shorter = load_recipe(None, ["train.max_steps=19"])
    with pytest.raises(DataError) as caught:
        rundir.check_standing(run, shorter, resume=True)
    code, exit_code, what, fix = refused(caught.value)
    assert (code, exit_code) == ("CKPT024", 65) and shows(what, "is at step 20", "end at step 19")
    assert shows(fix, "`train.max_steps=21`", "or more", "another `--run`")
    clear_exit(run)
    write_exit(run, Exit("done", 0, "done", step=22))  # whose last checkpoint could not be saved
    assert rundir.nothing_to_do(run, same) is None


def stopped_early(run: Path, step: int, stale: int) -> None:
    """A checkpoint, and the end of a run whose last ``stale`` validations found no lower loss."""
    generation = commit.claim(run / "checkpoints")
    attempt = commit.begin(run / "checkpoints", step, generation, 1000)
    facts = json.dumps({"early_stopping": [1.5, stale]}).encode()
    files = {STATE: commit.write_file(attempt.path / STATE, [memoryview(facts)])}
    commit.publish(attempt, Manifest("run", step, generation, 1, files, {}))
    write_exit(run, Exit("done", 0, "done", step=step))


def test_more_steps_do_not_move_a_run_that_stopped_early(tmp_path: Path) -> None:
    run, keys = tmp_path / "a", ["evaluate.eval_steps=1", "evaluate.early_stopping_patience=2"]
    run.mkdir()
    stopped_early(run, 20, stale=2)
    (run / "recipe.yaml").write_text(dump_recipe(load_recipe(None, ["train.max_steps=50", *keys])))
    values = run, "stopped early", "step 20", "last 2 validations", "larger evaluate.early_stopping_patience"
    for steps in (50, 99):
        said = rundir.nothing_to_do(run, load_recipe(None, [f"train.max_steps={steps}", *keys]))
        assert shows(said, "nothing to do", *values)
    patient = load_recipe(None, ["train.max_steps=50", "evaluate.eval_steps=1", "evaluate.early_stopping_patience=3"])
    assert rundir.nothing_to_do(run, patient) is None


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert rundir.check_standing(tmp_path / "a", load_recipe(None), resume=False) is None
    with pytest.raises(MissingInputError) as caught:
        rundir.check_standing(tmp_path / "a", load_recipe(None), resume=True)
    code, exit_code, what, _ = refused(caught.value)
    assert (code, exit_code) == ("CKPT001", 66)
    assert shows(what, "no checkpoint", tmp_path / "a", "checkpoints/step-*)")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, subject in ((tmp_path / "file", "it"), (tmp_path / "file" / "x", "the path")):
        with pytest.raises(OutputError) as caught:
            writable.check_writable(path)
        code, exit_code, what, _ = refused(caught.value)
        assert (code, exit_code) == ("OUT002", 73) and shows(what, f"{path}:", subject, "is a file")
    with pytest.raises(OutputError) as caught:
        writable.check_writable(tmp_path / ("x" * 300))
    assert "too long" in refused(caught.value)[2]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, "read-only file system"),
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "permission denied"),
        (errno.EDQUOT, "disk quota"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_each_step_of_the_probe_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, call)), fail)
    with pytest.raises(OutputError) as caught:
        writable.check_writable(tmp_path / "run")
    code, exit_code, what, _ = refused(caught.value)
    assert (code, exit_code) == ("OUT002", 73) and shows(what, f"{tmp_path / 'run'}:", reason)
    assert not list(tmp_path.rglob(".probe*"))


def test_a_directory_that_can_be_written_keeps_nothing_of_the_probe(tmp_path: Path) -> None:
    writable.check_writable(tmp_path / "runs" / "a")
    assert list((tmp_path / "runs" / "a").iterdir()) == []


def test_an_empty_directory_is_removed_only_by_who_made_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for out in ("mine", "new"):
        with rundir.owned(tmp_path / out / "run", print):
            assert (tmp_path / out / "run").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and not list((tmp_path / "mine").iterdir())


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_checkpoints_that_do_not_fit_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: Usage(0, 0, 31_000_000_000))
    parameters = 1_183_000_000
    with pytest.raises(OutputError) as caught:
        rundir.check_space(tmp_path / "not" / "yet", parameters, keep=3)
    code, exit_code, what, fix = refused(caught.value)
    assert (code, exit_code) == ("OUT003", 73)
    assert all(value in what for value in ("14.2 GB", "56.8 GB", f"31.0 GB free on {tmp_path}"))
    assert "`--out`" in fix and "`checkpoint.save_total_limit=1`" in fix
    with pytest.raises(OutputError) as caught:  # one, and one being written, do not fit either
        rundir.check_space(tmp_path, 1_500_000_000, keep=2)
    assert "save_total_limit" not in caught.value.problems[0].fix and "`--out`" in caught.value.problems[0].fix
    assert rundir.check_space(tmp_path, 100, keep=2) == 3600


def test_what_a_run_holds_already_counts_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 40,000 bytes, on which 2 checkpoints of 12,000 and a model of 4,000 lie, and one more can be
    written."""
    run, free = tmp_path / "run", 12_000
    for name in ("checkpoints/step-00000001", "checkpoints/step-00000002", "hf"):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_bytes(b"0" * (4_000 if name == "hf" else 12_000))
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: Usage(0, 0, free))
    assert rundir.check_space(run, 1000, keep=2, export_bytes=4000) == 40_000
    for keep in (1, 2):  # what is more than is kept makes no room before the next one is written
        free = 11_999
        with pytest.raises(OutputError, match="OUT003"):
            rundir.check_space(run, 1000, keep=keep, export_bytes=4000)
    (run / "checkpoints" / ".tmp-step-00000003-g1").mkdir()
    (run / "checkpoints" / ".tmp-step-00000003-g1" / "file").write_bytes(b"0")  # is swept first
    assert rundir.check_space(run, 1000, keep=2, export_bytes=4000) == 40_000
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints" / "step-00000002").rename(tmp_path / "elsewhere" / "step")
    (run / "checkpoints" / "step-00000002").symlink_to(tmp_path / "elsewhere" / "step")
    with pytest.raises(OutputError, match="OUT003"):
        rundir.check_space(run, 1000, keep=2, export_bytes=4000)


def test_a_checkpoint_of_another_run_is_named(tmp_path: Path) -> None:
    """And not the seed that it was trained with."""
    make(tmp_path / "a")
    other = make(tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(other / "checkpoints", tmp_path / "a" / "checkpoints")
    (tmp_path / "a" / "run.json").write_text('{"run_id": "mine", "data": "d"}')
    for resume in (False, True):
        with pytest.raises(DataError, match="CKPT013"):
            rundir.check_standing(tmp_path / "a", load_recipe(None, ["run.seed=7"]), resume=resume)


@pytest.mark.parametrize(
    ("begun", "steps", "epochs", "batch"),
    [
        ({"train.max_steps": None, "train.num_epochs": None}, 1000, None, None),  # as an older version began it
        ({"train.max_steps": None, "train.num_epochs": 2.0, "train.global_batch_size": 4}, None, 2.0, 4),
    ],
)
def test_a_run_goes_on_with_what_it_assumed_when_it_was_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: dict[str, object],
    steps: int | None,
    epochs: float | None,
    batch: int | None,
) -> None:
    settings = {**begun, "optim.learning_rate": 3e-4, "optim.warmup_steps": 0}
    monkeypatch.setattr(rundir, "_facts", lambda directory: {"settings": settings})
    recipe = rundir.as_begun(tmp_path, load_recipe(None, ["model=m", "method=sft"]))
    assert (recipe.train.max_steps, recipe.train.num_epochs) == (steps, epochs)
    assert recipe.train.global_batch_size == batch
    assert (recipe.optim.learning_rate, recipe.optim.warmup_steps) == (3e-4, 0)
    pinned = rundir.as_begun(tmp_path, load_recipe(None, ["model=m", "method=sft", "max_steps=7", "lr=1e-4"]))
    assert (pinned.train.max_steps, pinned.optim.learning_rate, pinned.optim.warmup_steps) == (7, 1e-4, 0)


def test_a_disk_without_room_for_what_is_offloaded_is_told_before_anything_starts(tmp_path: Path) -> None:
    little, much = (Plan(offload=Offload("nvme", "nvme"), estimate=Estimate(disk_bytes=size)) for size in (1, 10**18))
    rundir.check_offload(tmp_path / "not" / "yet", little)
    with pytest.raises(OutputError) as raised:
        rundir.check_offload(tmp_path / "not" / "yet", much)
    [problem] = raised.value.problems
    assert problem.code == "OUT003" and "offload.directory=" in (problem.fix or "")
    assert shows(problem.what, "offload", "optimizer and activations", "1,000,000.0 TB")
    assert (problem.fix or "").endswith(", or `offload.optimizer=host offload.activations=host`")


def test_a_log_that_is_none_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.jsonl").symlink_to("events.jsonl")
    for run in (tmp_path / "a", tmp_path / "b"):
        with pytest.raises(OutputError, match="OUT002"), rundir.owned(run, print):
            pass
