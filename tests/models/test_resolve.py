"""Which tokenizer a recipe means: the named one, the one of the model that is trained on, or one made for the text."""

from __future__ import annotations

import pytest

from shardwise.models.resolve import data_of
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Tokenizer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.path=a/b"], Tokenizer(path="a/b")),
        (["model.path=a/b", "model.revision=v1"], Tokenizer(path="a/b", revision="v1")),
        (["model.path=models/x/model.safetensors"], Tokenizer(path="models/x")),
        (["model.path=a/b", "data.tokenizer.path=c/d"], Tokenizer(path="c/d")),
        (["model.path=a/b", "data.tokenizer.vocab_size=300"], Tokenizer(vocab_size=300)),
        (["model.path=a/b", "model.init=random"], Tokenizer()),
        (["model.config.vocab_size=9"], Tokenizer()),
    ],
)
def test_a_model_that_is_trained_on_brings_its_tokenizer(words: list[str], expected: Tokenizer) -> None:
    recipe = load_recipe(None, words)
    assert data_of(recipe).tokenizer == expected
    assert data_of(recipe).model_copy(update={"tokenizer": recipe.data.tokenizer}) == recipe.data
