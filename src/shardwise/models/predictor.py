"""A model with a block that predicts a further token (models/decoder.py), and the same without it. No torch."""

from __future__ import annotations

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.family import FULL


def with_predictor(spec: ModelSpec, weight: float) -> ModelSpec:
    """The spec with one more block, which predicts a further token; tokens are mixed in it by attention."""
    types = spec.attention.layer_types and (*spec.attention.layer_types, FULL)
    layers = spec.num_hidden_layers + 1
    return with_fields(spec, num_hidden_layers=layers, layer_types=types, predictor_weight=weight)


def without_predictor(spec: ModelSpec) -> ModelSpec:
    """The inverse of :func:`with_predictor`; a spec without such a block as it is."""
    layers = spec.num_hidden_layers - spec.predictors
    types = spec.attention.layer_types[:layers]
    return with_fields(spec, num_hidden_layers=layers, layer_types=types, predictor_weight=0.0)
