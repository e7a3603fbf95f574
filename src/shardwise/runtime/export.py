"""A run's weights as a directory that transformers loads: config, safetensors, tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.data import tokens
from shardwise.models import hf
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.decoder import Decoder
from shardwise.runtime.checkpoint import read
from shardwise.techniques.numbers import torch_type


def export(
    parameters: Mapping[str, Tensor], spec: ModelSpec, tokenizer: tokens.Tokenizer, target: Path, dtype: torch.dtype
) -> Path:
    """Write ``target`` from the (sharded) parameters of all ranks: gathered one tensor at a time, written by rank 0.
    Every rank calls this alike. What stood there before is replaced when the new one is whole."""
    if dist.is_initialized() and dist.get_rank() != 0:
        for name in parameter_shapes(spec):
            whole(parameters[name])
        return target
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    hf.write_weights(draft, spec, lambda name: whole(parameters[name]), dtype)
    tokenizer.copy_to(draft)
    replace_directory(draft, target)
    return target


def whole(parameter: Tensor) -> Tensor:
    """The full value on the host. All ranks of a DTensor's mesh call this alike."""
    value = parameter.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu()


def replace_directory(draft: Path, target: Path) -> None:
    """Put ``draft`` in the place of ``target``."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(path: Path, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model of a run's newest checkpoint (or of the one named), whole, in this process."""
    with torch.device("meta"):
        model = Decoder(spec).to(dtype)
    model.to_empty(device="cpu")
    if spec.tie_word_embeddings:
        model.head.weight = model.embed.weight
    read(path, {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model


def export_run(run: Path, spec: ModelSpec, weights: str, tokenizer: tokens.Tokenizer, target: Path) -> Path:
    """``shardwise export``: the newest checkpoint of ``run`` into ``target``, in one process. ``weights`` is the number
    type that the run keeps its weights in."""
    dtype = torch_type(weights)  # type: ignore[arg-type]
    model = load_checkpoint(run, spec, dtype)
    return export(dict(model.named_parameters()), spec, tokenizer, target, dtype)
