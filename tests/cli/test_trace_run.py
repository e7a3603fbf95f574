"""A profiled run of two ranks has the names of the trace of its plan, as often, and the numbers of one without."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from tests.cli import traces
from tests.cli.test_tp_run import MODEL, contents
from tests.runtime.small_run import numbers, write_text

WORDS = [
    f"model.config={json.dumps(MODEL)}",
    *[
        "data.path=text",
        "data.cache=cache",
        "data.tokenizer.vocab_size=321",
        "train.seq_len=16",
        "train.global_batch_size=4",
    ],
    *["train.max_steps=2", "optim.learning_rate=0.01", "precision.compute=fp32", "run.device=cpu", "run.timeout_s=60"],
    *["run.nproc=2", "evaluate.max_batches=2", "evaluate.sample_prompt=line"],
]
RANGES = re.compile(
    r"forward .*|backward .*|optimizer|(all-gather|reduce-scatter|all-reduce) (weights|gradients) of .*"
)
CASES = {
    "zero3": ["parallel.strategy=zero3", "train.micro_batch_size=1"],
    "ddp": ["parallel.strategy=ddp"],
    "pipeline": ["parallel.pp=2", "train.micro_batch_size=1"],
}


def counted(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["name"] for one in events if one["ph"] == "X" and RANGES.fullmatch(one["name"]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("traced") / "text").parent


def words_of(case: str) -> list[str]:
    return [*WORDS, *CASES[case]]


def trained(case: str, *more: str) -> Path:
    """The directory of the run of a case, which is trained once."""
    run = Path("runs", f"{case}{'-profiled' * bool(more)}")
    if not run.exists():
        assert main(["train", *words_of(case), "--run", run.name, *more]) == 0
    return run


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES)
def test_what_was_planned_is_measured_under_the_same_names(
    case: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    run = trained(case, "--profile", "1:2")
    for rank in (0, 1):
        measured, both = run / f"profile/rank-{rank}-steps-1-2.json.gz", Path(f"{case}-{rank}.json")
        assert main(["plan", *words_of(case), "--trace", str(both), "--beside", str(measured)]) == 0
        ran, together = traces.read(measured), traces.read(both)
        planned = together[len(ran) :]
        assert together[: len(ran)] == ran and traces.faults(planned) == []
        processes = {pid: name for (pid, _), name in traces.named(planned, "process_name").items()}
        mine = next((pid for pid, name in processes.items() if name.startswith(f"planned rank {rank}")), None)
        pid = next(iter(processes)) if mine is None else mine  # ranks that are alike are one process
        told, found = counted([one for one in planned if one["pid"] == pid]), counted(ran)
        if case == "pipeline":  # whose blocks are ranges within those of stages
            assert "forward block 0" in found or rank == 1
            found = Counter({name: times for name, times in found.items() if "stage" in name or name == "optimizer"})
        assert found == {name: 2 * times for name, times in told.items()} and len(told) >= 3


@pytest.mark.prove
def test_a_profile_of_sharded_ranks_changes_no_bit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    plain, profiled = trained("zero3"), trained("zero3", "--profile", "1:2")
    assert numbers(plain) == numbers(profiled)
    assert contents(plain / "hf") == contents(profiled / "hf")
