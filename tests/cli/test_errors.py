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

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]
OUT = "error[MEM001]: out of memory"


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


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("train", "--sequence-lenn", "4"),
            78,
            "error[CFG001]: unknown key `sequence_lenn`\nwhere: `sequence_lenn=4` on the command line\n"
            "fix:   did you mean `train.seq_len`?\n",
        ),
        (
            ("train", "--optm.lr=3"),
            78,
            "error[CFG001]: unknown key `optm.lr`\nwhere: `optm.lr=3` on the command line\n"
            "fix:   did you mean `optim.learning_rate`?\n",
        ),
        (
            ("train", "quickstrat"),
            66,
            "error[CFG011]: cannot read quickstrat: no such file, and no recipe that ships has this name\n"
            "fix:   did you mean `quickstart`?\n",
        ),
        (
            ("train", "nowhere.yaml"),
            66,
            "error[CFG011]: cannot read nowhere.yaml: no such file\nfix:   check the path\n",
        ),
        (
            ("train", "--device", "cuda", "--nproc", "8"),
            2,
            "error[DEV001]: 8 processes on GPUs asked for, and no GPU found\nwhere: run.nproc\n"
            f"fix:   `--device cpu --nproc {min(2, len(os.sched_getaffinity(0)))}`; "
            "`shardwise plan --cluster 8xH100` plans for machines elsewhere\n",
        ),
        (
            ("train", "--run", "../x"),
            73,
            "error[OUT006]: `../x` cannot be a run's name: run names are letters, digits, . _ -, at most 100, and "
            "start with a letter or digit\nwhere: run.name\nfix:   `--run my-run-1`\n",
        ),
        (
            ("train", "--bogus"),
            2,
            "error[CLI001]: unknown option `--bogus`\nwhere: the command line\nfix:   `shardwise --help` lists them\n",
        ),
        (
            ("train", "--resum"),
            2,
            "error[CLI001]: unknown option `--resum`\nwhere: the command line\nfix:   did you mean `--resume`?\n",
        ),
        (
            ("train", "--seq-len"),
            2,
            "error[CLI001]: `--seq-len` needs a value\nwhere: the command line\nfix:   `--seq-len VALUE`\n",
        ),
        (
            ("train", "a.yaml", "b.yaml"),
            2,
            "error[CLI001]: two recipes: `a.yaml` and `b.yaml`\nwhere: the command line\n"
            "fix:   name one; settings are written key=value\n",
        ),
        (
            ("train", "--port", "x"),
            2,
            "error[CLI001]: Invalid value for '--port': Input should be a valid integer, unable to parse string as an "
            "integer\nwhere: the command line\n"
            "fix:   `shardwise train --help`\n",
        ),
        (
            ("train", "--cluster", "2x8xH100"),
            2,
            "error[CLI001]: `2x8xH100`: only `shardwise plan` takes other machines; this command runs on this one\n"
            "where: the command line\n"
            "fix:   `run.device=cuda run.nproc=8 run.nodes=2` to run on such machines, "
            "`shardwise plan --cluster 2x8xH100` to plan for them\n",
        ),
        (
            ("data", "prepare", "cluster=2xCPU"),
            2,
            "error[CLI001]: `2xCPU`: only `shardwise plan` takes other machines; this command runs on this one\n"
            "where: the command line\n"
            "fix:   `run.device=cpu run.nproc=2` to run on such machines, "
            "`shardwise plan --cluster 2xCPU` to plan for them\n",
        ),
        (
            ("train", "--cluster", "8xH101"),
            78,
            "error[CLU002]: unknown device `H101`\nwhere: --cluster\nfix:   did you mean H100-SXM-80GB?\n",
        ),
        (
            ("plan", "train.global_batch_size=10", "train.micro_batch_size=4"),
            78,
            "error[CFG008]: global_batch_size 10 is not a multiple of micro 4 × accumulation 1 = 4\n"
            "where: `train.global_batch_size=10` on the command line\n"
            "fix:   `train.global_batch_size=12`, or drop one of the three\n",
        ),
        (
            ("train", "model.config={}", "model.init=pretrained"),
            78,
            "error[CFG008]: `model.init: pretrained` needs weights, and `model.config` has none\n"
            "where: `model.init=pretrained` on the command line\nfix:   `model.init=random`, or `model.path`\n",
        ),
        (
            ("fly",),
            2,
            "error[CLI001]: No such command 'fly'.\nwhere: the command line\nfix:   `shardwise --help`\n",
        ),
        (
            ("plan", "--explain", "everything"),
            2,
            "error[CLI001]: nothing to explain about `everything`\nwhere: --explain\n"
            "fix:   one of memory, network, time, schedule, why, keys\n",
        ),
        (
            ("plan", "--cluster", "8xH101"),
            78,
            "error[CLU002]: unknown device `H101`\nwhere: --cluster\nfix:   did you mean H100-SXM-80GB?\n",
        ),
        (
            ("train", "--resume", "--run", "gone"),
            66,
            "error[CFG011]: cannot read gone: no such file\nfix:   check the path\n",
        ),
    ],
)
def test_errors(shardwise: Run, words: tuple[str, ...], code: int, message: str) -> None:
    if "--resume" in words:
        words = ("train", "--resume", "gone")
    found, out, err = shardwise(*words)
    assert (found, out, err) == (code, "", message)
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
    assert code == 73 and err.startswith("error[OUT002]: cannot write xxx") and "the name is too long" in err


def test_a_defect_ends_with_70_and_keeps_its_traceback(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours\nsecond line")

    monkeypatch.setattr(schema, "recipe_schema", broken)
    code, out, err = shardwise("schema")
    assert (code, out) == (70, "")
    first, where, fix = err.splitlines()
    assert first == "error[BUG001]: a bug in shardwise: ZeroDivisionError: of ours"
    assert fix == "fix:   report it with that file; --debug prints the traceback"
    kept = Path(where.removeprefix("where: the full traceback is in "))
    assert "Traceback (most recent call last)" in kept.read_text()
    kept.unlink()
    code, _, err = shardwise("schema", "--debug")
    assert code == 70 and "Traceback (most recent call last)" in err
    Path(err.partition("is in ")[2].splitlines()[0]).unlink()


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (MemoryError(), 1, "error[MEM001]: out of memory: MemoryError"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            1,
            f"{OUT}: libtorch_cpu.so: failed to map segment from shared object",
        ),
        (
            ImportError("PLEASE READ THIS\n\nOriginal error was: x.so: failed to map segment"),
            1,
            f"{OUT}: Original error was: x.so: failed to map segment",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, f"{OUT}: [Errno 12] Cannot allocate memory"),
        (RuntimeError("can't start new thread"), 1, f"{OUT}: can't start new thread"),
        (AssertionError(), 70, "error[BUG001]: a bug in shardwise: AssertionError"),
    ],
)
def test_errors_that_say_nothing_or_that_memory_ran_out(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: int, line: str
) -> None:
    def silent(*_: object) -> None:
        raise raised

    monkeypatch.setattr(schema, "recipe_schema", silent)
    ended, _, err = shardwise("schema")
    assert (ended, err.splitlines()[0]) == (code, line)
    if code == 70:
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
    assert "\x1b" not in err and "unknown key `a\\x1b[31m`" in err


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
    assert code == 2 and err.startswith("error[CLI001]: Invalid value for '--port': ")
    assert list(Path().iterdir()) == []


def test_a_plan_for_other_machines(shardwise: Run) -> None:
    """B-26."""
    Path("plan.yaml").write_text(dump_plan(replace(Plan(), layout=Layout(dp_replicate=8, ranks_per_node=8))))
    code, _, err = shardwise("train", "--plan", "plan.yaml", "--nproc", "1", "--dry-run")
    assert code == 78 and err.startswith("error[RUN001]: plan.yaml is for 8 processes, but 1 ")
    assert "\nwhere: plan.yaml\nfix:   `run.nproc=8`, " in err


def test_a_plan_of_another_recipe(shardwise: Run) -> None:
    """Without adapters it would silently train every weight, and export would look for adapters."""
    Path("plan.yaml").write_text(dump_plan(replace(Plan(), batch=replace(Plan().batch, seq_len=256))))
    words = ("train", "--plan", "plan.yaml", "--nproc", "1", "--dry-run", "train.global_batch_size=1")
    assert shardwise(*words)[0] == 0
    code, _, err = shardwise(*words, "recompute=full", "compile=true", "train.global_batch_size=8")
    assert code == 78 and "`recompute.mode` none, the recipe full" in err
    assert "`compile` none, the recipe True" in err and "`train.global_batch_size` 1, the recipe 8" in err
    code, _, err = shardwise(*words, "lora.rank=8", "optim.name=adamw8bit")
    assert code == 78 and err.startswith("error[PLAN019]: ") and "`lora` none, the recipe Lora(rank=8" in err
    assert "`optim.name` adamw, the recipe adamw8bit" in err
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
    assert code == 78 and err.startswith("error[CFG005]: `precision.matmul` ") and "auto, highest, high, medium" in err
    Path("plan.yaml").write_text(dump_plan(Plan()).replace("matmul: highest", "matmul: widened"))
    code, _, err = shardwise(*words, "--plan", "plan.yaml")
    assert code == 78 and err.startswith("error[CFG005]: `precision.matmul` ") and " of highest, high, medium" in err


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
    assert code == 73 and err.startswith('error[OUT001]: runs/a holds run "a" at step 400')
    assert "train.seq_len 256 (was 7), train.global_batch_size 4 (was None), train.max_steps 500 (was None), ..." in err
    assert "\nwhere: runs/a\nfix:   `--resume`, " in err


def test_a_disk_that_is_too_small(shardwise: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-71."""
    monkeypatch.setattr(start.rundir.shutil, "disk_usage", lambda path: os.terminal_size((0, 0)) and _Usage())
    code, _, err = shardwise("train", "--dry-run", "--nproc", "1")
    assert code == 73
    assert err.startswith("error[OUT003]: a checkpoint is ~63.6 MB, 2 ") and " 211." in err


class _Usage:
    free = 1000


def test_help_is_quick_and_imports_no_torch() -> None:
    program = (
        "import sys; from shardwise.cli.app import main; main(['--help']); print({'torch', 'numpy'} & set(sys.modules))"
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
