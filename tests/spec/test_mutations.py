"""Whatever is done to a valid recipe, the outcome is a recipe or an error with a code; never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.spec.keys import keys_of
from shardwise.spec.load import dump_recipe, load_recipe, recipe_schema
from shardwise.spec.recipe import Recipe

TEXT = dump_recipe(
    load_recipe(None, ["optim.groups=[{pattern: 'a*'}]", "precision.modules.head=fp32", "model.config.hidden_size=64"])
)
VALUES = ["", "null", "true", "-1", "0", "1", "1.5", "1e999", ".nan", "abc", "[1]", "{a: 1}", "9" * 30, "8k", "'", "*x"]
NASTY = st.one_of(
    st.text(alphabet=" \t\n:-#'\"[]{}&*!|>%@`,?\\0aé\x00\x85\u2028\ufeff\U0001f600$", max_size=12),
    st.binary(max_size=6).map(lambda content: content.decode("latin-1")),
    st.sampled_from(
        [*VALUES, "&a", "*a", "!!python/object:os.system", "${x}", "<<: ", "---\n", "...\n", "%YAML 9.9\n"]
    ),
)


def outcome(path: Path | None, overrides: list[str]) -> Recipe | None:
    """The recipe, or None after an error whose problems all carry a code, a text and a remedy."""
    try:
        return load_recipe(path, overrides)
    except ShardwiseError as error:
        assert error.exit_code in (66, 77, 78)
        for problem in error.problems:
            assert problem.code[:3] in ("CFG", "SEC") and problem.code[3:].isdigit()
            assert problem.what
            assert problem.code == "CFG007" or problem.fix
        return None


@pytest.mark.prove
@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(TEXT)), cut=st.integers(0, 30), put=NASTY)
def test_mutated_text(tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: str) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    path.write_text(TEXT[:at] + put + TEXT[at + cut :], encoding="utf-8", errors="surrogateescape")
    outcome(path, [])


@settings(max_examples=150, deadline=None)
@given(
    key=st.one_of(st.sampled_from(sorted(keys_of(recipe_schema()).leaves)), st.text(max_size=12)),
    value=st.one_of(st.sampled_from(VALUES), st.text(max_size=12)),
)
def test_mutated_overrides(key: str, value: str) -> None:
    outcome(None, [f"{key}={value}"])


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_recipe(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    path.write_bytes(content)
    outcome(path, [])


def test_what_is_accepted_is_accepted_again_after_writing(tmp_path: Path) -> None:
    draw = random.Random(0)
    keys, accepted = sorted(keys_of(recipe_schema()).leaves), 0
    for _ in range(150):
        found = outcome(None, [f"{draw.choice(keys)}={draw.choice(VALUES)}"])
        if found is not None:
            (tmp_path / "r.yaml").write_text(dump_recipe(found), encoding="utf-8")
            assert load_recipe(tmp_path / "r.yaml") == found
            accepted += 1
    assert accepted >= 20
