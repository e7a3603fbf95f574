"""Tiny models with a layer that predicts a further token, and the layouts in which they are proved."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.predictor import with_predictor
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Offload, Pipeline, Plan, Remat
from tests.parity.cases import UNTIED
from tests.parity.mixers import DEEPSEEK, NEXT
from tests.parity.routers import GLM, plan

WEIGHT = 0.3
DENSE = with_fields(UNTIED, intermediate_size=28, num_hidden_layers=3)
"""Of a width that two ranks can share."""
MODELS: dict[str, ModelSpec] = {
    name: with_predictor(with_fields(spec, name=f"{spec.name}-mtp", tie_word_embeddings=False), WEIGHT)
    for name, spec in {"dense": DENSE, "GLM": GLM, "DeepSeek": DEEPSEEK, "Qwen3-Next": NEXT}.items()
}
FULL, SELECTIVE = Remat("full"), Remat("selective")
PLANS: dict[str, Plan] = {
    "one rank": plan(Layout(), accumulation=4, remat=FULL),
    "ddp": plan(Layout(dp_replicate=2), remat=SELECTIVE),
    "zero2": plan(Layout(dp_shard=2), "zero2"),
    "zero3": plan(Layout(dp_shard=2), "zero3", remat=SELECTIVE),
    "hsdp": plan(Layout(dp_replicate=2, dp_shard=2), "zero3"),
    "tp": plan(Layout(tp=2), length=15, remat=SELECTIVE),
    "tp, whole stream": replace(plan(Layout(tp=2)), sequence_parallel=False),
    "zero3 x tp": plan(Layout(dp_shard=2, tp=2), "zero3", remat=FULL),
    "ep": plan(Layout(dp_shard=2, ep=2), "zero3", remat=FULL),
    "ep x tp": plan(Layout(tp=2, ep=2)),
    "ring": plan(Layout(cp=2)),
    "ulysses": plan(Layout(cp=2, ulysses=2), "zero3"),
    "host": plan(Layout(dp_shard=2), "zero3", offload=Offload("host", "none", "host"), remat=FULL),
    "1f1b": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 2))),
    "1f1b, the layer alone": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (3, 1)), remat=FULL),
    "interleaved x zero2": plan(
        Layout(pp=2, dp_shard=2), "zero2", accumulation=4, pipeline=Pipeline("interleaved", 2, (1, 1, 1, 1))
    ),
    "gpipe x zero3": plan(
        Layout(pp=2, dp_shard=2), "zero3", accumulation=4, pipeline=Pipeline("gpipe", 1, (2, 2)), remat=SELECTIVE
    ),
    "zbv": plan(Layout(pp=2, v_shaped=True), accumulation=4, pipeline=Pipeline("zbv", 2, (1, 1, 1, 1))),
    "three stages in halves": plan(Layout(pp=3), accumulation=4, pipeline=Pipeline("interleaved_zb", 1, (1, 1, 2))),
    "interleaved_zb x tp": plan(
        Layout(pp=2, tp=2), accumulation=4, pipeline=Pipeline("interleaved_zb", 1, (2, 2)), remat=SELECTIVE
    ),
    "1f1b x ring": plan(Layout(pp=2, cp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 2)), length=32),
}


def _serves(name: str, model: str) -> bool:
    """Whether there is such a layout of the model: experts are needed to divide them."""
    return not (PLANS[name].layout.ep > 1 and not MODELS[model].experts)


def _by_turns() -> list[tuple[str, str]]:
    """Each layout with one of the models that have it, so that all models come up alike."""
    found = []
    for number, name in enumerate(PLANS):
        models = [model for model in MODELS if _serves(name, model)]
        found.append((name, models[number % len(models)]))
    return found


CASES = _by_turns()
