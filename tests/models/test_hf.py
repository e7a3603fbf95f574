"""Weights in and out of Hugging Face directories."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.errors import DataError, MissingInputError, PolicyError, ShardwiseError
from shardwise.models import hf, tensorfile
from shardwise.models.attention import MaskSpec
from shardwise.models.config import parameter_shapes, with_fields
from shardwise.models.hf_names import locations, tensors, to_hf_name
from shardwise.models.lookup import load_spec
from tests.models.growth import grown
from tests.models.llama import pair, random_config, random_model, tokens
from tests.models.test_decoder import SPEC
from tests.said import shows


def export(
    directory: Path, max_shard_bytes: int = 10**9, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    state = random_model(SPEC).state_dict()
    hf.write_weights(directory, SPEC, state.__getitem__, dtype, max_shard_bytes)
    return state


def everything() -> dict[str, tuple[slice, ...]]:
    return {name: tuple(slice(0, n) for n in shape) for name, shape in parameter_shapes(SPEC).items()}


@pytest.mark.parametrize("seed", range(4))
def test_names_are_a_bijection_with_those_of_transformers(seed: int) -> None:
    ours, theirs = pair(random_config(seed))
    names = [name for name, _ in ours.named_parameters()]
    assert {to_hf_name(name) for name in names} == {name for name, _ in theirs.named_parameters()}
    held = tensors(locations(ours.spec)).items()
    assert {theirs: [name for name, _ in parts] for theirs, parts in held} == {
        to_hf_name(name): [name] for name in names
    }


@pytest.mark.parametrize("name", ["layers.0.attention.qkv.weight", "norm.scale", "weight"])
def test_other_names_have_no_counterpart(name: str) -> None:
    with pytest.raises(KeyError, match="no counterpart"):
        to_hf_name(name)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bitwise(tmp_path: Path, max_shard_bytes: int, dtype: torch.dtype) -> None:
    state = export(tmp_path, max_shard_bytes, dtype)
    assert (tmp_path / hf.INDEX).exists() == (max_shard_bytes < 10**9)
    read = dict(hf.read_weights(tmp_path, everything(), SPEC))
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name].to(dtype)) for name in state)
    for file in tmp_path.glob("*.safetensors"):  # safetensors' own reader agrees
        for name, value in load_file(file).items():
            [(ours, _)] = tensors(locations(SPEC))[name]
            assert torch.equal(value, state[ours].to(dtype))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_an_export_with_identical_logits(tmp_path: Path, seed: int, max_shard_bytes: int) -> None:
    """Identical to a transformers model of the same weights, and ours reads back what transformers saves."""
    ours, theirs = pair(random_config(seed))
    hf.write_weights(tmp_path / "ours", ours.spec, ours.state_dict().__getitem__, max_shard_bytes=max_shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids, positions = tokens(ours.spec.vocab_size)
    assert torch.equal(loaded(ids).logits, theirs(ids).logits)
    spec = load_spec(str(tmp_path / "ours"))
    assert replace(spec, name="test") == ours.spec
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    spec = load_spec(str(tmp_path / "theirs"))
    parts = {name: [slice(0, n) for n in shape] for name, shape in parameter_shapes(spec).items()}
    state = dict(hf.read_weights(tmp_path / "theirs", parts, spec))
    logits = ours(ids, positions, MaskSpec())
    ours.load_state_dict(state, strict=not spec.tie_word_embeddings)
    assert torch.equal(ours(ids, positions, MaskSpec()), logits)


def test_slices(tmp_path: Path) -> None:
    state = export(tmp_path)
    parts = {"embed.weight": (slice(3, 17), slice(0, 32)), "layers.1.attention.o.weight": (slice(0, 32), slice(8, 20))}
    parts["norm.weight"] = (slice(5, 5),)
    for name, value in hf.read_weights(tmp_path, parts, SPEC):
        assert torch.equal(value, state[name][parts[name]]) and value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.numel() * 4


@pytest.mark.parametrize("rows", [slice(0, 64), slice(50, 63), slice(61, 64), slice(62, 64), slice(3, 17)])
def test_rows_of_new_tokens_begin_as_the_mean(tmp_path: Path, rows: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' resize_token_embeddings begins them, but for its noise: whatever slice a rank reads."""
    monkeypatch.setattr("shardwise.models.stored._ROWS", 7)
    state, spec = export(tmp_path), replace(SPEC, vocab_size=SPEC.vocab_size + 3)
    wanted = {"embed.weight": (rows, slice(4, 20))}
    [(_, value)] = hf.read_weights(tmp_path, wanted, spec, grown=True)
    mean = state["embed.weight"].double().mean(0, keepdim=True).float()
    whole = torch.cat([state["embed.weight"], mean.expand(3, -1)])
    assert torch.equal(value, whole[rows, 4:20])
    with pytest.raises(DataError, match=r"tensors differ: `embed\.weight`"):
        next(hf.read_weights(tmp_path, wanted, spec))
    narrow = with_fields(spec, hidden_size=16, num_attention_heads=2)
    with pytest.raises(DataError, match="tensors differ"):
        next(hf.read_weights(tmp_path, wanted, narrow, grown=True))


@pytest.mark.prove
def test_reading_a_slice_allocates_the_slice_alone(tmp_path: Path) -> None:
    """Anonymous memory of a fresh process grows by less than 8 MiB when 1 MiB of a 256 MiB tensor is read."""
    shape = (2**16, 2**10)
    tensorfile.write(tmp_path / "big.safetensors", {"x": shape}, torch.float32, [torch.ones(shape)])
    read = "entry.read([slice(5000, 5256), slice(0, 1024)])"
    grown_bytes, total = grown(tmp_path / "big.safetensors", read)
    assert grown_bytes < 8 * 2**20 and total == 256 * 1024


def test_a_misaligned_tensor_is_read(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (7 - len(header) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    assert tensorfile.entries(path)["x"].read().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("value", "told"), [(torch.nan, "1 NaN"), (-torch.inf, "1 infinite")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_the_slice_that_holds_them(
    tmp_path: Path, dtype: torch.dtype, value: float, told: str
) -> None:
    name = "layers.1.attention.o.weight"
    state = random_model(SPEC).state_dict()
    state[name][4, 20] = value
    hf.write_weights(tmp_path, SPEC, state.__getitem__, dtype)
    beside, holding = ({name: (slice(0, 32), columns)} for columns in (slice(0, 20), slice(20, 32)))
    assert len(list(hf.read_weights(tmp_path, beside, SPEC))) == 1
    with pytest.raises(DataError) as caught:
        list(hf.read_weights(tmp_path, holding, SPEC))
    (problem,) = caught.value.problems
    assert problem.code == "MOD006" and problem.where == str(tmp_path / hf.SINGLE)
    assert shows(problem.what, "`model.layers.1.self_attn.o_proj.weight`", told, 384)


def test_nan_in_a_tied_embedding_is_not_taken_for_another_head(tmp_path: Path) -> None:
    state = random_model(SPEC).state_dict()
    state["embed.weight"][3] = torch.nan
    state["head.weight"] = state["embed.weight"]
    hf.write_weights(tmp_path, replace(SPEC, tie_word_embeddings=False), state.__getitem__)
    with pytest.raises(DataError, match="MOD006"):
        hf.check_weights(str(tmp_path), None, replace(SPEC, tie_word_embeddings=True))


def refused(source: Path, error: type[ShardwiseError], code: str) -> str:
    with pytest.raises(error) as caught:
        list(hf.read_weights(source, everything(), SPEC))
    assert code in [problem.code for problem in caught.value.problems]
    assert all(problem.fix and problem.where for problem in caught.value.problems)
    return str(caught.value)


def test_a_truncated_file(tmp_path: Path) -> None:
    """B-33: cut anywhere, within the header or the data."""
    export(tmp_path)
    path = tmp_path / hf.SINGLE
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100):
        path.write_bytes(whole[:size])
        text = refused(tmp_path, DataError, "CKPT005")
        assert f"{size:,} bytes" in text and "incomplete" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer (64"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML or XML"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 40, "a gzip archive"),
        (b"PK\x03\x04" + b"\x00" * 40, "a zip archive"),
        (b"\x80\x04\x95" + b"cposix\nsystem\n" * 3, "a pickle"),
        (b"", "safetensors file"),
        (b"\x01" * 7, "safetensors file"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00" + b"A" * 50, "safetensors file"),
    ],
)
def test_something_else_under_that_name(tmp_path: Path, content: bytes, text: str) -> None:
    """B-34, B-38."""
    (tmp_path / hf.SINGLE).write_bytes(content)
    assert text in refused(tmp_path, DataError, "CKPT006")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    """B-37: found in the directory, given as the file, or named by the index."""
    (tmp_path / name).write_bytes(b"\x80\x04")
    assert "can run code" in refused(tmp_path, PolicyError, "SEC004")
    refused(tmp_path / name, PolicyError, "SEC004")
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(tmp_path, PolicyError, "SEC004")


def outside_link(directory: Path) -> str:
    target = directory.parent / "outside.safetensors"
    save_file({"x": torch.zeros(1)}, target)
    (directory / "link.safetensors").symlink_to(target)
    return "link.safetensors"


def device_link(directory: Path) -> str:
    (directory / "zero.safetensors").symlink_to("/dev/zero")
    return "zero.safetensors"


@pytest.mark.parametrize("place", [lambda _: "../../x", lambda _: "/dev/zero", outside_link, device_link])
def test_a_shard_outside_the_directory(tmp_path: Path, place: Callable[[Path], str]) -> None:
    """B-40."""
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    (tmp_path / "x").write_bytes(b"secret")
    (directory / hf.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": place(directory)}}))
    assert "leaves" in refused(directory, PolicyError, "SEC006")


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    state = export(snapshot)
    (tmp_path / "blobs").mkdir()
    (snapshot / hf.SINGLE).rename(tmp_path / "blobs" / "abc")
    (snapshot / hf.SINGLE).symlink_to("../../blobs/abc")
    assert all(torch.equal(value, state[name]) for name, value in hf.read_weights(snapshot, everything(), SPEC))


GOOD = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "data_bytes", "code"),
    [
        (f'{{"a":{GOOD},"a":{GOOD}}}', 8, "CKPT009"),
        (f'{{"a":{GOOD},"b":{GOOD}}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', 12, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}', 8, "CKPT009"),
        ('{"a":{"dtype":"F32","shape":[2]}}', 8, "CKPT009"),
        ('{"a":7}', 8, "CKPT009"),
        ('{"a":', 8, "CKPT009"),
        (f'{{"a":{GOOD}}}', 20, "CKPT009"),
        ("{" * 100_000, 8, "CKPT009"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path: Path, header: str, data_bytes: int, code: str) -> None:
    """B-42, and bytes after the last tensor (a polyglot)."""
    text = header.encode()
    (tmp_path / hf.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    refused(tmp_path, DataError, code)


def test_a_header_too_large(tmp_path: Path) -> None:
    """B-43: refused by its length, unread (the file is sparse)."""
    with (tmp_path / hf.SINGLE).open("wb") as file:
        file.write((200 * 2**20).to_bytes(8, "little") + b"{")
        file.truncate(300 * 2**20)
    assert "over the limit" in refused(tmp_path, DataError, "CKPT010")


def test_missing_files(tmp_path: Path) -> None:
    """B-48, B-29, and files without an index."""
    export(tmp_path, 20_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    text = refused(tmp_path, MissingInputError, "CKPT014")
    assert shows(text, f"{len(shards)} shards", "1 missing", shards[1].name)
    (tmp_path / hf.INDEX).unlink()
    assert "no model.safetensors.index.json" in refused(tmp_path, MissingInputError, "CKPT014")
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    refused(tmp_path, MissingInputError, "CKPT001")
    refused(tmp_path / "nowhere.safetensors", MissingInputError, "CKPT001")
    with pytest.raises(MissingInputError, match="dimensions"):
        hf.weights_directory("Llama-3.1-8B")


def test_an_index_of_other_shards(tmp_path: Path) -> None:
    """A tensor listed that the file does not hold, and one held that is listed elsewhere."""
    export(tmp_path, 20_000)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    names = itertools.groupby(sorted(index["weight_map"].items(), key=lambda item: item[1]), key=lambda item: item[1])
    first, second = (next(iter(group))[0] for _, group in itertools.islice(names, 2))
    places = index["weight_map"]
    places[first], places[second] = places[second], places[first]
    (tmp_path / hf.INDEX).write_text(json.dumps(index))
    assert "disagree" in refused(tmp_path, DataError, "CKPT009")


def test_weights_of_another_model(tmp_path: Path) -> None:
    """B-30, B-31: all that differs is listed, shapes and keys together."""
    export(tmp_path)
    wider = replace(SPEC, vocab_size=64, num_hidden_layers=3)
    with pytest.raises(DataError) as caught:
        list(hf.read_weights(tmp_path, {}, wider))
    text = str(caught.value)
    assert {problem.code for problem in caught.value.problems} == {"CKPT002", "CKPT003"}
    assert "16 tensors missing (layers.2." in text and "2 of 51 tensors differ" in text
    assert "`embed.weight` file [61, 32], model [64, 32]" in text and "vocab_size: 61" in text
    fewer = replace(SPEC, num_hidden_layers=1)
    with pytest.raises(DataError, match="0 tensors missing, 16 unexpected"):
        list(hf.read_weights(tmp_path, {}, fewer))


def test_quantised_weights(tmp_path: Path) -> None:
    export(tmp_path)
    state = load_file(tmp_path / hf.SINGLE)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
    save_file(state, tmp_path / hf.SINGLE)
    assert "quantised" in refused(tmp_path, DataError, "CKPT004")


def test_a_failed_export_leaves_no_whole_file(tmp_path: Path) -> None:
    def broken(_: str) -> torch.Tensor:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        hf.write_weights(tmp_path, SPEC, broken)
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "config.json").exists()
