"""Which model a recipe means. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec, from_hf, load_spec, parameter_count
from shardwise.spec.recipe import Recipe


def resolve(recipe: Recipe) -> ModelSpec:
    """The model that the recipe names or describes. Raises ConfigError (CFG004) when it does neither."""
    model = recipe.model
    if model.config is not None:
        spec = from_hf(model.config, "the model of this recipe")
        return replace(spec, name=f"{spec.family}-{parameter_count(spec) / 1e6:.3g}m")
    if model.path is None:
        what, fix = (
            "the recipe names no model",
            "`model.path: meta-llama/Llama-3.2-1B`, or dimensions in `model.config`",
        )
        raise ConfigError(Problem("CFG004", what, "model", fix))
    return load_spec(model.path, model.revision)
