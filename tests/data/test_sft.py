"""Records as samples: golden texts for each format, masks, packing, what is left out, and every kind of file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from shardwise.data import read, tokens
from shardwise.data.bins import pack
from shardwise.data.pack import IGNORE, Packs, open_windows
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared, TokenStore
from shardwise.data.template import SHIPPED, WITH_TOOLS, Template
from shardwise.errors import DataError
from shardwise.runtime.report.sample import first_prompt
from shardwise.spec.recipe import Data
from tests.said import refusal

Make = Callable[..., Data]
Record = dict[str, Any]


def lines(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def talk(i: int, words: int = 3) -> Record:
    asked = {"role": "user", "content": f"alpha {i}"}
    return {"messages": [asked, {"role": "assistant", "content": "beta " * words + str(i)}]}


@pytest.fixture
def sft(settings: Make, tmp_path: Path) -> Callable[..., Prepared]:
    """Prepare records (or a file) with ``zephyr`` and nothing held out."""

    def make(given: list[Record] | Path, seq_len: int = 128, **more: object) -> Prepared:
        path = given if isinstance(given, Path) else lines(tmp_path / "given.jsonl", given)
        facts = {"chat_template": "zephyr", "validation_share": 0.0, **more}
        return prepare(settings(path, **facts), sample_tokens=seq_len)

    return make


def shown(prepared: Prepared, store: TokenStore | None = None) -> list[str]:
    """Each sample's text, what is learnt in marks; ids are exact, since the end-of-text is one."""
    store = store or prepared.train
    backend = tokens.open_directory(prepared.tokenizer_directory).backend
    found = []
    for index in range(store.split.documents):
        begin, end, _ = store.sample(index)
        pairs = zip(store.read(begin, end).tolist(), store.read_mask(begin, end).tolist(), strict=True)
        text = ""
        for learnt, group in groupby(pairs, key=lambda pair: pair[1]):
            piece = backend.decode([id_ for id_, _ in group], skip_special_tokens=False)
            text += f"«{piece}»" if learnt else piece
        found.append(text)
    return found


EOT = tokens.EOT
USER, ANSWER = f"<|user|>\n{{}}{EOT}\n", f"<|assistant|>\n«{{}}{EOT}»\n"
ASKED = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]
SHAREGPT = [{"from": "system", "value": "mu"}, {"from": "human", "value": "alpha"}, {"from": "gpt", "value": "beta"}]

GOLDEN = [
    ({"messages": ASKED}, USER.format("alpha") + ANSWER.format("beta")),
    ({"conversations": SHAREGPT}, f"<|system|>\nmu{EOT}\n" + USER.format("alpha") + ANSWER.format("beta")),
    ({"conversations": ASKED}, USER.format("alpha") + ANSWER.format("beta")),
    (
        {"instruction": "alpha", "input": "beta", "output": "gamma"},
        USER.format("alpha\n\nbeta") + ANSWER.format("gamma"),
    ),
    ({"instruction": "alpha", "output": "gamma"}, USER.format("alpha") + ANSWER.format("gamma")),
    ({"prompt": "alpha ", "completion": "beta"}, f"alpha «beta{EOT}»"),
    (
        {"prompt": [*ASKED, ASKED[0]], "completion": [ASKED[1]]},
        USER.format("alpha") + f"<|assistant|>\nbeta{EOT}\n" + USER.format("alpha") + ANSWER.format("beta"),
    ),
    (
        {"segments": [{"text": "alpha ", "label": False}, {"text": "beta", "label": True}, {"text": "\n"}]},
        f"alpha «beta»\n{EOT}",  # encoded apart: no token lies across a seam
    ),
    (
        {"segments": [{"text": f"alpha{EOT}", "special": True}, {"text": f"be{EOT}", "label": True}]},
        f"alpha{EOT}«be{EOT}{EOT}»",
    ),
    ({"text": "alpha beta"}, f"a«lpha beta{EOT}»"),
    (
        {"messages": [ASKED[0], {"role": "assistant", "content": [{"type": "text", "text": "beta"}]}]},
        USER.format("alpha") + ANSWER.format("beta"),
    ),
]


@pytest.mark.parametrize(("record", "expected"), GOLDEN)
def test_the_golden_text_of_each_format(sft: Callable[..., Prepared], record: Record, expected: str) -> None:
    (text,) = shown(sft([record]))
    if "text" in record:  # how long its first token is, which nothing comes before, is the tokenizer's to say
        assert text.replace("«", "").replace("»", "") == f"alpha beta{EOT}" and text.endswith(f"{EOT}»")
        assert "«" in text[1:]
    else:
        assert text == expected


def test_bytes_of_a_first_token_that_is_not_learnt_do_not_count(sft: Callable[..., Prepared]) -> None:
    """Text in samples: nothing comes before its first token, so neither it nor its bytes are in bits a byte."""
    text = "alpha beta " * 20
    split = sft([{"text": text}]).train.split
    learnt = split.supervised_tokens
    assert split.tokens == learnt + 1
    assert split.text_bytes == pytest.approx(len(text) * learnt / (learnt + 1), abs=0.5)


def test_formats_may_be_mixed_in_one_file(sft: Callable[..., Prepared]) -> None:
    found = shown(sft([record for record, _ in GOLDEN if "text" not in record]))
    assert found == [text for record, text in GOLDEN if "text" not in record]


def test_ids_and_labels_made_elsewhere(sft: Callable[..., Prepared], tokenizer: tokens.Tokenizer) -> None:
    ids = tokenizer.encode(["alpha beta gamma"])[0]
    labels = [-100] * 2 + ids[2:]
    prepared = sft([{"input_ids": ids, "labels": labels}, {"input_ids": ids}])
    first = prepared.train.sample(0)
    assert prepared.train.read(*first[:2]).tolist() == ids
    assert prepared.train.read_mask(*first[:2]).tolist() == [0, 0] + [1] * (len(ids) - 2)
    assert prepared.train.split.supervised_tokens == len(ids) - 2 + len(ids) - 1
    sample = open_windows(prepared.train, 128, True)[0]
    assert sorted(sample.labels[sample.labels != IGNORE].tolist()) == sorted([*ids[2:], *ids[1:]])


BAD = [
    ([{"txt": "a"}], {}, r"DATA005.*given.jsonl:2 .*\btxt\b"),
    ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, r"DATA005.*:2 .*\bpair\b(.|\n)*`method: dpo`"),
    ([{"messages": []}], {}, r"DATA005.*given.jsonl:2 `messages` .*\blist\b.*\bempty\b"),
    ([{"messages": [{"content": "a"}]}], {}, r"DATA005.*:2 `messages\[0\]` has no `role`"),
    ([{"messages": [{"role": "user", "content": 3}]}], {}, r"DATA005.*:2 `messages\[0\].content` .*\bstring\b"),
    ([{"messages": [{"role": "user", "content": "a"}]}], {}, r"CHAT002.*:2 .*\bassistant message\b"),
    (
        [{"messages": [ASKED[0], {"role": "assistant", "content": " "}]}],
        {},
        r"CHAT002.*:2 message 2 .*\bassistant\b.*\bempty\b",
    ),
    ([{"messages": [ASKED[0], {**ASKED[1], "weight": 0.5}]}], {}, r"DATA005.*:2 `messages\[1\].weight` is 0.5"),
    (
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 2}]}],
        {},
        r"DATA005.*:2 `conversations\[1\].weight` is 2",
    ),
    ([{"messages": ASKED, "tools": "{"}], {}, r"DATA005.*:2 `tools` .*\bstring\b.*\bJSON\b"),
    ([{"prompt": "a", "completion": ""}], {}, r"CHAT002.*:2 `completion` is empty"),
    ([{"segments": [{"text": "a"}]}], {}, r"CHAT002.*:2 no segment"),
    ([{"input_ids": [1, 2], "labels": [1]}], {}, r"DATA005.*:2 1 `labels` for 2 `input_ids`"),
    ([{"input_ids": [1, 2], "labels": [2, 3]}], {}, r"DATA005.*:2 `labels\[0\]` is 2, .*-100 .*\b1\b"),
    ([{"input_ids": [1, 2.0]}], {}, r"DATA005.*:2 `input_ids` .*\btoken ids\b"),
    ([{"input_ids": [1, 99999]}], {}, r"DATA009.*:2 id 99999 .* 1 >= vocab 300"),
    ([{"input_ids": [1, 2**63]}], {}, r"DATA009.*:2 id 9223372036854775808 .* 1 >= vocab 300"),
    ([{"input_ids": [10**4000]}], {}, r"DATA009.*:2 id 10{39} .* 0 >= vocab 300"),
    ([{"input_ids": [1], "labels": [2**70]}], {}, r"DATA005.*:2 `labels\[0\]` is 1180591620717411303424, neither"),
    ([{"input_ids": [1, 2], "labels": [1, -100]}], {}, r"CHAT002.*:2 .*\bno tokens\b"),
    ([{"messages": [{**ASKED[0], "content": "\ud800"}, ASKED[1]]}], {}, r"DATA006.*:2 lone surrogate U\+D800"),
    ([{"messages": ASKED}], {"format": "alpaca"}, r"DATA005.*:1 .*`instruction`, .*\balpaca\b"),
    ([{"messages": ASKED}], {"too_long": "error", "seq_len": 4}, r"DATA015.*:1 is [0-9]+ tokens, train.seq_len 4"),
    ([{"messages": ASKED}], {"chat_template": "{% if %}"}, r"CHAT001.*chat template line 1: "),
    ([{"messages": ASKED}], {"chat_template": None}, r"CHAT001.*\bno chat template"),
    (["text"], {}, r"DATA005.*:2 is a string, .*\bobject\b"),
    ([7], {}, r"DATA005.*:2 is a number, .*\bobject\b"),
]


@pytest.mark.parametrize(("records", "more", "message"), BAD)
def test_what_is_bad_is_named_by_its_line(
    sft: Callable[..., Prepared], records: list[Record], more: Record, message: str
) -> None:
    with pytest.raises(DataError, match=f"error\\[{message}"):
        sft([{"messages": ASKED}, *records], **more)


def test_bad_samples_may_be_passed_over(sft: Callable[..., Prepared]) -> None:
    prepared = sft([{"messages": ASKED}, {"messages": ASKED[:1]}, {"messages": ASKED}], on_bad_sample="skip")
    assert prepared.train.split.documents == 2 and prepared.manifest.counts == {"bad": 1, "CHAT002": 1}
    with pytest.raises(DataError, match=refusal("DATA002", "0 documents", "1 file", "0 are too long", "1 are bad")):
        sft([{"messages": ASKED[:1]}], on_bad_sample="skip")


@pytest.mark.prove
def test_one_bad_line_in_many(sft: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "UNIT_BYTES", 50_000)
    good = json.dumps({"input_ids": [1, 2, 3]}) + "\n"
    path = tmp_path / "many.jsonl"
    path.write_text(good * 12_344 + '{"input_ids": [1, 2}\n' + good * 5_000)
    with pytest.raises(DataError, match=r"error\[DATA004\]: many.jsonl:12345 col 20: "):
        sft(path, num_proc=2)


def test_what_is_too_long(sft: Callable[..., Prepared]) -> None:
    records = [talk(1, words=3), talk(2, words=200), {"prompt": "alpha " * 200, "completion": "beta"}]
    cut = sft(records, seq_len=64)
    whole = sft(records[1:2], seq_len=1024).train.split
    lost = whole.tokens - 64
    assert cut.manifest.counts == {"truncated": 1, "dropped": 1, "cut_tokens": lost, "cut_answers": 1}
    assert cut.train.split.documents == 2
    assert sorted(cut.train.lengths().tolist())[1] == 64
    dropped = sft(records, seq_len=64, too_long="drop")
    assert dropped.manifest.counts == {"dropped": 2} and dropped.train.split.documents == 1
    with pytest.raises(DataError, match=refusal("DATA002", "2 are too long", 0, fix="a larger train.seq_len")):
        sft(records[1:], seq_len=64, too_long="drop")


def test_packing_is_first_fit_longest_first() -> None:
    chance = np.random.default_rng(0)
    for capacity, count in ((10, 1), (10, 200), (64, 300), (7, 50)):
        lengths = chance.integers(1, capacity + 1, count)
        room: list[int] = []
        expected = np.zeros(count, dtype=np.int64)
        for index in np.argsort(-lengths, kind="stable"):
            fitting = [number for number, left in enumerate(room) if left >= lengths[index]]
            if not fitting:
                room.append(capacity)
                fitting = [len(room) - 1]
            expected[index] = fitting[0]
            room[fitting[0]] -= int(lengths[index])
        assert np.array_equal(pack(lengths, capacity), expected)


def test_windows_hold_every_sample_once(sft: Callable[..., Prepared]) -> None:
    prepared = sft([talk(i, words=1 + i * 7 % 13) for i in range(60)], seq_len=96)
    store = prepared.train
    windows = open_windows(store, 96, True)
    assert isinstance(windows, Packs) and len(windows) < 60
    seen: list[list[int]] = []
    learnt = 0
    for k in range(len(windows)):
        sample = windows[k]
        assert sum(sample.segments) == 96 and sample.masked
        starts = np.cumsum([0, *sample.segments[:-1]])
        for start, length in zip(starts, sample.segments, strict=True):
            assert sample.positions[start : start + length].tolist() == list(range(length))
            assert sample.labels[start + length - 1] == IGNORE
            inner = slice(start, start + length - 1)
            told = sample.labels[inner] != IGNORE
            assert np.array_equal(sample.labels[inner][told], sample.ids[start + 1 : start + length][told])
            if told.any():
                seen.append(sample.ids[start : start + length].tolist())
        learnt += int((sample.labels != IGNORE).sum())
    each = [store.read(*store.sample(i)[:2]).tolist() for i in range(60)]
    assert sorted(seen) == sorted(each) and learnt == store.split.supervised_tokens
    assert sum(windows.text_bytes(k) for k in range(len(windows))) == store.split.text_bytes
    alone = sft([talk(i, words=1 + i * 7 % 13) for i in range(60)], seq_len=96, packing=False)
    assert len(open_windows(alone.train, 96, True)) == 60


def test_a_sample_of_what_the_model_writes_begins_where_an_answer_does(sft: Callable[..., Prepared]) -> None:
    prepared = sft([talk(i) for i in range(3)])
    ids = first_prompt(prepared.train)
    decoded = tokens.open_directory(prepared.tokenizer_directory).backend.decode(ids, skip_special_tokens=False)
    assert shown(prepared)[0].startswith(f"{decoded}«")
    assert len(first_prompt(sft([{"text": "alpha beta " * 40}]).train)) == 16


def test_processes_and_units_do_not_show(
    sft: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", [talk(i, words=i % 9 + 1) for i in range(300)])
    whole = sft(path, validation_share=0.2)
    monkeypatch.setattr(read, "UNIT_BYTES", 3000)
    cut = sft(path, validation_share=0.2, num_proc=2, cache=str(tmp_path / "other"))
    assert {f.name: f.xxh3 for f in whole.files()} == {f.name: f.xxh3 for f in cut.files()}
    assert whole.validation is not None and whole.train.split.documents + whole.validation.split.documents == 300


def test_what_is_in_both_splits_is_counted(sft: Callable[..., Prepared], tmp_path: Path) -> None:
    held = lines(tmp_path / "held.jsonl", [talk(i) for i in range(5, 15)])
    prepared = sft([talk(i) for i in range(10)], validation_path=str(held))
    assert prepared.manifest.counts == {"in_both": 5}


def test_prepared_samples_belong_to_a_length_and_a_method(
    sft: Callable[..., Prepared], settings: Make, tmp_path: Path
) -> None:
    prepared = sft([talk(1)], seq_len=64)
    again = settings(prepared.directory)
    assert prepare(again, sample_tokens=64).manifest == prepared.manifest
    with pytest.raises(DataError, match=r"DATA013.*windows of 64.* of 32"):
        prepare(again, sample_tokens=32)
    with pytest.raises(DataError, match=r"DATA013.*asks for text"):
        prepare(again)


def test_the_template_goes_with_the_tokenizer(sft: Callable[..., Prepared]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(sft([talk(1)]).tokenizer_directory)
    assert theirs.apply_chat_template(ASKED, tokenize=False) == (
        USER.format("alpha") + ANSWER.format("beta").replace("«", "").replace("»", "")
    )


def test_a_template_that_was_edited_is_not_the_one_before(sft: Callable[..., Prepared], tmp_path: Path) -> None:
    found, path = [], tmp_path / "template.jinja"
    for mark in ("[%s]", "<<%s>>"):
        written = mark % "{{ m.role }}" + " {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
        path.write_text("{% for m in messages %}" + written + "{% endfor %}")
        found.append(shown(sft([talk(1)], chat_template=str(path)))[0])
    assert found[0].startswith("[user] alpha") and found[1].startswith("<<user>> alpha")


def test_roles_that_are_nearly_known_are_named(sft: Callable[..., Prepared]) -> None:
    """As they are, such a turn would not be learnt, without a word."""
    for role in ("asistant", "Assistant"):
        asked, answer = talk(1)["messages"]
        with pytest.raises(DataError, match=rf"messages\[1\].role` is `{role}`[^?]*`assistant`"):
            sft([{"messages": [asked, {**answer, "role": role}, asked, answer]}])


def test_nulls_with_which_tables_are_filled_say_nothing(sft: Callable[..., Prepared], tmp_path: Path) -> None:
    """A column that one message has all have, in parquet."""
    (asked, answer), extra = talk(1)["messages"], {"weight": 0, "name": "a", "tool_calls": [{"id": "b"}]}
    records = [{"messages": [asked, answer | extra, asked, answer]}, talk(2)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "talks.parquet")
    calls = "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    template = SHIPPED["zephyr"].partition("{% endif %}")[2].replace("{% endfor %}", f"{calls}{{% endfor %}}")
    expected = shown(sft(records, chat_template=template))
    assert [text.count("«") for text in expected] == [1, 1] and '[{"id": "b"}]' in expected[0]
    assert shown(sft(tmp_path / "talks.parquet", chat_template=template)) == expected


@pytest.mark.parametrize("name", sorted({*SHIPPED} - {*WITH_TOOLS}))
def test_templates_that_ship_refuse_tools_and_take_a_null(sft: Callable[..., Prepared], name: str) -> None:
    """A tool call left out of the text would be learnt as an empty answer."""
    asked = {"role": "user", "content": "alpha"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    plain = {"messages": [asked, {"role": "assistant", "content": "beta"}]}
    for bad in ({"messages": [asked, call]}, {**plain, "tools": [{"name": "f"}]}):
        with pytest.raises(DataError, match=r"CHAT002.*:1 .*cannot write tools"):
            sft([bad], chat_template=name)
    (text,) = shown(sft([{**plain, "tools": []}], chat_template=name))
    assert "beta" in text
    assert Template(SHIPPED[name], {"eos_token": "."}).render([{"role": "user", "content": None}], None)


RECORDS = [{"instruction": f"alpha {i}", "output": f'beta "{i}", \n— é'} for i in range(40)]


def write(path: Path, kind: str) -> Path:
    path = path / f"data.{kind}"
    text = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    columns = pa.Table.from_pylist(RECORDS)
    if kind in ("csv", "tsv"):
        import csv

        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, ["instruction", "output"], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(RECORDS)
    elif kind == "parquet":
        pyarrow.parquet.write_table(columns, path, row_group_size=16)
    elif kind in ("arrow", "stream.arrow"):
        maker = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with maker(path, columns.schema) as out:
            out.write_table(columns, max_chunksize=16)
    elif kind == "json":
        path.write_text(json.dumps(RECORDS))
    elif kind == "jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as compressed:
            compressed.write(text)
    else:
        path.write_bytes(gzip.compress(text) if kind == "jsonl.gz" else text)
    return path


KINDS = ["jsonl.gz", "jsonl.zst", "json", "csv", "tsv", "parquet", "arrow", "stream.arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_samples(sft: Callable[..., Prepared], tmp_path: Path, kind: str) -> None:
    expected = shown(sft(write(tmp_path, "jsonl")))
    assert len(expected) == 40 and expected[3].endswith(f'«beta "3", \n— é{EOT}»\n')
    path = write(tmp_path, kind)
    prepared = sft(path)
    assert shown(prepared) == expected
    assert [Path(facts.path) for facts in prepared.manifest.files] == [path]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("jsonl.gz", r"data.jsonl.gz ends early .*[0-9,]+ .*\([0-9,]+ lines"),
        ("jsonl.zst", r"data.jsonl.zst (ends|is damaged).* byte"),
        ("parquet", r"data.parquet cannot be read: "),
        ("arrow", r"data.arrow cannot be read: "),
    ],
)
def test_files_that_end_early(sft: Callable[..., Prepared], tmp_path: Path, kind: str, message: str) -> None:
    path = write(tmp_path, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=rf"error\[DATA008\]: {message}"):
        sft(path)
    assert not list((tmp_path / "cache" / "converted").glob("[!.]*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[1, 2", r"DATA004\]: a.json: expecting"),
        ("a.json", "[7]", r"DATA005\]: a.json:1 is a number, .*\bobject\b"),
        ("a.csv", "instruction,output\na,b\nc\n", r"DATA004\]: a.csv:3 .*\b1 field\b.*\b2 fields\b"),
        ("a.csv", 'instruction,output\na,"b\n', r"DATA004\]: a.csv:1 .*\bend of data\b"),
        ("a.txt", "hello", r"DATA005\]: a.txt .*\btext\b.*\bsft and dpo\b"),
    ],
)
def test_files_that_hold_something_else(
    sft: Callable[..., Prepared], tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        sft(tmp_path / name)


def test_mixtures(sft: Callable[..., Prepared], settings: Make, tmp_path: Path) -> None:
    a = lines(tmp_path / "a.jsonl", [{"text": f"alpha {i}"} for i in range(400)])
    b = lines(tmp_path / "b.jsonl", [{"text": f"beta {i}"} for i in range(10)])
    c = lines(tmp_path / "c.jsonl", [{"text": f"gamma {i}"} for i in range(10)])
    paths = [str(a), str(b), str(c)]

    def mixed(weights: list[float], **more: object) -> Prepared:
        return prepare(settings(paths, mixture_weights=weights, **more), sample_tokens=64)

    texts = shown(mixed([0.5, 3, 0], validation_share=0.0))
    texts = [text.replace("«", "").replace("»", "") for text in texts]
    counts = [sum(word in text for text in texts) for word in ("alpha", "beta", "gamma")]
    assert 160 < counts[0] < 240 and counts[1:] == [30, 0] and len(set(texts)) == counts[0] + 10
    held = mixed([1, 3, 1], validation_share=0.3)
    assert held.validation is not None
    in_train, in_held = set(shown(held)), shown(held, held.validation)
    assert len(set(in_held)) == len(in_held) and not in_train & set(in_held)
    with pytest.raises(DataError, match=r"DATA012.*a.jsonl: -1"):
        mixed([-1, 1, 1])
    with pytest.raises(DataError, match=r"DATA012.*a.jsonl: 1e\+08"):
        mixed([1e8, 1, 1])
    with pytest.raises(DataError, match=r"DATA012.*not all 0"):
        mixed([0, 0, 0])
    with pytest.raises(DataError, match=r"DATA012.*2 weights for 3 paths"):
        mixed([1, 1])


def test_conversations_train_no_tokenizer(tmp_path: Path) -> None:
    """What is missing is named, not a key of the records that has nothing to do with it."""
    data = Data(path=str(lines(tmp_path / "given.jsonl", [talk(0)])), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=refusal("TOK004", "no tokenizer")):
        prepare(data, sample_tokens=32)


def test_a_record_whose_tools_are_nested_too_deeply_is_a_bad_record(
    sft: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Deep enough for what walks through them, not for what parses JSON."""
    deep = "[" * 700 + "]" * 700
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    bad = good[:-1] + f', "tools": [{deep}]}}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n")
    with pytest.raises(DataError, match=refusal("DATA007", "a.jsonl:2", "nested")):
        sft(tmp_path / "a.jsonl", chat_template="chatml")
