"""Relative paths of a recipe are relative to its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec.beside_recipe import placed
from shardwise.spec.load import read_recipe


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a folder of the shell's directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside.jsonl").touch()
    (folder / "both.jsonl").touch()
    (tmp_path / "both.jsonl").touch()
    (tmp_path / "here.jsonl").touch()
    return Path("mine/recipe.yaml")


def data_of(recipe: Path, text: str) -> tuple[object, tuple[str, ...]]:
    recipe.write_text(f"data: {{path: {text}}}\n")
    loaded = read_recipe(recipe)
    return loaded.recipe.data.path, loaded.notices


def test_a_path_is_relative_to_the_recipe(recipe: Path) -> None:
    assert data_of(recipe, "beside.jsonl") == ("mine/beside.jsonl", ())
    assert data_of(recipe, "'bes*.jsonl'") == ("mine/bes*.jsonl", ())


def test_one_of_the_shells_directory_is_read_with_a_word(recipe: Path) -> None:
    path, notices = data_of(recipe, "here.jsonl")
    assert path == "here.jsonl" and "not beside mine/recipe.yaml" in notices[0]
    path, notices = data_of(recipe, "both.jsonl")
    assert path == "mine/both.jsonl" and "the shell's directory" in notices[0]
    path, notices = data_of(recipe, "[beside.jsonl, here.jsonl]")
    assert path == ["mine/beside.jsonl", "here.jsonl"] and len(notices) == 1


@pytest.mark.parametrize(
    "text", ["hf://datasets/org/name", "https://host/both.jsonl", "/tmp/both.jsonl", "stdlib", "no/where"]
)
def test_what_is_no_relative_path_stays(recipe: Path, text: str) -> None:
    assert data_of(recipe, text) == (text, ())


def test_keys_that_are_no_paths_and_recipes_of_runs_stay(recipe: Path) -> None:
    assert placed("run.name", "beside.jsonl", recipe) == ("beside.jsonl", [])
    recipe.write_text("run: {name: mine}\ndata: {path: both.jsonl}\n")
    loaded = read_recipe(recipe)
    assert (loaded.recipe.data.path, loaded.notices) == ("both.jsonl", ())


def test_settings_of_the_command_line_are_the_shells(recipe: Path) -> None:
    recipe.write_text("{}\n")
    loaded = read_recipe(recipe, ["data.path=both.jsonl"])
    assert (loaded.recipe.data.path, loaded.notices) == ("both.jsonl", ())


def test_a_recipe_that_stands_in_the_shells_directory_has_nothing_to_say(recipe: Path) -> None:
    (here := Path("recipe.yaml")).write_text("data: {path: here.jsonl}\n")
    assert read_recipe(here).notices == ()
