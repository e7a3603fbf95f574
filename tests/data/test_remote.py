"""Data from elsewhere: fetched once and whole, read as files are, and told apart when they change."""

from __future__ import annotations

import builtins
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.data import remote
from shardwise.data.prepare import check_sources, prepare
from shardwise.data.remote import HUB, TRUST_S, bring
from shardwise.data.store import Prepared
from shardwise.errors import DataError, MissingInputError, ShardwiseError, UnavailableError
from shardwise.spec.recipe import Data
from tests.data.conftest import prose
from tests.said import refuses, shows

Settings = Callable[..., Data]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A store in memory with a corpus in it."""
    store = fsspec.filesystem("memory")
    for index in range(6):
        store.pipe(f"/corpus/{'inner/' * (index % 2)}{index}.txt", prose(40 + 9 * index, seed=index).encode())
    store.pipe("/corpus/.hidden/x.txt", b"no")
    store.pipe("/talks.jsonl", b"".join(b'{"text": "line %d of text"}\n' % n for n in range(50)))
    yield store
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read out of the store."""
    paths: list[str] = []
    plain = MemoryFileSystem._open

    def spied(self: MemoryFileSystem, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb":
            paths.append(path)
        return plain(self, path, mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "_open", spied)
    return paths


def fails(kind: type[ShardwiseError], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def documents(prepared: Prepared) -> int:
    return sum(split.documents for split in prepared.manifest.splits.values())


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("memory://corpus", "corpus"),
        ("memory://corpus/inner/3.txt", "corpus/inner/3.txt"),
        ("memory://corpus/**/*.txt", "corpus/**/*.txt"),
        ("memory://talks.jsonl", "talks.jsonl"),
    ],
)
def test_the_same_files_elsewhere_are_the_same_data(
    bucket: Any, tmp_path: Path, settings: Settings, url: str, local: str
) -> None:
    for path in bucket.find("/"):
        target = tmp_path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bucket.cat(path))
    there, here = prepare(settings(url)), prepare(settings(str(tmp_path / local)))
    assert there.manifest.fingerprint == here.manifest.fingerprint and documents(there) == documents(here)


def test_what_was_fetched_is_not_fetched_again_until_it_changes(
    bucket: Any, settings: Settings, opened: list[str]
) -> None:
    data = settings(["memory://corpus", "memory://talks.jsonl"], mixture_weights=[1, 2])
    check_sources(data)
    assert opened == []
    first = prepare(data)
    assert len(opened) == 7 and not any("hidden" in path for path in opened)
    assert prepare(data).directory == first.directory and len(opened) == 7
    bucket.pipe("/corpus/0.txt", b"something else entirely\n" * 40)
    assert prepare(data, trust_s=TRUST_S).directory == first.directory and len(opened) == 7
    second = prepare(data)
    assert opened[7:] == ["/corpus/0.txt"]
    assert second.manifest.fingerprint != first.manifest.fingerprint
    for note in Path(str(data.cache), "fetched").glob("*.json"):
        os.utime(note, (time.time() - TRUST_S - 1,) * 2)
    bucket.pipe("/talks.jsonl", b'{"text": "other"}\n' * 20)
    assert prepare(data, trust_s=TRUST_S).manifest.fingerprint != second.manifest.fingerprint


def test_fetching_tells_how_far_it_is(bucket: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all files of a URL together, a block at a time; nothing when they are there."""
    sizes = [len(bucket.cat(f"/corpus/{number}.txt")) for number in (0, 2)]
    monkeypatch.setattr(remote, "_BLOCK_BYTES", sizes[0] // 2 + 1)
    told: list[tuple[str, int, int]] = []
    data = settings("memory://corpus/[02].txt")
    prepare(data, progress=lambda *said: told.append(said))
    fetched = [said[1:] for said in told if said[0] == "fetching"]
    assert fetched[0] == (sizes[0] // 2 + 1, sum(sizes)) and fetched[-1] == (sum(sizes), sum(sizes))
    assert fetched == sorted(fetched) and len(fetched) >= 4
    told.clear()
    prepare(data, force=True, progress=lambda *said: told.append(said))
    assert told and {said[0] for said in told} <= {"tokenizer", "tokens"}
    told.clear()
    prepare(settings("memory://corpus/[024].txt"), progress=lambda *said: told.append(said))
    third = len(bucket.cat("/corpus/4.txt"))  # the others are there
    assert [said[1:] for said in told if said[0] == "fetching"][-1] == (third, third)


def test_what_ends_early_or_breaks_leaves_nothing(
    bucket: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings("memory://talks.jsonl")
    whole = bucket.cat("/talks.jsonl")
    blocks = remote._blocks
    monkeypatch.setattr(remote, "_blocks", lambda *args: iter([whole[:100]]))
    assert shows(fails(DataError, lambda: prepare(data)), "talks.jsonl", "byte 100", f"{len(whole):,}")

    def broken(*args: Any) -> Iterator[bytes]:
        with remote._explained("memory://talks.jsonl"):
            yield whole[:100]
            raise TimeoutError("the line is dead")

    monkeypatch.setattr(remote, "_blocks", broken)
    said = fails(UnavailableError, lambda: prepare(data))
    assert refuses(said, "DATA016", "`memory://talks.jsonl`", "TimeoutError")
    assert not list(Path(str(data.cache)).rglob("*.jsonl"))
    monkeypatch.setattr(remote, "_blocks", blocks)
    assert documents(prepare(data)) == 50


def test_a_full_disk_is_not_the_stores_fault(bucket: Any, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = settings("memory://talks.jsonl", cache=str(tmp_path / "file" / "cache"))
    assert "error[OUT002]: cannot write" in fails(ShardwiseError, lambda: prepare(data))


def test_memory_does_not_grow_with_the_file(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 2**16)
    bucket.pipe("/large.txt", bytes(2**24))
    tracemalloc.start()
    bring(Data(path="memory://large.txt"), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("memory://nothing.txt", MissingInputError, "error[DATA001]: `memory://nothing.txt` cannot be found: /nothing"),
        ("memory://corpus/*.parquet", MissingInputError, "`memory://corpus/*.parquet` holds no file"),
        ("s4://bucket/x", MissingInputError, "`s4://bucket/x` cannot be found: Protocol not known: s4"),
        ("s3://bucket/x.jsonl", UnavailableError, "fix:   pip install s3fs"),
        ("gs://bucket/x.jsonl", UnavailableError, "fix:   pip install gcsfs"),
        ("az://bucket/x.jsonl", UnavailableError, "fix:   pip install adlfs"),
        ("https://example.org/x.jsonl?a=1", UnavailableError, "fix:   pip install aiohttp requests"),
    ],
)
def test_what_cannot_be_found_is_told_before_anything_starts(
    bucket: Any,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    kind: type[ShardwiseError],
    said: str,
) -> None:
    without(monkeypatch, "s3fs", "gcsfs", "adlfs", "aiohttp")
    for act in (check_sources, prepare):
        message = fails(kind, lambda act=act: act(settings(url)))  # type: ignore[misc]
        assert said in message and "where: data.path" in message


def without(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """Have these not installed."""
    plain = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] in libraries:
            raise ImportError(f"No module named {name!r}")
        return plain(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_no_access_is_told(bucket: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        """As botocore's, which is an error of no common kind."""

    def refuse(*args: Any, **more: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    said = fails(UnavailableError, lambda: check_sources(settings("memory://talks.jsonl")))
    assert "DATA016" in said and "NoCredentialsError" in said and "credentials" in said


def test_an_object_whose_name_holds_a_wildcard_is_that_object(bucket: Any, settings: Settings) -> None:
    lines = {"1": 10, "[1]": 20, "?": 30, "22": 40}
    bucket.pipe({f"/odd/a{name}.jsonl": b'{"text": "a line"}\n' * count for name, count in lines.items()})
    listed = [documents(prepare(settings(url))) for url in remote.listed("memory://odd", 1)]
    assert sorted(listed) == sorted(lines.values())
    bucket.rm("/odd/a1.jsonl")
    for name, count in (("a[1].jsonl", 20), ("a?.jsonl", 30), ("a[2]2.jsonl", 40), ("a*.jsonl", 90)):
        assert documents(prepare(settings(f"memory://odd/{name}"))) == count, name


@pytest.mark.parametrize("url", ["memory://corpus", "memory://corpus/**"])
def test_markers_of_directories_are_no_files(
    bucket: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Empty objects with a slash at the end, which consoles make and s3fs lists as files."""
    expected = documents(prepare(settings(url)))
    for name in ("find", "glob"):
        plain = getattr(MemoryFileSystem, name)

        def marked(self: Any, path: str, plain: Any = plain, **more: Any) -> Any:
            markers = ("/corpus/", "/corpus/inner/")
            return {place: {"name": place, "size": 0, "type": "file"} for place in markers} | plain(self, path, **more)

        monkeypatch.setattr(MemoryFileSystem, name, marked)
    assert documents(prepare(settings(url))) == expected
    assert not any(place.endswith("/") for place in remote.listed(url, 1))


def test_an_object_is_the_same_alone_and_in_a_list(
    bucket: Any, settings: Settings, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs tells its size twice in a list, and its time in the zone of the machine."""
    made, here = datetime(2026, 5, 1, 12, tzinfo=UTC), timezone(timedelta(hours=2))
    plain = MemoryFileSystem.find, MemoryFileSystem.info

    def told(facts: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in facts.items() if key != "created"}

    def find(self: Any, path: str, **more: Any) -> Any:
        known = {"LastModified": made.astimezone(here)}
        return {
            place: {**told(facts), **known, "Size": facts["size"]}
            for place, facts in plain[0](self, path, **more).items()
        }

    monkeypatch.setattr(MemoryFileSystem, "find", find)
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda *args, **more: {**told(plain[1](*args, **more)), "LastModified": made}
    )
    together = prepare(settings(["memory://corpus", "memory://corpus/inner/1.txt"]))
    assert documents(together) == 6 and len(opened) == 6
    prepare(settings("memory://corpus/inner/1.txt"))
    assert len(opened) == 6


def test_what_is_wrong_in_a_fetched_file_is_told_of_its_url(bucket: Any, settings: Settings) -> None:
    bucket.pipe("/faulty/in/a.jsonl", b'{"text": "a"}\n{"text": oops}\n')
    bucket.pipe("/archives/x.tar.gz", b"123")
    for named in ("memory://faulty", "memory://faulty/in/a.jsonl"):
        said = fails(DataError, lambda named=named: prepare(settings(named)))  # type: ignore[misc]
        assert "where: memory:///faulty/in/a.jsonl\n" in said and "sed -n 2p memory:///faulty/in/a.jsonl" in said
    assert "where: memory:///archives/x.tar.gz\n" in fails(DataError, lambda: prepare(settings("memory://archives")))


# The web ------------------------------------------------------------------------------------------------------------


class Web(MemoryFileSystem):
    """aiohttp is not installed, so the web is played by the store in memory."""

    facts: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[dict[str, Any]]] = []
    error: ClassVar[Exception | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        if self.error:
            raise FileNotFoundError(path) from self.error
        return {"name": path, "size": None, "type": "file", "ETag": "abc", **self.facts}

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        self.asked.append(more)
        return super()._open(path, mode)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> type[Web]:
    def url_to_fs(url: str, **more: Any) -> tuple[Web, str]:
        Web.asked.append(more)
        return Web(), url

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    aiohttp = SimpleNamespace(ClientTimeout=dict)
    monkeypatch.setitem(sys.modules, "fsspec.implementations.http", SimpleNamespace(aiohttp=aiohttp))
    Web.store, Web.facts, Web.asked, Web.error = {}, {}, [], None
    return Web


def test_a_web_address_has_a_name_without_its_query(web: type[Web], tmp_path: Path) -> None:
    """A question mark is no wildcard there."""
    url = "https://example.org/d/talks.jsonl?download=1"
    web.store = {url: MemoryFileSystem().open("/x", "wb")}
    web.store[url].write(b'{"text": "a"}\n')
    found = Path(str(bring(Data(path=url), tmp_path).path))
    assert found.name == "talks.jsonl" and found.read_bytes() == b'{"text": "a"}\n'
    # One answer, read to its end: servers may have no ranges, and a long file may take longer than five minutes.
    assert web.asked[-1]["block_size"] == 0
    assert web.asked[0]["timeout"]["total"] is None and web.asked[0]["timeout"]["sock_read"] == 60


def test_what_fails_on_the_way_is_fetched_again(
    web: type[Web], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of other stores try again themselves."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    failures = 2

    def broken(files: Any, place: str, url: str) -> Iterator[bytes]:
        with remote._explained(url):
            yield b"half of a line"
            if len(waits) < failures:
                raise OSError("the line is dead")

    monkeypatch.setattr(remote, "_blocks", broken)
    told: list[tuple[str, int, int]] = []
    one = Data(path="https://example.org/a.txt")
    found = Path(str(bring(one, tmp_path, said=lambda *said: told.append(said)).path))
    assert found.read_bytes() == b"half of a line" and len(waits) == 2
    assert [done for _, done, _ in told] == [len(b"half of a line")] * 3
    failures = 9
    said = fails(UnavailableError, lambda: bring(Data(path="https://example.org/b.txt"), tmp_path))
    assert "line is dead" in said and len(waits) == 4


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("404, message='Not Found', url='{url}'", MissingInputError, ": 404, message='Not Found'"),
        (
            "403, message='Forbidden', url='{url}'",
            UnavailableError,
            ": Exception 403, message='Forbidden'",
        ),
        ("Cannot connect to host\nexample.org:443", UnavailableError, "Cannot connect to host example.org:443"),
    ],
)
def test_what_the_web_answers_is_told_without_what_is_secret_in_an_address(
    web: type[Web], settings: Settings, status: str, kind: type[ShardwiseError], said: str
) -> None:
    url = "https://me:hush@example.org/d/talks.jsonl?X-Amz-Signature=hush"
    web.error = Exception(status.format(url=url))
    message = fails(kind, lambda: check_sources(settings(url)))
    assert "`https://example.org/d/talks.jsonl` cannot be" in message and said in message and "hush" not in message


def test_a_page_in_place_of_a_file_is_refused(web: type[Web], settings: Settings) -> None:
    """Such as the one that asks who you are, or shows the file with line numbers."""
    web.facts = {"mimetype": "text/html"}
    said = fails(MissingInputError, lambda: check_sources(settings("https://example.org/blob/main/a.txt")))
    assert refuses(said, "DATA001", "`https://example.org/blob/main/a.txt`", "web page")
    check_sources(settings("https://example.org/a.html"))


# Datasets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset as it lies on the Hub: two splits, of one of them two files, and a second subset."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    root = tmp_path / "mine"
    for name, rows in (("train-0", 30), ("train-1", 20), ("validation-0", 8), ("other", 12)):
        table = pyarrow.table({"text": [f"{name} row {n} says {n * n}" for n in range(rows)]})
        (root / "data").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, root / "data" / f"{name}.parquet")
    (root / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: plain, default: true, data_files: [{split: train, path: data/train-*}, "
        "{split: validation, path: data/validation-*}]}\n"
        "- {config_name: other, data_files: [{split: train, path: data/other.parquet}]}\n---\n"
    )
    return root


@pytest.mark.parametrize(
    ("rest", "rows"),
    [("", 50), (":validation", 8), ("/other", 12), (":train[10:25]", 15), ("/plain:train+validation", 58)],
)
def test_what_load_dataset_loads(dataset: Path, settings: Settings, rest: str, rows: int) -> None:
    import datasets

    subset, _, split = rest.lstrip("/").partition(":")
    wanted = datasets.load_dataset(str(dataset), subset or None, split=split or "train")
    data = settings(f"{HUB}{dataset}{rest}", validation_share=0.0)
    check_sources(data)
    prepared = prepare(data)
    assert documents(prepared) == rows == len(wanted)
    text = "".join(f"{row}" for row in wanted["text"])
    assert prepared.manifest.splits["train"].text_bytes == len(text.encode())


def test_a_dataset_is_loaded_once_and_again_when_it_changes(
    dataset: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(f"{HUB}{dataset}", validation_path=f"{HUB}{dataset}:validation")
    first = prepare(data)
    assert {name: split.documents for name, split in first.manifest.splits.items()} == {"train": 50, "validation": 8}
    made = sorted(Path(str(data.cache), "fetched").rglob("*.parquet"))
    assert [path.name for path in made] and prepare(data).directory == first.directory
    assert sorted(Path(str(data.cache), "fetched").rglob("*.parquet")) == made
    # datasets 5.2.0 itself goes on giving the old rows here.
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new text"] * 9}), dataset / "data" / "validation-0.parquet")
    assert prepare(data).manifest.splits["validation"].documents == 9


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (":test", 'Unknown split "test". Should be one of'),
        ("/third", "BuilderConfig 'third' not found. Available: ['plain', 'other']"),
    ],
)
def test_splits_and_subsets_that_are_there_are_named(dataset: Path, settings: Settings, rest: str, said: str) -> None:
    message = fails(MissingInputError, lambda: prepare(settings(f"{HUB}{dataset}{rest}")))
    assert "error[DATA001]" in message and said in message and "where: data.path" in message


def test_without_datasets_the_extra_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "datasets")
    message = fails(UnavailableError, lambda: check_sources(settings(f"{HUB}org/name")))
    assert 'fix:   pip install "shardwise[hub]"' in message and "error[DATA016]" in message


def test_the_hub_that_cannot_be_reached_and_the_dataset_that_is_not_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def refuse(path: str, subset: str | None, revision: str | None) -> None:
        asked.append((path, subset, revision))
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    error: Exception = ConnectionError("Couldn't reach 'org/name' on the Hub")
    said = fails(UnavailableError, lambda: prepare(settings(f"{HUB}org/name@v1.0/sub:train[:5%]")))
    assert "DATA016" in said and "org/name" in said
    error = datasets.exceptions.DatasetNotFoundError("Dataset 'org/name' is a gated dataset on the Hub.")
    said = fails(MissingInputError, lambda: prepare(settings(f"{HUB}org/name")))
    assert "gated" in said and "`hf auth login`" in said
    assert asked == [("org/name", "sub", "v1.0"), ("org/name", None, None)]


def test_a_file_of_a_repository_is_a_file() -> None:
    assert remote._is_dataset(f"{HUB}org/name") and remote._is_dataset(f"{HUB}org/name@v1.0:train[:5%]")
    assert remote._is_dataset(f"{HUB}org/wiki/20220301.en")
    assert not remote._is_dataset(f"{HUB}org/name/data/train.parquet") and not remote._is_dataset(f"{HUB}o/n/*.jsonl")
