"""The model that a recipe means, and its tokenizer. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError, Problem
from shardwise.models.added_rows import rows_for, with_added
from shardwise.models.config import ModelSpec, parameter_count, to_hf, with_fields
from shardwise.models.families import FAMILIES
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.predictor import with_predictor
from shardwise.spec.recipe import PREFERENCE, Data, Model, Recipe, TokenizerSection

FEW_HELD_OUT = 8
"""So many records are a batch of validation where the recipe says nothing of the batch."""


def resolve(recipe: Recipe) -> ModelSpec:
    """The model that the recipe names or describes, with the losses of routers and the capacity of experts that it asks
    for. Raises ConfigError: CFG004 when it does neither, or not whole; CFG008 for these of a model without experts."""
    if recipe.model.router_bias_rate and recipe.lora.rank:
        what = "`model.router_bias_rate` moves corrections of routers, and with adapters only these are saved"
        fix = "leave it out, or train all weights"
        raise ConfigError(Problem("CFG008", what, "model.router_bias_rate", fix))
    return _predicting(_balanced(_described(recipe), recipe.model), recipe)


def _predicting(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The spec with the layer that predicts a further token, where the recipe trains one. Raises ConfigError (CFG008)
    where there is none, or what else the recipe asks for does not go with it."""
    weight = recipe.model.mtp.weight
    if not weight:
        return spec
    barred = {
        f"{spec.name} is of no family whose layers that predict further tokens are trained": spec.hf_model is not None
        or not FAMILIES[spec.family].predictor,
        f"{spec.name} has tied embeddings": spec.tie_word_embeddings,
        f"`method.name: {recipe.method.name}` has no loss for it": recipe.method.spec.loss != "cross_entropy",
        "with adapters only these are trained": recipe.lora.rank is not None,
        "what it reads must be trained, and `model.frozen` names weights": bool(recipe.model.frozen),
    }
    if what := next((what for what, holds in barred.items() if holds), ""):
        what = f"`model.mtp` trains a layer that predicts a further token, and {what}"
        raise ConfigError(
            Problem("CFG008", what, "model.mtp.weight", "leave it out: such layers are exported as they were")
        )
    return with_predictor(spec, weight)


def _balanced(spec: ModelSpec, model: Model) -> ModelSpec:
    asked = {"router_aux_loss": model.router_aux_loss, "router_z_loss": model.router_z_loss}
    asked["expert_capacity"] = model.expert_capacity
    if key := next((key for key, value in asked.items() if value and not spec.experts), ""):
        what = f"`model.{key}` is for routers and experts, and {spec.name} has no experts that Shardwise computes"
        raise ConfigError(Problem("CFG008", what, f"model.{key}", "leave it out"))
    routing = spec.experts.sigmoid
    if model.router_bias_rate and routing is None:
        what = f"`model.router_bias_rate` is for routers that choose by sigmoids, and {spec.name} has none"
        raise ConfigError(Problem("CFG008", what, "model.router_bias_rate", "leave it out, or `model.router_aux_loss`"))
    if not spec.experts:
        return spec
    routing = routing and replace(routing, bias_rate=model.router_bias_rate)
    auxiliary = spec.experts.router_aux_loss_coef if model.router_aux_loss is None else model.router_aux_loss
    begins = model.config is not None or model.init == "random"
    added = spec.experts.output_router_logits or begins if model.router_aux_loss is None else model.router_aux_loss > 0
    spec = with_fields(spec, router_aux_loss_coef=auxiliary, output_router_logits=added, sigmoid=routing)
    return with_fields(spec, router_z_loss_coef=model.router_z_loss, expert_capacity=model.expert_capacity)


def _described(recipe: Recipe) -> ModelSpec:
    model = recipe.model
    if model.config is not None:
        if not {"model_type", "architectures"} & model.config.keys():
            what = "`model.config` does not name a model type"
            fix = "`model.config.model_type: llama`, for example"
            raise ConfigError(Problem("CFG004", what, "model.config", fix))
        try:
            spec = _drawn(read_spec(model.config, "the model of this recipe"))
        except DataError as error:  # what stands in a recipe is no file
            raise ConfigError(*error.problems) from None
        for key in model.config.keys() - to_hf(spec).keys():
            if near := get_close_matches(key, to_hf(spec), 1, 0.9):
                what, fix = f"unknown key `model.config.{key}`", f"did you mean `{near[0]}`?"
                raise ConfigError(Problem("CFG001", what, "model.config", fix))
        return replace(spec, name=f"{spec.family}-{parameter_count(spec) / 1e6:.3g}m")
    if model.path is None:
        fix = "`model.path: meta-llama/Llama-3.2-1B`, or dimensions in `model.config`"
        raise ConfigError(Problem("CFG004", "the recipe names no model", "model", fix))
    spec = load_spec(model.path, model.revision, rotation(model))
    if (rows := rows_for(data_of(recipe), recipe.lora, spec.vocab_size)) > spec.vocab_size:
        spec = load_spec(model.path, model.revision, {**rotation(model), "vocab_size": rows})
    return _drawn(spec) if model.init == "random" else spec


def rotation(model: Model) -> dict[str, Any]:
    """Return what a recipe changes in a model's config: how its positions turn, and, where that stretches them, how far
    they reach."""
    scaling, theta = model.rope_scaling or {}, model.rope_theta
    changed: dict[str, Any] = {"rope_scaling": scaling} if scaling else {}
    factor, trained = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(trained, int):
        changed["max_position_embeddings"] = int(factor * trained)
    return changed | ({} if theta is None else {"rope_theta": theta})


def _drawn(spec: ModelSpec) -> ModelSpec:
    """A spec for random initial weights; raises MOD001 if they cannot be drawn. Special tokens are left to the
    tokenizer."""
    odd = [name for name, *_, drawn in spec.hf_model.parameters if drawn is None] if spec.hf_model is not None else []
    if odd:
        what = f"{spec.family} initialises {odd[0].replace('.{}', '')} with values that are not normally distributed"
        raise ConfigError(Problem("MOD001", what, "model", "`model.path` with trained weights"))
    return replace(spec, bos_token_id=None, eos_token_id=None, pad_token_id=None, stored="")


def with_adapter(recipe: Recipe) -> Recipe:
    """The recipe with the settings of the adapter in ``lora.path`` (rank, alpha, targets, added tokens and so on)
    wherever it does not set them itself. Raises as :func:`resolve` and
    :func:`shardwise.models.peft.adapter_settings`."""
    asked = recipe.lora
    left = {"rank", "alpha", "targets", "rslora", "dora", "dropout", "modules_to_save"} - asked.model_fields_set
    if asked.path is None or not left or (asked.rank is not None and not Path(asked.path).is_dir()):
        return recipe
    from shardwise.models.peft import adapter_settings

    adapter, spec = Path(asked.path), resolve(recipe)
    theirs = adapter_settings(adapter, spec)
    missing = {key: theirs[key] for key in left & theirs.keys()}
    data = with_added(recipe.data, data_of(recipe).tokenizer, adapter) if theirs.get("modules_to_save") else recipe.data
    return recipe.model_copy(update={"lora": asked.model_copy(update=missing), "data": data})


def data_of(recipe: Recipe) -> Data:
    """The recipe's data with format and tokenizer settled: weights that were trained with one tokenizer mean nothing
    under another, so a model that is trained on brings its own unless the recipe names one. Where the run depends on
    its validation loss, at least a batch of records is held out. Of a run that streams its data, the first portion,
    once it is there."""
    model = recipe.model
    named = recipe.data.tokenizer
    train = recipe.train
    data = recipe.data.model_copy(update={"format": PREFERENCE}) if recipe.pairs else recipe.data
    if recipe.judged:
        batch = (train.micro_batch_size or FEW_HELD_OUT) * (train.gradient_accumulation_steps or 1)
        least = max(data.validation_records, train.global_batch_size or batch)
        data = data.model_copy(update={"validation_records": least})
    first = Path(recipe.run.out, recipe.run.name, "stream", "portion-00000", "data")
    if data.streaming and first.is_dir():
        data = data.model_copy(update={"path": str(first), "streaming": False})
    if model.path is None or model.init == "random" or named.path is not None or named.vocab_size is not None:
        return data
    file = Path(model.path).suffix in (".safetensors", ".json")
    path = str(Path(model.path).parent) if file else model.path
    return data.model_copy(update={"tokenizer": TokenizerSection(path=path, revision=model.revision)})
