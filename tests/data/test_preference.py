"""Pairs of answers: the forms they come in, what is learnt of them, how they lie in windows, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.data.micro_batch import collate
from shardwise.data.pack import IGNORE, Packs, open_windows
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared
from shardwise.errors import ConfigError, DataError
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Data, TokenizerSection
from tests.data.test_sft import ANSWER, EOT, USER, lines, shown
from tests.said import refusal, shows

Record = dict[str, Any]
Make = Callable[..., Data]
Pairs = Callable[..., Prepared]
ASK = {"role": "user", "content": "alpha"}


def says(text: str) -> Record:
    return {"role": "assistant", "content": text}


@pytest.fixture
def pairs(settings: Make, tmp_path: Path) -> Pairs:
    """Prepare records with ``zephyr`` and nothing held out."""

    def make(given: list[Record], seq_len: int = 128, **more: object) -> Prepared:
        facts = {"chat_template": "zephyr", "validation_share": 0.0, "format": "preference", **more}
        return prepare(settings(lines(tmp_path / "given.jsonl", given), **facts), sample_tokens=seq_len)

    return make


EARLIER = [ASK, says("mu"), {"role": "user", "content": "eta"}]
CHAT = [USER.format("alpha") + ANSWER.format(word) for word in ("beta", "gamma")]
LONGER = [
    USER.format("alpha") + f"<|assistant|>\nmu{EOT}\n" + USER.format("eta") + ANSWER.format(word)
    for word in ("beta", "gamma")
]
FORMS: dict[str, tuple[Record, list[str]]] = {
    "texts behind a prompt": (
        {"prompt": "alpha ", "chosen": "beta", "rejected": "gamma"},
        [f"alpha «beta{EOT}»", f"alpha «gamma{EOT}»"],
    ),
    "texts, the prompt in both": (
        {"chosen": "alpha beta", "rejected": "alpha gamma"},
        [f"alpha« beta{EOT}»", f"alpha« gamma{EOT}»"],
    ),
    "messages behind messages": ({"prompt": [ASK], "chosen": [says("beta")], "rejected": [says("gamma")]}, CHAT),
    "conversations": ({"chosen": [ASK, says("beta")], "rejected": [ASK, says("gamma")]}, CHAT),
    "conversations of several turns": (
        {"chosen": [*EARLIER, says("beta")], "rejected": [*EARLIER, says("gamma")]},
        LONGER,
    ),
    "conversations beside their prompt": (
        {"prompt": "alpha", "chosen": [ASK, says("beta")], "rejected": [ASK, says("gamma")]},
        CHAT,
    ),
    "conversations behind the same messages": (
        {"prompt": [ASK], "chosen": [ASK, says("beta")], "rejected": [ASK, says("gamma")]},
        CHAT,
    ),
    "single messages behind a text": ({"prompt": "alpha", "chosen": says("beta"), "rejected": says("gamma")}, CHAT),
    "texts behind messages": ({"prompt": [ASK], "chosen": "beta", "rejected": "gamma"}, CHAT),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_a_pair(pairs: Pairs, form: str) -> None:
    """What both begin with is not learnt: of texts it is the prompt; the words share no first token."""
    record, expected = FORMS[form]
    assert shown(pairs([record])) == expected


def test_what_the_answers_begin_with_is_learnt_by_neither(pairs: Pairs) -> None:
    """Its probabilities are the same in both, and their difference is nothing."""
    record = {"prompt": "alpha ", "chosen": "mu beta", "rejected": "mu gamma"}
    assert shown(pairs([record])) == [f"alpha mu« beta{EOT}»", f"alpha mu« gamma{EOT}»"]


def test_a_token_across_the_end_of_the_prompt(pairs: Pairs, tmp_path: Path) -> None:
    """A prompt that ends in a line end, an answer that begins with two, and a tokenizer with a token for two: it holds
    something of both, in one of the answers. There it is learnt, so that what is not learnt is the same in both."""
    (tmp_path / "own").mkdir()
    tokens.train_tokenizer(["alpha\n\n\nbeta gamma\n\n\n" * 50], 300, tmp_path / "own")
    record = {"prompt": [ASK], "chosen": [says("\n\nbeta")], "rejected": [says("gamma")]}
    prepared = pairs([record], tokenizer=TokenizerSection(path=str(tmp_path / "own")))
    head = USER.format("alpha") + "<|assistant|>"
    assert shown(prepared) == [f"{head}«\n\n\nbeta{EOT}»\n", f"{head}«\ngamma{EOT}»\n"]


def many(count: int) -> list[Record]:
    words = ["beta", "gamma mu", "delta eta zeta", "theta"]
    return [
        {"prompt": f"alpha {i} ", "chosen": words[i % 4] * (1 + i % 3), "rejected": words[(i + 1) % 4]}
        for i in range(count)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_lie_in_windows_together(pairs: Pairs, packing: bool) -> None:
    """Chosen, rejected, chosen, ... and padding last, wherever the pair lies; each token says which answer it is of."""
    prepared = pairs(many(40), seq_len=64, packing=packing)
    windows = open_windows(prepared.train, 64, True)
    assert isinstance(windows, Packs) and prepared.train.split.pairs and prepared.train.split.documents == 80
    assert sorted(pair for k in range(len(windows)) for pair in windows.pairs(k)) == list(range(40))
    assert (len(windows) == 40) is not packing
    scores = np.arange(80.0).reshape(40, 2)
    known = Packs(windows.store, 64, scores)
    for k in range(len(windows)):
        sample, numbers = known[k], windows.pairs(k)
        assert sample.references is not None and sample.references.tolist() == [[2 * n, 2 * n + 1] for n in numbers]
        assert windows[k].references.tolist() == [[0.0, 0.0]] * len(numbers)
        at = 0
        for index, length in zip([i for n in numbers for i in (2 * n, 2 * n + 1)], sample.segments, strict=False):
            begin, end, _ = prepared.train.sample(index)
            assert length == end - begin
            assert sample.ids[at : at + length].tolist() == prepared.train.read(begin, end).tolist()
            at += length
        assert (sample.labels[at:] == IGNORE).all()
    batch = collate([known[0], known.padding(), known[1]])
    assert batch.answers is not None and batch.references is not None
    assert batch.references.tolist() == np.concatenate(
        [known[0].references, known[1].references]
    ).tolist() and batch.terms() == len(windows.pairs(0) + windows.pairs(1))
    runs = [row[np.flatnonzero(np.diff(row, prepend=-1))].tolist() for row in batch.answers.numpy()]
    first, second = 2 * len(windows.pairs(0)), 2 * len(windows.pairs(1))
    assert runs[0][:first] == list(range(first))
    assert runs[2][:second] == list(range(first, first + second))


def test_too_long_together(pairs: Pairs) -> None:
    """Each has half of the window, and what the other leaves; a pair of which nothing is left to learn goes."""
    long = {"prompt": "alpha ", "chosen": "beta " * 60, "rejected": "gamma"}
    whole = pairs([long, {"prompt": "alpha ", "chosen": "mu", "rejected": "eta"}], seq_len=1024).train
    lengths = whole.lengths().tolist()
    cut = pairs([long, {"prompt": "alpha ", "chosen": "mu", "rejected": "eta"}], seq_len=64)
    assert lengths[0] > 64 and cut.train.lengths().tolist() == [64 - lengths[1], *lengths[1:]]
    assert cut.manifest.counts["truncated"] == 1
    both = pairs([{**long, "rejected": "gamma " * 60}], seq_len=64)
    assert both.train.lengths().tolist() == [32, 32] and both.manifest.counts["truncated"] == 2
    shared = {"prompt": "alpha " * 60, "chosen": "mu", "rejected": "eta"}
    assert pairs([shared, many(1)[0]], seq_len=64).manifest.counts == {"dropped": 1}
    assert pairs([long, many(1)[0]], seq_len=64, too_long="drop").manifest.counts == {"dropped": 1}
    with pytest.raises(DataError, match=r"DATA015.*given.jsonl:1 .*train.seq_len 64"):
        pairs([long], seq_len=64, too_long="error")


BAD: list[tuple[Record, str]] = [
    ({"prompt": "a", "chosen": "b"}, r"DATA005.*:2 has no `rejected`.*prompt"),
    ({"messages": [ASK, says("b")]}, r"DATA005.*:2 has no `chosen`.*messages"),
    ({"prompt": "a", "chosen": None, "rejected": "b"}, r"DATA005.*:2 has no `chosen`"),
    ({"prompt": "a", "chosen": 3, "rejected": "b"}, r"DATA005.*:2 `chosen` .*\blist\b.*\bempty\b"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, r"DATA005.*:2 `prompt` is not .*\bstring\b"),
    ({"prompt": 3, "chosen": [ASK, says("b")], "rejected": [ASK, says("c")]}, r"DATA005.*:2 `prompt` is neither"),
    ({"prompt": [3], "chosen": "b", "rejected": "c"}, r"DATA005.*:2 `prompt\[0\]` has no `role`"),
    ({"chosen": [{"role": "user"}], "rejected": [ASK]}, r"DATA005.*:2 `chosen\[0\].content` .*\bstring\b"),
    ({"prompt": "a", "chosen": [], "rejected": "c"}, r"DATA005.*:2 `chosen` .*\blist\b.*\bempty\b"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"CHAT002.*:2 `chosen` and `rejected` .*\bsame\b"),
    ({"chosen": [ASK, says("b")], "rejected": [ASK, says("b")]}, r"CHAT002.*:2 `chosen` and `rejected` .*\bsame\b"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, r"CHAT002.*:2 `chosen` is empty"),
    ({"chosen": [ASK, says("b")], "rejected": [ASK, says(" ")]}, r"CHAT002.*:2 message 2 .*is empty"),
    ({"chosen": [ASK, says("b")], "rejected": [ASK]}, r"CHAT002.*:2 .*\bassistant message\b"),
    (
        {"chosen": [ASK, says("b")], "rejected": [{"role": "user", "content": "other"}, says("c")]},
        r"DATA005.*:2 `chosen` and `rejected` .*user message",
    ),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_what_is_refused_with_its_line(pairs: Pairs, record: Record, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pairs([many(1)[0], record])


def test_bad_pairs_may_be_left_out(pairs: Pairs) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    prepared = pairs([same, many(1)[0], {"prompt": "a", "chosen": "", "rejected": "b"}], on_bad_sample="skip")
    assert prepared.train.split.documents == 2 and prepared.manifest.counts == {"bad": 2, "CHAT002": 2}
    prepared = pairs([{"chosen": "b"}, many(1)[0]], on_bad_sample="skip")
    assert prepared.train.split.documents == 2 and prepared.manifest.counts == {"bad": 1, "DATA005": 1}


def test_an_answer_without_its_end_may_be_the_beginning_of_the_other(pairs: Pairs) -> None:
    """Then one of them has nothing of its own."""
    record = {"prompt": "alpha ", "chosen": "beta", "rejected": "beta gamma"}
    assert shown(pairs([record]))[0] == f"alpha beta«{EOT}»"
    with pytest.raises(DataError, match=r"CHAT002.*`chosen` has no tokens"):
        pairs([record], train_on_eot=False)


def test_prepared_pairs_are_not_samples(pairs: Pairs, settings: Make, tmp_path: Path) -> None:
    """Named directly, they are refused for the other method; in the cache each method has its own."""
    data = settings(lines(tmp_path / "p.jsonl", many(3)), validation_share=0.0, format="preference")
    prepare(data, out=tmp_path / "out", sample_tokens=64)
    assert prepare(settings(str(tmp_path / "out"), format="preference"), sample_tokens=64).train.split.pairs
    with pytest.raises(DataError, match=refusal("DATA013", "pairs", "samples")):
        prepare(settings(str(tmp_path / "out")), sample_tokens=64)


def test_recipes() -> None:
    """The names that others use, and what means nothing beside dpo or without it."""
    recipe = load_recipe(None, ["rl=dpo", "dpo_beta=0.3", "model=m", "method.label_smoothing=0.1"])
    assert (recipe.method.name, recipe.method.beta, recipe.method.label_smoothing) == ("dpo", 0.3, 0.1)
    assert recipe.pairs and recipe.sample_tokens == recipe.train.seq_len
    for words, message in (
        (["method=sft", "rl_beta=0.2"], "CFG008.*`method.beta` .*`method: dpo`.* sft"),
        (["method=dpo", "simpo_gamma=1"], "CFG008.*`method.gamma` .*`method: simpo`.* dpo"),
        (
            ["method.label_smoothing=0.1"],
            "CFG008.*`method.label_smoothing` .*`method: dpo` and `simpo`.* pretrain",
        ),
        (["method=dpo", "data.train_on=last"], "CFG008.*`data.train_on` .*`method: dpo`"),
        (["method=dpo", "data.format=alpaca"], "CFG008.*`data.format` .*`method: dpo`"),
        (
            ["method=sft", "data.format=preference"],
            "CFG008.*`data.format` .*`method: dpo`.* sft",
        ),
        (["method=dpo", "method.beta=0"], "CFG005.*`method.beta`"),
        (["method=dpo", "method.label_smoothing=0.5"], "CFG005.*`method.label_smoothing`"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_recipe(None, ["model=m", *words])


def test_the_preview_shows_pairs(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = settings("x").tokenizer.path
    lines(tmp_path / "p.jsonl", many(5))
    words = ["data.path=p.jsonl", "data.cache=cache", f"data.tokenizer.path={tokenizer}", "data.validation_share=0"]
    words += ["model=m", "train.seq_len=64", "method=dpo"]
    assert main(["data", "preview", *words, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "pair 0, chosen, " in said and "pair 0, rejected, " in said and "pair 1" not in said
    assert f"alpha 0 «beta{EOT}»" in said and f"alpha 0 «gamma mu{EOT}»" in said
    assert shows(said, "samples", "10 answers", "5 pairs")
    assert main(["data", "preview", *words, "-n", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pairs"] == 5 and len(facts["samples"]) == 2
    assert main(["data", "prepare", *words]) == 0
    assert shows(capsys.readouterr().out, "answers", "two per pair")
