"""Tokenizers: trained the same every time, loadable by transformers, special strings are content."""

from __future__ import annotations

import base64
import errno
import json
import shutil
import time
from pathlib import Path

import pytest

from shardwise.data import tokens
from shardwise.data.limits import check_growth
from shardwise.data.tokens import EOT, Tokenizer
from shardwise.errors import DataError, MissingInputError, UnavailableError
from tests.data.conftest import prose
from tests.said import shows


def test_training_is_deterministic(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        tokens.train_tokenizer((prose(300, seed) for seed in range(100)), 400, tmp_path / name)
    for file in tokens.FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_trained_tokenizer_has_the_size_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert tokenizer.eot_id == 299 and tokenizer.backend.id_to_token(299) == EOT
    assert tokenizer.prefix == ()


@pytest.mark.parametrize("text", [prose(50, 1), "é\u2028\0 \r\n\t", "日本語 🎉", "1234567 it's  x\n\n\n    y", ""])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_b64_content_that_looks_special_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode([f"a{EOT}b"])[0]
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == f"a{EOT}b"


def test_transformers_reads_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.copy_to(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = prose(200, 3)
    assert theirs(text)["input_ids"] == tokenizer.encode([text])[0]
    assert theirs.decode(tokenizer.encode([text])[0]) == text
    assert theirs.eos_token_id == tokenizer.eot_id and len(theirs) == tokenizer.vocab_size


def test_the_hash_follows_the_meaning(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.copy_to(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    again = tokens.open_directory(tmp_path)
    assert again.hash == tokenizer.hash
    assert again.encode([prose(50, 1)]) == tokenizer.encode([prose(50, 1)])
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokens.open_directory(tmp_path).hash != tokenizer.hash


def test_what_a_tokenizer_puts_in_front_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer.copy_to(tmp_path)
    changed = tokens.open_directory(tmp_path).backend
    changed.post_processor = processors.TemplateProcessing(single=f"{EOT} $A {EOT}", special_tokens=[(EOT, 299)])
    changed.save(str(tmp_path / "tokenizer.json"))
    assert tokens.open_directory(tmp_path).prefix == (299,)


def test_other_forms_are_converted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A GPT-2 style directory: vocab.json and merges.txt, no tokenizer.json."""
    source = tmp_path / "gpt2"
    source.mkdir()
    model = json.loads((tokenizer.directory / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps({**model["vocab"], EOT: 299}))
    (source / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    facts = {"tokenizer_class": "GPT2Tokenizer", "eos_token": EOT, "bos_token": EOT, "unk_token": EOT}
    (source / "tokenizer_config.json").write_text(json.dumps(facts))
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    loaded = tokens.load(str(source), tmp_path / "cache")
    assert (loaded.eot_id, loaded.vocab_size) == (299, 300)
    assert loaded.decode(loaded.encode(["alpha beta"])[0]) == "alpha beta"


def test_added_tokens_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Ordinary ones stand for their texts wherever these are; special ones in data are plain text, as others are. One
    that is there keeps its id, and the tokenizer that is made once is taken again."""
    from transformers import AutoTokenizer

    made = tokens.extended(tokenizer, ["<think>", EOT], ["<|im_end|>"], tmp_path)
    assert (made.vocab_size, made.eot_id) == (302, tokenizer.eot_id) and made.hash != tokenizer.hash
    theirs = AutoTokenizer.from_pretrained(tokenizer.directory)
    assert theirs.add_tokens(["<think>"]) == theirs.add_special_tokens({"extra_special_tokens": ["<|im_end|>"]}) == 1
    texts = ["so <think>it is", "a<think>", "plain"]
    assert made.encode(texts) == [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert made.encode(["so <think>it is"])[0].count(300) == 1 and made.decode([300]) == "<think>"
    assert 301 not in made.encode(["a <|im_end|> b"])[0] and "".join(map(made.decode, made.encode(["<|im_end|>"])))
    read = AutoTokenizer.from_pretrained(made.directory)
    assert read("<think><|im_end|>")["input_ids"] == [300, 301] and len(read) == 302
    again = tokens.extended(tokenizer, ["<think>", EOT], ["<|im_end|>"], tmp_path)
    assert (again.directory, again.hash) == (made.directory, made.hash)
    assert tokens.extended(tokenizer, [], [], tmp_path) is tokenizer


def test_b57_a_model_with_too_few_rows(tokenizer: Tokenizer) -> None:
    tokens.check_vocabulary(tokenizer.vocab_size, 300)
    with pytest.raises(DataError) as caught:
        tokens.check_vocabulary(tokenizer.vocab_size, 256)
    [problem] = caught.value.problems
    assert (caught.value.exit_code, problem.code, problem.where) == (65, "TOK001", "data.tokenizer")
    assert "300 ids, model 256" in problem.what and problem.fix.startswith("model.config.vocab_size=300 ")


@pytest.mark.parametrize(
    ("eos", "what"),
    [
        (None, "no end-of-text token"),
        ("<|end|>", "`<|end|>`"),
    ],
)
def test_b61_no_end_of_text(tokenizer: Tokenizer, tmp_path: Path, eos: str | None, what: str) -> None:
    tokenizer.copy_to(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(DataError) as caught:
        tokens.open_directory(tmp_path)
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("TOK003", "data.tokenizer")
    assert problem.what.startswith("no end-of-text token") and what in problem.what
    assert f'"eos_token" in {tmp_path}/tokenizer_config.json' in problem.fix and f'"{EOT}"' in problem.fix


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(MissingInputError) as caught:
        tokens.load(str(tmp_path), tmp_path / "cache")
    assert str(caught.value).startswith(f"error[TOK004]: `{tmp_path}` ") and "weights.bin" in str(caught.value)


def test_a_damaged_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shutil.copytree(tokenizer.directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    with pytest.raises(DataError, match=r"TOK004.*tokenizer.json "):
        tokens.load(str(tmp_path), tmp_path / "cache")


def charsmap(longest: int) -> str:
    """A table as sentencepiece writes it, whose longest text has so many bytes."""
    return base64.b64encode((8).to_bytes(4, "little") + b"\0" * 8 + b"ab\0" + b"x" * longest + b"\0c\0").decode()


SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10 * 2**20}),
        ("normalizer", {"type": "Sequence", "normalizers": [TWICE] * 20}),
        ("normalizer", {"type": "Sequence", "normalizers": [SPACES] * 20}),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 5000}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap(5000)}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "x" * 5000}]}),
        ("model", {"type": "WordPiece", "continuing_subword_prefix": "#" * 5000, "vocab": {"a": 1}}),
        ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 5000}),
    ],
)
def test_a_tokenizer_that_makes_texts_huge_is_refused(part: str, value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"{part} .*at most 1,024"):
        check_growth({part: value})


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {**TWICE, "content": "\u2581"}]},
        {
            "type": "Sequence",
            "normalizers": [{"type": "NFKC"}, {"type": "Precompiled", "precompiled_charsmap": charsmap(33)}, SPACES],
        },
        {"type": "Replace", "pattern": {"Regex": "(?:" + "a|" * 3000 + "b)"}, "content": " "},
        None,
    ],
)
def test_normalizers_as_they_are_in_use_are_not(normalizer: object) -> None:
    check_growth({"normalizer": normalizer, "model": {"vocab": {"a" * 5000: 1}, "merges": []}})


def test_a_tokenizer_that_lengthens_texts_is_refused_when_it_is_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.copy_to(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    content["normalizer"] = {"type": "Sequence", "normalizers": [TWICE] * 40}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"TOK004.*tokenizer.json .*normalizer"):
        tokens.open_directory(tmp_path)


def test_a_tokenizer_that_puts_many_tokens_in_front_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer.copy_to(tmp_path)
    changed = tokens.open_directory(tmp_path).backend
    front = f"{EOT} " * 1000
    changed.post_processor = processors.TemplateProcessing(single=f"{front}$A", special_tokens=[(EOT, 299)])
    changed.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"1,000 tokens .*at most 64"):
        tokens.open_directory(tmp_path)


def test_a_hub_id_that_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(path: str, **settings: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UnavailableError) as caught:
        tokens.load("some/model", tmp_path)
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("MOD003", "data.tokenizer.path")
    assert "some/model" in problem.what
    monkeypatch.undo()
    with pytest.raises(MissingInputError, match=r"MOD002.*not/an/id"):
        tokens.load("not/an/id", tmp_path)


@pytest.mark.parametrize("character", ["\0", "a", " ", "\n", "-"])
def test_a_run_of_one_character_costs_no_more_than_other_text(tmp_path: Path, character: str) -> None:
    """It is one word to the tokenizer, and merging took the square of its length: 86 s for 200 kB."""
    begun_s = time.process_time()
    tokens.train_tokenizer([character * 200_000], 300, tmp_path)
    trained = tokens.open_directory(tmp_path)
    [ids] = trained.encode([character * 200_000])
    assert time.process_time() - begun_s < 5
    assert trained.decode(ids) == character * 200_000


def test_the_bound_on_words_changes_nothing_for_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prose(2000, seed) + "é\u2028\r\n\t 日本語。\n\n" + "x" * 900 + " " * 900 for seed in range(5)]
    made = []
    for bound in (tokens._WORD_CHARACTERS, 100_000):
        monkeypatch.setattr(tokens, "_WORD_CHARACTERS", bound)
        tokens.train_tokenizer(texts, 400, tmp_path)
        made.append((tmp_path / "tokenizer.json").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"eos_token": "<|end', "JSON: Unterminated string"),
        (b"[1]", "a JSON object"),
        (b'{"eos_token": "caf\xe9"}', "it is not UTF-8"),
        (b'{"eos_token": ' + b"[" * 100_000, "JSON: "),
        (b'{"eos_token": "\\ud800"}', "(lone surrogate U+D800)"),
        (b'{"bos_token": {"content": "a\\udfff"}}', "(lone surrogate U+DFFF)"),
    ],
)
def test_files_beside_a_tokenizer_that_are_damaged(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    shutil.copy(tokenizer.directory / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        tokens.open_directory(tmp_path)
    [problem] = caught.value.problems
    assert problem.code == "TOK004" and shows(problem.what, name, why)
    assert problem.where == str(tmp_path / name)


def test_a_file_beside_a_tokenizer_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.copy_to(tmp_path)

    def fail(path: Path, *_: int) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(tokens, "read_regular", fail)
    with pytest.raises(DataError, match=r"TOK004.*tokenizer_config.json .*: Permission denied"):
        tokens.read_facts(tmp_path / "tokenizer_config.json")


def test_an_id_beyond_all_others_is_refused(tokenizer: tokens.Tokenizer, tmp_path: Path) -> None:
    """A table of two billion numbers was made for it."""
    directory = shutil.copytree(tokenizer.directory, tmp_path / "tokenizer")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["alpha beta"] = 2**31
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="TOK004"):
        tokens.open_directory(directory)
