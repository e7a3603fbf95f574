"""A block on paper under tensor parallelism, operation by operation beside a block that ran so on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.models.decoder import Decoder
from shardwise.planner import record, trace
from shardwise.planner.sheets import sheet_of
from shardwise.prove.world import fake_world
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.sheet import Op, Unit
from shardwise.techniques import freeze, lora, precision, tp

SPEC = ModelSpec("oracle", 601, 48, 104, 1, 8, 4, 8)
B, S = trace.MICRO_BATCH, trace.SEQ_LEN
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "norms before and after": {"norm_placement": "both", "qk_norm": "head"},
    "norms after": {"norm_placement": "after", "qk_norm": "head"},
    "norms over whole projections": {"norm_placement": "after", "qk_norm": "projection", "num_key_value_heads": 8},
}
SMALL = 4096
"""Bytes that grow with no token, as those of a norm's weight gradient; what has fewer is not compared."""


class LocalRecorder(record.Recorder):
    """Sees of a DTensor what is local."""

    def __init__(self) -> None:
        super().__init__()
        storages, add = self.storages, self.storages.add
        storages.add = lambda t: add(t._local_tensor if isinstance(t, DTensor) else t)  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def parallel(spec: ModelSpec, plan: Plan, dtype: torch.dtype) -> Iterator[Decoder]:
    """A decoder to which adapters and tensor parallelism were applied in a fake world."""
    with fake_world(plan.layout) as groups:
        parts: list[nn.Module] = [(model := Decoder(spec)).to(dtype)]
        for technique in (lora, freeze, tp):
            technique.apply(parts, plan, groups)
        yield model


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def traced(spec: ModelSpec, plan: Plan, which: str, monkeypatch: pytest.MonkeyPatch) -> Unit:
    """The block as it ran, with sizes as numbers."""
    monkeypatch.setattr(trace, "Recorder", LocalRecorder)
    monkeypatch.setattr(trace, "_dim", lambda size: size)
    dtype = torch.bfloat16 if which == "narrow" else torch.float32
    with parallel(spec, plan, dtype) as model:
        weights = {module: dict(module.named_parameters(recurse=False)) for module in model.modules()}
        shapes = {p: _local(p).shape for own in weights.values() for p in own.values()}
        with trace._tracing(which):
            for module, own in weights.items():
                for name, p in own.items():
                    whole = torch.empty(shapes[p], dtype=dtype)
                    if isinstance(p, DTensor):
                        whole = DTensor.from_local(
                            whole, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                        )
                    module.register_parameter(name, nn.Parameter(whole, p.requires_grad))
            (kind,), ids = layer_kinds(spec)[0], torch.zeros((B, S), dtype=torch.int64)
            stream = (-(-B * S // plan.layout.tp),) if plan.sequence_parallel else (B, S)
            hidden = torch.empty((*stream, spec.hidden_size), dtype=dtype, requires_grad=True)
            (rotary,) = model.tables((kind,), ids, dtype, MaskSpec())
            model.embed(ids)  # from which the blocks know the number of rows
            block = model.layers[0]
            call = partial(trace._call, block, (rotary, MaskSpec()), {})
            return trace._unit("block", trace._named("", block), call, hidden, [*(rotary or ())])


def told(unit: Unit, ops: Iterable[Op], which: str) -> list[tuple[Any, ...]]:
    """What each operation makes and frees, in bytes, and what it multiplies by. What a cut product's name is, or which
    of the operations between two that make something frees, is no matter."""
    found: list[tuple[Any, ...]] = []
    gradients = {tensor for _, tensor in unit.weight_gradients}
    compute = 2 if which == "narrow" else 4
    for op in ops:
        made, freed = (
            sorted(size for t in each if t not in gradients and (size := _bytes(unit, t, compute)) > SMALL)
            for each in (op.allocates, op.frees)
        )
        layer = op.weight.rpartition(".")[0] if op.kind == "matmul" else ""
        if made or layer:
            found.append((layer, op.flops if layer else 0, made, freed))
        elif found and freed:
            found[-1] = (*found[-1][:3], sorted(found[-1][3] + freed))
    return found


def _bytes(unit: Unit, index: int, compute: int) -> int:
    tensor = unit.tensors[index]
    width = {"compute": compute, "bf16": 2, "bool": 1}.get(tensor.dtype, 4)
    return tensor.numel(B, S) * width


@pytest.mark.parametrize("which", ["narrow", "wide"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_on_paper_is_the_block_that_ran(
    model: str, ranks: int, sequence: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, **MODELS[model])
    types = Precision("bf16", "bf16", "bf16") if which == "narrow" else Precision()
    plan = Plan(Layout(tp=ranks), Batch(B, 1, S), Shard(), types, sequence_parallel=sequence)
    sheet = sheet_of(spec, which, ranks=ranks)
    for technique in (precision, tp):
        sheet = technique.cost(sheet, plan)
    (paper,) = sheet.blocks
    ran = traced(spec, plan, which, monkeypatch)
    for passes in ("forward", "forward_plain", "backward"):
        wanted, seen = (told(unit, vars(unit)[passes], which) for unit in (ran, paper))
        assert seen == wanted, passes
