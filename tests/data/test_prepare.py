"""Preparation: the same bytes from any number of processes, found again, refused when stale, whole or not there."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import read, shards, store, tokens
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared
from shardwise.errors import DataError, MissingInputError, OutputError
from shardwise.spec.recipe import Data, TokenizerSection
from tests.data.conftest import prose
from tests.said import refusal, refuses
from tests.traps import set_traps, sprung

Make = Callable[..., Data]


def contents(prepared: Prepared) -> dict[str, bytes]:
    """All files but the manifest's."""
    return {file.name: (prepared.directory / file.name).read_bytes() for file in prepared.files()}


def test_what_is_prepared_is_the_text(corpus: Path, settings: Make, tokenizer: tokens.Tokenizer) -> None:
    prepared = prepare(settings(corpus, validation_share=0.2))
    assert prepared.validation is not None
    texts = []
    for part in (prepared.train, prepared.validation):
        ends = part.document_ends(0, part.tokens).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            ids = part.read(start, end).tolist()
            assert ids[-1] == tokenizer.eot_id and tokenizer.eot_id not in ids[:-1]
            texts.append(tokenizer.decode(ids[:-1]))
        assert ends[-1] == part.tokens and len(ends) == part.split.documents
    assert sorted(texts) == sorted(path.read_text() for path in corpus.rglob("*.*"))
    counted = prepared.train.split.text_bytes + prepared.validation.split.text_bytes
    assert counted == sum(path.stat().st_size for path in corpus.rglob("*.*"))
    assert tokens.open_directory(prepared.tokenizer_directory).hash == prepared.manifest.tokenizer_hash


def test_shards_and_units_do_not_show(corpus: Path, settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus / "lines.jsonl").write_text("".join(json.dumps({"text": prose(20, i)}) + "\n" for i in range(50)))
    whole = prepare(settings(corpus, validation_share=0.2))
    boundaries = {name: whole._store(name)._documents.copy() for name in ("train", "validation")}
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    monkeypatch.setattr(read, "UNIT_BYTES", 500)
    cut = prepare(settings(corpus, validation_share=0.2, cache=str(corpus.parent / "other")))
    assert len(cut.train.split.shards) == -(-cut.train.tokens // 100)
    for name, expected in boundaries.items():
        part = cut._store(name)
        assert np.array_equal(part._documents[:, 1], expected[:, 1])  # tokens differ where a long text was cut
        assert part._documents[-1].tolist() == [part.tokens, part.split.text_bytes]
        written = b"".join((cut.directory / file.name).read_bytes() for file in part.split.shards)
        assert part.read(0, 10**9).astype("<u2").tobytes() == written and len(written) == 2 * part.tokens
    for start, stop in ((0, 1), (99, 101), (150, 450), (cut.train.tokens - 1, cut.train.tokens + 5)):
        assert np.array_equal(cut.train.read(start, stop), cut.train.read(0, 10**9)[start:stop])


def test_parallel_equals_serial(corpus: Path, settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus / "lines.jsonl").write_text("".join(json.dumps({"text": prose(20, i)}) + "\n" for i in range(200)))
    monkeypatch.setattr(read, "UNIT_BYTES", 2000)
    told: list[tuple[str, int, int]] = []
    serial = prepare(settings(corpus), progress=lambda *said: told.append(said))
    monkeypatch.chdir(set_traps(corpus.parent / "traps"))
    parallel = prepare(settings(corpus, num_proc=3), force=True)
    assert sprung(corpus.parent / "traps") == [], "code of the working directory was run"
    assert contents(serial) == contents(parallel)
    assert serial.manifest == parallel.manifest
    total = sum(path.stat().st_size for path in corpus.rglob("*.*"))
    assert [stage for stage, _, _ in told] == ["tokens"] * len(told) and told[-1] == ("tokens", total, total)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told}) and len(told) > 5


def test_jsonl_documents_are_held_out_one_by_one(tmp_path: Path, settings: Make) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(3, i)}) + "\n" for i in range(1000)))
    prepared = prepare(settings(tmp_path / "a.jsonl", validation_share=0.1))
    assert prepared.validation is not None
    assert (prepared.train.split.documents, prepared.validation.split.documents) == (900, 100)


@pytest.mark.parametrize(
    ("number", "share", "least", "held_out"),
    [(60, 0.1, 1, 6), (40, 0.05, 1, 2), (7, 0.05, 1, 1), (2, 0.05, 1, 1), (40, 0.05, 8, 8), (12, 0.05, 8, 3)],
)
def test_the_share_held_out_is_exact_to_one_document(
    number: int, share: float, least: int, held_out: int, tmp_path: Path, settings: Make
) -> None:
    """Over two files, with empty lines between; the same ones as with other numbers of processes."""
    for name, first in (("a", 0), ("b", number // 3)):
        texts = [
            json.dumps({"text": f"{prose(3, i)} {i}"}) for i in range(first, number // 3 if name == "a" else number)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(texts))
    given = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    prepared = prepare(settings(given, validation_share=share, validation_records=least))
    assert prepared.validation is not None
    assert (prepared.train.split.documents, prepared.validation.split.documents) == (number - held_out, held_out)


def test_of_one_document_nothing_is_held_out(tmp_path: Path, settings: Make) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "alpha beta"}\n')
    prepared = prepare(settings(tmp_path / "a.jsonl"))
    assert prepared.validation is None and prepared.train.split.documents == 1


def test_more_than_can_be_counted_is_divided_by_hash(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "EXACT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(3, i)}) + "\n" for i in range(1000)))
    prepared = prepare(settings(tmp_path / "a.jsonl", validation_share=0.1))
    assert prepared.validation is not None and 60 < prepared.validation.split.documents < 140


def test_a_path_of_its_own_for_validation(corpus: Path, tmp_path: Path, settings: Make) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "alpha beta"}\n')
    prepared = prepare(settings(corpus, validation_path=str(tmp_path / "held.jsonl"), validation_share=0.5))
    assert prepared.validation is not None
    assert (prepared.train.split.documents, prepared.validation.split.documents) == (12, 1)
    both = prepare(settings(tmp_path / "held.jsonl", validation_path=str(tmp_path / "held.jsonl")))
    assert both.validation is not None and both.train.split.documents == both.validation.split.documents == 1


def test_a_tokenizer_is_trained_once_for_the_same_text(corpus: Path, settings: Make) -> None:
    stages: list[str] = []
    trained = settings(corpus, tokenizer=TokenizerSection(vocab_size=320))
    first = prepare(trained, progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"tokenizer", "tokens"} and first.manifest.vocab_size == 320
    stages.clear()
    again = prepare(trained, force=True, progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"tokens"} and again.manifest == first.manifest


def test_it_is_found_again_and_new_text_is_another(corpus: Path, settings: Make) -> None:
    stages: list[str] = []

    def run(**more: object) -> Prepared:
        stages.clear()
        return prepare(settings(corpus, **more), progress=lambda stage, done, total: stages.append(stage))

    first = run()
    assert stages
    assert run().directory == first.directory and not stages
    (corpus / "0.md").touch()
    assert run().directory == first.directory and not stages
    (corpus / "0.md").write_text(prose(5, seed=99))
    second = run()
    assert stages and second.directory != first.directory
    assert run(validation_share=0.3).directory not in (first.directory, second.directory)
    store.load(first.directory)


def test_what_an_older_version_made_is_not_found(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the note that nothing changed nor by its fingerprint."""
    (tmp_path / "talks.csv").write_text("prompt,completion\n" + "one two three,four five six\n" * 20)
    made = settings(tmp_path / "talks.csv")
    first = prepare(made, sample_tokens=64)
    assert prepare(made, sample_tokens=64).directory == first.directory
    monkeypatch.setattr("shardwise.data.convert.VERSION", 99)
    monkeypatch.setattr("shardwise.data.prepare._VERSIONS", [99])
    second = prepare(made, sample_tokens=64)
    assert second.directory != first.directory
    monkeypatch.setattr("shardwise.data.prepare.SAMPLES_VERSION", 99)
    assert prepare(made, sample_tokens=64).directory not in (first.directory, second.directory)


def test_wide_vocabularies_take_four_bytes(
    corpus: Path, settings: Make, tokenizer: tokens.Tokenizer, tmp_path: Path
) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    tokenizer.copy_to(wide)
    content = json.loads((wide / "tokenizer.json").read_text())
    content["model"]["vocab"]["wide"] = 70_000
    (wide / "tokenizer.json").write_text(json.dumps(content))
    prepared = prepare(settings(corpus, tokenizer=TokenizerSection(path=str(wide))))
    narrow = prepare(settings(corpus))
    assert (prepared.train.split.dtype, narrow.train.split.dtype) == ("<u4", "<u2")
    theirs = prepared.train.read(0, 10**9)
    assert prepared.train.eot_id == 300  # one more entry, so end-of-text moved by one
    assert np.array_equal(np.where(theirs == 300, 299, theirs), narrow.train.read(0, 10**9))


def test_b50_no_documents(tmp_path: Path, settings: Make) -> None:
    (tmp_path / "c").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "c" / name).write_text("")
    (tmp_path / "c" / "c.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(DataError) as caught:
        prepare(settings(tmp_path / "c"))
    [problem] = caught.value.problems
    assert (caught.value.exit_code, problem.code, problem.where) == (65, "DATA002", "data.path")
    assert "3 files" in problem.what
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path, settings: Make) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "alpha"}\n{"text": ""}\n')
    prepared = prepare(settings(tmp_path / "a.jsonl", validation_share=0.0))
    assert prepared.train.split.documents == 1 and prepared.manifest.empty_documents == 2
    assert prepared.validation is None


def test_b52_a_bad_line_is_found_when_preparing(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": prose(3, i % 9)}) + "\n" for i in range(2000)]
    lines[1776] = lines[1776][:20] + "\n"
    (tmp_path / "a.jsonl").write_text("".join(lines))
    monkeypatch.setattr(read, "UNIT_BYTES", 8000)
    for num_proc in (1, 2):
        with pytest.raises(
            DataError, match=r"error\[DATA004\]: a.jsonl:1777 col 10: unterminated string: `{\"text\": \""
        ):
            prepare(settings(tmp_path / "a.jsonl", num_proc=num_proc))
    with pytest.raises(DataError, match=r"error\[DATA004\]: a.jsonl:1777 col 10"):
        prepare(settings(tmp_path / "a.jsonl", tokenizer=TokenizerSection(vocab_size=300)))
    for directory in ("data", "tokenizers"):
        assert [path.suffix for path in (tmp_path / "cache" / directory).iterdir()] == [".lock"]


def test_added_tokens_make_other_data(corpus: Path, settings: Make, tokenizer: tokens.Tokenizer) -> None:
    """What was prepared without them is not taken; what was prepared with them is."""
    named = TokenizerSection(path=str(tokenizer.directory))
    plain = prepare(settings(corpus, tokenizer=named))
    made = prepare(settings(corpus, tokenizer=named, add_tokens=["the quick"]))
    assert (plain.manifest.vocab_size, made.manifest.vocab_size) == (300, 301)
    assert made.directory != plain.directory
    assert prepare(settings(corpus, tokenizer=named, add_tokens=["the quick"])).directory == made.directory
    assert prepare(settings(corpus, tokenizer=named)).directory == plain.directory


def test_b58_another_tokenizer(corpus: Path, tmp_path: Path, settings: Make, tokenizer: tokens.Tokenizer) -> None:
    (tmp_path / "other").mkdir()
    tokens.train_tokenizer([prose(500, 7)], 310, tmp_path / "other")
    other = tokens.open_directory(tmp_path / "other")
    out = tmp_path / "out"
    prepare(settings(corpus), out)
    hashes, command = (tokenizer.hash[:8], other.hash[:8]), f"shardwise data prepare RECIPE.yaml --force --out {out}"
    for attempt in (
        lambda: prepare(settings(corpus, tokenizer=TokenizerSection(path=str(other.directory))), out),
        lambda: prepare(settings(out, tokenizer=TokenizerSection(path=str(other.directory)))),
    ):
        with pytest.raises(DataError) as caught:
            attempt()
        assert refuses(caught.value, "TOK002", *hashes, where=out, fix=command)
    assert prepare(settings(out, tokenizer=TokenizerSection())).directory == out
    with pytest.raises(DataError, match=r"TOK002.*300 ids.*4096"):
        prepare(settings(out, tokenizer=TokenizerSection(vocab_size=4096)))
    again = prepare(settings(corpus, tokenizer=TokenizerSection(path=str(other.directory))), out, force=True)
    assert again.manifest.tokenizer_hash == other.hash


def test_b68_sources_changed_since(corpus: Path, tmp_path: Path, settings: Make) -> None:
    out = tmp_path / "out"
    first = prepare(settings(corpus), out)
    assert prepare(settings(corpus), out).manifest == first.manifest
    (corpus / "4.md").write_text("something else")
    again = f"shardwise data prepare RECIPE.yaml --force --out {out}"
    for attempt, fix in (
        (lambda: prepare(settings(corpus), out), "another --out"),
        (lambda: prepare(settings(out)), again),
    ):
        with pytest.raises(DataError) as caught:
            attempt()
        [problem] = caught.value.problems
        assert (problem.code, problem.where) == ("DATA013", str(out))
        assert problem.what.startswith(f"{corpus}/4.md changed ") and fix in problem.fix
    assert prepare(settings(corpus), out, force=True).manifest.fingerprint != first.manifest.fingerprint
    with pytest.raises(DataError, match=refusal("DATA013", "out", "other files")):
        prepare(settings(corpus, validation_share=0.4), out)


def test_prepared_data_may_travel_without_its_sources(corpus: Path, tmp_path: Path, settings: Make) -> None:
    prepared = prepare(settings(corpus), tmp_path / "out")
    corpus.rename(tmp_path / "gone")
    (tmp_path / "out").rename(tmp_path / "there")
    assert prepare(settings(tmp_path / "there")).manifest == prepared.manifest


def test_sources_that_change_meanwhile(corpus: Path, tmp_path: Path, settings: Make) -> None:
    def write(stage: str, done: int, total: int) -> None:
        (corpus / "2.md").write_text("changed")

    with pytest.raises(DataError, match=r"DATA013.*2.md changed while"):
        prepare(settings(corpus), progress=write)
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_what_is_not_ours_is_not_overwritten(corpus: Path, tmp_path: Path, settings: Make) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=refusal("OUT001", "not prepared")):
        prepare(settings(corpus), tmp_path / "out", force=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_where_nothing_can_be_written(corpus: Path, tmp_path: Path, settings: Make) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=refusal("OUT002", "file", "not a directory")):
        prepare(settings(corpus, cache=str(tmp_path / "file")))


CHILD = """
import multiprocessing, os, signal, sys
from pathlib import Path
from shardwise.data import read
from shardwise.data.prepare import prepare
from shardwise.spec.recipe import Data

if __name__ == "__main__":
    read.UNIT_BYTES = 2000
    facts, kill_at = Data.model_validate_json(sys.argv[1]), float(sys.argv[2])

    def said(stage, done, total):
        print(stage, done, total, *[child.pid for child in multiprocessing.active_children()], flush=True)
        if done >= kill_at * total:
            os.kill(os.getpid(), signal.SIGKILL)

    print("made", prepare(facts, progress=said).directory)
"""


def child(tmp_path: Path, facts: Data, kill_at: float) -> subprocess.Popen[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    source = str(Path(store.__file__).parents[2])
    command = [sys.executable, str(script), facts.model_dump_json(), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source})


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("num_proc", "kill_at"), [(1, 0.0), (2, 0.4), (1, 1.0)])
def test_a_kill_leaves_nothing_half_made(
    corpus: Path, tmp_path: Path, settings: Make, num_proc: int, kill_at: float
) -> None:
    facts = settings(corpus, num_proc=num_proc)
    with child(tmp_path, facts, kill_at) as killed:
        output, _ = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL and "made" not in output
    directory = tmp_path / "cache" / "data"
    assert [path for path in directory.iterdir() if not path.name.startswith(".")] == []
    assert [path.suffix for path in directory.iterdir() if path.is_dir()] == [".tmp"]
    workers = [int(pid) for pid in output.splitlines()[-1].split()[3:]]
    assert len(workers) == (num_proc if num_proc > 1 else 0)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    prepared = prepare(facts)
    assert sorted(path.suffix for path in directory.iterdir()) == ["", ".lock"]
    prepared.verify()
    assert contents(prepared) == contents(prepare(settings(corpus, cache=str(tmp_path / "fresh"))))


def test_two_at_once_make_it_once(corpus: Path, tmp_path: Path, settings: Make) -> None:
    facts = settings(corpus)
    both = [child(tmp_path, facts, 2.0) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] and outputs[0][-1].startswith("made ")
    assert sorted(len(output) > 1 for output in outputs) == [False, True]
    store.load(Path(outputs[0][-1].removeprefix("made ")))


class Failing(io.RawIOBase):
    """A file that is there, on a disk that is not: each read fails, without a name, as the system has it."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def tell(self) -> int:
        return 0

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def readline(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("place", ["read", "sums", "source"])
@pytest.mark.parametrize("vocab_size", [None, 300], ids=["tokenizer", "trained"])
def test_a_disk_that_fails_while_data_are_read_is_told_as_that(
    corpus: Path, settings: Callable[..., Data], monkeypatch: pytest.MonkeyPatch, place: str, vocab_size: int | None
) -> None:
    """Not as a cache that cannot be written, nor as a defect."""
    given = {} if vocab_size is None else {"tokenizer": TokenizerSection(vocab_size=vocab_size)}
    data = settings(str(corpus / "0.md" if place == "source" else corpus), **given)
    monkeypatch.setattr(f"shardwise.data.{place}.open_regular", lambda path: Failing())
    with pytest.raises(MissingInputError, match=r"DATA001\]: .*: Input/output error"):
        prepare(data)


def test_prepared_data_that_cannot_be_read_are_told_as_that(
    corpus: Path, settings: Callable[..., Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(settings(str(corpus)))

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("shardwise.data.store.np.memmap", fail)
    with pytest.raises(MissingInputError, match=r"DATA001\]: .*documents.bin .*: Permission denied"):
        prepared.train.lengths()
    monkeypatch.setattr("shardwise.data.store.read_regular", fail)
    with pytest.raises(MissingInputError, match=r"DATA001\]: the prepared data .*: Permission denied"):
        store.load(prepared.directory)
