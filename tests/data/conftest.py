"""A small corpus and a small tokenizer, made once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.data import tokens
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared
from shardwise.spec.recipe import Data, TokenizerSection

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "é",
    "ü",
    "—",
    "1234",
    "def",
    "return\n",
    "",
    "self.",
]


def prose(words: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words)) + "\n"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokens.Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokens.train_tokenizer([prose(2000, seed=0)], 300, directory)
    return tokens.open_directory(directory)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """12 text files of unequal length."""
    directory = tmp_path / "corpus"
    (directory / "inner").mkdir(parents=True)
    for index in range(12):
        name = f"inner/{index}.txt" if index % 2 else f"{index}.md"
        (directory / name).write_text(prose(5 + 37 * index, seed=index), encoding="utf-8")
    return directory


@pytest.fixture
def settings(tmp_path: Path, tokenizer: tokens.Tokenizer) -> Callable[..., Data]:
    """The data section of a recipe with a cache of its own and the small tokenizer."""

    def make(path: Path | str | list[str], **more: object) -> Data:
        facts: dict[str, object] = {
            "path": str(path) if isinstance(path, Path) else path,
            "cache": str(tmp_path / "cache"),
            "num_proc": 1,
            "tokenizer": TokenizerSection(path=str(tokenizer.directory)),
        }
        return Data.model_validate({**facts, **more})

    return make


@pytest.fixture
def prepared(corpus: Path, settings: Callable[..., Data]) -> Prepared:
    return prepare(settings(corpus, validation_share=0.2))
