"""``shardwise compare`` of what runs leave, finished, unfinished, damaged or none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.spec.load import dump_recipe
from shardwise.spec.recipe import Recipe
from tests.pages.parsed import SVG, Parsed, faults
from tests.said import refuses, shows


def write_run(directory: Path, steps: int, slope: float, finished: bool = True, **changes: Any) -> Path:
    """A run whose loss is 5 - slope x step, as a run writes it."""
    directory.mkdir(parents=True)
    sections: dict[str, Any] = {"run": {"name": directory.name}, **changes}
    (directory / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate(sections)))
    rows = [
        {"step": n, "tokens": 64 * n, "loss": 5 - slope * n, "tokens_per_s": 100.0 + n, "seconds": 0.5, "mfu": None}
        | {"memory_bytes": 2**30 + n, "skipped": n == 2}
        for n in range(1, steps + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "ranks": 2}]
    for n in (steps // 2, steps):
        events.append({"event": "validation", "step": n, "nats_per_token": 6 - slope * n, "bits_per_byte": 1.0})
    events += [{"event": "end", "step": steps, "tokens": 64 * steps}] if finished else []
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if finished:
        table = "| | predicted | measured | |\n|---|---:|---:|---:|\n| memory per rank | 1.5 MiB | 1.6 MiB | +1 % |\n"
        (directory / "report.md").write_text(f"# {directory.name}\n\n{table}")
    return directory


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    a = write_run(tmp_path / "a", 20, 0.1, optim={"learning_rate": 1e-3}, train={"max_steps": 20})
    b = write_run(tmp_path / "b", 10, 0.2, False, optim={"learning_rate": 2e-3}, train={"max_steps": 20})
    return str(a), str(b)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["compare", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_runs_of_different_length_by_their_common_steps(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, *pair)
    assert found["recipe"] == {"optim.learning_rate": [0.001, 0.002]}
    assert [row[0] for row in found["losses"]] == [1, 3, 5, 6, 8, 10]
    assert found["losses"][-1] == [10, pytest.approx(4.0), pytest.approx(3.0)]
    a, b = found["runs"]
    assert (a["finished"], a["steps"], b["finished"], b["steps"]) == (True, 20, False, 10)
    assert a["best_loss"] == {"step": 20, "loss": pytest.approx(3.0)}
    assert a["last_validation"] == a["best_validation"] == {"step": 20, "nats_per_token": pytest.approx(4.0)}
    assert (a["tokens_per_s"], a["step_s"], a["memory_bytes"]) == (112.0, 0.5, 2**30 + 20)
    assert (a["skipped_steps"], a["tokens"], a["ranks"], a["mfu"]) == (1, 1280, 2, None)
    assert a["measured"] == {"memory per rank": "1.6 MiB"} and b["measured"] == {}


def test_it_is_said_to_people(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *pair]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "state finished" + " not finished",
        "optim.learning_rate 0.001 0.002",
        "last loss 3.0000 3.0000 +0.0 %",
        "10 4.0000 3.0000 -1.0000",
        "tokens/s 112 107 -4.5 %",
    ):
        assert line in lines
    assert not any("run.name" in line for line in lines)


@pytest.fixture
def sweep(tmp_path: Path) -> list[str]:
    """Four runs that differ in two settings: one is not finished, one has not begun."""
    slopes = {"slow": (0.1, 1e-3, 0), "fast": (0.2, 2e-3, 0), "early": (0.3, 4e-3, 1)}
    runs = [
        write_run(
            tmp_path / name,
            10 if name == "early" else 20,
            slope,
            name != "early",
            optim={"learning_rate": rate},
            train={"max_steps": 20},
            run={"name": name, "seed": seed},
        )
        for name, (slope, rate, seed) in slopes.items()
    ]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").write_text("optim: {learning_rate: 8.0e-3}\ntrain: {max_steps: 20}\n")
    return [*map(str, runs), str(tmp_path / "new")]


def test_a_sweep_is_a_table_of_the_settings_that_differ(sweep: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Expected values are those of the straight lines that were written: 5 - slope x step."""
    assert main(["compare", *sweep[:3]]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    names = ["run", "optim.learning_rate", "run.seed", "loss at 10", "steps", "last loss", "best validation"]
    assert [head.index(name) for name in names] == sorted(head.index(name) for name in names)
    assert "train.max_steps" not in head and "run.name" not in head
    assert [row.split()[1:4] for row in rows] == [
        ["0.001", "0", "4.0000"],
        ["0.002", "0", "3.0000"],
        ["0.004", "1", "2.0000"],
    ]
    assert rows[0].split()[4:] == ["20", "3.0000", "4.0000", "500.0", "ms", "0:00:10", "112", "1.0", "GiB"]
    assert rows[2].split()[4:7] == ["10,", "not", "finished"]
    found = told(capsys, *sweep)
    assert found["recipe"] == {"optim.learning_rate": [1e-3, 2e-3, 4e-3, 8e-3], "run.seed": [0, 0, 1, 0]}
    assert (found["losses"], [run["trained_s"] for run in found["runs"]]) == ([], [10.0, 10.0, 5.0, 0.0])
    assert told(capsys, *sweep[:3])["losses"][-1] == [10, *map(pytest.approx, (4.0, 3.0, 2.0))]


@pytest.mark.parametrize(
    ("word", "order"),
    [
        ("loss", ["fast", "early", "slow", "new"]),
        ("validation", ["fast", "early", "slow", "new"]),
        ("speed", ["slow", "fast", "early", "new"]),
    ],
)
def test_the_best_come_first(sweep: list[str], capsys: pytest.CaptureFixture[str], word: str, order: list[str]) -> None:
    """Last losses are 3, 1, 2 and none; tokens a second 112, 112, 107 and none."""
    found = told(capsys, *sweep, "--sort", word)
    assert [Path(run["run"]).name for run in found["runs"]] == order
    assert found["recipe"]["optim.learning_rate"][-1] == 8e-3, "in the same order as the runs"
    assert main(["compare", *sweep, "--sort", word]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [Path(row.split()[0]).name for row in rows] == order and rows[-1].split()[3:5] == ["0,", "not"]


def test_what_cannot_be_compared_or_sorted(sweep: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", sweep[0]]) == 2
    assert f"`shardwise compare {sweep[0]} OTHER_RUN`" in capsys.readouterr().err
    assert main(["compare", *sweep, "--sort", "beauty"]) == 2
    assert "one of loss, validation, speed" in capsys.readouterr().err
    assert main(["compare"]) == 2


def test_a_run_that_is_writing_or_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A torn last line is left out; without any step there is nothing in common, and that is said."""
    a = write_run(tmp_path / "a", 4, 0.1)
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").write_text("optim: {learning_rate: 3.0e-4}\n")
    found = told(capsys, str(a), str(tmp_path / "new"))
    assert (found["runs"][0]["steps"], found["runs"][1]["steps"], found["losses"]) == (4, 0, [])
    assert found["recipe"] == {}, "what is left out is the default"
    assert main(["compare", str(a), str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "no steps in" in out and "are the same" in out


def test_steps_that_were_not_finite_are_no_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", 4, 0.1)
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "tokens_per_s": 1.0, "seconds": 1.0}\n')
    with (a / "events.jsonl").open("a") as file:
        file.write('{"event": "validation", "step": 5, "nats_per_token": null}\n')
    b = copytree(a, tmp_path / "b")
    found = told(capsys, str(a), str(b))
    assert found["runs"][0]["last_loss"] == pytest.approx(4.6) and found["losses"][-1][0] == 4
    assert found["runs"][0]["last_validation"] == {"step": 5, "nats_per_token": None}
    assert main(["compare", str(a), str(b)]) == 0


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_what_is_no_run_is_refused(
    tmp_path: Path, pair: tuple[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["compare", pair[0], str(tmp_path / name)]) == 66
    err = capsys.readouterr().err
    assert refuses(err, "CFG011", "run")


def test_damaged_lines_are_named_and_left_out(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """One without a step, one that is torn, one with a byte that is no UTF-8; a torn event."""
    path, events = Path(pair[0]) / "metrics.jsonl", Path(pair[0]) / "events.jsonl"
    data = (
        path.read_bytes().replace(b'{"step": 3,', b'{"stop": 3,').replace(b'{"step": 5, "tok', b'\n{"step": 5, "t\xff')
    )
    path.write_bytes(data)
    events.write_bytes(b'{"event": "st\n' + events.read_bytes())
    assert main(["compare", *pair]) == 0
    captured = capsys.readouterr()
    places = f"{path}:3", f"{path}:5", f"{path}:6", f"{events}:1"
    for line, place in zip(captured.err.splitlines(), places, strict=True):
        assert refuses(line, "LOG001", place, "left out", as_warning=True)
    assert "20  " in captured.out and "last loss" in captured.out


def test_losses_that_are_not_of_the_same_thing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, 4, 0.1) for name in ("a", "b", "c")]
    runs.append(write_run(tmp_path / "d", 4, 0.1, method={"name": "sft"}))
    for run, data, tokenizer in zip(runs, ("x", "y", "x", "x"), ("t", "t", "u", "t"), strict=True):
        (run / "run.json").write_text(json.dumps({"data": data, "tokenizer": tokenizer}))
    a, b, c, d = map(str, runs)
    assert told(capsys, a, str(copytree(a, tmp_path / "e")))["warnings"] == []
    assert "the data differ" in told(capsys, a, b)["warnings"][0]
    assert "the tokenizers differ" in told(capsys, a, c)["warnings"][0]
    assert "(pretrain and sft)" in told(capsys, a, d)["warnings"][0]
    assert main(["compare", a, d]) == 0
    assert shows(capsys.readouterr().out, "warning", "different methods")
    (runs[2] / "run.json").write_text("{")
    assert told(capsys, a, c)["warnings"] == [], "nothing is known of its tokenizer"


def test_it_is_quick_and_loads_no_torch(pair: tuple[str, str]) -> None:
    """10,000 steps each; half a second of this process's time is ten times what it takes to read them."""
    rows = (Path(pair[0]) / "metrics.jsonl").read_text().splitlines()
    for run in pair:
        lines = [rows[0].replace('"step": 1,', f'"step": {n},') for n in range(1, 10_001)]
        (Path(run) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    program = (
        "import sys\nfrom shardwise.cli.app import main\ncode = main(['compare', *sys.argv[1:]])\n"
        "sys.exit(code or ('torch' in sys.modules) * 99)\n"
    )
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run([sys.executable, "-c", program, *pair], capture_output=True, env={"PYTHONPATH": source})
    assert done.returncode == 0, done.stderr
    took_s = []
    for _ in range(3):  # a collection of all garbage of this process may fall into one
        begun = time.process_time()
        assert main(["compare", *pair]) == 0
        took_s.append(time.process_time() - begun)
    assert min(took_s) < 0.5


def test_a_page_of_runs_has_their_curves_and_every_figure(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "both.html"
    third = str(write_run(tmp_path / "<script>c", 15, 0.15))
    for runs in (pair, (*pair, third)):
        assert main(["compare", *runs, "--html", str(page)]) == 0
        text, found = capsys.readouterr().out, page.read_text(encoding="utf-8")
        assert faults(found) == [] and "<script" not in found
        told = " ".join(Parsed(found).words.lower().split())
        cells = [cell.strip().lower() for line in text.splitlines() for cell in re.split(" {2,}", line)]
        assert not [cell for cell in cells if cell not in told]
        loss, *_ = Parsed(found).pictures()
        points = [len(each.get("points", "").split()) for each in loss.iter(f"{SVG}polyline")]
        assert points[:2] == [20, 10] and len(points) == 2 * len(runs)


@pytest.mark.parametrize("finished", [True, False])
def test_a_page_of_one_run(finished: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of one that was killed, which wrote no report."""
    run, page = write_run(tmp_path / "one", 20, 0.1, finished), tmp_path / "one.html"
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "checkpoint failed", "step": 7, "what": "no room <b>"}) + "\n")
    for _ in range(2):
        assert main(["compare", str(run), "--html", str(page)]) == 0
    found = page.read_text(encoding="utf-8")
    assert faults(found) == []
    told = " ".join(Parsed(found).words.split())
    cells = [cell.strip() for line in capsys.readouterr().out.splitlines() for cell in re.split(" {2,}", line)]
    assert len(cells) > 20 and not [cell for cell in cells if cell not in told]
    assert shows(told, "checkpoint failed", 7, "no room <b>") and ("not finished" in told) != finished
    loss, *others = Parsed(found).pictures()
    assert [len(each.get("points", "").split()) for each in loss.iter(f"{SVG}polyline")] == [20, 2] and len(others) == 5
    assert main(["compare", str(run), "--html", str(page), "--json"]) == 0
    assert [one["steps"] for one in json.loads(capsys.readouterr().out)["runs"]] == [20]


def test_a_run_that_is_named_twice_is_refused(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair
    assert main(["compare", a, b, f"{a}/../a"]) == 2
    assert refuses(capsys.readouterr().err, "CLI001", a, where="RUN")


def test_a_page_of_runs_that_cannot_be_written(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *pair, "--html", f"{pair[0]}/metrics.jsonl"]) != 0
    assert refuses(capsys.readouterr().err, "OUT001", "metrics.jsonl", where="--html")


def test_what_is_secret_in_a_url_is_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the text nor in the page nor for programs, of two runs or of three, and in lists of paths."""
    page, url = tmp_path / "page.html", "https://user:sekret@host.example/{}.jsonl?token=qx77"
    paths: tuple[Any, ...] = (url.format("x"), [url.format("y"), url.format("z")], "text.txt")
    runs = [str(write_run(tmp_path / f"r{n}", 4, 0.1, data={"path": path})) for n, path in enumerate(paths)]
    for some in (runs[:2], runs):
        for more in ([], ["--json"]):
            assert main(["compare", *some, "--html", str(page), *more]) == 0
            for text in (capsys.readouterr().out, page.read_text(encoding="utf-8")):
                assert "host.example/x.jsonl" in text and "host.example/z.jsonl" in text
                assert "sekret" not in text and "qx77" not in text
