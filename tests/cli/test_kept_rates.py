"""Rates that ``shardwise doctor`` measured on this machine: plans and runs here use them as they use its file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from shardwise.cli import kept_rates
from shardwise.cli.app import main
from shardwise.cli.decide import cluster_of, this_machine
from shardwise.cli.kept_rates import file_of, keep, with_kept
from shardwise.launch import local
from shardwise.launch.worker import state_directory
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.spec.cluster import Cluster
from shardwise.spec.load import load_plan, load_recipe
from shardwise.spec.measured import AttentionTime, Measured, Pointwise, Product

SLOW = Measured(
    ranks=2,
    launch_s=1e-3,
    products=(Product("fp32", 64, 64, 64, 1e-3), Product("bf16", 64, 64, 64, 1e-3)),
    attention=(AttentionTime("fp32", 64, 2, 16, 1e-3, 2e-3), AttentionTime("bf16", 64, 2, 16, 1e-3, 2e-3)),
    pointwise=(Pointwise(2**16, 1e-3),),
    memory_bytes_per_s=1e8,
)
"""A machine a hundred times slower than any that runs this."""
RECIPE = load_recipe(None, ["model.path=Llama-3.1-8B", "run.device=cpu", "run.nproc=2"])
SAID = "measured by shardwise doctor on here, 2026-11-21 05:17"


def measured() -> Cluster:
    return replace(this_machine(RECIPE), measured=SLOW, link_bytes_per_s=1e8, assumptions=(SAID,))


def test_a_plan_for_this_machine_takes_them() -> None:
    spec = resolve(RECIPE)
    before = choose(RECIPE, spec, cluster_of(RECIPE)).estimate.seconds
    keep(measured(), (SAID,), state_directory())
    after = choose(RECIPE, spec, cluster_of(RECIPE)).estimate.seconds
    assert before is not None and after is not None and after.step_s > 5 * before.step_s
    assert before.basis.startswith("rough figures") and after.basis == "what doctor measured"


@pytest.mark.prove
def test_plans_and_runs_here_take_what_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The seconds of all three are the same, and neither those of before nor those of another number of ranks."""

    @contextmanager
    def apart() -> Iterator[Path]:
        path = Path(f"{len(list(Path().iterdir()))}.yaml")
        yield path
        path.with_suffix(".done").touch()

    def step_s(*words: str) -> float:
        with apart() as path:
            assert main(["plan", *asked, *words, "-o", str(path)]) == 0, capfd.readouterr()
            seconds = load_plan(path).estimate.seconds
        assert seconds is not None
        return seconds.step_s

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 300)
    sizes = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    asked = [f"model.config.{key}={value}" for key, value in sizes.items()]
    asked += ["data.path=text.txt", "data.cache=cache", "data.num_proc=1", "data.tokenizer.vocab_size=300"]
    asked += ["train.seq_len=32", "train.global_batch_size=4", "train.max_steps=2", "run.device=cpu", "run.nproc=2"]
    before = step_s()
    kept = keep(measured(), (SAID,), state_directory())
    os.utime(kept, (time.time() - 3.5 * 86400,) * 2)
    capfd.readouterr()
    after = step_s()
    assert f"rates {SAID} (3 days ago)" in capfd.readouterr().out
    assert after == pytest.approx(step_s("--cluster", str(kept)), rel=1e-12) and after > 5 * before
    assert step_s("run.nproc=1") < after / 5

    monkeypatch.setattr(local, "run_ranks", lambda *given, **named: local.Ended(1, None))
    main(["train", *asked, "--run", "a"])
    planned = load_plan("runs/a/plan.yaml").estimate.seconds
    assert planned is not None and planned.step_s == pytest.approx(after, rel=1e-12)
    assert (planned.basis, planned.scale) == ("what doctor measured", 1.0)
    assert f"rates {SAID} (3 days ago)\n" in capfd.readouterr().err


def test_they_are_of_this_machine_and_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(measured(), (SAID,), tmp_path)
    here = this_machine(RECIPE)
    found = with_kept(here, tmp_path)
    assert (found.measured, found.link_bytes_per_s) == (SLOW, 1e8)
    assert found.device == here.device and found.host_memory_bytes == here.host_memory_bytes
    assert found.assumptions == (here.assumptions[0], f"rates {SAID} (just now)")
    for name, value in (("gethostname", lambda: "elsewhere"), ("__version__", "9.9"), ("version", lambda name: "9.9")):
        with monkeypatch.context() as other:
            other.setattr(kept_rates, name, value)
            assert with_kept(here, tmp_path) is here, name
    for other_machine in (replace(here, devices_per_node=1), replace(here, nodes=2)):
        assert with_kept(other_machine, tmp_path) is other_machine
    assert metadata.version("torch") in file_of(here, tmp_path).name


def test_a_file_that_cannot_be_used_is_told() -> None:
    path = keep(measured(), (SAID,), state_directory())
    path.write_text(path.read_text()[:-20])
    found = cluster_of(RECIPE)
    assert found.measured is None
    assert f"{path} cannot be used: " in found.assumptions[-1] and "`shardwise doctor`" in found.assumptions[-1]
