"""Hugging Face weights: the files of a model's directory, reading no more than the slices asked for, and writing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import DataError, MissingInputError, PolicyError, Problem
from shardwise.models import float8, known, quantization, tensorfile
from shardwise.models.config import ModelSpec, parameter_shapes, to_hf
from shardwise.models.families import FAMILIES, text_part
from shardwise.models.float8 import Scales
from shardwise.models.hf_names import Location, copies, locations, name_in_files, predictor_names, tensors, written
from shardwise.models.hf_spec import HFModel
from shardwise.models.predictor import without_predictor
from shardwise.models.quantization import Block
from shardwise.models.roles import is_counted
from shardwise.models.stored import KeptLayers, KeptTensor, StoredParameter, StoredRows
from shardwise.models.tensorfile import Entry, read_json, shortened, some
from shardwise.spec.file_kind import PICKLES, pickle_refused
from shardwise.spec.files import inside
from shardwise.spec.hub import fetch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

ENDS = {"embed.weight", "head.weight"}
"""What has a row for each id."""
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.(activation|input|output|[qkv])_scale)$")
"""Tables in old exports that are not needed, for they follow from the config; and scales of what inference quantises
beside weights."""
_PREDICTING = re.compile(r"num_nextn_predict_layers$|(num_)?mtp_")
"""Keys of a config that tell of layers which predict further tokens."""
_OUTER = re.compile(r"^language_model\.|^(model\.)language_model\.")
"""The prefix of the text part's names in a model of text and images."""


def weights_directory(source: str, revision: str | None = None, *, here: bool = False) -> Path:
    """The directory (or single file) that holds the weights of a local path or a Hub id, fetched if need be, unless
    they have to be ``here``."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        what, fix = f"{source} is not a directory", "model.path: a directory or Hub id; or model.init: random"
        if known.find(source) is not None:
            what = f"{source} is only known by its dimensions: there are no weights"
        raise MissingInputError(Problem("CKPT001", what, "model.path", fix))
    return fetch(source, revision, ["*.safetensors", "*.json"], "model.path", here=here)


def find_weights(source: Path) -> dict[str, Entry]:
    """Every tensor of a model's directory (or single file), by its Hugging Face name. Headers are read, no weights."""
    if not source.is_dir():
        return tensorfile.entries(_checked(source.parent, source.name))
    if (source / INDEX).exists():
        return _indexed(source)
    files = sorted(path.name for path in source.glob("*.safetensors"))
    if SINGLE in files:
        files = [SINGLE]
    if len(files) == 1:
        return tensorfile.entries(_checked(source, files[0]))
    if files:
        what = f"{len(files)} safetensors files in {source} and no {INDEX} that says which holds what"
        raise MissingInputError(Problem("CKPT014", what, str(source), f"add {INDEX}, or leave one file"))
    if pickles := sorted(path.name for path in source.iterdir() if path.suffix in PICKLES):
        raise pickle_refused(source / pickles[0])
    what = f"no weights in {source} (looked for {INDEX}, {SINGLE}, *.safetensors)"
    raise MissingInputError(Problem("CKPT001", what, str(source), "give a directory as save_pretrained writes it"))


def _checked(directory: Path, name: str) -> Path:
    """The path of file ``name``; refused if it is outside ``directory`` or not a regular safetensors file."""
    fix, root = "fetch the model again from where it was made", directory.resolve()
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []  # a cache of the Hub's
    try:
        path = inside(directory, name, directory, *blobs)
    except (OSError, ValueError, RuntimeError) as error:  # thousands of characters, a zero byte, links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"no file can be opened as {shortened(name)!r}: {reason}"
        raise DataError(Problem("CKPT009", what, str(directory), fix)) from error
    if path.suffix in PICKLES:
        raise pickle_refused(path)
    if not path.exists():
        raise MissingInputError(Problem("CKPT001", f"no file {path}", str(directory), "check the path"))
    if not path.is_file():
        raise PolicyError(Problem("SEC006", f"{name!r} is not a regular file", str(directory), "fetch the model again"))
    return path


def _indexed(directory: Path) -> dict[str, Entry]:
    path = _checked(directory, INDEX)
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise DataError(Problem("CKPT009", f"{INDEX} has no weight_map of file names", str(path), "fetch it again"))
    files = sorted(set(places.values()))
    paths, missing = {}, []
    for name in files:
        try:
            paths[name] = _checked(directory, name)
        except MissingInputError:
            missing.append(name)
    if missing:
        what = f"index names {len(files)} shards, {len(missing)} missing: {some(missing)}"
        raise MissingInputError(Problem("CKPT014", what, str(path), f"fetch {some(missing)} into {directory}"))
    found: dict[str, Entry] = {}
    for name in files:
        held = tensorfile.entries(paths[name])
        listed = {tensor for tensor, file in places.items() if file == name}
        if wrong := sorted(listed ^ held.keys()):
            what = f"{INDEX} and {name} disagree about {len(wrong)} tensors: {some(wrong)}"
            raise DataError(Problem("CKPT009", what, str(path), "fetch index and shards of one revision"))
        found |= held
    return found


def match(
    found: Mapping[str, Entry], spec: ModelSpec, where: str, *, grown: bool = False, blocks: Sequence[Block] = ()
) -> dict[str, StoredParameter]:
    """Find where every parameter of ``spec`` is stored, by its canonical name; with ``grown`` embedding and output
    layer may have fewer rows in the files. ``blocks``: those of weights in float8 that have one scale. Raises DataError
    listing all that differs: tensors by the canonical name of the parameter if they are one, by their own if they are
    one of several, or hold several."""
    found = _text_part(found, spec) if spec.hf_model is None else found
    located = locations(spec, found)
    if absent := _absent(located, found, spec):
        located = {name: parts for name, parts in located.items() if name not in absent}
    if grown:
        located |= {name: _held(located[name], found) for name in ENDS & located.keys()}
    shapes = {name: shape for parts in located.values() for part in parts for name, shape in part.shapes()}
    packed = {name for parts in located.values() for part in parts if part.packed for name, _ in part.shapes()}
    of_scales = [f"{name}{word}" for name in shapes for word in float8.NAMES]
    found = found if spec.hf_model is None else _named_as_now(found, spec.hf_model, [*shapes, *of_scales])
    held = tensors(located)
    own = {tensor: parts[0][0] for tensor, parts in held.items() if len(parts) == len(located[parts[0][0]]) == 1}
    ignored = {name_in_files("head.weight", spec)} if spec.tie_word_embeddings else set()
    there = {name: found[name] for name in shapes if name in found}
    scales, problems = float8.scales_of(there, found, blocks, where)
    ignored |= {f"{name}{word}" for name in there if there[name].dtype in float8.KINDS for word in float8.NAMES}
    extra = [name for name in found if name not in shapes and name not in ignored and not _IGNORED.search(name)]
    missing = [own.get(name, name) for name in shapes if name not in found]
    if missing or extra:
        what = f"{len(missing)} tensors missing ({some(missing)}), {len(extra)} unexpected ({some(extra)})"
        model = f"{spec.num_hidden_layers} layers" + (f", {spec.experts.num_experts} experts" if spec.experts else "")
        fix = f"take the config.json that belongs to these weights (the model: {model})"
        problems.append(Problem("CKPT003", what.replace(" ()", ""), where, fix))
    if differ := [name for name, entry in there.items() if entry.shape != shapes[name]]:
        one = [f"`{own.get(name, name)}` file {list(there[name].shape)}, model {list(shapes[name])}" for name in differ]
        embed = next((name for name in differ if own.get(name) == "embed.weight"), None)
        fix = "fix the config" if embed is None else f"model.config: vocab_size: {there[embed].shape[0]}"
        problems.append(Problem("CKPT002", f"{len(differ)} of {len(shapes)} tensors differ: {some(one)}", where, fix))
    if odd := [name for name, entry in there.items() if not _readable(entry.dtype, name in packed)]:
        named = some([own.get(name, name) for name in odd])
        what = f"{len(odd)} tensors are quantised ({there[odd[0]].dtype}): {named}"
        problems.append(Problem("CKPT004", what, where, "take the unquantised weights (fp32, bf16 or fp16)"))
    if problems:
        raise DataError(*problems)
    return {
        name: StoredParameter(tuple(_stored(part, there, scales) for part in parts)) for name, parts in located.items()
    }


def _absent(located: Mapping[str, tuple[Location, ...]], found: Mapping[str, Entry], spec: ModelSpec) -> frozenset[str]:
    """Return the parameters of a layer that predicts a further token, where the files have none of them."""
    own = predictor_names(spec)
    there = any(name in found for each in own for part in located[each] for name, _ in part.shapes())
    return frozenset() if there else frozenset(own)


def begun_anew(source: Path, spec: ModelSpec) -> frozenset[str]:
    """Return the canonical parameters that these files lack and that are drawn: those of a layer that predicts a
    further token, of a model that has had none. Raises what :func:`find_weights` does."""
    if not spec.predictors:
        return frozenset()
    found = _text_part(find_weights(source), spec)
    return _absent(locations(spec, found), found, spec)


def _stored(part: Location, there: Mapping[str, Entry], scales: Mapping[str, Scales]) -> StoredRows:
    held = [there[tensor] for tensor, _ in part.shapes()]
    return StoredRows(part, held[0], held[1] if part.packed else None, scales.get(part.tensor))


def _held(parts: tuple[Location, ...], found: Mapping[str, Entry]) -> tuple[Location, ...]:
    """Cut the one place of a parameter to the rows that the files have, where they have fewer than the model."""
    [part] = parts
    there = found[part.tensor].shape if part.tensor in found else part.shape
    rows, width = there[0], part.shape[1:]
    fewer = len(there) > 1 and there[1:] == width and rows < part.shape[0] and part.stop == part.shape[0]
    return (replace(part, stop=rows, shape=there) if fewer else part,)


def _readable(dtype: torch.dtype, packed: bool) -> bool:
    return dtype == torch.uint8 if packed else dtype.is_floating_point and dtype != torch.float8_e8m0fnu


def _text_part(found: Mapping[str, Entry], spec: ModelSpec) -> Mapping[str, Entry]:
    """The entries of the text part of a model of text and images, under the names of a text-only model."""
    family = FAMILIES[spec.family]
    others = "|".join(filter(None, (family.unused, "" if spec.predictors else family.predictors)))
    if not others and not spec.predictors:
        return found
    own = {name: entry for name, entry in found.items() if not (others and _is_of(others, name, spec))}
    own = {_OUTER.sub(r"\1", name): entry for name, entry in own.items()}
    return {name: entry for name, entry in own.items() if name not in copies(spec)}


def _is_of(pattern: str, name: str, spec: ModelSpec) -> bool:
    """Return whether a family's pattern matches the name of a tensor."""
    layers = str(spec.num_hidden_layers - spec.predictors)
    return bool(re.match(rf"(model\.)?({pattern.replace('LAYERS', layers)})", name))


def kept_beside(source: Path, spec: ModelSpec) -> KeptLayers:
    """Return the layers of these files that predict further tokens, and what their config says of them. Raises what
    :func:`find_weights` does, DataError for float8 without scales that fit."""
    found, predictors = find_weights(source), FAMILIES[spec.family].predictors
    own = {name: found[name] for name in found if predictors and _is_of(predictors, name, spec)}
    scales, problems = float8.scales_of(own, found, _blocks(source), str(source))
    if problems:
        raise DataError(*problems)
    not_kept = {each.name for each in scales.values()} | {name for name in own if _IGNORED.search(name)}
    kept = {name: KeptTensor(entry, scales.get(name)) for name, entry in own.items() if name not in not_kept}
    config = text_part(_config_beside(source)) if kept else {}
    return KeptLayers(kept, {key: value for key, value in config.items() if _PREDICTING.match(key)})


def _named_as_now(found: Mapping[str, Entry], hf_model: HFModel, names: Iterable[str]) -> Mapping[str, Entry]:
    """The entries under transformers' current names: old files may lack the prefix (``h.0`` for ``transformer.h.0``)
    and contain tables that are not parameters."""
    word, known_names = hf_model.inner.partition(".")[0], set(names)
    full = {f"{word}.{name}" if f"{word}.{name}" in known_names else name: entry for name, entry in found.items()}
    old = [name for name in full if name not in known_names and any(re.search(word, name) for word in hf_model.ignored)]
    return {name: entry for name, entry in full.items() if name not in old}


def _blocks(source: Path) -> Sequence[Block]:
    """Return the blocks that have a scale where weights are in float8, by the config.json beside them, if there is
    one. Raises DataError CKPT004 for weights in a format that is not read."""
    config = _config_beside(source)
    if method := quantization.unread(config):
        what = f"the weights are quantised by {shortened(method)}, which is not read"
        raise DataError(Problem("CKPT004", what, str(source), "take the unquantised weights (fp32, bf16 or fp16)"))
    return quantization.blocks(config)


def _config_beside(source: Path) -> dict[str, Any]:
    """Return the config beside these weights; empty if there is none."""
    path = (source if source.is_dir() else source.parent) / "config.json"
    return read_json(path) if path.is_file() else {}


def check_weights(source: str, revision: str | None, spec: ModelSpec, *, grown: bool = False) -> None:
    """Download the weights of ``source`` if needed, and raise the errors of :func:`read_weights`. Reads headers only,
    and the output layer if the config says that it is tied to the embedding."""
    directory = weights_directory(source, revision)
    found = find_weights(directory)
    embed = match(found, spec, str(directory), grown=grown, blocks=_blocks(directory))["embed.weight"]
    head = found.get(name_in_files("head.weight", spec))
    if not spec.tie_word_embeddings or head is None:
        return
    shape = (embed.pieces[-1].location.stop, *parameter_shapes(spec)["embed.weight"][1:])
    name, whole = name_in_files("head.weight", spec), tuple(slice(0, size) for size in shape)
    alike = head.shape == shape and head.dtype not in float8.KINDS
    if not alike or not torch.equal(head.read_finite(name, whole), embed.read_finite(whole)):
        what = "head and embedding differ in the files, but the config says that they are tied"
        raise DataError(Problem("CKPT002", what, str(directory), "tie_word_embeddings: false in its config.json"))


def read_weights(
    source: Path, parts: Mapping[str, Sequence[slice]], spec: ModelSpec, *, grown: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, its slice in the stored type) for each of ``parts``, one at a time, checked while it is read:
    raises DataError (MOD006) for NaN and infinity."""
    stored = stored_weights(source, spec, grown=grown)
    yield from ((name, stored[name].read_finite(part)) for name, part in parts.items())


def stored_weights(source: Path, spec: ModelSpec, *, grown: bool = False) -> dict[str, StoredParameter]:
    """Every parameter by its canonical name, headers checked; ``grown``: new rows begin as the mean of the others."""
    return match(find_weights(source), spec, str(source), grown=grown, blocks=_blocks(source))


MAX_SHARD_BYTES = 5 * 10**9
"""Of a file of weights, unless one tensor is larger."""
NOTHING = KeptLayers()


def write_weights(
    directory: Path,
    spec: ModelSpec,
    fetch: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    kept: KeptLayers = NOTHING,
) -> list[Path]:
    """Write ``directory`` as transformers' ``from_pretrained`` reads it, and behind the model what is ``kept`` of
    another; returns the files of weights.

    ``fetch`` gives the whole value of a canonical parameter; it is called once for each, in :func:`order_of_writing`,
    and no more than one parameter, one tensor of the files and a copy of it are held. What follows from counts is
    written in fp32, whatever the ``dtype``. In float8 linear layers of blocks are, with scales behind them, and the
    rest in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    held = written(spec)
    fetched = {"": torch.empty(0)}
    scales = dict[str, Tensor]()
    coded = float8.coded_names(held) if dtype == float8.WRITTEN else set()
    dtype = torch.bfloat16 if dtype == float8.WRITTEN else dtype
    others = {name: torch.float32 for name, parts in held.items() if is_counted(parts[0][0])}
    others |= {name: each.entry.dtype for name, each in kept.tensors.items() if each.float8 is None}
    shapes = dict[str, tuple[int, ...]]()
    for name, parts in held.items():
        shapes[name] = parts[0][1].shape
        if name in coded:
            shapes[name + float8.SCALE] = float8.scales_shape(shapes[name])
            others |= {name: float8.WRITTEN, name + float8.SCALE: torch.float32}
    shapes |= {name: each.entry.shape for name, each in kept.tensors.items()}
    sizes_bytes = {name: prod(shape) * others.get(name, dtype).itemsize for name, shape in shapes.items()}
    files = _files(sizes_bytes, max_shard_bytes)

    def value(name: str) -> Tensor:
        if name not in fetched:
            fetched.clear()
            fetched[name] = fetch(name).detach()
        return fetched[name]

    def made(name: str) -> Tensor:
        if name in scales:
            return scales.pop(name)
        found = assembled(held[name], value) if name in held else kept.tensors[name].read()
        if name in coded:
            found, scales[name + float8.SCALE] = float8.coded(found.to(dtype))  # as training multiplies it
        return found

    for file, names in files.items():
        own = {name: shapes[name] for name in names}
        tensorfile.write(directory / file, own, dtype, map(made, names), others)
    _write_index(directory, files, sum(sizes_bytes.values()))
    config = to_hf(without_predictor(spec)) | {**kept.config, "dtype": str(dtype).removeprefix("torch.")}
    if coded:
        config |= float8.config_of([name for name, shape in shapes.items() if len(shape) == 2 and name not in coded])
    if spec.predictors:
        config[FAMILIES[spec.family].predictor_count] = spec.predictors
    _write_json(directory / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _write_json(directory / "config.json", config)
    return [directory / file for file in files]


def _write_index(directory: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    """Write which file has which tensor, where there are several."""
    if len(files) > 1:
        file_of = {name: file for file, names in files.items() for name in names}
        _write_json(directory / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": file_of})


def _files(sizes_bytes: Mapping[str, int], most_bytes: int) -> dict[str, list[str]]:
    """Return the tensors that go into each file, by the file's name: in their order, as many as are together no larger
    than ``most_bytes``, and one alone that is larger."""
    files: list[list[str]] = [[]]
    left = most_bytes
    for name, size in sizes_bytes.items():
        if files[-1] and size > left:
            files.append([])
            left = most_bytes
        files[-1].append(name)
        left -= size
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def order_of_writing(spec: ModelSpec) -> list[str]:
    """The canonical parameters in the order in which :func:`write_weights` fetches them: each once, as all tensors with
    rows of one alone follow each other."""
    return list(dict.fromkeys(name for parts in written(spec).values() for name, _ in parts))


def assembled(parts: Sequence[tuple[str, Location]], value: Callable[[str], Tensor]) -> Tensor:
    """A tensor of the files from the parameters that are in it."""
    [(name, location), *others] = parts
    if not others and location.expert is None:
        rows = value(name)[location.start : location.stop]
        return rows.T if location.transposed else rows
    out = torch.empty(location.shape, dtype=value(name).dtype)
    for name, location in parts:
        rows = value(name)[location.start : location.stop]
        location.rows(out if location.expert is None else out[location.expert]).copy_(rows)
    return out


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
