"""Rows of the embedding and the output layer for tokens that a recipe adds to a model's tokenizer."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from shardwise.errors import ConfigError, DataError, MissingInputError, Problem, UnavailableError
from shardwise.spec.files import read_regular
from shardwise.spec.hub import fetch
from shardwise.spec.recipe import Data, LoraSection, TokenizerSection
from shardwise.spec.units import counted

FILE = "tokenizer.json"
_DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
_KINDS = {"add_tokens": False, "add_special_tokens": True}


def adds_tokens(data: Data) -> bool:
    """Return whether the files of a model may have fewer rows than the model."""
    return bool(_asked(data))


def rows_for(data: Data, lora: LoraSection, rows: int) -> int:
    """Return how many rows a model of ``rows`` has with the tokens that are added to its tokenizer: those it has where
    they are enough, as where a model has rows to spare. A tokenizer that is not at hand, as where a known model is
    planned, is taken to need each. Raises DataError TOK004 for one that cannot be read, and ConfigError CFG008 where
    adapters would leave the rows of new tokens as they are."""
    if not adds_tokens(data) or data.tokenizer.path is None:
        return rows
    ids = _ids_of(data.tokenizer)
    last = max(ids.values(), default=rows - 1)
    new = [text for text in _asked(data) if text not in ids]
    if new and lora.rank is not None and lora.path is None and not {*lora.modules_to_save} & {"embed", "embed_tokens"}:
        what = f"adapters leave the embedding as it is, so that the row of the new token `{new[0]}` would never learn"
        fix = "lora.modules_to_save: [embed_tokens, lm_head]"
        raise ConfigError(Problem("CFG008", what, "lora.modules_to_save", fix))
    return max(rows, last + 1 + len(new))


def told(data: Data) -> str:
    """Return what a run says of tokens that are added: how many are new, and which the tokenizer had before."""
    if not adds_tokens(data):
        return ""
    ids = _ids_of(data.tokenizer)
    known = [text for text in _asked(data) if text in ids]
    had = f"; {', '.join(f'`{text}`' for text in known)} {'was' if len(known) == 1 else 'were'} in it before"
    return f", {counted(len(_asked(data)) - len(known), 'token')} added{had * bool(known)}"


def _asked(data: Data) -> list[str]:
    return [*data.add_tokens, *data.add_special_tokens]


def _ids_of(named: TokenizerSection) -> dict[str, int]:
    """Every token of a tokenizer with its id; empty where it is not at hand."""
    if named.path is None:
        return {}
    directory = Path(named.path).expanduser()
    if not directory.is_dir():
        try:
            directory = fetch(named.path, named.revision, [FILE], "data.tokenizer.path")
        except (UnavailableError, MissingInputError):  # training, which needs it, says so
            return {}
    try:
        content = json.loads(read_regular(directory / FILE))
        vocabulary = content["model"]["vocab"]
        pairs = isinstance(vocabulary, list)  # of a unigram model, with their scores
        ids = {text: i for i, (text, _) in enumerate(vocabulary)} if pairs else {**vocabulary}
        return ids | {token["content"]: token["id"] for token in content["added_tokens"]}
    except _DAMAGED as error:
        what = f"tokens are added by the ids of a {FILE}, and {directory} has none that can be read"
        fix = "save the tokenizer once with transformers' save_pretrained, and name that directory"
        raise DataError(Problem("TOK004", what, "data.tokenizer.path", fix)) from error


def with_added(data: Data, own: TokenizerSection, adapter: Path) -> Data:
    """The data with the tokens that were added where an adapter was trained, which the model's own tokenizer does
    not have: they are in the tokenizer beside it, where the recipe names no other."""
    named = data.tokenizer != TokenizerSection() or own.path is None
    if adds_tokens(data) or named or not (adapter / FILE).is_file():
        return data
    with suppress(*_DAMAGED, DataError):
        listed, ids = json.loads(read_regular(adapter / FILE))["added_tokens"], _ids_of(own)
        new = [(token["content"], token["special"]) for token in listed if token["content"] not in ids]
        kinds = {name: [text for text, marks in new if marks is special] for name, special in _KINDS.items()}
        if new:
            return data.model_copy(update={"tokenizer": TokenizerSection(path=str(adapter)), **kinds})
    return data
