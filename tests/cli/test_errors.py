"""The command line: errors said once, with their exit codes, before anything is written; JSON where asked."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli import app, interrupt, schema, start
from shardwise.cli.app import main
from shardwise.errors import first_line
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan
from shardwise.spec.plan import Plan, Precision
from tests.said import refuses, shows

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]
UNMAPPED = "failed to map segment from shared object"
THREADLESS = "can't start new thread"


@pytest.fixture
def shardwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


LINE = "the command line"
CORES = min(2, len(os.sched_getaffinity(0)))
HERE = ("`run.device=cuda run.nproc=8 run.nodes=2`", "`shardwise plan --cluster 2x8xH100`")


@pytest.mark.parametrize(
    ("words", "ended", "code", "values", "where", "fix"),
    [
        ("train --sequence-lenn 4", 78, "CFG001", ["`sequence_lenn`"], "`sequence_lenn=4`", ["`train.seq_len`"]),
        ("train --optm.lr=3", 78, "CFG001", ["`optm.lr`"], "`optm.lr=3`", ["`optim.learning_rate`"]),
        ("train quickstrat", 66, "CFG011", ["quickstrat", "recipe"], "", ["`quickstart`"]),
        ("train nowhere.yaml", 66, "CFG011", ["nowhere.yaml"], "", ["path"]),
        ("train --device cuda --nproc 8", 2, "DEV001", [8, "GPU"], "run.nproc", [f"--nproc {CORES}", "8xH100"]),
        ("train --run ../x", 73, "OUT006", ["`../x`", 100], "run.name", ["`--run my-run-1`"]),
        ("train --bogus", 2, "CLI001", ["`--bogus`"], LINE, ["`shardwise --help`"]),
        ("train --resum", 2, "CLI001", ["`--resum`"], LINE, ["`--resume`"]),
        ("train --seq-len", 2, "CLI001", ["`--seq-len`", "value"], LINE, ["`--seq-len VALUE`"]),
        ("train a.yaml b.yaml", 2, "CLI001", ["`a.yaml`", "`b.yaml`"], LINE, ["key=value"]),
        ("train --port x", 2, "CLI001", ["'--port'", "integer"], LINE, ["`shardwise train --help`"]),
        ("train --cluster 2x8xH100", 2, "CLI001", ["`2x8xH100`", "`shardwise plan`"], LINE, HERE),
        ("data prepare cluster=2xCPU", 2, "CLI001", ["`2xCPU`"], LINE, ["`run.device=cpu run.nproc=2`", "2xCPU"]),
        ("train --cluster 8xH101", 78, "CLU002", ["`H101`"], "--cluster", ["H100-SXM-80GB"]),
        (
            "plan train.global_batch_size=10 train.micro_batch_size=4",
            78,
            "CFG008",
            [10, 4, 1, 4],
            "`train.global_batch_size=10`",
            ["`train.global_batch_size=12`", "three"],
        ),
        (
            "train model.config={} model.init=pretrained",
            78,
            "CFG008",
            ["`model.init: pretrained`", "`model.config`"],
            "`model.init=pretrained`",
            ["`model.init=random`", "`model.path`"],
        ),
        ("fly", 2, "CLI001", ["'fly'"], LINE, ["`shardwise --help`"]),
        ("plan --explain everything", 2, "CLI001", ["`everything`"], "--explain", ["memory", "time", "keys"]),
        ("plan --cluster 8xH101", 78, "CLU002", ["`H101`"], "--cluster", ["H100-SXM-80GB"]),
        ("train --resume gone", 66, "CFG011", ["gone"], "", ["path"]),
    ],
)
def test_errors(
    shardwise: Run, words: str, ended: int, code: str, values: list[object], where: str, fix: list[object]
) -> None:
    """Each is said once, on stderr, before anything is written. Their words: tests/texts.txt."""
    found, out, err = shardwise(*words.split())
    assert (found, out) == (ended, "")
    assert refuses(err, code, *values, where=where)
    assert len(err.splitlines()) == 2 + bool(where)
    assert shows(err.splitlines()[-1], "fix", *fix)
    assert list(Path().iterdir()) == []


def test_the_same_as_an_object(shardwise: Run) -> None:
    code, out, err = shardwise("train", "trian.seq_len=3", "optim.beta2=1", "--json")
    assert (code, err) == (78, "")
    error = json.loads(out)["error"]
    assert error["exit_code"] == 78
    assert [problem["code"] for problem in error["problems"]] == ["CFG001", "CFG005"]
    assert set(error["problems"][0]) == {"code", "what", "where", "fix"}


def test_a_path_that_is_too_long_is_an_error_like_any_other(shardwise: Run) -> None:
    code, _, err = shardwise("train", "x" * 5000)
    assert code == 66 and err.startswith("error[CFG011]: cannot read xxx")
    code, _, err = shardwise("train", "--out", "x" * 5000, "--run", "a")
    assert code == 73 and refuses(err, "OUT002", "too long") and "xxx" in err


def test_a_defect_ends_with_70_and_keeps_its_traceback(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours\nsecond line")

    monkeypatch.setattr(schema, "recipe_schema", broken)
    code, out, err = shardwise("schema")
    assert (code, out) == (70, "")
    first, where, fix = err.splitlines()
    assert refuses(first, "BUG001", "shardwise", "ZeroDivisionError: of ours")
    assert shows(fix, "fix", "--debug", "traceback")
    kept = Path(where.removeprefix("where: the full traceback is in "))
    assert "Traceback (most recent call last)" in kept.read_text()
    kept.unlink()
    code, _, err = shardwise("schema", "--debug")
    assert code == 70 and "Traceback (most recent call last)" in err
    Path(err.partition("is in ")[2].splitlines()[0]).unlink()


@pytest.mark.parametrize(
    ("raised", "ended", "code", "said"),
    [
        (MemoryError(), 1, "MEM001", "MemoryError"),
        (ImportError(f"libtorch_cpu.so: {UNMAPPED}"), 1, "MEM001", f"libtorch_cpu.so: {UNMAPPED}"),
        (
            ImportError(f"PLEASE READ THIS\n\nOriginal error was: x.so: {UNMAPPED}"),
            1,
            "MEM001",
            f"Original error was: x.so: {UNMAPPED}",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "MEM001", "[Errno 12] Cannot allocate memory"),
        (RuntimeError(THREADLESS), 1, "MEM001", THREADLESS),
        (AssertionError(), 70, "BUG001", "AssertionError"),
    ],
)
def test_errors_that_say_nothing_or_that_memory_ran_out(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, raised: Exception, ended: int, code: str, said: str
) -> None:
    def silent(*_: object) -> None:
        raise raised

    monkeypatch.setattr(schema, "recipe_schema", silent)
    found, _, err = shardwise("schema")
    assert found == ended and refuses(err.splitlines()[0], code, said)
    if ended == 70:
        Path(err.partition("is in ")[2].splitlines()[0]).unlink()


def test_the_first_line_of_what_an_exception_says() -> None:
    said = [first_line(error, 5) for error in (MemoryError(), ValueError("\n\n"), OSError(" first\nsecond"))]
    assert said == ["MemoryError", "ValueError", "first"]


def test_ctrl_c_ends_with_130(shardwise: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "recipe_schema", interrupted)
    monkeypatch.setattr(interrupt, "_said", threading.Lock())
    assert shardwise("schema") == (130, "", "interrupted\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_is_told(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(schema, "recipe_schema", full)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        code, _, err = shardwise("schema")
    assert code == 73 and err.startswith(f"error[OUT003]: {os.strerror(number)}: ")


def test_control_characters_of_a_file_never_reach_the_terminal(shardwise: Run) -> None:
    Path("r.yaml").write_text('"a\\u001b[31m": 1\n')
    code, _, err = shardwise("train", "r.yaml")
    assert code == 78
    assert "\x1b" not in err and refuses(err, "CFG001", "`a\\x1b[31m`")


def test_more_processes_than_cores_are_tried_and_more_than_memory_refused(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-75."""
    many = len(os.sched_getaffinity(0)) + 2
    for command in (("train", "--dry-run"), ("plan",)):
        code, out, err = shardwise(*command, "--nproc", str(many), "--global-batch-size", str(2 * many))
        assert code == 0 and f"over {many}" in out
        assert f"warning[DEV002]: {many} processes share {many - 2} core" in err
    monkeypatch.setattr("shardwise.spec.cluster.available_memory_bytes", lambda: 8 * 2**30)
    code, _, err = shardwise("train", "--nproc", "1024")
    assert code == 2 and err.startswith("error[DEV001]: 1024 processes ") and "300.0 MiB" in err
    assert err.endswith("fix:   `--nproc 27`\n")
    assert list(Path().iterdir()) == []


def test_a_port_that_is_none(shardwise: Run) -> None:
    """B-73. No port of this machine is opened, so none can be taken."""
    code, _, err = shardwise("train", "run.nodes=2", "--port", "70000")
    assert code == 2 and refuses(err, "CLI001", "'--port'")
    assert list(Path().iterdir()) == []


def test_a_plan_for_other_machines(shardwise: Run) -> None:
    """B-26."""
    Path("plan.yaml").write_text(dump_plan(replace(Plan(), layout=Layout(dp_replicate=8, ranks_per_node=8))))
    code, _, err = shardwise("train", "--plan", "plan.yaml", "--nproc", "1", "--dry-run")
    assert code == 78 and refuses(err, "RUN001", "plan.yaml", 8, 1, where="plan.yaml", fix="`run.nproc=8`")


def test_a_plan_of_another_recipe(shardwise: Run) -> None:
    """Without adapters it would silently train every weight, and export would look for adapters."""
    Path("plan.yaml").write_text(dump_plan(replace(Plan(), batch=replace(Plan().batch, seq_len=256))))
    words = ("train", "--plan", "plan.yaml", "--nproc", "1", "--dry-run", "train.global_batch_size=1")
    assert shardwise(*words)[0] == 0
    code, _, err = shardwise(*words, "recompute=full", "compile=true", "train.global_batch_size=8")
    assert code == 78 and shows(err, "`recompute.mode` none", "full")
    assert shows(err, "`compile` none", True) and shows(err, "`train.global_batch_size` 1", 8)
    code, _, err = shardwise(*words, "lora.rank=8", "optim.name=adamw8bit")
    assert code == 78 and refuses(err, "PLAN019", "`lora` none", "Lora(rank=8")
    assert shows(err, "`optim.name` adamw", "adamw8bit")
    code, _, err = shardwise(*words, "train.seq_len=128", "precision.weights=bf16", "precision.compute=bf16")
    assert code == 78 and "`train.seq_len` 256, the recipe 128" in err
    assert "`precision.weights` fp32, the recipe bf16" in err
    code, _, err = shardwise("train", "--nproc", "1", "--dry-run", "lora.rank=8", "lora.targets=[]")
    assert code == 78 and "`lora.targets` names no layer" in err


def test_an_edited_plan_that_contradicts_itself(shardwise: Run) -> None:
    wrong = replace(Plan(), batch=replace(Plan().batch, seq_len=256), precision=Precision("fp64", reduce="bf16"))
    Path("plan.yaml").write_text(dump_plan(wrong))
    batch = "train.global_batch_size=1"
    code, _, err = shardwise("train", "--plan", "plan.yaml", "--nproc", "1", "--dry-run", batch)
    assert code == 78 and err.startswith("error[PLAN012]: gradients of fp64 ") and "bf16" in err


def test_norms_of_blocks_have_no_narrower_type(shardwise: Run) -> None:
    for compute, norms in (("fp32", "bf16"), ("fp64", "fp32")):
        words = f"precision.compute={compute}", f'precision.modules={{"*attention_norm": {norms}}}'
        code, _, err = shardwise("train", "--nproc", "1", "--dry-run", f"precision.weights={compute}", *words)
        assert code == 78 and err.startswith("error[PLAN012]: norms ") and norms in err
        assert f"fix:   {compute}\n" in err


def test_products_that_torch_does_not_know(shardwise: Run) -> None:
    words = ("train", "--nproc", "1", "--dry-run")
    code, _, err = shardwise(*words, "precision.matmul=widened")
    assert (
        code == 78
        and err.startswith("error[CFG005]: `precision.matmul` ")
        and shows(err, "auto", "highest", "high", "medium")
    )
    Path("plan.yaml").write_text(dump_plan(Plan()).replace("matmul: highest", "matmul: widened"))
    code, _, err = shardwise(*words, "--plan", "plan.yaml")
    assert (
        code == 78
        and err.startswith("error[CFG005]: `precision.matmul` ")
        and shows(err, "of highest", "high", "medium")
        and "auto" not in err
    )


def test_a_plan_is_written_over_nothing(shardwise: Run) -> None:
    Path("mine.yaml").write_text("train: {seq_len: 256}\n")
    code, _, err = shardwise("plan", "-o", "mine.yaml")
    assert code == 73 and err.startswith("error[OUT001]: mine.yaml exists")
    assert Path("mine.yaml").read_text() == "train: {seq_len: 256}\n"


@pytest.mark.parametrize(
    ("pins", "ranks", "chosen"),
    [
        (["dp_shard=2"], 2, "ZeRO-1 over 2"),
        (["dp_replicate=2"], 2, "DDP over 2"),
        (["dp_shard=1", "tp=1"], 2, "DDP over 2"),
        (["dp_replicate=2", "tp=1"], 4, "ZeRO-1"),
        (["dp_replicate=2", "tp=2"], 4, "DDP over 2, tp 2"),
        (["dp_shard=3"], 2, None),
        (["dp_shard=4", "strategy=zero3"], 1, None),
        (["dp_replicate=4"], 1, None),
        (["dp_replicate=2", "dp_shard=2"], 8, None),
    ],
)
def test_a_mesh_that_is_pinned_is_obeyed_or_refused(
    shardwise: Run, pins: list[str], ranks: int, chosen: str | None
) -> None:
    code, out, err = shardwise("plan", "--cluster", f"{ranks}xRTX-4090", *(f"parallel.{pin}" for pin in pins))
    if chosen is None:
        assert code == 78 and err.startswith("error[PLAN001]")
    else:
        assert code == 0 and f"chosen: {chosen}" in out


def test_another_runs_directory(shardwise: Run) -> None:
    """B-69."""
    Path("runs/a/checkpoints/step-00000400").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text("train: {seq_len: 7}\n")
    code, _, err = shardwise("train", "--run", "a")
    assert code == 73 and refuses(err, "OUT001", "runs/a", '"a"', 400, where="runs/a", fix="`--resume`")
    assert shows(err, "train.seq_len 256", 7, "train.global_batch_size 4", None, "train.max_steps 500", None)


def test_a_disk_that_is_too_small(shardwise: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-71."""
    monkeypatch.setattr(start.rundir.shutil, "disk_usage", lambda path: os.terminal_size((0, 0)) and _Usage())
    code, _, err = shardwise("train", "--dry-run", "--nproc", "1")
    assert code == 73
    assert refuses(err, "OUT003", "63.6 MB", 2) and " 211." in err


class _Usage:
    free = 1000


def test_help_is_quick_and_imports_little() -> None:
    program = (
        "import sys; from shardwise.cli.app import main; main(['--help']);"
        "print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.endswith("set()\n")
    # processor time: what the clock shows when nothing else runs
    assert min(seconds) < 0.5, f"shardwise --help took {min(seconds):.2f} s"


def test_every_command_has_help(shardwise: Run) -> None:
    code, out, _ = shardwise("--help")
    assert code == 0
    for name, said in app.COMMANDS.items():
        assert f"  {name} " in out and said in " ".join(out.split())
        code, text, _ = shardwise(name, "--help")
        assert code == 0 and said[:-1] in " ".join(text.split())
        assert ("--debug" in text) == (name != "data")
