"""An optimizer, or inputs of blocks, in a file: kills within a step and within a save lose nothing, for the file is not
what a run goes on from; and a full disk is told before the first step."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Make
from tests.faults.job import SAVE, Job
from tests.said import refuses

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL
NVME = {"offload": {"optimizer": "nvme"}}
PLACES = 3
"""Of a parameter in the file."""


@pytest.mark.prove
def test_killed_within_a_step(make: Make, whole: Job) -> None:
    """Some weights and moments are a step ahead of others when it dies. It goes on from its checkpoint to the losses of
    the run that was in memory and that nothing disturbed, and nothing is left of the file."""
    job = make("nvme-pass", strategy="nvme-zero3")
    words = job.write(**NVME)
    parameters = 2 + 9 * 2 + 1  # of two blocks and both ends
    codes = job.train(words, sabotage=("kill_in_pass", 1, PLACES * (parameters * (SAVE + 2) + 4)))
    assert job.fired("pass") and codes == [1, KILLED]
    assert job.saved() == [SAVE]
    assert [*job.directory.glob(".offload-*")] == []
    assert job.train(words) == [0, 0], job.log.read_text()[-3000:]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_killed_within_a_save(make: Make, whole: Job) -> None:
    job = make("nvme-save", strategy="nvme-zero3")
    words = job.write(**NVME, checkpoint={"asynchronous": True})
    codes = job.train(words, sabotage=("kill_in_save", 1, 2 * SAVE, "torn"))
    assert job.fired("save-torn") and codes == [1, KILLED]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_it_goes_on_in_memory(make: Make, whole: Job) -> None:
    """And what was begun on NVMe ends as what was always in memory."""
    job = make("nvme-left", strategy="weights-zero3")
    assert (
        job.train(
            job.write(offload={"optimizer": "nvme", "weights": "nvme"}), {rank: f"count:7:{rank}" for rank in range(2)}
        )
        == [KILLED] * 2
    )
    other = replace(job, strategy="zero3")
    assert other.train(other.write()) == [0, 0]
    assert other.begun_at() == [0, SAVE]
    other.same_as(whole)


@pytest.mark.prove
def test_a_disk_without_room_ends_the_run_before_a_step(make: Make) -> None:
    job = make("nvme-full", strategy="nvme-zero3")
    codes = job.train(job.write(**NVME), sabotage=("no_room", 1, "offload"))
    assert job.fired("full-offload") and set(codes) == {73}
    said = job.log.read_text()
    assert refuses(said, "OUT003", "the optimizer") and "offload.directory=" in said
    assert f"in {job.directory}" in said, "by default it is in the run's own directory"


@pytest.mark.prove
def test_a_disk_without_room_for_the_copy_of_a_save_ends_the_run_before_a_step(make: Make) -> None:
    job = make("nvme-no-copy", strategy="nvme-zero3")
    codes = job.train(job.write(**NVME), sabotage=("no_room", 1, "save"))
    assert job.fired("full-save")
    assert set(codes) == {73} and job.saved() == []
    assert refuses(job.log.read_text(), "OUT003", "the copy", "saves")


FILED = {"offload": {"activations": "nvme"}, "recompute": {"mode": "full"}}


@pytest.mark.prove
def test_killed_while_inputs_of_blocks_are_in_a_file(make: Make, whole: Job) -> None:
    """It goes on to the losses of the run that kept all, and nothing is left of the file."""
    job = make("filed-kill", strategy="filed-zero3")
    words = job.write(**FILED)
    assert job.train(words, {rank: f"count:7:{rank}" for rank in range(2)}) == [KILLED] * 2
    assert [*job.directory.glob(".offload-*")] == []
    assert job.train(words) == [0, 0], job.log.read_text()[-3000:]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_a_disk_without_room_for_inputs_of_blocks_ends_the_run_before_a_step(make: Make) -> None:
    job = make("filed-full", strategy="filed-zero3")
    codes = job.train(job.write(**FILED), sabotage=("no_room", 1, "offload"))
    assert job.fired("full-offload") and not (job.directory / "metrics.jsonl").exists()
    said = job.log.read_text()
    assert refuses(said, "OUT003", "inputs of blocks")
    assert f"in {job.directory}" in said and codes[1] == 73


WIDE = {"model_type": "llama", "hidden_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8}
WIDE |= {"intermediate_size": 3072, "vocab_size": 8192}
LIMIT_BYTES = 1330 * 2**20
"""Of a process's own memory: 0.8 to 0.9 GiB is that of Python, torch and its threads; weights and gradients take 0.3,
moments as much again."""


def trained(root: Path, name: str, optimizer: str, limit: int) -> tuple[int, list[float], str]:
    """One process: its exit code, the losses, and what was said."""
    sections: dict[str, Any] = {
        "run": {"name": name, "out": str(root / "runs"), "device": "cpu", "nproc": 1},
        "data": {"path": str(root / "text"), "cache": str(root / "cache"), "tokenizer": {"vocab_size": 320}},
        "model": {"config": WIDE},
        "train": {"seq_len": 64, "global_batch_size": 2, "max_steps": 3},
        "evaluate": {"max_batches": 1, "sample_prompt": ""},
        "offload": {"optimizer": optimizer},
    }
    recipe = root / f"{name}.json"
    recipe.write_text(json.dumps(sections))

    def limited() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "shardwise", "train", str(recipe)]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, env=threads, timeout=300)
    metrics = root / "runs" / name / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    return done.returncode, losses, done.stdout + done.stderr


@pytest.mark.big
def test_it_trains_where_memory_is_too_small_for_the_optimizer(tmp_path: Path) -> None:
    """With the losses of a run that has enough, at the peak that was planned."""
    (tmp_path / "text").mkdir()
    words = "\n".join(f"line {n} says {n * n % 97} and {n * 7 % 13}" for n in range(6000))
    (tmp_path / "text" / "0.txt").write_text(words)
    code, right, _ = trained(tmp_path, "whole", "none", 0)
    assert code == 0 and len(right) == 3
    code, _, said = trained(tmp_path, "none", "none", LIMIT_BYTES)
    assert code == 1 and "MEM001" in said and "offload.optimizer=nvme" in said
    code, losses, said = trained(tmp_path, "nvme", "nvme", LIMIT_BYTES)
    assert code == 0, said[-3000:]
    assert losses == right
    [peak] = [line.split("memory per rank")[1].split() for line in said.splitlines() if "memory per rank" in line]
    assert abs(float(peak[-2])) < 10, peak  # percent
