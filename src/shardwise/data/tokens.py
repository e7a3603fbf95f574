"""Tokenizers: one that exists (a directory or a Hub id) or a byte-level BPE trained on the data, always as a
directory in Hugging Face form.

Text is content: strings in it that look like special tokens are encoded as ordinary text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from shardwise.data.limits import check_growth
from shardwise.data.source import digest
from shardwise.data.whole import once
from shardwise.errors import DataError, MissingInputError, Problem, first_line
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.hub import fetch

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EOT = "<|endoftext|>"
TRAINED_VERSION = 2
"""The version of :func:`train`: equal texts, sizes and versions give equal tokenizers."""
FILES = ("tokenizer.json", "tokenizer_config.json")
KEPT = (*FILES, "special_tokens_map.json", "chat_template.jinja")
_WANTED = (*KEPT, "tokenizer.model", "vocab.*", "merges.txt", "config.json")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_CHARACTERS = 1000
"""Longer words (a run of letters, of spaces, of anything else) are cut where a tokenizer is trained."""
MOST_IDS = 2**24
"""Tables with a place for each id are made: real tokenizers have up to a million."""
_NO_MEANING = ("truncation", "padding", "version")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of ``vocab_size`` ids (the largest id + 1). ``hash`` changes if and only if texts may be encoded
    differently. ``prefix``: the ids that it adds before a text (a begin-of-text token, or nothing)."""

    directory: Path
    hash: str
    vocab_size: int
    eot_id: int
    prefix: tuple[int, ...]
    backend: Backend

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without prefix and end-of-text."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def copy_to(self, directory: Path) -> None:
        """Put the tokenizer's files into ``directory``, where transformers' AutoTokenizer finds them."""
        directory.mkdir(exist_ok=True)
        for name in KEPT:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)


def check_vocabulary(tokenizer_ids: int, model_vocab_size: int) -> None:
    """Raises TOK001 unless every id has a row in the model's embedding."""
    if tokenizer_ids > model_vocab_size:
        what = f"tokenizer has {tokenizer_ids} ids, model {model_vocab_size}"
        fix = f"model.config.vocab_size={tokenizer_ids} for a new model, or the tokenizer that belongs to the model"
        raise DataError(Problem("TOK001", what, "data.tokenizer", fix))


def load(path: str, cache: Path, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a directory or a Hub id. One without ``tokenizer.json`` is converted once, into ``cache``."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = fetch(path, revision, _WANTED, "data.tokenizer.path")
    if not (directory / FILES[0]).is_file():
        directory = _convert(directory, path, cache)
    return open_directory(directory)


def open_directory(directory: Path) -> Tokenizer:
    """A directory that holds ``tokenizer.json`` and ``tokenizer_config.json``. Raises TOK003 without an end-of-text
    token."""
    from tokenizers import Tokenizer as Backend

    try:
        raw = read_regular(directory / FILES[0])
        backend, content = Backend.from_buffer(raw), json.loads(raw)
        check_growth(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise _unusable(directory / FILES[0], first_line(error, 200)) from error
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if vocab_size > MOST_IDS:
        raise _unusable(directory / FILES[0], f"a token has the id {vocab_size - 1:,}, below {MOST_IDS:,} are allowed")
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    named = (special_tokens(directory, name).get("eos_token") for name in (FILES[1], "special_tokens_map.json"))
    eot = next((token for token in named if token is not None), None)
    eot_id = backend.token_to_id(eot) if eot else None
    if eot is None or eot_id is None:
        what = f"no end-of-text token: `{eot}` is not in the vocabulary" if eot else "no end-of-text token"
        fix = f'set "eos_token" in {directory / FILES[1]} to a token of the vocabulary, such as "{_candidate(backend)}"'
        raise DataError(Problem("TOK003", what, "data.tokenizer", fix))
    bare, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    if at > 64:
        raise _unusable(directory / FILES[0], f"it adds {at:,} tokens before a text, at most 64 are allowed")
    meaning = {key: value for key, value in content.items() if key not in _NO_MEANING}
    return Tokenizer(directory, digest([meaning, eot]), vocab_size, eot_id, tuple(full[:at]), backend)


def extended(tokenizer: Tokenizer, ordinary: Sequence[str], special: Sequence[str], cache: Path) -> Tokenizer:
    """The tokenizer with tokens added that it does not have yet, made once, in ``cache``: ``ordinary`` ones stand for
    their texts wherever these are, ``special`` ones only where a template writes them."""
    from tokenizers import AddedToken

    def make(directory: Path) -> None:
        tokenizer.copy_to(directory)
        backend = type(tokenizer.backend).from_file(str(tokenizer.directory / FILES[0]))
        for texts, marks in ((ordinary, False), (special, True)):
            backend.add_tokens([AddedToken(text, normalized=False, special=marks) for text in texts])
        backend.save(str(directory / FILES[0]))

    if not (ordinary or special):
        return tokenizer
    files = [tokenizer.directory / name for name in KEPT]
    own = [file.read_text("utf-8") for file in files if file.is_file()]
    return open_directory(once(cache / "tokenizers" / digest([own, [*ordinary], [*special]]), make))


def special_tokens(tokenizer: Path, name: str = FILES[1]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and so on from a file of the tokenizer, under the names that chat templates use."""
    facts = {key: value for key, value in read_facts(tokenizer / name).items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in facts.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def read_facts(file: Path) -> dict[str, Any]:
    """The contents of a JSON file of a tokenizer; empty if it does not exist. Raises TOK004 unless it is an object."""
    if not file.is_file():
        return {}
    why = "it is not a JSON object"
    try:
        if isinstance(facts := json.loads(read_regular(file, NOTE_BYTES)), dict):
            json.dumps(facts, ensure_ascii=False).encode()
            return facts
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except UnicodeEncodeError as error:
        why = f"it holds half a character (lone surrogate U+{ord(error.object[error.start]):04X})"
    except OSError as error:
        why = error.strerror or first_line(error)
    except (ValueError, RecursionError) as error:
        why = f"it is not JSON: {first_line(error, 200)}"
    raise _unusable(file, why)


def _unusable(file: Path, why: str) -> DataError:
    return DataError(Problem("TOK004", f"{file.name} cannot be used: {why}", str(file), "fetch the tokenizer again"))


def _candidate(backend: Backend) -> str:
    known = (EOT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
    return next((token for token in known if backend.token_to_id(token) is not None), EOT)


def _convert(directory: Path, path: str, cache: Path) -> Path:
    """Let transformers convert another format (sentencepiece, vocab and merges) to tokenizer.json. Code that comes with
    a tokenizer is never run."""
    from transformers import AutoTokenizer

    target = cache / "tokenizers" / xxhash.xxh3_128_hexdigest(bytes(directory.resolve()))
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, use_fast=True)
        tokenizer.save_pretrained(target)
    except Exception as error:  # transformers raises many kinds for one cause
        there = ", ".join(sorted(entry.name for entry in directory.iterdir())[:6]) or "nothing"
        what = f"`{path}` holds no tokenizer that can be read; it holds {there}"
        fix = "name a directory with tokenizer.json"
        raise MissingInputError(Problem("TOK004", what, "data.tokenizer.path", fix)) from error
    return target


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE of ``vocab_size`` entries, ``<|endoftext|>`` the last of them, and save it in Hugging
    Face form."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    # The time to merge grows with the square of a word's length: 86 s for 200 kB of NULs.
    short = pre_tokenizers.Split(Regex(f"(?m).{{1,{_WORD_CHARACTERS}}}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, short, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    backend.save(str(directory / FILES[0]))
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOT, "pad_token": EOT}
    facts |= {"model_max_length": 10**9, "clean_up_tokenization_spaces": False}
    (directory / FILES[1]).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
