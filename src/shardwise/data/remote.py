"""Remote data: files that fsspec opens (``s3://``, ``gs://``, ``az://``, ``https://``, ...) and datasets of the Hub
(``hf://datasets/<org>/<name>[@revision][/<subset>][:split]``). They are downloaded into the cache, block by block, and
renamed when complete, and then read like any other file.

A cached file is identified by what the store says of it: size, etag, time. If a file changes, it is downloaded again.
fsspec's own caches write a file under its final name, half of it too, and so are not used (docs/log.md, 2026-11-25).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from glob import escape, has_magic
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from shardwise.data.source import digest
from shardwise.data.whole import once, write_whole
from shardwise.errors import ConfigError, DataError, MissingInputError, Problem, UnavailableError
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.recipe import Data
from shardwise.spec.record import from_json

Progress = Callable[[str, int, int], None]
"""Called with a stage, the bytes done and the bytes in total (0: unknown)."""
HUB = "hf://datasets/"
TRUST_S = 600.0
"""Ranks use what their launcher has just downloaded, so that not all of them ask the store."""
_BLOCK_BYTES = 2**23
_WAITS_S = (5.0, 30.0, 0.0)
"""Seconds between attempts to download a file over http. The packages of other stores retry by themselves."""
_FACTS = {"size", "etag", "mtime", "created", "updated", "lastmodified", "md5hash", "contentmd5", "digest", "blobid"}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
_PACKAGES |= {"http": "aiohttp requests", "https": "aiohttp requests", "hf": '"shardwise[hub]"'}
_FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt", ".md", ".bin"}
_WHERE, _ORIGIN = "data.path", ".url"


def is_remote(name: str) -> bool:
    """Return whether ``name`` is a URL."""
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None


def check(paths: str | list[str]) -> list[str]:
    """Check that the URLs among ``paths`` exist, as far as possible without downloading; returns the other paths.
    Raises DATA001, DATA016."""
    names = [paths] if isinstance(paths, str) else paths
    for name in filter(is_remote, names):
        (_datasets if _is_dataset(name) else _listing)(name)
    return [name for name in names if not is_remote(name)]


def bring(data: Data, cache: Path, trust_s: float = 0.0, said: Progress | None = None) -> Data:
    """``data`` with local paths in place of URLs, downloaded if they are not in the cache; ``said`` receives the
    progress. For ``trust_s`` seconds after a download the store is not asked whether files have changed. Raises
    DATA001, DATA008, DATA016."""

    def local(name: str) -> str:
        if not is_remote(name):
            return name
        fetched = cache / "fetched"
        note = fetched / f"{digest(name)}.json"
        with suppress(OSError, ValueError):  # else it is fetched, or found, again
            if time.time() - note.stat().st_mtime < trust_s:
                known = from_json(str, read_regular(note, NOTE_BYTES))
                if Path(known).resolve().is_relative_to(fetched.resolve()) and Path(known).exists():
                    return known
        found = str(_fetch_dataset(name, fetched) if _is_dataset(name) else _fetch_files(name, fetched, said))
        write_whole(note, json.dumps(found))
        return found

    changed: dict[str, Any] = {}
    for key, paths in (("path", data.path), ("validation_path", data.validation_path)):
        if paths is not None:
            changed[key] = local(paths) if isinstance(paths, str) else [local(name) for name in paths]
    return data.model_copy(update=changed)


def listed(url: str, unknown: int) -> dict[str, int]:
    """The files that ``url`` names, each as a URL of its own, with its size in bytes (``unknown`` if the store does not
    report it). Raises DATA001, DATA016, and CFG008 for a dataset, which is not read file by file."""
    if _is_dataset(url):
        what, fix = f"`data.streaming` reads files; `{url}` is a dataset", f"data.path={HUB}ORG/NAME/**/*.parquet"
        raise ConfigError(Problem("CFG008", what, _WHERE, fix))
    files, found = _listing(url)
    sizes = {files.unstrip_protocol(place): told.get("size", "") for place, told in found.values()}
    alone = (lambda place: place) if url.startswith("http") else escape
    return {alone(place): int(size) if size.isdecimal() else unknown for place, size in sizes.items()}


def _is_dataset(name: str) -> bool:
    """Return whether ``name`` is a dataset to be loaded, rather than files in its repository."""
    path = name.removeprefix(HUB).partition(":")[0]
    return name.startswith(HUB) and not has_magic(path) and PurePosixPath(path).suffix not in _FILES


def _listing(url: str) -> tuple[Any, dict[str, tuple[str, dict[str, str]]]]:
    """The file system of ``url``, and its files: name relative to ``url`` -> (path, size, etag and so on)."""
    import fsspec

    web, patience = url.startswith("http"), {}
    with _explained(url):
        if web:
            from fsspec.implementations.http import aiohttp

            # aiohttp's own limit is five minutes for a whole answer, however long the file is.
            patience = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)}
        files, path = fsspec.core.url_to_fs(url, **patience)
        if has_magic(path) and not web:
            parts = path.split("/")
            root = "/".join(parts[: next(i for i, part in enumerate(parts) if has_magic(part))])
            matches = files.glob(path, detail=True) or files.glob(escape(path), detail=True)
            found = {name: facts for name, facts in matches.items() if facts["type"] == "file"}
        else:
            facts = files.info(path)
            root, found = path, files.find(path, detail=True) if facts["type"] == "directory" else {path: facts}
    listed = {}
    for place in sorted(found):
        name = urlsplit(place).path if web else place
        name = PurePosixPath(name).name if place == root else name.removeprefix(root).lstrip("/")
        # A name with a slash at the end stands for a directory, or is a page that lists one.
        if not place.endswith("/") and not any(part.startswith(".") for part in PurePosixPath(name).parts):
            facts = {re.sub("[-_]", "", key.lower()): value for key, value in found[place].items()}
            listed[name] = place, {key: _told(value) for key, value in facts.items() if key in _FACTS}
            if facts.get("mimetype") == "text/html" and not name.endswith((".html", ".htm")):
                what, fix = f"`{shown(url)}` is a web page, not a file", "use the address of the file itself"
                raise MissingInputError(Problem("DATA001", what, _WHERE, fix))
    if not listed:
        what = f"`{shown(url)}` holds no file"
        raise MissingInputError(Problem("DATA001", what, _WHERE, "name a file, or another pattern"))
    return files, listed


def _fetch_files(url: str, cache: Path, said: Progress | None) -> Path:
    """The local path of one file, or of a directory with links to several, each downloaded separately."""
    files, listed = _listing(url)
    places = {name: cache / digest([url.partition("://")[0], *where]) for name, where in listed.items()}

    missing = [told for name, (_, told) in listed.items() if not places[name].exists()]
    total = sum(int(told["size"]) for told in missing if told.get("size", "None") != "None")
    fetched: dict[str, int] = {}

    def copy(name: str, directory: Path) -> None:
        (place, told), last = listed[name], PurePosixPath(name).name
        (directory / _ORIGIN).write_text(shown(files.unstrip_protocol(place)), encoding="utf-8")
        for wait_s in _WAITS_S if url.startswith("http") else (0.0,):
            try:
                with (directory / last).open("wb") as out:
                    fetched[name] = 0
                    for block in _blocks(files, place, url):
                        fetched[name] += out.write(block)
                        if said is not None:
                            said("fetching", sum(fetched.values()), total)
                break
            except UnavailableError:
                if not wait_s:
                    raise
                time.sleep(wait_s)
        due = told.get("size", "None")
        if due not in ("None", str(fetched[name])):
            what = f"{last} ended at byte {fetched[name]:,} of {int(due):,}"
            fix = "start again; files that were completely downloaded are kept"
            raise DataError(Problem("DATA008", what, shown(url), fix))

    def link(directory: Path) -> None:
        for name, target in places.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to(target.absolute() / PurePosixPath(name).name)

    for name, target in places.items():
        once(target, partial(copy, name))
    if list(places) == [PurePosixPath(urlsplit(url).path).name]:
        return places[name] / name
    return once(cache / digest({name: str(target) for name, target in places.items()}), link)


def _blocks(files: Any, place: str, url: str) -> Iterator[bytes]:
    # Over http, one response is read to its end: not every server has ranges, and a file may change between two.
    whole = {"block_size": 0} if url.startswith("http") else {}
    with _explained(url), files.open(place, "rb", **whole) as source:
        while block := source.read(_BLOCK_BYTES):
            yield block


def _told(value: Any) -> str:
    """A value as text; times, which stores report in different zones, as seconds since 1970."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def shown(text: str) -> str:
    """``text`` without the parts of URLs that may be secret: user names, passwords and query strings."""
    return re.sub(r"(https?://[^\s?'`]*)\?[^\s'`]*", r"\1", re.sub(r"://[^/\s:@]*:[^/\s@]*@", "://", text))


def all_shown(value: Any) -> Any:
    """``value`` with every text in it as :func:`shown`."""
    if isinstance(value, dict):
        return {key: all_shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [all_shown(inner) for inner in value]
    return shown(value) if isinstance(value, str) else value


@contextmanager
def of_their_urls() -> Iterator[None]:
    """Report errors in a downloaded file under its URL."""
    try:
        yield
    except DataError as error:
        fetched = {p: Path(p.where).resolve().parent / _ORIGIN for p in error.problems if "fetched" in p.where}
        urls = {problem: _origin(note) for problem, note in fetched.items()}
        told = (replace(p, where=u, fix=p.fix.replace(p.where, u)) if (u := urls.get(p)) else p for p in error.problems)
        raise DataError(*told) from error


def _origin(note: Path) -> str | None:
    """The URL that a note beside a downloaded file names, if there is one."""
    with suppress(OSError, ValueError):
        return read_regular(note, NOTE_BYTES).decode()
    return None


def _datasets(name: str) -> Any:
    with _explained(name):
        import datasets
    return datasets


def _fetch_dataset(name: str, cache: Path) -> Path:
    """One split as ``datasets`` loads it, written as parquet. A local directory may be given in place of org/name; its
    README.md defines its subsets."""
    datasets = _datasets(name)
    rest, _, split = name.removeprefix(HUB).partition(":")
    parts = rest.split("/")
    split = split or "train"
    size = 2
    mark = "@"
    if local := rest.startswith(("/", ".")):
        subset = not Path(rest).is_dir() and Path(rest).with_name("README.md").is_file()
        size, mark = len(parts) - subset, "\n"
    path, _, revision = "/".join(parts[:size]).partition(mark)
    with _explained(name):
        builder = datasets.load_dataset_builder(path, "/".join(parts[size:]) or None, revision=revision or None)
    told = [files.origin_metadata for files in (builder.config.data_files or {}).values()]
    file_name = re.sub(r"[^\w.-]+", "-", f"{parts[size - 1]}-{split}") + ".parquet"

    def make(directory: Path) -> None:
        with _explained(name):
            # What datasets itself keeps of a local directory with a README it takes for fresh when files have changed.
            anew = {"download_mode": "force_redownload", "verification_mode": "no_checks"} if local else {}
            builder.download_and_prepare(**anew)
            table = builder.as_dataset(split=split)
        table.to_parquet(directory / file_name)

    return once(cache / digest([str(builder.cache_dir), split, told]), make) / file_name


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns the errors of stores and of the Hub, which may be of any class, into DATA001 and DATA016."""
    scheme, address = url.partition("://")[0], shown(url)
    web = scheme.startswith("http")
    package = _PACKAGES.get(scheme, "")
    try:
        yield
    except ImportError as error:
        what, fix = f"`{address}` cannot be opened: {error}", f"pip install {package}" if package else "install it"
        raise UnavailableError(Problem("DATA016", what, _WHERE, fix)) from error
    except Exception as error:
        # Over http fsspec reports every failure as a missing file; the cause says what it really was.
        cause, gone = error.__cause__ or error, isinstance(error, FileNotFoundError | ValueError)
        gone = gone and (not web or cause is error or str(cause).startswith("404"))
        said = shown(" ".join(str(cause if web or not gone else error).split()))[:300]
        if gone:
            fix = "check its name" + (", and `hf auth login` if it is private or gated" if scheme == "hf" else "")
            what = f"`{address}` cannot be found: {said or 'nothing is there'}"
            raise MissingInputError(Problem("DATA001", what, _WHERE, fix)) from error
        what = f"`{address}` cannot be read: {type(cause).__name__} {said}".strip()
        fix = "check the network and your permissions; credentials are read as the store's own programs do"
        fix += "; for a public bucket FSSPEC_S3_ANON=true" if package == "s3fs" else ""
        raise UnavailableError(Problem("DATA016", what, _WHERE, fix)) from error
