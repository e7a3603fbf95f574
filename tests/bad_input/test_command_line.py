"""What is wrong is told by the command itself: exit code and words pinned, no rank started, no file made.

The cases bear the numbers of the list that the project was planned with. Errors of checkpoints (B-29 to B-37) are in
tests/runtime/checkpoint/test_save.py and, for model files, tests/cli/test_pretrained.py; ports, plans and run
directories (B-26, B-69, B-71, B-73) in tests/cli/test_errors.py;
ranks that differ (B-27) in tests/runtime/test_world.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.launch import local
from shardwise.launch.local import Ended

Run = Callable[..., tuple[int, str]]
TINY = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = [f"model.config.{key}={value}" for key, value in TINY.items()]
WORDS += ["model.config.num_key_value_heads=1", "data.cache=cache", "data.tokenizer.vocab_size=300", "train.seq_len=16"]
WORDS += ["train.global_batch_size=4", "--nproc", "1", "--run", "a", "--max-steps", "40", "optim.warmup_steps=10"]


@pytest.fixture
def shardwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty directory: (exit code, what it said). Starting a rank fails the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def launch(*_: object, **__: object) -> Ended:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(local, "run_ranks", launch)

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        return code, capfd.readouterr().err.replace(str(tmp_path), "HERE")

    return run


def text(code: str, what: str, where: str, fix: str) -> str:
    return f"error[{code}]: {what}\nwhere: {where}\nfix:   {fix}\n"


RECIPES = [
    (
        "B-01",
        "trian: {seq_len: 4}",
        78,
        ("CFG001", "unknown key `trian.seq_len`", "r.yaml:1", "did you mean `train.seq_len`?"),
    ),
    (
        "B-02",
        "lr: abc",
        78,
        ("CFG002", '`optim.learning_rate` must be a number > 0, got text "abc"', "r.yaml:1", "give a number > 0"),
    ),
    ("B-03", "run:\n  seed: 1\n  seed: 2", 78, ("CFG003", "`run.seed` is set twice", "r.yaml:2 and :3", "remove one")),
    (
        "B-04",
        "train: {max_steps: 1.5}",
        78,
        (
            "CFG004",
            "`train.max_steps` must be a whole number ≥ 1, or null, got 1.5",
            "r.yaml:1",
            "give a whole number ≥ 1, or null",
        ),
    ),
    (
        "B-05",
        "optim: {warmup_steps: 5000}\ntrain: {max_steps: 1000}",
        78,
        (
            "CFG005",
            "`warmup_steps` 5000 exceeds `max_steps` 1000",
            "r.yaml:1",
            "`optim.warmup_steps: 1000` or less, or a larger `train.max_steps`",
        ),
    ),
    (
        "B-06",
        "optim: {max_grad_norm: .nan}",
        78,
        ("CFG006", "`optim.max_grad_norm` is NaN", "r.yaml:1", "use a finite number, or null to turn it off"),
    ),
    (
        "B-07",
        "train:\n\tseq_len: 4",
        78,
        ("CFG007", "r.yaml:2:1 is not valid YAML: found a tab", "r.yaml:2:1", "indent with spaces"),
    ),
    (
        "B-09",
        "train: {global_batch_size: 10, micro_batch_size: 4, gradient_accumulation_steps: 1}",
        78,
        (
            "CFG008",
            "global_batch_size 10 is not a multiple of micro 4 × accumulation 1 = 4",
            "r.yaml:1",
            "`train.global_batch_size: 12`, or drop one of the three",
        ),
    ),
    (
        "B-10",
        "format: 3",
        78,
        ("CFG009", "written for format 3, this program reads up to 1", "r.yaml:1", "upgrade: pip install -U shardwise"),
    ),
    (
        "B-11",
        "data: !!python/object/apply:os.system ['touch canary']",
        77,
        (
            "SEC001",
            "a Python object tag, `!!python/object/apply:os.system`; refused, nothing was executed",
            "r.yaml:1",
            "remove the tag",
        ),
    ),
    (
        "B-12",
        "a: " + "[" * 100,
        77,
        (
            "SEC002",
            "r.yaml:1 is nested more than 64 deep (limit)",
            "r.yaml:1",
            "write the values out, in one small file",
        ),
    ),
    (
        "B-13",
        "data: !include ../../etc/passwd",
        77,
        ("SEC003", "`!include`: includes are refused", "r.yaml:1", "write the text into this file"),
    ),
]


@pytest.mark.parametrize(("case", "recipe", "code", "problem"), RECIPES, ids=[row[0] for row in RECIPES])
def test_a_recipe(shardwise: Run, case: str, recipe: str, code: int, problem: tuple[str, str, str, str]) -> None:
    Path("r.yaml").write_text(recipe)
    assert shardwise("train", "r.yaml") == (code, text(*problem))
    assert [path.name for path in Path().iterdir()] == ["r.yaml"]


def test_b08_a_setting(shardwise: Run) -> None:
    problem = (
        "CFG001",
        "unknown key `optm.lr`",
        "`optm.lr=3` on the command line",
        "did you mean `optim.learning_rate`?",
    )
    assert shardwise("train", "optm.lr=3") == (78, text(*problem))


LINES = '{"content": "x", "id": 1}\n'
DATA = [
    (
        "B-49 glob",
        {"d/a.jsonl.gz": "x"},
        "d/*.jsonl",
        66,
        ("DATA001", "`d/*.jsonl` matches no file (did you mean d/*.jsonl.gz?)", "data.path", "data.path=d/*.jsonl.gz"),
    ),
    (
        "B-49 file",
        {"text.txt": "x"},
        "txet.txt",
        66,
        ("DATA001", "`txet.txt` does not exist (did you mean text.txt?)", "data.path", "data.path=text.txt"),
    ),
    (
        "B-49 directory",
        {"d/.hidden": "x"},
        "d",
        66,
        ("DATA001", "`d` is a directory without files", "data.path", "name another directory, or a file"),
    ),
    (
        "B-50",
        {"d/a.txt": "", "d/b.txt": "", "d/c.txt": ""},
        "d",
        65,
        ("DATA002", "0 documents in 3 files", "data.path", "name data with text in it"),
    ),
    (
        "B-51",
        {"a.txt": "some words\n" * 20},
        "a.txt",
        65,
        (
            "DATA003",
            "58 tokens, one global batch needs 4 x 16 = 64 (and one more)",
            "data.path",
            "train.global_batch_size=3, or train.seq_len=14, or data.repeat=true, to read samples more than once in "
            "a step, or more data",
        ),
    ),
    (
        "B-52",
        {"a.jsonl": '{"text": "fine"}\n' * 9 + '{"text": "abc\n'},
        "a.jsonl",
        65,
        (
            "DATA004",
            'a.jsonl:10 col 10: unterminated string: `{"text": "abc`',
            "HERE/a.jsonl",
            "repair the line: sed -n 10p HERE/a.jsonl; data.on_bad_sample=skip leaves out every bad record",
        ),
    ),
    (
        "B-53",
        {"a.jsonl": LINES * 20},
        "a.jsonl",
        65,
        (
            "DATA005",
            "a.jsonl:1 has no `text`; its keys are content, id; the same at "
            + ", ".join(f"a.jsonl:{line}" for line in range(2, 21)),
            "HERE/a.jsonl",
            "data.text_key=content; data.on_bad_sample=skip leaves out every bad record (these are the first 20)",
        ),
    ),
]


@pytest.mark.parametrize(("case", "files", "path", "code", "problem"), DATA, ids=[row[0] for row in DATA])
def test_data(
    shardwise: Run, case: str, files: dict[str, str], path: str, code: int, problem: tuple[str, str, str, str]
) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    assert shardwise("train", *WORDS, f"data.path={path}") == (code, text(*problem))
    assert not Path("runs").exists()
    if case.startswith("B-49"):
        assert shardwise("train", *WORDS, f"data.path={path}", "--dry-run") == (code, text(*problem))
        assert not Path("runs").exists()


def test_b57_a_tokenizer_larger_than_the_model(shardwise: Run) -> None:
    Path("a.txt").write_text("".join(f"{n} and {n * n}\n" for n in range(500)))
    problem = (
        "TOK001",
        "tokenizer has 300 ids, model 260",
        "data.tokenizer",
        "model.config.vocab_size=300 for a new model, or the tokenizer that belongs to the model",
    )
    assert shardwise("train", *WORDS, "data.path=a.txt", "model.config.vocab_size=260") == (65, text(*problem))
    assert not Path("runs/a").exists()


def test_b70_where_nothing_can_be_written(shardwise: Run) -> None:
    Path("a.txt").write_text("words\n" * 2000)
    Path("file").write_text("")
    fix = "`--out` a directory that can be written (checked by a probe file, fsync and rename)"
    problem = ("OUT002", "cannot write file/a: part of the path is a file", "file/a", fix)
    assert shardwise("train", *WORDS, "data.path=a.txt", "--out", "file") == (73, text(*problem))


def test_what_stands_where_a_model_is_exported_to_is_never_replaced(shardwise: Run) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text("run: {seed: 0}\n")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    fix = "another --out"
    for place in ("mine", "mine/thesis.txt"):
        problem = ("OUT001", f"{place} exists; nothing is overwritten", "--out", fix)
        assert shardwise("export", "runs/a", "-o", place) == (73, text(*problem))
    assert Path("mine/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("words", [("plan", "-o", "file/x.yaml"), ("export", "runs/a", "-o", "file/x")])
def test_a_result_that_cannot_be_written(shardwise: Run, words: tuple[str, ...]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text("run: {seed: 0}\n")
    Path("file").write_text("")
    fix = "`--out` a directory that can be written (checked by a probe file, fsync and rename)"
    assert shardwise(*words) == (73, text("OUT002", "cannot write HERE/file: it is a file", "HERE/file", fix))
