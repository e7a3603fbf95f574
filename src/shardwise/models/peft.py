"""Writes and reads adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.models import tensorfile
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.expert_families import TAKEN_FOR_EXPERTS
from shardwise.models.hf_names import name_in_model, transposed
from shardwise.models.peft_experts import Fused, Member, parameter_of, place_of, targeted
from shardwise.models.peft_turns import in_turn, mixed, turned, weight_of
from shardwise.models.peft_whole import ends_differ, whole_ends, whole_names
from shardwise.models.roles import is_adaptable, is_adapter, is_expert, role
from shardwise.models.stored import StoredParameter, StoredRows
from shardwise.models.tensorfile import Entry
from shardwise.spec.complaints import show_value
from shardwise.spec.files import NOTE_BYTES
from shardwise.spec.plan import Lora
from shardwise.spec.recipe import LoraSection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BESIDE: tuple[str, ...] = ("lora_bias", "trainable_token_indices")
_BESIDE += ("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config")
_BESIDE += ("kasa_config", "monteclora_config")
_FIRST = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the model unchanged. PiSSA, OLoRA, CorDA, LoftQ and others subtract the adapter's initial
value from the model's weights, so that it belongs to another model than the one that its config names."""
_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
"""The others that PEFT can convert to a plain adapter."""
_WORDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}


def _stored(modules: Mapping[str, Mapping[str, list[str]]]) -> dict[str, tuple[str, list[str]]]:
    """Every tensor of an adapter by PEFT's name: whether it is A, B or the magnitude, and the parameters in it."""
    return {
        f"{place_of(module, modules)}.{_WORDS[word]}": (word, held[word])
        for module, held in modules.items()
        for word in held
    }


def _modules(names: Iterable[str], spec: ModelSpec) -> dict[str, dict[str, list[str]]]:
    """``layers.3.attention.q.lora_a.weight`` is in ``base_model.model.model.layers.3.self_attn.q_proj``, under lora_a;
    where the files of a family, or transformers' modules of experts, stack layers, with those of the layers beside it,
    in their order."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        layer, _, word = name.removesuffix(".weight").rpartition(".")
        theirs = parameter_of(layer) if is_expert(name) else name_in_model(f"{layer}.weight", spec)
        theirs = theirs.removesuffix(".weight")
        found.setdefault(f"base_model.model.{theirs}", {}).setdefault(word, []).append(name)
    return found


def _patterns(lora: Lora, modules: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, dict[str, float]]:
    """The adapter of k stacked layers as one of k times the rank: every A, and B as a block-diagonal matrix."""
    stacked = {name.rpartition(".")[2]: len(words["lora_a"]) for name, words in modules.items()}
    ranks = {name: lora.rank * count for name, count in stacked.items() if count > 1}
    alphas = {name: lora.alpha * (stacked[name] ** 0.5 if lora.rslora else stacked[name]) for name in ranks}
    return {"rank_pattern": dict(ranks), "alpha_pattern": alphas}


def write_adapter(
    directory: Path,
    lora: Lora,
    spec: ModelSpec,
    model: str | None,
    named: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
) -> None:
    """Write ``directory`` as ``PeftModel.from_pretrained`` reads it, in the dtype that the adapters have. ``named`` are
    their parameters by canonical name, and behind them what was trained whole, of which the global shapes and dtypes
    are read; ``fetch`` gives their whole values, once each and in that order. ``model``: what they belong to."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: tuple(value.shape) for name, value in named.items()}
    dtype = reduce(torch.promote_types, {value.dtype for value in named.values()})
    modules, whole = _modules(filter(is_adapter, shapes), spec), whole_names(lora, spec)
    turns = in_turn(spec)
    wide = {
        theirs: Fused.of(names, shapes, lora.rank, spec).shape()
        if is_expert(names[0])
        else _joined([shapes[name] for name in names], rows=True, columns=word == "lora_b")
        for theirs, (word, names) in _stored(modules).items()
    } | {theirs: shapes[name] for theirs, name in whole.items()}

    def values() -> Iterator[Tensor]:
        for words in modules.values():
            held = {name: fetch(name) for layer in zip(*words.values(), strict=True) for name in layer}
            for word, names in words.items():
                parts = [held[name] for name in names]
                if is_expert(names[0]):
                    yield Fused.of(names, shapes, lora.rank, spec).packed(parts)
                else:
                    joined = torch.block_diag(*parts) if word == "lora_b" else torch.cat(parts)
                    yield joined if word == "lora_a" else turned(joined, names, turns)
        fetched = {name: fetch(name) for name in dict.fromkeys(whole.values())}
        yield from (fetched[name] for name in whole.values())

    tensorfile.write(directory / WEIGHTS, wide, dtype, values())
    chosen, parameters = _targeted(modules, spec)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        **_patterns(lora, modules),
        "lora_dropout": 0.0 if parameters else lora.dropout,  # which PEFT does not have of parameters
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "target_modules": chosen,
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "modules_to_save": [theirs.split(".")[-2] for theirs in whole] or None,
        **({"ensure_weight_tying": True} if whole and spec.tie_word_embeddings else {}),
        # Of the model's own layers: A and B are [r, in] and [out, r] in any case.
        "fan_in_fan_out": bool(transposed(spec)),
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _targeted(modules: Iterable[str], spec: ModelSpec) -> tuple[list[str], list[str]]:
    """Return which of the modules PEFT is told to look for as modules, and which as parameters: those of experts, and
    what it would else take for them."""
    chosen, parameters = set(), set()
    for name in modules:
        last, inner = name.rpartition(".")[2], name.partition(".mlp.")[2]
        if is_expert(name):
            parameters.add(f"mlp.experts.{last}")
        elif spec.family in TAKEN_FOR_EXPERTS and inner:
            parameters.add(f"mlp.{inner}.weight")
        else:
            chosen.add(last)
    return sorted(chosen), sorted(parameters)


def _joined(shapes: Sequence[tuple[int, ...]], *, rows: bool, columns: bool) -> tuple[int, ...]:
    """The shape of the tensors concatenated by rows, by columns, by both (block-diagonal), or of one of them."""
    height = sum(shape[0] for shape in shapes) if rows else shapes[0][0]
    return (height, *(size * len(shapes) if columns else size for size in shapes[0][1:]))


_SETTINGS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora", "dropout": "lora_dropout"}


def adapter_settings(directory: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the settings of the adapter in ``directory``, by the keys of a recipe's ``lora``: from its config, but for
    the targets, which are the layers whose tensors it has. Raises MissingInputError (CKPT001), DataError for damaged
    files."""
    config = _config(directory)
    found = tensorfile.entries(directory / WEIGHTS)
    settings = {ours: config[theirs] for ours, theirs in _SETTINGS.items() if config.get(theirs) is not None}
    roles: dict[str, bool] = {}
    experts = targeted(config.get("target_parameters"))
    for module, words in _linears(spec).items():
        for name in words["lora_a"]:
            kind = role(name.replace(".lora_a", ""))
            there = f"{module}.{_WORDS['lora_a']}" in found
            if is_expert(name):
                there = module.rpartition(".")[2] in experts
            roles[kind] = roles.get(kind, False) or there
    targets = [kind for kind, targeted in roles.items() if targeted]
    if targets:
        settings["targets"] = "all-linear" if len(targets) == len(roles) else targets
    if (whole := whole_ends(config, spec)) and not isinstance(whole, str):
        settings["modules_to_save"] = whole
    return settings


def model_of_adapter(directory: Path) -> str | None:
    """The model that the adapter in ``directory`` belongs to, as its config names it. Raises as
    :func:`adapter_settings`."""
    model = _config(directory).get("base_model_name_or_path")
    return model if isinstance(model, str) else None


def _config(directory: Path) -> dict[str, Any]:
    """The adapter's own words, each of the kind that it must be. Raises MissingInputError (CKPT001), DataError
    (CKPT009)."""
    for file in (CONFIG, WEIGHTS):
        if not (directory / file).is_file():
            fix = "a directory as PEFT's save_pretrained writes it"
            raise MissingInputError(Problem("CKPT001", f"no {file} in {directory}", "lora.path", fix))
    config = tensorfile.read_json(directory / CONFIG, NOTE_BYTES)
    given = {ours: config[theirs] for ours, theirs in _SETTINGS.items() if config.get(theirs) is not None}
    wrong = [key for key in ("rank_pattern", "alpha_pattern") if not isinstance(config.get(key) or {}, dict)]
    try:
        LoraSection.model_validate(given)
    except ValidationError as error:
        wrong += [_SETTINGS[str(fault["loc"][0])] for fault in error.errors()]
    modules = config.get("target_modules")
    if not all(isinstance(name, str) for name in (modules if isinstance(modules, list) else [modules or ""])):
        wrong.append("target_modules")
    if wrong:
        said = ", ".join(f"{key}: {show_value(config[key])}" for key in wrong)
        what = f"{CONFIG} has values that no adapter has: {said}"
        raise DataError(Problem("CKPT009", what, str(directory / CONFIG), "fetch the adapter again"))
    return config


def _linears(spec: ModelSpec) -> dict[str, dict[str, list[str]]]:
    """Every layer that can have an adapter, by PEFT's name."""
    weights = (name for name in parameter_shapes(spec) if is_adaptable(name))
    return _modules((name.replace(".weight", ".lora_a.weight") for name in weights), spec)


Found = tuple[Entry | StoredParameter, int] | Member
"""The stored rows of a parameter and the first column, or where it is in a tensor of several."""


def find_adapter(directory: Path, names: Iterable[str], lora: Lora, spec: ModelSpec) -> dict[str, Found]:
    """Find where every adapter parameter in ``names``, and what is trained whole beside them, is stored. Of stacked
    layers the adapter is as :func:`write_adapter` writes it, or one of PEFT's, whose A serves them all. Raises
    DataError (CKPT002, CKPT003) with all that the adapter in ``directory`` and the recipe disagree about,
    MissingInputError (CKPT001)."""
    where = str(directory)
    config = _config(directory)
    found = tensorfile.entries(directory / WEIGHTS)
    weights = parameter_shapes(spec)
    linears = _linears(spec)
    modules, whole = _modules(filter(is_adapter, names), spec), whole_names(lora, spec)
    blocks = _in_blocks(config, lora, linears)
    unserved = _unserved(config, where, blocks=blocks)
    unserved += [*_parameters_differ(config, modules, where), *ends_differ(config, lora, spec, where)]
    problems = [*unserved, *_settings_differ(config, lora, where)]
    if odd := [name for name, entry in found.items() if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2]:
        what = f"{len(odd)} tensors of the adapter are quantised ({found[odd[0]].dtype}), such as {odd[0]}"
        problems.append(Problem("CKPT004", what, where, "give the adapter in fp32, bf16 or fp16"))
    theirs = _stored(modules)
    if not unserved and (odd := sorted(found.keys() ^ (theirs.keys() | whole.keys()))):
        what = f"the adapter and the recipe's targets differ in {len(odd)} tensors, such as {odd[0]}"
        problems.append(Problem("CKPT003", what, where, _targets(config, linears)))
    if problems:
        raise DataError(*problems)
    places: dict[str, Found] = {}
    turns = in_turn(spec)
    for name, ours in whole.items():
        _shaped(name, found[name], weights[ours], where)
        places[ours] = found[name], 0
    if spec.tie_word_embeddings and whole and not torch.equal(*(found[name].mapped() for name in whole)):
        what = "its embedding and output layer differ, and are one weight of the model"
        raise DataError(Problem("CKPT003", what, where, "train it with PEFT's ensure_weight_tying"))
    for name, (word, members) in theirs.items():
        if is_expert(members[0]):
            shapes_of = _expert_shapes(members, lora, spec)
            fused = Fused.of(members, shapes_of, lora.rank, spec)
            _shaped(name, found[name], fused.shape(shared=not blocks), where)
            if fused.mixed(found[name].mapped()):
                raise DataError(_not_apart(name, where))
            places |= {member: Member(found[name], fused) for member in members}
            continue
        layers = [weights[weight_of(member)] for member in members]
        forms = {
            "lora_a": [(lora.rank, wide) for _, wide in layers],
            "lora_b": [(tall, lora.rank) for tall, _ in layers],
        }
        shapes = forms.get(word, [layer[:1] for layer in layers])
        rows, columns = blocks or word != "lora_a", blocks and word == "lora_b"
        _shaped(name, found[name], _joined(shapes, rows=rows, columns=columns), where)
        row = column = 0
        pieces: list[tuple[Entry | StoredParameter, int]] = []
        for member, shape in zip(members, shapes, strict=True):
            apart = turns.get(weight_of(member), ()) if word != "lora_a" else ()
            held = StoredParameter(tuple(StoredRows(replace(one, tensor=name), found[name]) for one in apart))
            pieces.append((held if apart else found[name].rows(row, row + shape[0]), column))
            row, column = row + shape[0] * rows, column + lora.rank * columns
        if columns and mixed(pieces, shapes, lora.rank * len(members)):
            raise DataError(_not_apart(name, where))
        places |= dict(zip(members, pieces, strict=True))
    return places


def _shaped(name: str, entry: Entry, wanted: tuple[int, ...], where: str) -> None:
    if entry.shape != wanted:
        what = f"{name} has shape {list(entry.shape)}, the model takes {list(wanted)}"
        raise DataError(Problem("CKPT002", what, where, "give an adapter that was trained on this model"))


def _not_apart(name: str, where: str) -> Problem:
    what = f"{name} is not block-diagonal: trained elsewhere as one layer"
    return Problem("CKPT003", what, where, "merge it with PEFT, and use that model")


def _expert_shapes(members: Iterable[str], lora: Lora, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of adapters of experts."""
    shapes, ranks = parameter_shapes(spec), spec.experts.num_experts * lora.rank
    weights = {name: shapes[f"{name.rsplit('.', 2)[0]}.weight"] for name in members}
    return {
        name: (ranks, wide) if role(name) == "lora_a" else (tall, lora.rank) for name, (tall, wide) in weights.items()
    }


def _parameters_differ(config: Mapping[str, Any], modules: Iterable[str], where: str) -> Iterator[Problem]:
    """Yield a problem unless the adapter's parameters are those of the experts that the recipe targets."""
    theirs = config.get("target_parameters") or []
    own, asked = targeted(theirs), {name.rpartition(".")[2] for name in modules if is_expert(f"{name}.")}
    if not isinstance(theirs, list) or not all(targeted([name]) or str(name).endswith(".weight") for name in theirs):
        what = f"the adapter uses target_parameters {theirs}, which is not supported"
        yield Problem("CKPT003", what, where, "give an adapter of linear layers, and of experts")
    elif own != asked:
        had, wanted = (", ".join(sorted(each)) or "none" for each in (own, asked))
        what = f"of experts the adapter has {had}, the recipe {wanted}"
        yield Problem("CKPT003", what, where, "leave out lora.targets: they are then the adapter's")


def _in_blocks(config: Mapping[str, Any], lora: Lora, linears: Mapping[str, Mapping[str, Sequence[str]]]) -> bool:
    """Return whether the config declares, in its rank and alpha patterns, that stacked layers are stored as
    :func:`write_adapter` stores them."""
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    given = config.get("rank_pattern")
    if not (given and isinstance(rank, int) and isinstance(alpha, int | float)):
        return False
    own = replace(lora, rank=rank, alpha=alpha, rslora=bool(config.get("use_rslora")))
    patterns = _patterns(own, linears).items()
    return all(config.get(key) == {name: known.get(name) for name in given} for key, known in patterns)


def _targets(config: Mapping[str, Any], linears: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The ``lora.targets`` that match the adapter, as a fix; or other advice if a recipe cannot express them."""
    layers = {name.rpartition(".")[2]: words["lora_a"] for name, words in linears.items() if not is_expert(name)}
    theirs = config.get("target_modules")
    if not isinstance(theirs, list) or config.get("layers_to_transform") is not None or set(theirs) - set(layers):
        return "an adapter on every layer of a name, in every block; or merge this one with PEFT and use that model"
    roles = [role(name.replace(".lora_a", "")) for target in theirs for name in layers[target]]
    return f"lora.targets: [{', '.join(dict.fromkeys(roles))}]"


def read_adapter(
    directory: Path,
    parts: Mapping[str, Sequence[slice]],
    lora: Lora,
    spec: ModelSpec,
    names: Iterable[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, its slice as stored) of every parameter of the adapter among ``parts``, which are some of its
    ``names`` where a rank has some of the model; None: all. Raises as find_adapter."""
    for name, place in find_adapter(directory, parts if names is None else names, lora, spec).items():
        if name not in parts:
            continue
        if isinstance(place, Member):
            yield name, place.read(name, parts[name])
            continue
        (entry, column), (rows, *columns) = place, parts[name]
        own = (slice(column + part.start, column + part.stop) for part in columns)
        part = (rows, *own)
        yield name, entry.read_finite(name, part) if isinstance(entry, Entry) else entry.read_finite(part)


def _unserved(config: Mapping[str, Any], where: str, *, blocks: bool) -> list[Problem]:
    """Problems for features of PEFT that are not supported: some have tensors of their own, others would load and
    compute something else."""
    odd = [key for key in ("rank_pattern", "alpha_pattern") if config.get(key) and not blocks]
    odd += [key for key in _BESIDE if config.get(key)]
    if config.get("peft_type") != "LORA":
        odd.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        odd.append(f"bias {config['bias']}")
    plain = "give a plain LoRA adapter, with one rank for all layers"
    fixes = dict.fromkeys(odd, plain)
    first = config.get("init_lora_weights")
    if (first.lower() if isinstance(first, str) else first) not in _FIRST:
        convert = "the adapter saved again by PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        fixes[f"init_lora_weights {first}"] = convert if str(first).startswith(_CONVERTED) else plain
    return [Problem("CKPT003", f"the adapter uses {key}, which is not supported", where, fixes[key]) for key in fixes]


def _settings_differ(config: Mapping[str, Any], lora: Lora, where: str) -> Iterator[Problem]:
    for key, field in {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "dora"}.items():
        ours, theirs = vars(lora)[field], config.get(key)
        if config.get(key, False) != ours:
            what = f"the adapter has {key} {theirs}, the recipe {ours}"
            yield Problem("CKPT002", what, where, f"lora.{field}: {theirs}")
