"""Certificates that are read back: of what they are, what of it has changed, what is no certificate; and what ``train``
does about them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import prove
from shardwise.cli.app import main
from shardwise.cli.start import How
from shardwise.cli.work import work
from shardwise.data import tokens
from shardwise.errors import ShardwiseError
from shardwise.launch import local
from shardwise.launch.local import Ended
from shardwise.launch.worker import LAUNCHER
from shardwise.prove import basis
from shardwise.runtime import loop
from shardwise.spec.load import dump_recipe, load_recipe
from tests.runtime.small_run import recipe
from tests.said import shows

RECIPE, SETTINGS = "mine.yaml", ["parallel.strategy=zero3"]
Checked = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a tiny run was proved, of drift alone: so it takes a second."""
    directory = tmp_path_factory.mktemp("proved")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        patched.setattr(prove, "available_memory_bytes", lambda: 1)
        Path(RECIPE).write_text(dump_recipe(recipe(directory, run={"nproc": 2})))
        assert main(["prove", RECIPE, *SETTINGS, "--quick"]) == 0
    return directory


@pytest.fixture
def certificate(
    proved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Path:
    """The certificate in a copy of the directory, where no rank may be started."""
    shutil.copytree(proved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "available_memory_bytes", lambda: 1)
    monkeypatch.setattr(local, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    capfd.readouterr()
    [found] = Path("certificates").rglob("certificate.json")
    return found


@pytest.fixture
def checked(capfd: pytest.CaptureFixture[str]) -> Checked:
    """``prove --check`` with these words: its exit code and what it says as JSON."""

    def check(*words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main(["prove", "--check", *words, "--json"])
        return code, json.loads(capfd.readouterr().out)

    return check


def names(told: dict[str, Any]) -> dict[str, set[str]]:
    return {part: set(changes) for part, changes in told["changed"].items()}


def test_a_certificate_says_what_it_covers_and_that_it_matches(certificate: Path, checked: Checked) -> None:
    for path in (certificate, certificate.parent):
        code, told = checked(str(path))
        assert (code, told["holds"], told["matches"], told["changed"]) == (0, True, True, {})
    assert [check["proof"] for check in told["checks"]] == ["drift", "drift", "recipe"]
    assert any("2 ranks" in line for line in told["not_shown"])
    kept = json.loads(certificate.read_text())
    assert kept["digests"] == basis.digests(told["basis"])
    assert {"recipe", "model", "plan", "data", "versions", "code", "all"} == set(kept["digests"])
    assert certificate.parent.name == f"mine-{kept['digests']['plan'][:8]}"


def test_in_words(certificate: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--check", str(certificate)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert shows(lines[-1], "matches") and any("no data" in line for line in lines)
    assert main(["prove", "--check", str(certificate), RECIPE, *SETTINGS, "optim.learning_rate=0.5"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-3:-1] == ["another recipe:", "  optim.learning_rate 0.01 -> 0.5"] and "not match" in lines[-1]


CHANGED: dict[str, tuple[list[str], dict[str, set[str]]]] = {
    "optimizer": (["optim.weight_decay=0.5"], {"recipe": {"optim.weight_decay"}}),
    "seed": (["run.seed=3"], {"recipe": {"run.seed"}}),
    "length": (["train.max_steps=9"], {"recipe": {"train.max_steps"}}),
    "model": (
        ["model.config.num_hidden_layers=3"],
        {"recipe": {"model.config.num_hidden_layers"}, "model": {"num_hidden_layers"}, "plan": {"model"}},
    ),
    "recomputation": (["recompute.mode=full"], {"plan": {"remat.mode"}}),
    "batch": (["train.micro_batch_size=2"], {}),
    "data": (["data.text_key=body"], {"recipe": {"data.text_key"}}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_changed_is_named(what: str, certificate: Path, checked: Checked) -> None:
    settings, expected = CHANGED[what]
    code, told = checked(str(certificate), RECIPE, *SETTINGS, *settings)
    assert (code, told["holds"], told["matches"]) == (1, True, False)
    found = names(told)
    assert found.pop("model", set()) - {"name"} == expected.get("model", set())
    if what == "batch":
        assert "train.micro_batch_size" in found["recipe"] and "batch.micro_batch_size" in found["plan"]
    else:
        assert found == {part: keys for part, keys in expected.items() if part != "model"}


def test_what_decides_no_number_changes_nothing(certificate: Path, checked: Checked) -> None:
    others = ["run.name=another", "run.timeout_s=90", "checkpoint.save_steps=7", "evaluate.max_batches=9"]
    assert checked(str(certificate), RECIPE, *SETTINGS, *others)[0] == 0
    Path("plan.yaml").unlink(missing_ok=True)
    assert main(["plan", RECIPE, *SETTINGS, "-o", "plan.yaml"]) == 0  # another day's estimate and reasons
    edited = Path("plan.yaml").read_text().replace("peak_bytes: ", "peak_bytes: 1")
    Path("plan.yaml").write_text(edited)
    assert checked(str(certificate), RECIPE, *SETTINGS, "--plan", "plan.yaml")[0] == 0


def test_the_recipe_of_the_certificate_is_read_again(certificate: Path, checked: Checked) -> None:
    text = Path(RECIPE).read_text()
    Path(RECIPE).write_text(text.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    code, told = checked(str(certificate))
    assert code == 1 and told["changed"] == {"recipe": {"optim.learning_rate": {"then": 0.01, "now": 0.02}}}
    Path(RECIPE).unlink()
    assert main(["prove", "--check", str(certificate)]) == 66


def test_other_versions_and_other_code(certificate: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*basis._code()]
    assert len(found) > 300 and dict(found)["prove/basis.py"]
    monkeypatch.setattr(basis, "_code", lambda: iter([(found[0][0], "0"), *found[1:-1], ("new.py", "1")]))
    monkeypatch.setattr(basis, "version", lambda name: "9.9")
    code, told = checked(str(certificate))
    assert code == 1
    assert names(told) == {"versions": {"torch", "transformers"}, "code": {found[0][0], found[-1][0], "new.py"}}
    assert told["changed"]["code"]["new.py"] == {"then": "not there", "now": "1"}


def test_data_that_are_prepared_are_part_of_it(
    certificate: Path, checked: Checked, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the certificate that was written before they were they are none."""
    small = ["data.path=text/0.txt", *SETTINGS]
    assert main(["data", "prepare", RECIPE, *small]) == 0
    assert checked(str(certificate))[0] == 0
    assert main(["prove", RECIPE, *small, "--quick", "-o", "second"]) == 0
    assert checked("second")[0] == 0
    with Path("text/0.txt").open("a") as file:
        file.write("one line more")
    code, told = checked("second")
    assert code == 1 and names(told) == {"data": {"fingerprint", "tokenizer"}}
    assert {change["now"] for change in told["changed"]["data"].values()} == {"not there"}
    assert main(["data", "prepare", RECIPE, *small]) == 0
    code, told = checked("second")
    assert code == 1 and "not there" not in {change["now"] for change in told["changed"]["data"].values()}


def damaged(text: str, how: str) -> str:
    kept = json.loads(text)
    if how == "cut short":
        return text[: len(text) // 2]
    if how == "another verdict":
        return json.dumps(kept | {"holds": not kept["holds"]})
    if how == "another basis":
        kept["basis"]["versions"]["torch"] = "1.0"
    if how == "no checks":
        kept.pop("checks")
    if how == "of the wrong type":
        kept["not_shown"] = 3
    if how == "of the first format":
        kept = {key: value for key, value in kept.items() if key not in ("format", "basis", "sha256", "command")}
    if how == "of a newer format":
        kept["format"] = 99
    return json.dumps(kept)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("cut short", "CERT002"),
        ("another verdict", "CERT002"),
        ("another basis", "CERT002"),
        ("no checks", "CERT002"),
        ("of the wrong type", "CERT002"),
        ("of the first format", "CERT003"),
        ("of a newer format", "CERT003"),
    ],
)
def test_what_is_damaged_or_of_another_format(how: str, code: str, certificate: Path, checked: Checked) -> None:
    certificate.write_text(damaged(certificate.read_text(), how))
    rc, told = checked(str(certificate))
    assert (rc, [problem["code"] for problem in told["error"]["problems"]]) == (65, [code])


@pytest.mark.parametrize(
    ("name", "text", "rc", "code"),
    [
        ("plan.yaml", "layout: 1", 65, "CERT002"),
        ("list.json", "[1, 2]", 65, "CERT002"),
        ("empty.json", "", 65, "CERT002"),
        ("other.json", "{}", 65, "CERT002"),
        ("missing.json", None, 66, "CFG011"),
        ("directory", None, 66, "CFG011"),
    ],
)
def test_what_is_no_certificate(
    name: str, text: str | None, rc: int, code: str, checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "directory":
        Path(name).mkdir()
    elif text is not None:
        Path(name).write_text(text)
    found, told = checked(name)
    assert (found, told["error"]["problems"][0]["code"]) == (rc, code)


def test_train_tells_of_it(certificate: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", RECIPE, *SETTINGS, "--dry-run"]) == 0
    told = capfd.readouterr().out
    assert told.count("certificate ") == 1 and shows(told, f"certificate {certificate.parent}", "holds")
    assert main(["train", RECIPE, *SETTINGS, "--dry-run", "run.name=mine-7", "optim.weight_decay=0.5"]) == 0
    told = capfd.readouterr().out
    assert shows(told, f"certificate {certificate.parent}", "not match", "recipe", "optim.weight_decay 0.1 -> 0.5")
    certificate.write_text("{")
    assert main(["train", RECIPE, *SETTINGS, "--dry-run"]) == 0
    assert "is damaged" in capfd.readouterr().out
    certificate.unlink()
    assert main(["train", RECIPE, *SETTINGS, "--dry-run"]) == 0
    assert "certificate" not in capfd.readouterr().out


@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_certificate_that_is_required(
    words: list[str], certificate: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    required = [RECIPE, *SETTINGS, "run.certificate=require", "run.name=mine-1", "run.out=runs"]
    assert main(["train", *required, "optim.weight_decay=0.5", *words]) == 78
    told = capfd.readouterr().err
    assert "error[CERT001]" in told and "optim.weight_decay 0.1 -> 0.5" in told
    assert f"`shardwise prove {' '.join(required)} optim.weight_decay=0.5`" in told
    assert not Path("runs/mine-1/plan.yaml").exists()
    started: list[object] = []
    monkeypatch.setattr(local, "run_ranks", lambda *given, **named: started.append(given) or Ended(0))
    assert main(["train", *required, *words]) == 0
    assert len(started) == (not words)
    kept = json.loads(certificate.read_text())
    kept["holds"], kept["verdict"] = False, "does not hold: drift failed"
    kept["sha256"] = basis.digest({key: value for key, value in kept.items() if key != "sha256"})
    certificate.write_text(json.dumps(kept))
    capfd.readouterr()
    assert main(["train", *required[:-1], "run.name=mine-2", *words]) == 78
    assert "drift failed" in capfd.readouterr().err
    certificate.unlink()
    assert main(["train", *required[:-1], "run.name=mine-2", *words]) == 78
    assert shows(capfd.readouterr().err, "no certificate", "in certificates")


def test_a_rank_that_torchrun_started_asks_too(
    certificate: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our launcher has asked for its own ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(LAUNCHER, raising=False)
    trained: list[object] = []
    monkeypatch.setattr(loop, "train", lambda *given, **named: trained.append(given))
    asked = load_recipe(RECIPE, ["run.certificate=require", "run.name=alone", "run.out=runs", "run.nproc=1"])
    done = work(asked, How())
    assert isinstance(done, ShardwiseError) and [one.code for one in done.problems] == ["CERT001"] and not trained
    assert "shardwise prove" in capfd.readouterr().err


def test_no_secret_of_a_url_is_kept(certificate: Path, checked: Checked) -> None:
    remote = "data.path=https://me:canary1@example.org/text.jsonl?token=canary2"
    assert main(["prove", RECIPE, *SETTINGS, remote, "--quick", "-o", "of-a-url"]) == 0
    written = [path.read_text() for path in Path("of-a-url").iterdir()]
    assert len(written) == 2 and all("example.org" in text and "canary" not in text for text in written)
    code, told = checked("of-a-url", RECIPE, *SETTINGS, remote)
    assert code == 0 and "canary" not in json.dumps(told)


def test_batch_and_length_that_follow_from_the_data_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody prepared the data before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "available_memory_bytes", lambda: 1)
    monkeypatch.setattr(local, "run_ranks", lambda *_, **__: Ended(0))
    talk = '{"messages": [{"role": "user", "content": "say %d"}, {"role": "assistant", "content": "%d %d %d"}]}\n'
    Path("talks.jsonl").write_text("".join(talk % (4 * (n,)) for n in range(300)))
    tokens.train_tokenizer(["say it again " * 50], 300, Path("."))
    sections = {"data": {"path": "talks.jsonl", "chat_template": "zephyr", "tokenizer": {"path": "."}}}
    sections["train"] = {"seq_len": 128, "max_steps": None}
    made = recipe(tmp_path, run={"nproc": 2}, method={"name": "sft"}, **sections)
    Path(RECIPE).write_text(dump_recipe(made))
    assert main(["prove", RECIPE, "--quick"]) == 0
    [kept] = [json.loads(path.read_text()) for path in Path("certificates").rglob("*.json")]
    settled = kept["basis"]["recipe"]
    assert settled["train.global_batch_size"] < 32 and settled["train.num_epochs"] == 3.0 and kept["basis"]["data"]
    assert main(["train", RECIPE, "run.certificate=require"]) == 0
    assert "holds and matches" in capfd.readouterr().out
