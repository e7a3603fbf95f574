"""Files of a run whose contents are JSON or YAML of another shape: every reader says that they are damaged and goes on
where it can, and a run with good checkpoints goes on from them. Seeded mutations, in this process."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.errors import ShardwiseError
from shardwise.launch import rundir
from shardwise.runtime import owner
from shardwise.runtime.checkpoint.locate import best, check_own
from shardwise.runtime.checkpoint.manifest import MANIFEST, STATE, chunk_hashes
from shardwise.runtime.checkpoint.save import RunCheckpoints, read
from shardwise.runtime.faults.outcome import Exit, read_exit, write_exit
from shardwise.runtime.job import read_run
from shardwise.runtime.metrics.log import keep_until
from shardwise.runtime.state import RunFacts
from shardwise.spec.load import dump_recipe, load_recipe
from shardwise.spec.recipe import Checkpoint, Recipe
from tests.bad_input.damage import places
from tests.runtime.checkpoint.checkpoint_ranks import same, values
from tests.said import refuses, shows

NASTY = [
    "1e400", "-1e400", "-1", "-3.5", "NaN", "true", "null", '"x"', '""', "[]", "{}", "[[1]]", '{"a": {"b": []}}',
    "1" * 400, "9" * 5000, "9223372036854775807", "[" * 100_000, '{"a":' * 50_000, '"\\ud800"', '"\\u001b[2J"', "01",
]  # fmt: skip
"""What is put in place of a value, as it stands in the file."""
MARK = "the value to be replaced"
ROUNDS = 22


def mutated(text: str, pick: random.Random, round_: int) -> str:
    """``text`` with another value at one place; every third time, without the value."""
    value = json.loads(text)
    *above, last = pick.choice(list(places(value))[1:])
    target = value
    for key in above:
        target = target[key]
    if round_ % 3 == 2:
        del target[last]
        return json.dumps(value)
    target[last] = MARK
    return json.dumps(value).replace(f'"{MARK}"', NASTY[round_ % len(NASTY)])


def facts(step: int) -> dict[str, Any]:
    counters = {"step": step, "updates": step, "tokens": 64 * step, "cursor": 4 * step, "skipped_in_row": 0}
    scale = {"value": 1.0, "good_steps": 0, "growth_steps": 2000, "enabled": False}
    settings = {"train.max_steps": 4}
    return counters | {"loss_scale": scale, "data": "d" * 32, "settings": settings, "validation": 3.5 - step} | {
        "early_stopping": [3.5 - step, 0]
    }  # fmt: skip


def make(directory: Path) -> Path:
    """A run that was stopped after two of its four steps, with a checkpoint of each."""
    directory.mkdir(parents=True)
    recipe = Recipe.model_validate({"run": {"name": directory.name, "out": str(directory.parent)}})
    (directory / "recipe.yaml").write_text(dump_recipe(recipe))
    row = {"loss": 3.0, "tokens_per_s": 9.5, "seconds": 0.5, "mfu": None, "memory_bytes": 2**30, "skipped": False}
    rows = [{"step": step, "tokens": 64 * step, **row} for step in (1, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "ranks": 2}, {"event": "end", "step": 2}]
    events.insert(1, {"event": "validation", "step": 2, "nats_per_token": 3.5, "bits_per_byte": 1.0})
    (directory / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (directory / "run.json").write_text(json.dumps({"format": 1, "run_id": "run", "data": "d" * 32, "tokenizer": "t"}))
    write_exit(directory, Exit("preempted", 75, "asked to stop", problems=[{"code": "STOP001", "what": "asked"}]))
    held = {"token": "t", "host": "h", "pid": 2**22 + 1, "started": 3, "kernel": owner._kernel(), "beat": "0000000001"}
    (directory / ".owner-1").write_text(json.dumps(held))
    checkpoints = RunCheckpoints(directory / "checkpoints", Checkpoint(), "run")
    for step in (1, 2):
        checkpoints.save(values(step), facts(step), step)
        checkpoints.wait()
    return directory


def seal(step: Path, change: Callable[[dict[str, Any]], str]) -> None:
    """Give the manifest of ``step`` the contents that ``change`` makes of it, with their right sum."""
    text = change(json.loads((step / MANIFEST).read_bytes())["manifest"])
    digest = hashlib.sha256(text.encode()).hexdigest()
    (step / MANIFEST).write_text(f'{{"sha256":"{digest}","manifest":{text}}}\n')


def damage(run: Path, name: str, pick: random.Random, round_: int) -> None:
    """Change one value in the file ``name``. What is hashed in a manifest is hashed again."""
    step = run / "checkpoints" / "step-00000002"
    if name == MANIFEST:
        return seal(step, lambda body: mutated(json.dumps(body), pick, round_))
    path = step / name if name == STATE else run / name
    text = path.read_text()
    if name == "recipe.yaml":
        lines = text.splitlines()
        at = pick.randrange(len(lines))
        lines[at] = lines[at].partition(":")[0] + ": " + NASTY[round_ % len(NASTY)]
        path.write_text(NASTY[round_] if round_ % 3 == 2 else "\n".join(lines))
    elif name.endswith(".jsonl"):
        first, *rest = text.splitlines()
        path.write_text("\n".join([mutated(first, pick, round_), *rest, NASTY[round_ % len(NASTY)]]) + "\n")
    else:
        path.write_text(mutated(text, pick, round_))
    if name == STATE:
        record = chunk_hashes([memoryview(path.read_bytes())])
        seal(step, lambda body: json.dumps(body | {"files": body["files"] | {STATE: vars(record)}}))
    return None


FILES = ("metrics.jsonl", "events.jsonl", "run.json", "exit.json", ".owner-1", "recipe.yaml", MANIFEST, STATE)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", FILES)
def test_a_run_with_a_damaged_file_is_listed_compared_and_resumed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make(tmp_path / "runs" / "good")
    recipe = load_recipe(good / "recipe.yaml")
    pick = random.Random(FILES.index(name))
    for round_ in range(ROUNDS):
        run = shutil.copytree(good, tmp_path / "runs" / f"bad-{round_}")
        damage(run, name, pick, round_)
        assert main(["compare", str(good), str(run), *["--json"] * (round_ % 2)]) == 0
        again = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": run.name})})
        owner.check_free(run)
        try:
            check_own(run / "checkpoints")
        except ShardwiseError as error:  # run.json names another run
            assert name == "run.json" and error.problems[0].code == "CKPT013"
            continue
        assert rundir.check_standing(run, again, resume=True) == 2
        rundir.resuming(run, 2, again), rundir.nothing_to_do(run, again), read_exit(run)
        assert best(run / "checkpoints") is not None
        identity = read_run(run)
        assert identity is not None and {*identity} == {"run_id", "data"}
        state = values(99)
        found = RunCheckpoints(run / "checkpoints", Checkpoint(), "run").resume(state, log=print, kind=RunFacts)
        assert found is not None and same(state, values(found["step"]) if name != STATE else state)
        assert found == facts(2) or name in (MANIFEST, STATE)
        keep_until(run / "metrics.jsonl", 2)
        read(run, values(98))
    capsys.readouterr()
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 1 + ROUNDS and rows["good"]["state"] == "stopped"
    assert main(["runs", str(tmp_path / "runs")]) == 0


def test_what_is_damaged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make(tmp_path / "runs" / "good"), make(tmp_path / "runs" / "bad")
    (bad / "recipe.yaml").write_text("- train\n")
    (bad / "run.json").write_text("[" * 10_000)
    (bad / "exit.json").write_text('{"kind": "preempted", "exit_code": "75", "message": ""}')
    with (bad / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1e400}\n')
    assert main(["compare", str(good), str(bad)]) == 0
    places = bad / "recipe.yaml", f"{bad / 'metrics.jsonl'}:3", bad / "run.json"
    for line, place in zip(capsys.readouterr().err.splitlines(), places, strict=True):
        assert refuses(line, "LOG001", place, "left out", as_warning=True)
    assert main(["runs", str(bad.parent)]) == 0
    assert "bad   damaged: " in capsys.readouterr().out
    (bad / "recipe.yaml").write_text("train: {max_steps: 4}\n")
    assert main(["runs", str(bad.parent)]) == 0
    assert shows(capsys.readouterr().out, "bad", "damaged: exit.json", "2/4", "3.000")
    (bad / "recipe.yaml").write_text("- train\n")
    assert main(["export", str(bad)]) == 78
    assert f"where: {bad / 'recipe.yaml'}" in capsys.readouterr().err
    assert shows(keep_until(bad / "metrics.jsonl", 2), "1 line", "dropped")
    with pytest.raises(ShardwiseError, match=r"recipe\.yaml"):
        load_recipe(bad / "recipe.yaml")
