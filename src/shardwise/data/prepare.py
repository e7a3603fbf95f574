"""Preparation: text becomes memory-mapped tokens once, before any process group exists, and is found again by its
fingerprint.

In the cache a directory is named by its fingerprint (names, sizes and contents of the sources, settings, tokenizer),
so other data is another directory. A directory that the user names (``out``, or prepared data as ``data.path``) is
refused when it no longer fits: DATA013, TOK002.

Everything is written beside its final place and renamed when whole, under a lock that the system releases when its
holder dies: a kill leaves nothing half-made, and two processes that prepare the same thing do it once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.data import convert, remote, shards, source, store, sums, tokens
from shardwise.data.binary import index_of
from shardwise.data.faults import Faults
from shardwise.data.fields import Fields
from shardwise.data.read import SourcePart, exactly, pieces, units
from shardwise.data.remote import Progress
from shardwise.data.samples import SampleRules
from shardwise.data.source import Source, Sources
from shardwise.data.template import find_template
from shardwise.data.whole import becoming, lock, once, write_whole
from shardwise.errors import ConfigError, DataError, OutputError, Problem
from shardwise.spec.host import cores
from shardwise.spec.recipe import PREFERENCE, SFT_ONLY, Data
from shardwise.spec.units import typed

DEFAULT_VOCAB_SIZE = 4096
SAMPLES_VERSION = 1
"""The version of how records become samples: equal records, rules and versions give equal samples."""
_VERSIONS = [store.FORMAT, convert.VERSION, tokens.TRAINED_VERSION]
"""The versions of everything else that decides which tokens a text becomes."""
_MOST_FILES = 1000
"""A check reads the first records of at most this many files."""
_TRAINING_TEXT_BYTES = 2**29
"""A tokenizer is trained on at most about this much text, sampled evenly from all of it."""


@remote.of_their_urls()
def prepare(
    data: Data,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    sample_tokens: int | None = None,
    trust_s: float = 0.0,
) -> store.Prepared:
    """Prepare ``data``, or find them already prepared. ``out``: the target directory, instead of the cache; ``force``:
    prepare again; ``sample_tokens``: records become samples for fine-tuning, packed into windows of that many tokens;
    ``trust_s``: see :func:`remote.bring`. Raises DATA001 to DATA009, DATA012, DATA014 to DATA016 and CHAT001 to CHAT003
    for the sources, DATA013 and TOK002 for prepared data that are already there, TOK003 and TOK004 for the tokenizer,
    SEC009 for a chat template, CFG008 for a streamed source, OUT001 and OUT002 for the target; an error leaves no
    files."""
    said: Progress = progress or (lambda stage, done, total: None)
    cache = _cache(data)
    if isinstance(data.path, str) and store.is_prepared(named := Path(data.path).expanduser()):
        return _open_named(named, data, sample_tokens)
    if data.streaming:
        what, fix = "`data.streaming` prepares the data during training", "data.streaming=false, to prepare all of it"
        raise ConfigError(Problem("CFG008", what, "data.streaming", fix))
    with _writing(cache):
        data = remote.bring(data, cache, trust_s, said)
        sources = _sources(data, cache, sample_tokens is not None)
    settings = _settings(data, sample_tokens)
    note = _note(cache, data, sources, settings)
    if out is None and not force and (known := store.noted(note, cache)):
        return store.load(known)
    of = _Ingredients(data, exactly(sources, data.validation_records), sums.source_files(sources), settings)
    with _writing(cache):
        tokenizer = _tokenizer(of, cache, said)
        of = replace(of, rules=_rules(data, sample_tokens, tokenizer.directory))
        fingerprint = of.fingerprint(tokenizer)
        target = out or cache / "data" / fingerprint
        with lock(target, tidy=out is None):
            if not (store.is_prepared(target) and not force and _fits(target, fingerprint, tokenizer)):
                _refuse_foreign(target)
                _make(target, of, tokenizer, said)
        if out is None:
            write_whole(note, fingerprint)
    return store.load(target, verify=False)


def already_prepared(data: Data, sample_tokens: int | None) -> store.Prepared | None:
    """Return what :func:`prepare` made of these files in an earlier run, if they have not changed since. Downloads,
    prepares and writes nothing; None where that would be needed."""
    if isinstance(data.path, str) and store.is_prepared(named := Path(data.path).expanduser()):
        return _open_named(named, data, sample_tokens)
    cache, paths = _cache(data), _inputs(data)
    if data.streaming or any(map(remote.is_remote, paths)):
        return None
    found = source.find(paths, sample_tokens is not None)
    if not all(one.kind != "other" or convert.converted(one, cache).is_dir() for one in found):
        return None
    note = _note(cache, data, _sources(data, cache, sample_tokens is not None), _settings(data, sample_tokens))
    known = store.noted(note, cache)
    return store.load(known, verify=False) if known else None


def _inputs(data: Data) -> list[str]:
    """The paths and URLs that ``data`` names, each once."""
    both = [data.path, data.validation_path or data.path]
    return list(dict.fromkeys(name for given in both for name in ([given] if isinstance(given, str) else given)))


def _note(cache: Path, data: Data, sources: Sources, settings: dict[str, Any]) -> Path:
    """The file that names what was prepared from these inputs, by their sizes and times."""
    return cache / "seen" / source.digest([_stats(sources, data), settings, _VERSIONS, SAMPLES_VERSION])


def _cache(data: Data) -> Path:
    return Path(data.cache).expanduser() if data.cache else Path.home() / ".cache" / "shardwise"


def open_tokenizer(data: Data) -> tokens.Tokenizer | None:
    """The tokenizer that the settings name, with the tokens that they add, or None if they name none."""
    named, cache = data.tokenizer, _cache(data)
    found = None if named.path is None else tokens.load(named.path, cache, named.revision)
    return found and tokens.extended(found, data.add_tokens, data.add_special_tokens, cache)


def check_sources(data: Data) -> None:
    """Raises DATA001, DATA008 and DATA016 unless there is something to prepare. Reads and writes nothing."""
    if not (isinstance(data.path, str) and store.is_prepared(Path(data.path).expanduser())):
        for paths in (data.path, data.validation_path or data.path):
            here = remote.check(paths)
            if here or not paths:
                source.find(here)


def check_records(data: Data, sample_tokens: int | None) -> Counter[str]:
    """Read the first records of each file as :func:`prepare` would, and write nothing. Returns the counts of each
    outcome; ``read`` is the total. Remote files are not fetched, and without a tokenizer only the texts are read.
    Raises BadRecords, and the errors of tokenizer and template."""
    counts: Counter[str] = Counter()
    if isinstance(data.path, str) and store.is_prepared(Path(data.path).expanduser()):
        return counts
    here = [name for name in _inputs(data) if not remote.is_remote(name)]
    tokenizer, skip = open_tokenizer(data), data.on_bad_sample == "skip"
    with tempfile.TemporaryDirectory() as scratch:
        found = source.find(here, sample_tokens is not None)[:_MOST_FILES] if here else []
        heads = [convert.head(one, Path(scratch)) for one in found if one.kind != "ids"]
        parts = [SourcePart(one, 0, one.stop) for one in heads]
        if tokenizer is None:
            with _training_texts(sample_tokens, data.text_key, skip) as faults:
                for piece in (piece for part in parts for piece in pieces(part, data.text_key, 0.0, faults)):
                    faults.counts["read"] += piece.last
            return +faults.counts
        rules = _rules(data, sample_tokens, tokenizer.directory)
        job = shards.TokenizeSettings(tokenizer.directory, data.text_key, 0.0, ("train", "train"), rules, skip)
        for runs in shards.tokenise_all([((part,), job) for part in parts], num_proc=1):
            counts += runs["train"].counts
            counts["read"] += len(runs["train"].documents)
    return counts


def _sources(data: Data, cache: Path, records: bool) -> Sources:
    """The sources to read; files of other formats are converted to jsonl first."""

    def found(paths: str | list[str]) -> list[Source]:
        sources = source.find(paths, records)
        return [convert.to_jsonl(one, cache) if one.kind == "other" else one for one in sources]

    if data.validation_path is None:
        sources = source.divide(found(data.path), data.validation_share)
    else:
        sources = Sources(tuple(found(data.path)), tuple(found(data.validation_path)), 0.0)
    if data.mixture_weights is None:
        return sources
    paths = [data.path] if isinstance(data.path, str) else data.path
    return replace(sources, train=source.mix(paths, data.mixture_weights, sources.train))


def _settings(data: Data, sample_tokens: int | None) -> dict[str, Any]:
    """The settings that affect the tokens, in addition to the sources."""
    keys = {"path", "validation_path", "validation_share", "validation_records", "text_key", "tokenizer"}
    keys |= {"on_bad_sample", "mixture_weights", "add_tokens", "add_special_tokens"}
    if sample_tokens is None:
        return data.model_dump(include=keys, mode="json")
    return {**data.model_dump(include=keys | SFT_ONLY, mode="json"), "sample_tokens": sample_tokens}


def _rules(data: Data, sample_tokens: int | None, tokenizer: Path) -> SampleRules | None:
    """Return how records become samples. A missing chat template is an error only once a record is a conversation."""
    if sample_tokens is None:
        return None
    template = None
    with suppress(*() if data.chat_template else (DataError,)):
        template = find_template(data.chat_template, tokenizer)
    kept = data.too_long, data.packing, data.text_key, Fields.of(data)
    return SampleRules(data.format, template, data.train_on, data.train_on_eot, sample_tokens, *kept)


@source.reading()
def _stats(sources: Sources, data: Data) -> list[list[Any]]:
    """Sizes and times of all inputs: cheap to compare, to see that nothing changed since the last run."""
    named = [(s.original, s.name) for s in (*sources.train, *sources.validation)]
    local = [Path(data.tokenizer.path or "", name).expanduser() for name in tokens.KEPT]
    beside = [Path(data.chat_template or "").expanduser(), *(path.with_suffix(".idx") for path, _ in named)]
    named += [(path, path.name) for path in [*(local if data.tokenizer.path else ()), *beside] if os.path.isfile(path)]
    return [[str(path), name, path.stat().st_size, path.stat().st_mtime_ns] for path, name in named]


@dataclass(frozen=True)
class _Ingredients:
    """Everything that goes into prepared data. ``files``: what :func:`sums.source_files` returns."""

    data: Data
    sources: Sources
    files: dict[Path, sums.SourceFacts]
    settings: dict[str, Any]
    rules: SampleRules | None = None

    def identity(self, group: Sequence[Source]) -> list[list[Any]]:
        """Names and contents, but not the location of the files."""
        mixed = self.data.mixture_weights is not None
        told: list[list[Any]] = []
        for s in group:
            facts = [s.name, s.kind, s.start, s.stop, self.files[s.original].xxh3]
            facts += [s.copy, s.keep] if mixed else []
            facts += [convert.VERSION] if s.origin else []
            if s.kind == "ids" and (index := index_of(s.path)):
                facts.append(sums.checksum(index))
            told.append(facts)
        return told

    def fingerprint(self, tokenizer: tokens.Tokenizer) -> str:
        both = [self.identity(self.sources.train), self.identity(self.sources.validation)]
        facts = [store.FORMAT, both, self.sources.share, self.data.text_key, tokenizer.hash, self.data.on_bad_sample]
        return source.digest(facts if self.rules is None else [*facts, SAMPLES_VERSION, asdict(self.rules)])


def _tokenizer(of: _Ingredients, cache: Path, said: Progress) -> tokens.Tokenizer:
    """The tokenizer that the settings name; if they name none, one trained on the data."""
    data, sources = of.data, of.sources
    if (named := open_tokenizer(data)) is not None:
        return named
    if ids := next((s for s in (*sources.train, *sources.validation) if s.kind == "ids"), None):
        what = f"{ids.name} holds token ids, but the recipe does not name their tokenizer"
        raise DataError(Problem("TOK004", what, "data.tokenizer.path", "data.tokenizer.path=TOKENIZER, the ids' own"))
    size = data.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE

    def train(directory: Path) -> None:
        skip = data.on_bad_sample == "skip"
        with _training_texts(of.settings.get("sample_tokens"), data.text_key, skip) as faults:
            tokens.train_tokenizer(_texts(data, sources, said, faults), size, directory)

    facts = [tokens.TRAINED_VERSION, size, data.text_key, sources.share, of.identity(sources.train)]
    return tokens.open_directory(once(cache / "tokenizers" / source.digest(facts), train))


@contextmanager
def _training_texts(sample_tokens: int | None, text_key: str, skip: bool) -> Iterator[Faults]:
    """Wraps reading the texts on which a tokenizer is trained. Raises if there are none, as in conversations."""
    faults = Faults(skip)
    try:
        yield faults
        faults.raise_found()
        if (bad := faults.counts["bad"]) and not faults.counts["read"]:
            what = f"none of {bad:,} records has a `{text_key}` to train a tokenizer on"
            fix = "data.tokenizer.path=TOKENIZER, or records with text"
            raise DataError(Problem("DATA005", what, "data.path", fix))
    except DataError as error:
        if sample_tokens is None or error.problems[0].code != "DATA005":
            raise
        first = error.problems[0].what.partition("; the same at")[0]
        what = f"the recipe names no tokenizer, and records without a `text` cannot train one: {first}"
        raise DataError(Problem("TOK004", what, "data.tokenizer", "data.tokenizer.path=TOKENIZER")) from error


def _texts(data: Data, sources: Sources, said: Progress, faults: Faults) -> Iterator[str]:
    total, done = sum(s.stop - s.start for s in sources.train), 0
    for unit in units(sources.train)[:: -(-total // _TRAINING_TEXT_BYTES) or 1]:
        for part in unit:
            for piece in pieces(part, data.text_key, sources.share, faults):
                faults.counts["read"] += piece.last
                if not piece.held_out:
                    yield piece.text
            done += part.stop - part.start
            said("tokenizer", done, total)


def _make(target: Path, of: _Ingredients, tokenizer: tokens.Tokenizer, said: Progress) -> None:
    data, sources = of.data, of.sources
    # A jsonl file with a held-out share is in both lists, but is read only once.
    held = tuple(s for s in sources.validation if s.kind != "jsonl" or not sources.share)
    with becoming(target) as directory, ExitStack() as files_open:
        tokenizer.copy_to(directory / "tokenizer")
        if data.chat_template is not None and of.rules is not None and of.rules.template is not None:
            # The exported model must be used with the template that it was tuned on, so the template is saved too.
            (directory / "tokenizer" / "chat_template.jinja").write_text(of.rules.template, encoding="utf-8")
        names = ("train", "validation")
        writers = {n: files_open.enter_context(shards.SplitWriter(directory, n, tokenizer.vocab_size)) for n in names}
        kept = data.text_key, sources.share, names, of.rules, data.on_bad_sample == "skip"
        mixed = shards.TokenizeSettings(directory / "tokenizer", *kept)
        only = replace(mixed, share=0.0, splits=("validation", "validation"))
        work = [(unit, mixed) for unit in units(sources.train)] + [(unit, only) for unit in units(held)]
        total = sum(part.stop - part.start for unit, _ in work for part in unit)
        done = 0
        num_proc = data.num_proc or cores()
        for (unit, _), runs in zip(work, shards.tokenise_all(work, num_proc), strict=True):
            for name, run in runs.items():
                writers[name].add(run)
            done += sum(part.stop - part.start for part in unit)
            said("tokens", done, total)
        if changed := sums.first_change(of.files.values()):
            what = f"{changed} changed while it was being prepared"
            raise DataError(Problem("DATA013", what, str(target), "prepare again when it no longer changes"))
        splits = {name: writer.close(of.rules) for name, writer in writers.items()}
        counts = writers["train"].counts + writers["validation"].counts
        counts["in_both"] = len(writers["train"].hashes & writers["validation"].hashes)
        empty = sum(writer.empty for writer in writers.values())
        if not splits["train"].documents:
            held_out = f" ({splits['validation'].documents} held out)" if splits["validation"].documents else ""
            dropped = f"; {counts['dropped']} are too long, {counts['bad']} are bad" if counts.total() else ""
            what = f"0 documents in {len(of.files)} file{'s' * (len(of.files) != 1)}{held_out}{dropped}"
            bad = "data.on_bad_sample=error, which says why" if counts["bad"] else "name data with text in it"
            fix = "a larger train.seq_len" if counts["dropped"] else bad
            raise DataError(Problem("DATA002", what, "data.path", fix))
        if not splits["validation"].documents:
            del splits["validation"]
            shutil.rmtree(directory / "validation")
        facts = of.fingerprint(tokenizer), tokenizer.hash, tokenizer.vocab_size, tokenizer.eot_id
        copied = [(f"tokenizer/{path.name}", path) for path in sorted((directory / "tokenizer").iterdir())]
        copies = tuple(store.FileSum(name, path.stat().st_size, sums.checksum(path)) for name, path in copied)
        manifest = store.DataManifest(*facts, splits, copies, tuple(of.files.values()), of.settings, empty)
        length = of.rules.seq_len if of.rules else None
        made = replace(manifest, counts=dict(+counts), seq_len=length, prefix_tokens=len(tokenizer.prefix))
        store.write_manifest(directory, made)


def _fits(target: Path, fingerprint: str, tokenizer: tokens.Tokenizer) -> bool:
    """True; raises DATA013 or TOK002 if the data at ``target`` were prepared from something else."""
    manifest = store.load(target).manifest
    _check_tokenizer(target, manifest, tokenizer)
    if manifest.fingerprint != fingerprint:
        what = f"{target} was prepared from other files or settings"
        if changed := sums.first_change(manifest.files):
            what = f"{changed} changed since it was prepared"
        fix = "another --out; or the same command with --force, which replaces it"
        raise DataError(Problem("DATA013", what, str(target), fix))
    return True


def _check_tokenizer(target: Path, manifest: store.DataManifest, tokenizer: tokens.Tokenizer) -> None:
    if manifest.tokenizer_hash != tokenizer.hash:
        what = f"data prepared with tokenizer {manifest.tokenizer_hash[:8]}, the recipe uses {tokenizer.hash[:8]}"
        fix = f"shardwise data prepare RECIPE.yaml --force --out {typed(target)}, or the tokenizer that made it"
        raise DataError(Problem("TOK002", what, str(target), fix))


def _open_named(directory: Path, data: Data, sample_tokens: int | None) -> store.Prepared:
    prepared = store.load(directory)
    made, asked = (prepared.manifest.seq_len, prepared.train.split.pairs), (sample_tokens, data.format == PREFERENCE)
    if made != asked:
        nouns = ("samples", "pairs of answers")
        kinds = ["text" if size is None else f"{nouns[pairs]} in windows of {size:,}" for size, pairs in (made, asked)]
        other = None in (made[0], sample_tokens) or made[1] != asked[1]
        what = f"prepared as {kinds[0]}, the recipe asks for {kinds[1]}"
        fix = "the method it was prepared for, or other data" if other else f"train.seq_len={made[0]}"
        raise DataError(Problem("DATA013", what, str(directory), fix))
    if (tokenizer := open_tokenizer(data)) is not None:
        _check_tokenizer(directory, prepared.manifest, tokenizer)
    elif data.tokenizer.vocab_size not in (None, prepared.manifest.vocab_size):
        what = f"data prepared with {prepared.manifest.vocab_size} ids, the recipe asks for {data.tokenizer.vocab_size}"
        fix = "leave it out: the prepared data include a tokenizer"
        raise DataError(Problem("TOK002", what, "data.tokenizer.vocab_size", fix))
    if changed := sums.first_change(prepared.manifest.files):
        fix = f"with the recipe that made it: shardwise data prepare RECIPE.yaml --force --out {typed(directory)}"
        raise DataError(Problem("DATA013", f"{changed} changed since it was prepared", str(directory), fix))
    return prepared


def _refuse_foreign(target: Path) -> None:
    """Raise OUT001 if ``target`` holds anything but prepared data, which alone may be replaced."""
    if target.exists() and not store.is_prepared(target) and (target.is_file() or any(target.iterdir())):
        what = f"{target} exists and is not prepared data; nothing is overwritten"
        raise OutputError(Problem("OUT001", what, "--out", "another --out"))


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Turns an OSError into OUT002, which says where writing failed."""
    try:
        yield
    except OSError as error:
        path = error.filename or cache
        what = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        fix = "data.cache=DIRECTORY, with free space and write permission"
        raise OutputError(Problem("OUT002", what, "data.cache", fix)) from error
