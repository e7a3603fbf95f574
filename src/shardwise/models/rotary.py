"""Rotary tables: from positions to cosines and sines, with the model's rope scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.models.layers import Rotary, accumulation_dtype
from shardwise.models.rope import RopeScaling


def rotary_tables(
    spec: ModelSpec,
    positions: Tensor,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    local: bool = False,
    reached: Tensor | None = None,
) -> Rotary:
    """cos and sin [b,s,1,r/2] for ``positions`` [b,s], computed in fp32 (fp64 for fp64) and cast to ``dtype``; r of a
    head's elements are rotated. ``documents`` and ``reached`` as in MaskSpec; ``local``: with the theta of sliding
    layers."""
    wide = accumulation_dtype(dtype)
    exponents = torch.arange(0, spec.rotary_dim, 2, device=positions.device).to(wide) / spec.rotary_dim
    frequencies = (
        1.0
        / (spec.positions.local_rope_theta if local and spec.positions.local_rope_theta else spec.positions.rope_theta)
        ** exponents
    )
    scaling = None if local else spec.positions.rope_scaling
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        frequencies = _by_length(
            spec, frequencies, scaling, _reached(positions, documents) if reached is None else reached
        )
    elif scaling is not None:
        frequencies = _scaled(spec, frequencies, scaling)
    angles = (positions.to(wide).unsqueeze(-1) * frequencies).unsqueeze(2)
    if scaling is None or scaling.attention_factor == 1.0:
        return angles.cos().to(dtype), angles.sin().to(dtype)
    factor = scaling.attention_factor
    return angles.cos().mul_(factor).to(dtype), angles.sin().mul_(factor).to(dtype)


def _scaled(spec: ModelSpec, frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Positions divided by ``factor``: at every frequency (linear), or at low ones with a ramp between: over the turns
    that a frequency makes in the trained range (Llama 3.1), or over its place among all (YaRN)."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        return torch.lerp(frequencies, slow, _yarn_ramp(spec, frequencies, scaling))
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, ramp.clamp(0.0, 1.0))


def _yarn_ramp(spec: ModelSpec, frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """0 for frequencies with more than ``beta_fast`` turns in the trained range, 1 for fewer than ``beta_slow``."""

    def place(turns: float) -> float:
        span = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(span) / (2 * math.log(spec.positions.rope_theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    places = torch.arange(frequencies.shape[-1], device=frequencies.device).to(frequencies.dtype)
    return ((places - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)


def _reached(positions: Tensor, documents: Tensor | None) -> Tensor:
    """Return the length of the sequence that each token is in, [b,s] or [b,1]: of its document where the batch tells
    documents, or else of its row. So packing changes nothing, nor does the rest of a micro-batch."""
    if documents is None:
        return positions.amax(1, keepdim=True) + 1
    bounds = documents.long()
    ends = positions.flatten()[bounds[1:] - 1] + 1
    return torch.repeat_interleave(ends, bounds.diff(), output_size=positions.numel()).view_as(positions)


def _by_length(spec: ModelSpec, frequencies: Tensor, scaling: RopeScaling, reached: Tensor) -> Tensor:
    """Frequencies [b,s or 1,r/2] for sequences of the length ``reached``: of a larger theta in a longer sequence
    (dynamic, "NTK-aware"), or each divided by a factor of its own, one within the trained range and one beyond it."""
    dim = spec.rotary_dim
    trained = scaling.original_max_position_embeddings
    reached = reached.unsqueeze(-1)
    if scaling.kind == "dynamic":
        growth = scaling.factor * reached.clamp_min(trained).to(frequencies.dtype) / trained - (scaling.factor - 1)
        exponents = torch.arange(0, dim, 2, device=frequencies.device).to(frequencies.dtype) / (dim - 2)
        return frequencies / growth**exponents
    short, long = (
        frequencies / torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)
        for factors in (scaling.short_factor, scaling.long_factor)
    )
    return torch.where(reached > trained, long, short)
