"""Whatever stands in a model's files, what comes out is an error of the right class: never a defect, never a hang."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cli.app import main
from shardwise.errors import ConfigError, DataError, MissingInputError, PolicyError
from shardwise.models import hf, init, peft, tensorfile
from shardwise.models.config import ModelSpec, from_hf, layer_kinds, parameter_count, parameter_shapes, problems, to_hf
from shardwise.models.lookup import load_spec, read_spec
from shardwise.planner import comparison
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import lora
from tests.models import families, hf_models
from tests.models.test_config import SMALL
from tests.said import refuses

SPEC = from_hf(SMALL, "small")
OURS = (ConfigError, DataError, MissingInputError, PolicyError)
MUTATE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**62, 2**63, 10**400]),
    st.floats(),
    st.sampled_from(["", "x", "full_attention", "llama", "9" * 50]),
    st.lists(st.sampled_from([0, -1, math.nan, "x", None, {}, "full_attention"]), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), st.sampled_from(["yarn", 0, None])),
)


@pytest.mark.parametrize("family", families.CONFIGS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_config(family: str, data: st.DataObject) -> None:
    """Read, or refused; what is read can be counted and written as JSON."""
    config = copy.deepcopy(to_hf(families.spec_of(family)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = config
        key = data.draw(st.sampled_from(sorted(config)))
        if isinstance(at[key], dict) and at[key] and data.draw(st.booleans()):
            at = at[key]
            key = data.draw(st.sampled_from(sorted(at)))
        at[key] = data.draw(ODD)
    config["model_type"] = family
    try:
        spec = read_spec(config, "mutated")
    except OURS:
        return
    assert not problems(spec) and parameter_count(spec) > 0 and len(layer_kinds(spec)[1]) == spec.num_hidden_layers
    json.dumps(to_hf(spec), allow_nan=False)


@settings(max_examples=15, deadline=None)
@given(key=st.sampled_from(sorted(hf_models.config_of("olmo"))), value=ODD)
def test_a_mutated_config_of_a_model_of_transformers(key: str, value: Any) -> None:
    try:
        spec = read_spec(hf_models.config_of("olmo") | {key: value, "model_type": "olmo"}, "mutated")
    except OURS:
        return
    assert parameter_count(spec) > 0 and to_hf(spec)["model_type"] == "olmo"


def stored(directory: Path, shard_bytes: int = 10**9) -> None:
    shapes = parameter_shapes(SPEC)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(
        directory, SPEC, lambda name: init.fill(name, shapes[name], wholes[name], 0, SPEC), torch.bfloat16, shard_bytes
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    stored(directory)
    return directory


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    stored(directory, 10_000)
    return directory


@MUTATE
@given(data=st.data())
def test_a_mutated_header(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Values, entries or bytes of the header are others; what is read is what was stored, or it is refused."""
    whole = (model / hf.SINGLE).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, rest = whole[8 : 8 + length], whole[8 + length :]
    kind = data.draw(st.sampled_from(["bytes", "value", "entry", "length"]))
    if kind == "bytes":
        at = data.draw(st.integers(0, length - 1))
        header = header[:at] + data.draw(st.binary(min_size=1, max_size=6)) + header[at + 6 :]
    elif kind != "length":
        table = json.loads(header)
        name = data.draw(st.sampled_from(sorted(table)))
        if kind == "entry":
            table[name] = data.draw(ODD)
        else:
            table[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = data.draw(ODD)
        header = json.dumps(table).encode()
    size = data.draw(st.integers(0, 2**64 - 1)) if kind == "length" else len(header)
    (tmp_path / hf.SINGLE).write_bytes(size.to_bytes(8, "little") + header + rest)
    try:
        found = hf.match(hf.find_weights(tmp_path), SPEC, "here")
    except OURS:
        return
    for name, stored in found.items():
        [piece] = stored.pieces
        assert tuple(piece.entry.read().shape) == parameter_shapes(SPEC)[name]


@MUTATE
@given(data=st.data())
def test_a_mutated_index(shards: Path, data: st.DataObject) -> None:
    index = json.loads((shards / hf.INDEX).read_text())
    names = index["weight_map"]
    odd = st.one_of(ODD, st.sampled_from(["../x", "/etc/passwd", "x" * 5000, "a\0b", ".", "", "x.bin", "config.json"]))
    for _ in range(data.draw(st.integers(1, 2))):
        names[data.draw(st.sampled_from([*names, "another"]))] = data.draw(odd)
    changed = data.draw(st.sampled_from([index, {"weight_map": data.draw(ODD)}, names]))
    kept = (shards / hf.INDEX).read_text()
    (shards / hf.INDEX).write_text(json.dumps(changed))
    try:
        with pytest.raises(OURS):
            hf.match(hf.find_weights(shards), SPEC, "here")
    finally:
        (shards / hf.INDEX).write_text(kept)


def test_whole_numbers_of_6000_digits(shards: Path, tmp_path: Path) -> None:
    """Python refuses to read them, by another error than that of text which is no JSON."""
    text = '{"x": ' + "9" * 6000 + "}"
    (tmp_path / hf.INDEX).write_text(text)
    with pytest.raises(DataError, match=r"CKPT009.*index\.json: not JSON"):
        hf.find_weights(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match="MOD004"):
        load_spec(str(tmp_path))
    (tmp_path / "one.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(DataError, match=r"CKPT009.*one\.safetensors: not JSON"):
        tensorfile.entries(tmp_path / "one.safetensors")


@pytest.mark.parametrize("depth", [40, 900, 100_000])
def test_a_deeply_nested_config(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"x": ' * depth + "1" + "}" * depth)
    with pytest.raises(DataError, match="MOD004") as caught:
        load_spec(str(tmp_path))
    assert len(str(caught.value)) < 600


def test_a_shard_that_no_file_can_be(shards: Path, tmp_path: Path) -> None:
    os.symlink("circle.safetensors", tmp_path / "circle.safetensors")
    for name, told in (("x" * 5000, "name too long"), ("a\0b", "null"), ("circle.safetensors", "link")):
        (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(DataError, match=f"(?i)CKPT009.*{told}") as caught:
            hf.find_weights(tmp_path)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("key", ["model.path", "lora.path", "run.out", "data.path"])
def test_paths_that_no_file_can_have(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [f"model.config.{name}={value}" for name, value in SMALL.items() if key != "model.path"]
    words = [*small, "train.global_batch_size=4", "data.path=x", f"{key}={'x' * 5000}"]
    assert main(["train", "--dry-run", "--nproc", "1", *words]) == 66
    told = capfd.readouterr().err
    assert told.startswith("error[") and "BUG001" not in told and len(told) < 7000


def test_layers_are_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A million would keep the planner for hours, and transformers' modules for ever."""
    for kind in ("llama", "olmo", "gpt2"):
        layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
        (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": kind, layers: 10**6}))
        assert main(["plan", "--model", str(tmp_path)]) == 65
        assert refuses(capfd.readouterr().err, "MOD005", f"`{layers}`", "1,000,000", "1,000")


@pytest.mark.prove
def test_a_search_is_interrupted() -> None:
    """While it prices its fifth layout of 1,000 layers; it ends within a second of the processor's time."""
    priced, interrupted = comparison.price, []

    def interrupt(spec: ModelSpec, plan: Plan, cluster: Cluster, *, most: float) -> Plan:
        interrupted.append(time.process_time())
        if len(interrupted) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return priced(spec, plan, cluster, most=most)

    words = [f"model.config.{key}={value}" for key, value in (SMALL | {"num_hidden_layers": 1000}).items()]
    with patch.object(comparison, "price", interrupt):
        assert main(["plan", "--cluster", "8xH100", "data.path=x", "train.global_batch_size=8", *words]) == 130
    assert len(interrupted) == 5
    assert time.process_time() - interrupted[-1] < 1


def test_a_timeout_beyond_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.timeout_s=1e308"]) == 78
    assert refuses(capfd.readouterr().err, "CFG005", "`run.timeout_s`", "> 0", "604,800")


ADAPTER = Lora(2, 4.0, ("q", "down"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    ones = {name: torch.ones(shape) for name, shape in lora.adapters(SPEC, ADAPTER).items()}
    peft.write_adapter(directory, ADAPTER, SPEC, None, ones, ones.__getitem__)
    return directory


@MUTATE
@given(data=st.data())
def test_a_mutated_adapter(adapter: Path, data: st.DataObject) -> None:
    file = adapter / peft.CONFIG
    kept = file.read_text()
    config = json.loads(kept)
    extra = ["rank_pattern", "modules_to_save", "init_lora_weights", "layers_to_transform"]
    for _ in range(data.draw(st.integers(1, 2))):
        config[data.draw(st.sampled_from([*sorted(config), *extra]))] = data.draw(ODD)
    file.write_text(json.dumps(config))
    try:
        settings = peft.adapter_settings(adapter, SPEC)
        assert settings.get("rank", 1) >= 1
        peft.find_adapter(adapter, lora.adapters(SPEC, ADAPTER), ADAPTER, SPEC)
    except OURS:
        pass
    finally:
        file.write_text(kept)


def test_an_adapter_that_is_not_finite(adapter: Path, tmp_path: Path) -> None:
    shapes = lora.adapters(SPEC, ADAPTER)
    infinite = {name: torch.full(shape, torch.inf) for name, shape in shapes.items()}
    peft.write_adapter(tmp_path, ADAPTER, SPEC, None, infinite, infinite.__getitem__)
    parts = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    with pytest.raises(DataError, match=r"MOD006.*`layers.0.attention.q.lora_a.weight` .*96 infinite of 96 "):
        list(peft.read_adapter(tmp_path, parts, ADAPTER, SPEC))
    stored = safetensors.torch.load_file(tmp_path / peft.WEIGHTS)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        safetensors.torch.save_file({name: value.to(dtype) for name, value in stored.items()}, tmp_path / peft.WEIGHTS)
        with pytest.raises(DataError, match=f"CKPT004.*{dtype}"):
            peft.find_adapter(tmp_path, shapes, ADAPTER, SPEC)
