"""Every reader of a file on disk, given a file that is damaged in two hundred ways: what comes out is what the reader
makes of it, or an error with a code; it takes no time, and nothing outside the directory is opened."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from bench.accuracy.score import rows_of, score
from shardwise.cli.runs import Options as Runs
from shardwise.cli.runs import run as list_runs
from shardwise.data import prepare, remote, store, tokens
from shardwise.data.conversations import Chat, Encoder
from shardwise.data.faults import Fault
from shardwise.data.pack import open_windows
from shardwise.data.portions import Portions
from shardwise.data.source import digest
from shardwise.data.template import RenderError, Template, find_template
from shardwise.errors import ShardwiseError
from shardwise.launch import rundir
from shardwise.models import hf, init, peft
from shardwise.models.config import from_hf, parameter_shapes, to_hf
from shardwise.models.lookup import load_spec
from shardwise.planner import sheets
from shardwise.planner.seconds import history
from shardwise.runtime import owner
from shardwise.runtime.checkpoint.locate import best, newest
from shardwise.runtime.checkpoint.manifest import MANIFEST, STATE, chunk_hashes
from shardwise.runtime.checkpoint.save import RunCheckpoints, read
from shardwise.runtime.faults.heartbeat import DIRECTORY, LAYOUT, MAGIC, read_pages
from shardwise.runtime.faults.outcome import read_exit
from shardwise.runtime.job import read_run
from shardwise.runtime.metrics.json_lines import Lines
from shardwise.runtime.metrics.log import keep_until
from shardwise.runtime.reference import read_scores
from shardwise.runtime.report.run_files import read_history
from shardwise.runtime.state import RunFacts
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.cluster_file import dump_cluster, load_cluster
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.load import dump_plan, load_plan, load_recipe
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.recipe import Checkpoint, Data
from shardwise.techniques import lora
from tests.bad_input import test_damaged_runs as runs
from tests.bad_input.damage import COUNT, damage
from tests.bench.accuracy.published import ROW
from tests.data.conftest import prose
from tests.models.test_config import SMALL
from tests.runtime.checkpoint.checkpoint_ranks import values

SPEC, ADAPTER, H100 = from_hf(SMALL, "small"), Lora(2, 4.0, ("q", "down")), parse_cluster("8xH100")
TALK = [{"role": "user", "content": "alpha?"}, {"role": "assistant", "content": "beta."}]
STEP = "runs/a/checkpoints/step-00000002"
SLOW_S = 20.0
EVERY = 101
"""`make test` tries one damage in so many."""
PARTS = 5
"""Each of two hundred damages by so many cases, of which `make prove` runs one in six, `make prove-big` all."""
Read = Callable[[Path], object]
PREPARE = {"validation_share": 0.0, "num_proc": 1}


@dataclass(frozen=True)
class Reader:
    """``read`` is given the directory whose ``file`` (of a ``kind``, see damage.py) is damaged; ``needs``: what else of
    it there must be; ``seal`` makes sums right that would otherwise tell at once."""

    file: str
    kind: str
    read: Read
    needs: str = ""
    seal: Read = str


def model(directory: Path) -> None:
    shapes = parameter_shapes(SPEC)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    whole = directory / "whole"
    for target, shard_bytes in ((whole, 10**9), (directory / "shards", 10_000)):
        hf.write_weights(
            target, SPEC, lambda n: init.fill(n, shapes[n], wholes[n], 0, SPEC), torch.bfloat16, shard_bytes
        )
    ones = {name: torch.ones(shape) for name, shape in lora.adapters(SPEC, ADAPTER).items()}
    peft.write_adapter(directory / "adapter", ADAPTER, SPEC, None, ones, ones.__getitem__)


def tables(directory: Path) -> None:
    rows = [{"instruction": f"alpha {k}", "output": "beta gamma"} for k in range(12)]
    directory.mkdir()
    text, columns = "".join(json.dumps(row) + "\n" for row in rows), pa.Table.from_pylist(rows)
    (directory / "a.jsonl").write_text(text)
    (directory / "a.json").write_text(json.dumps(rows))
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pa.CompressedOutputStream(str(directory / "a.jsonl.zst"), "zstd") as compressed:
        compressed.write(text.encode())
    pyarrow.parquet.write_table(columns, directory / "a.parquet")
    with pa.ipc.new_file(directory / "a.arrow", columns.schema) as out:
        out.write_table(columns)
    for name, given in (("a.csv", rows), ("rows.csv", [ROW, ROW | {"id": "a-2", "tp": "1"}])):
        with (directory / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, [*given[0]])
            writer.writeheader()
            writer.writerows(given)
    np.arange(60, dtype="<u2").tofile(directory / "ids.bin")
    lengths, firsts = np.full(3, 20, "<i4"), np.arange(3, dtype="<i8") * 40
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    (directory / "ids.idx").write_bytes(
        head + lengths.tobytes() + firsts.tobytes() + np.arange(4, dtype="<i8").tobytes()
    )
    (directory / "a.txt").write_text(prose(200, seed=3))


def run(directory: Path) -> None:
    made = runs.make(directory / "runs" / "a")
    page = LAYOUT.pack(MAGIC, 0, 1, 2, 3, 4.0, 5.0, 6, b"step", b"", b"host")
    (made / DIRECTORY).mkdir()
    (made / DIRECTORY / "00000").write_bytes(page)
    (made / "plan.yaml").write_text(dump_plan(Plan()))
    (made / "reference.safetensors").write_bytes(
        safetensors.torch.save({"train": torch.zeros(4, 2, dtype=torch.float64)})
    )
    (directory / "cluster.yaml").write_text(dump_cluster(H100, ("measured",)))
    for ratio in (1.0, 2.0):
        history.remember(Plan(model="llama"), H100, 2.0, 2.0 * ratio, directory)
    sheets._keep(directory / "unit.json", sheets.shipped().unit(min(sheets.shipped().keys)))


def data_of(directory: Path, path: str, **more: Any) -> Data:
    given = {"path": str(directory / path), "cache": str(directory / "cache"), **PREPARE, **more}
    return Data.model_validate(given | {"tokenizer": {"path": str(directory / "tokenizer")}})


def of_samples(directory: Path, path: str) -> Data:
    return data_of(directory, path, chat_template="zephyr")


STREAM = {
    "data.num_proc": 1,
    "data.validation_share": 0.0,
    "data.streaming": True,
    "data.streaming_bytes": 600,
    "train.seq_len": 16,
    "train.max_steps": 9,
}


def stream() -> Portions:
    keys = STREAM | {"data.path": "texts", "data.tokenizer.path": "tokenizer", "data.cache": "cache"}
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    return Portions(recipe, recipe.data, Path("stream"), leader=True)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of everything."""
    inside = tmp_path_factory.mktemp("readers") / "inside"
    inside.mkdir()
    model(inside / "model")
    run(inside)
    tables(inside / "tables")
    (inside / "tokenizer").mkdir()
    tokens.train_tokenizer([prose(2000, seed=0)], 300, inside / "tokenizer")
    (inside / "tokenizer" / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    (inside / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}\n{{ '<|' ~ m.role ~ '|>' }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}\n{% endif %}\n"
    )
    (inside / "texts").mkdir()
    for k in range(4):
        (inside / "texts" / f"{k}.txt").write_text(prose(60, seed=k))
    prepare.prepare(data_of(inside, "texts"), out=inside / "made")
    prepare.prepare(of_samples(inside, "tables/a.jsonl"), out=inside / "packed", sample_tokens=64)
    prepare.prepare(data_of(inside, "texts"))
    (note,) = (inside / "cache" / "seen").iterdir()
    note.rename(inside / "cache" / "seen" / "note")
    with chdir(inside):
        stream()
    (inside / "cache" / "fetched").mkdir()
    shutil.copyfile(inside / "tables" / "a.jsonl", inside / "cache" / "fetched" / "a.jsonl")
    (inside / "cache" / "fetched" / "note.json").write_text('"HERE/a.jsonl"')
    return inside


def read_model(name: str) -> Read:
    def found(directory: Path) -> None:
        shapes = parameter_shapes(SPEC)
        parts = {each: tuple(slice(0, size) for size in shape) for each, shape in shapes.items()}
        for _ in hf.read_weights(directory / "model" / name, parts, SPEC):
            pass

    return found


def read_adapter(directory: Path) -> None:
    peft.adapter_settings(directory / "model" / "adapter", SPEC)
    shapes = lora.adapters(SPEC, ADAPTER)
    parts = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    for _ in peft.read_adapter(directory / "model" / "adapter", parts, ADAPTER, SPEC):
        pass


def read_config(directory: Path) -> None:
    to_hf(load_spec(str(directory / "model" / "whole")))


def read_tokenizer(directory: Path) -> None:
    opened = tokens.open_directory(directory / "tokenizer")
    opened.encode(["alpha beta"])
    of = Template(find_template(None, directory / "tokenizer"), tokens.special_tokens(directory / "tokenizer"))
    with suppress(Fault):
        Chat(of, Encoder(directory / "tokenizer"), end_of_turn=True).ask(TALK[:1])
    with suppress(RenderError):
        of.render(TALK, None)


def read_prepared(name: str, verify: bool | None = None) -> Read:
    def found(directory: Path) -> None:
        prepared = store.load(directory / name, verify)
        part = prepared.train
        tokens.open_directory(prepared.tokenizer_directory)
        part.lengths()
        windows = open_windows(part, prepared.manifest.seq_len or 16, True)
        for k in range(len(windows)):
            windows[k], windows.text_bytes(k)

    return found


def seal_prepared(name: str) -> Read:
    def seal(directory: Path) -> None:
        path = directory / name / store.MANIFEST
        with suppress(ValueError, RecursionError):
            body = json.loads(path.read_bytes())
            body.pop("checksum", None)
            path.write_text(json.dumps(body | {"checksum": digest(body)}))

    return seal


def prepared_of(path: str, sample_tokens: int | None = None, **more: Any) -> Read:
    def found(directory: Path) -> None:
        data = data_of(directory, path, **more)
        prepare.check_records(data, sample_tokens)
        if (directory / path).stat().st_size > 2**30:
            return  # sparse: no more than its beginning is read
        prepare.prepare(data, out=directory / "out", sample_tokens=sample_tokens)

    return found


def read_stream(directory: Path) -> None:
    with chdir(directory):
        portions = stream()
        portions[0], portions[1]


def read_note(directory: Path) -> None:
    data = data_of(directory, "texts")
    cache = directory / "cache"
    note = prepare._note(cache, data, prepare._sources(data, cache, False), prepare._settings(data, None))
    if os.path.lexists(cache / "seen" / "note"):
        (cache / "seen" / "note").rename(note)
    prepare.already_prepared(data, None)


def read_fetched(directory: Path) -> None:
    fetched = directory / "cache" / "fetched"
    url = "memory://nowhere/a.jsonl"
    note = fetched / "note.json"
    with suppress(OSError, UnicodeError):
        note.write_bytes(read_regular(note, NOTE_BYTES).replace(b"HERE", str(fetched).encode()))
    if os.path.lexists(note):
        note.rename(fetched / f"{digest(url)}.json")
    remote.bring(Data(path=url), directory / "cache", 1e9)


def read_step(directory: Path) -> None:
    at = directory / "runs" / "a"
    newest(at / "checkpoints"), best(at / "checkpoints")
    with suppress(ShardwiseError):
        read(at, values(98))
    kept = RunCheckpoints(at / "checkpoints", Checkpoint(), "run")
    kept.resume(values(99), log=lambda text: None, kind=RunFacts)


def seal_step(name: str) -> Read:
    """Gives the manifest of the newest checkpoint its right sum, and the file ``name`` its right hashes."""

    def seal(directory: Path) -> None:
        step = directory / STEP
        if name == MANIFEST:
            head, mark, body = (step / name).read_text().partition('"manifest": ')
            digest_ = hashlib.sha256(body[:-1].encode()).hexdigest()
            (step / name).write_text(f'{{"sha256":"{digest_}","manifest":{body[:-1]}}}\n' if mark else head)
            return
        record = asdict(chunk_hashes([memoryview((step / name).read_bytes())]))
        runs.seal(step, lambda body: json.dumps(body | {"files": body["files"] | {name: record}}))

    return seal


def read_a_run(directory: Path) -> None:
    at = directory / "runs" / "a"
    owner.check_free(at), owner.holder(at), read_exit(at), read_run(at), read_pages(at, [0])
    read_history(at)
    list_runs(Runs(directory / "runs"))
    recipe = load_recipe(directory / "runs" / "a" / "recipe.yaml")
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"out": str(directory / "runs")})})
    rundir.nothing_to_do(at, recipe), rundir.check_standing(at, recipe, resume=True)


def read_log(directory: Path) -> None:
    at = directory / "runs" / "a" / "metrics.jsonl"
    with rundir.owned(at.parent, lambda text: None):
        keep_until(at, 2)
        Lines(at).close()


def read_reference(directory: Path) -> None:
    path = directory / "runs" / "a" / "reference.safetensors"
    if path.is_file():
        read_scores(path, {"train": 4})


def read_measurements(directory: Path) -> None:
    with suppress(SystemExit):  # no command of the package, and refused without a code
        score(rows_of(directory / "tables" / "rows.csv"))


def read_past(directory: Path) -> None:
    with suppress(OSError):  # as those who ask for it
        history.past_runs(H100, directory)
    with suppress(OSError):
        history.remember(Plan(model="llama"), H100, 2.0, 3.0, directory)


READERS = [
    Reader("runs/a/recipe.yaml", ":", lambda d: load_recipe(d / "runs" / "a" / "recipe.yaml")),
    Reader("runs/a/plan.yaml", ":", lambda d: load_plan(d / "runs" / "a" / "plan.yaml")),
    Reader("cluster.yaml", ":", lambda d: load_cluster(d / "cluster.yaml")),
    Reader("model/whole/config.json", "json", read_config),
    Reader("model/whole/model.safetensors", "bytes", read_model("whole")),
    Reader("model/shards/model.safetensors.index.json", "json", read_model("shards")),
    Reader("model/adapter/adapter_config.json", "json", read_adapter),
    Reader("model/adapter/adapter_model.safetensors", "bytes", read_adapter),
    Reader("tokenizer/tokenizer.json", "json", read_tokenizer),
    Reader("tokenizer/tokenizer_config.json", "json", read_tokenizer),
    Reader("tokenizer/special_tokens_map.json", "json", read_tokenizer),
    Reader("tokenizer/chat_template.jinja", " ", read_tokenizer),
    Reader("made/manifest.json", "json", read_prepared("made"), seal=seal_prepared("made")),
    Reader("made/train/documents.bin", "bytes", read_prepared("made", verify=False)),
    Reader("made/train/tokens-00000.bin", "bytes", read_prepared("made", verify=False)),
    Reader("packed/manifest.json", "json", read_prepared("packed"), seal=seal_prepared("packed")),
    Reader("packed/train/packs.bin", "bytes", read_prepared("packed", verify=False)),
    Reader("packed/train/documents.bin", "bytes", read_prepared("packed", verify=False)),
    Reader("packed/train/mask-00000.bin", "bytes", read_prepared("packed")),
    Reader("stream/stream.json", "json", read_stream, "texts tokenizer cache"),
    Reader("cache/seen/note", "bytes", read_note, "texts tokenizer"),
    Reader("cache/fetched/note.json", "json", read_fetched),
    Reader("tables/a.jsonl", "jsonl", prepared_of("tables/a.jsonl", 64, chat_template="zephyr"), "tokenizer"),
    Reader("tables/a.json", "json", prepared_of("tables/a.json", 64), "tokenizer"),
    Reader("tables/a.csv", ",", prepared_of("tables/a.csv", 64), "tokenizer"),
    Reader("tables/a.jsonl.gz", "bytes", prepared_of("tables/a.jsonl.gz", 64), "tokenizer"),
    Reader("tables/a.jsonl.zst", "bytes", prepared_of("tables/a.jsonl.zst", 64), "tokenizer"),
    Reader("tables/a.parquet", "bytes", prepared_of("tables/a.parquet", 64), "tokenizer"),
    Reader("tables/a.arrow", "bytes", prepared_of("tables/a.arrow", 64), "tokenizer"),
    Reader("tables/a.txt", " ", prepared_of("tables/a.txt"), "tokenizer"),
    Reader("tables/ids.bin", "bytes", prepared_of("tables/ids.bin"), "tokenizer"),
    Reader("tables/ids.idx", "bytes", prepared_of("tables/ids.bin"), "tokenizer"),
    Reader("tables/rows.csv", ",", read_measurements),
    Reader(f"{STEP}/{MANIFEST}", "json", read_step, seal=seal_step(MANIFEST)),
    Reader(f"{STEP}/{STATE}", "json", read_step, seal=seal_step(STATE)),
    Reader(f"{STEP}/model-00000-of-00001.safetensors", "bytes", read_step),
    Reader(
        f"{STEP}/optim-00000-of-00001.safetensors",
        "bytes",
        read_step,
        seal=seal_step("optim-00000-of-00001.safetensors"),
    ),
    Reader("runs/a/run.json", "json", read_a_run),
    Reader("runs/a/exit.json", "json", read_a_run),
    Reader("runs/a/.owner-1", "json", read_a_run),
    Reader("runs/a/metrics.jsonl", "jsonl", lambda d: (read_log(d), read_a_run(d))),
    Reader("runs/a/events.jsonl", "jsonl", read_a_run),
    Reader(f"runs/a/{DIRECTORY}/00000", "bytes", read_a_run),
    Reader("runs/a/reference.safetensors", "bytes", read_reference),
    Reader("steps.jsonl", "jsonl", read_past),
    Reader("unit.json", "json", lambda d: sheets._kept(d / "unit.json")),
]
OPENED: list[str] | None = None


def _watch(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and OPENED is not None and isinstance(given[0], str | bytes):
        OPENED.append(os.fsdecode(given[0]))


sys.addaudithook(_watch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of all files that Python opens from now on."""
    found: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "OPENED", found)
    return found


def told(reader: Reader, work: Path, number: int | None, outside: Path, opened: list[str]) -> str | None:
    """What is wrong with how a damage is taken; None if nothing is."""
    if number is not None and damage(work / reader.file, reader.kind, number, outside / Path(reader.file).parent):
        reader.seal(work)
    opened.clear()
    begun = time.monotonic()
    wrong = None
    try:
        reader.read(work)
    except ShardwiseError as error:
        if (
            number is None
            or error.exit_code == 70
            or not all(problem.code and problem.what for problem in error.problems)
        ):
            wrong = f"{error!r:.300}"
    except Exception as error:
        wrong = f"{type(error).__name__}: {error!s:.200}"
    seen = {os.path.realpath(path) for path in opened if "\0" not in path}
    if strays := [path for path in seen if path.startswith(f"{outside}/") or path == "/etc/passwd"]:
        wrong = f"opened {strays[0]}"
    if time.monotonic() - begun > SLOW_S:
        wrong = f"took {time.monotonic() - begun:.0f} s"
    return wrong


def failures(reader: Reader, good: Path, numbers: list[int | None], opened: list[str]) -> list[str]:
    outside, found = good.parent / "outside", []
    if not outside.exists():
        shutil.copytree(good, outside)
    for number in numbers:
        work = good.parent / f"work-{token_hex(4)}"
        work.mkdir()
        for name in {Path(reader.file).parts[0], *reader.needs.split()}:
            (shutil.copytree if (good / name).is_dir() else shutil.copyfile)(good / name, work / name)
        path = work / reader.file
        if path.name == "stream.json":
            path.write_text(path.read_text().replace(str(good), str(work)))
        path.parent.joinpath("link").symlink_to(outside / Path(reader.file).parent)
        if wrong := told(reader, work, number, outside, opened):
            found.append(f"{reader.file} {number}: {wrong}")
        shutil.rmtree(work)
    return found


NAMES = [reader.file for reader in READERS]


@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_some_damages(
    reader: Reader, good: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place = READERS.index(reader)
    found = failures(reader, good, [None, *range(place % EVERY, COUNT, EVERY)], opened)
    assert not found, "\n".join(found)


def test_a_file_that_is_opened_outside_is_seen(good: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of names, a name that leads through a link is told."""

    def astray(path: Path, kind: str, number: int, outside: Path) -> bool:
        path.write_text(path.read_text().replace('"train/documents.bin"', '"link/train/documents.bin"'))
        return True

    monkeypatch.setattr(sys.modules[__name__], "damage", astray)
    [reader] = [each for each in READERS if each.file == "made/manifest.json"]
    assert not failures(reader, good, [0], opened)
    monkeypatch.setattr(store, "inside", lambda directory, name, where: directory / name)
    [found] = failures(reader, good, [0], opened)
    assert ": opened " in found


@pytest.mark.prove
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_two_hundred_damages(
    reader: Reader, part: int, good: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = failures(reader, good, [*range(part, COUNT, PARTS)], opened)
    assert not found, "\n".join(found)
