"""``shardwise plan --html``: the page has all that the text has, is one file, and is refused before any work."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import plan as command
from shardwise.cli import planned as answers
from shardwise.cli.app import main
from shardwise.cli.plan_page import recipe_text
from shardwise.pages.page import WebPage
from shardwise.spec.load import load_recipe
from shardwise.spec.units import show_seconds
from tests.cli.test_compare import write_run
from tests.pages.parsed import Parsed, faults
from tests.said import refuses, shows

CASES = {
    "nodes": ["model=meta-llama/Llama-3.2-1B", "seq_len=1024", "--cluster", "2x8xL40S", "--tokens", "1B"],
    "pipeline": ["model=meta-llama/Llama-3.2-1B", "seq_len=1024", "--cluster", "8xH100", "pp=4", "--price", "H100=2"],
    "does not fit": ["model=meta-llama/Llama-3.1-8B", "--cluster", "1xRTX-4090"],
    "cpu": ["--cluster", "2xCPU,host=64GB"],
    "on the host": ["model=meta-llama/Llama-3.2-1B", "--cluster", "1xRTX-4090", "offload.optimizer=host"],
}


def cells(text: str) -> list[str]:
    """The words and figures of a text page, without marks, bars and drawings."""
    found = [cell.strip().lower() for line in text.splitlines() for cell in re.split(r" {2,}", line)]
    return [cell.removeprefix("next: ") for cell in found if cell.strip("#>")]


def words(path: Path) -> str:
    return re.sub(r"\s+", " ", Parsed(path.read_text(encoding="utf-8")).words).lower()


SLOW = ("nodes", "pipeline")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.prove] * (case in SLOW)) for case in CASES])
def test_the_page_has_every_figure_of_the_text(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "plan.html"
    assert main(["plan", *CASES[case], "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert faults(page.read_text(encoding="utf-8")) == []
    told = words(page)
    missing = [cell for cell in cells(text) if cell not in told]
    assert not missing, missing
    pictures = Parsed(page.read_text(encoding="utf-8")).pictures()
    assert len(pictures) >= 6


def test_with_json_the_page_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *CASES["cpu"], "--json", "--html", str(page)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    told = words(page)
    assert found["cluster"]["device"]["name"].lower() in told
    assert f"{found['tokens_per_s']:,.0f} tokens/s" in told
    assert all(" ".join(reason.lower().split()) in told for reason in found["plan"]["why"].values())


def test_what_a_recipe_names_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "<script>alert(1)<b onclick=x>"
    (tmp_path / evil).mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, **sizes}
    (tmp_path / evil / "config.json").write_text(json.dumps(config))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"# {evil}\nmodel:\n  path: '{evil}'\ndata:\n  path: '</pre>{evil}'\n")
    assert main(["plan", str(recipe), "--cluster", "2xCPU,host=8GB", "--html", "plan.html"]) == 0
    text = Path("plan.html").read_text(encoding="utf-8")
    assert faults(text) == [] and "<script" not in text and "<b " not in text
    assert Parsed(text).words.count(evil) >= 2


@pytest.mark.parametrize("words", [[], ["model.path=x/y", "train.seq_len=512", "optim.beta2=0.99"]])
def test_the_recipe_to_copy_is_the_same_recipe(words: list[str], tmp_path: Path) -> None:
    recipe = load_recipe(None, words)
    (tmp_path / "copied.yaml").write_text(recipe_text(recipe))
    assert load_recipe(tmp_path / "copied.yaml") == recipe


def nothing_is_searched(*given: object, **named: object) -> Any:
    raise AssertionError("a plan was searched for")


def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "planned", nothing_is_searched)
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    (tmp_path / "file").write_text("")
    for name, code in (("notes.html", "OUT001"), ("file/plan.html", "OUT002"), (".", "OUT001"), ("x" * 300, "OUT00")):
        assert main(["plan", *CASES["cpu"], "--html", str(tmp_path / name)]) != 0
        said = capsys.readouterr().err
        assert code in said or refuses(said, "CFG011"), said
    assert (tmp_path / "notes.html").read_text() == "<p>mine</p>"
    assert main(["plan", "--html", "x.html", "--smallest"]) != 0
    assert refuses(capsys.readouterr().err, "CLI001", where="--html")


def test_a_page_of_ours_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *CASES["cpu"], "--html", str(page)]) == 0
    first = page.read_text(encoding="utf-8")
    assert main(["plan", *CASES["cpu"], "train.seq_len=128", "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8") != first
    assert [one.name for one in tmp_path.iterdir()] == ["plan.html"]


def test_a_page_is_replaced_by_one_of_its_kind_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan, a run and a comparison: each is kept from the commands that write another."""
    runs = [str(write_run(tmp_path / name, 4, 0.1)) for name in "ab"]
    plan, both, report = (tmp_path / f"{name}.html" for name in ("plan", "both", "report"))
    make_plan, make_both = ["plan", *CASES["cpu"], "--html"], ["compare", *runs, "--html"]
    assert main([*make_plan, str(plan)]) == 0 and main([*make_both, str(both)]) == 0
    report.write_text(WebPage("Run a", "done", [], kind="run").html(), encoding="utf-8")
    there = {path: path.read_bytes() for path in (plan, both, report)}
    capsys.readouterr()
    for asked, other in ((make_plan, both), (make_plan, report), (make_both, plan), (make_both, report)):
        assert main([*asked, str(other)]) != 0
        assert refuses(capsys.readouterr().err, "OUT001", other.name, where="--html")
    assert there == {path: path.read_bytes() for path in there}
    assert main([*make_both, str(both)]) == 0


def test_a_plan_from_a_file_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    assert main(["plan", *CASES["cpu"], "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["plan", "--plan", str(plan), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert faults(page.read_text(encoding="utf-8")) == []
    told = words(page)
    skip = text.index("the best plan of each kind"), text.index("memory of the fullest")
    missing = [cell for cell in cells(text[: skip[0]] + text[skip[1] :]) if cell not in told]
    assert not missing, missing


def test_what_would_change_a_plan_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, own = [], answers.alternatives

    def counted(*given: Any) -> Any:
        asked.append(given)
        return own(*given)

    monkeypatch.setattr(answers, "alternatives", counted)
    assert main(["plan", *CASES["cpu"], "--html", str(tmp_path / "plan.html")]) == 0
    assert len(asked) == 1


def test_what_is_secret_in_a_url_is_on_no_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    url = "data.path=https://user:sekret@host.example/x.jsonl?token=qx77"
    assert main(["plan", *CASES["cpu"], url, "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "host.example" in text and "sekret" not in text and "qx77" not in text


def listings(path: Path) -> list[str]:
    """The texts of a page that are to be copied."""
    found = re.findall(r"<pre[^>]*>(.*?)</pre>", path.read_text(encoding="utf-8"), re.DOTALL)
    return [html.unescape(text) for text in found]


def test_commands_on_a_page_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stands alone; what the page says is typed makes the plan, with and without a file for it."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *CASES["cpu"], "train.seq_len=64", "--html", "first.html"]) == 0
    *_, again = listings(Path("first.html"))
    assert main([*shlex.split(again)[1:], "--html", "second.html"]) == 0 and Path("plan.yaml").is_file()
    *_, train, prove = listings(Path("second.html"))
    for text, name in ((train, "train"), (prove, "prove")):
        found = shlex.split(text)
        assert found[:2] == ["shardwise", name] and found[-2:] == ["--plan", "plan.yaml"]


def test_every_column_of_changes_has_a_head(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *CASES["cpu"], "--html", str(page)]) == 0
    [head] = [row for row in re.findall(r"<thead>.*?</thead>", page.read_text(), re.DOTALL) if ">change<" in row]
    found = re.findall(r"<th[^>]*>(.*?)</th>", head)
    assert len({*found}) == 8 and all(found)


def test_a_page_is_not_written_over_the_plan(tmp_path: Path) -> None:
    same = str(tmp_path / "same")
    assert main(["plan", *CASES["cpu"], "--html", same, "-o", same]) == 2
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_written_is_named_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for option, more in (("--html", []), ("--plot", ["parallel.pp=2"])):
        assert main(["plan", *CASES["cpu"], *more, option, str(tmp_path / "file" / "it")]) != 0
        assert refuses(said := capsys.readouterr().err, "OUT002", fix=option) and "--out" not in said
    assert main(["plan", *CASES["cpu"], "parallel.pp=2", "--plot", str(tmp_path / "file")]) != 0
    assert refuses(capsys.readouterr().err, "OUT001", where="--plot")


def test_nothing_is_made_before_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "new" / "one" / "plan.html"
    assert main(["plan", str(tmp_path / "nowhere.yaml"), "--html", str(page)]) != 0
    assert not [*tmp_path.iterdir()]
    assert main(["plan", *CASES["cpu"], "--html", str(page)]) == 0
    assert [*page.parent.iterdir()] == [page]


def notes_of(path: Path) -> list[str]:
    """The words below the pictures of a page."""
    return re.findall(r'<p class="small">(.*?)</p>', path.read_text(encoding="utf-8"))


def test_of_a_step_whose_micro_batches_are_not_all_drawn_the_whole_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, words = (
        tmp_path / "plan.html",
        ["plan", *CASES["on the host"], "--html", str(tmp_path / "plan.html"), "--json"],
    )
    for count in (2, 3, 16):
        shape = ["train.micro_batch_size=1", f"train.global_batch_size={count}"]
        assert main([*words, *shape]) == 0
        found = json.loads(capsys.readouterr().out)["plan"]["estimate"]["seconds"]
        share = f"{found['optimizer_s'] / found['step_s']:.1%}"
        told = [note for note in notes_of(page) if shows(note, count - 2, count, show_seconds(found["step_s"]), share)]
        assert len(told) == (count > 2)


def test_the_drawing_of_a_pipeline_tells_both_shares_that_are_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That over all ranks, which the text has too, and that of the slowest rank in a whole step."""
    page, words = tmp_path / "plan.html", ["plan", "--cluster", "2xCPU,host=64GB", "parallel.pp=2"]
    assert main([*words, "--html", str(page), "--explain", "schedule"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("idle over all ranks"))
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]["estimate"]["seconds"]
    assert any(shows(note, line, f"{found['exposed_s']['pp'] / found['step_s']:.0%}") for note in notes_of(page))
