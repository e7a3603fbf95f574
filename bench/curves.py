"""Learning curves of three kinds of small models on the same text: a Llama, one with gated delta nets (Qwen3-Next's)
and one with latent attention and experts chosen by sigmoids, whose correction balances them (DeepSeek-V3's).

    python bench/curves.py [--steps 400] [--models llama qwen3_next deepseek_v3] [--bias-rate 5e-3] [--out DIRECTORY]

Each has 3.7 to 3.9 million parameters, and trains in one process on a CPU on the sources of Python's standard library,
384 tokens a step. Told are the loss every 50 steps (the mean of ten), the validation loss, and, of a mixture,
the tokens of the fullest expert of a layer over the mean, in the last 50 steps together: of the worst layer. It fails
where a loss is not finite or ends above where it was at a quarter of the run, and where corrections of routers move and
an expert has more than 1.5 times the mean.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.runtime.loop import train
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.recipe import Recipe

EVEN = 1.5
SHARED = {"vocab_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 128, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_next": {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 4,
        **EXPERTS,
        "num_experts": 12,
        "shared_expert_intermediate_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 48,
        "linear_conv_kernel_dim": 4,
    },
    "deepseek_v3": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def recipe_of(model_type: str, steps: int, rate: float, directory: Path) -> Recipe:
    model = {"config": {"model_type": model_type, **SHARED, **MODELS[model_type]}}
    if model_type == "deepseek_v3":
        model["router_bias_rate"] = rate
    sections = {
        "model": model,
        "data": {"path": "stdlib", "tokenizer": {"vocab_size": SHARED["vocab_size"]}, "cache": str(directory / "data")},
        "train": {"seq_len": 64, "global_batch_size": 6, "max_steps": steps},
        "optim": {"learning_rate": 1e-3, "beta2": 0.99, "warmup_steps": steps // 10, "schedule": "linear"},
        "run": {"out": str(directory), "name": model_type, "device": "cpu", "seed": 1},
    }
    return Recipe.model_validate(sections)


def curve(model_type: str, steps: int, rate: float, directory: Path) -> list[str]:
    """Train one, tell its curve, and return what is wrong with it."""
    recipe = recipe_of(model_type, steps, rate, directory)
    losses: list[float] = []
    loads: dict[int, torch.Tensor] = {}

    def look(state: Any, stats: Any) -> None:
        losses.append(stats.loss)
        if stats.step > steps - 50:
            for layer, counts in stats.loads.items():
                loads[layer] = loads.get(layer, 0) + torch.tensor(counts)

    begun = time.monotonic()
    report = train(recipe, choose(recipe, resolve(recipe), parse_cluster("1xCPU")), (look,))
    told = {step: sum(losses[step - 10 : step]) / 10 for step in range(50, steps + 1, 50)}
    fullest = max((float(each.max() / each.mean(dtype=torch.float64)) for each in loads.values()), default=0.0)
    shown = " ".join(f"{step}: {loss:.3f}" for step, loss in told.items())
    mixture = f"; fullest expert {fullest:.2f} of the mean" if loads else ""
    held = f"validation {report.validation.loss:.3f}" if report.validation else ""
    name = resolve(recipe).name
    print(f"== {name}: {shown}; {held}{mixture}; {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    wrong = []
    if not all(map(math.isfinite, losses)) or told[steps] >= told[max(50, steps // 4 // 50 * 50)]:
        wrong.append(f"{name} diverges")
    if model_type == "deepseek_v3" and rate and fullest > EVEN:
        wrong.append(f"{name}: an expert has {fullest:.2f} times its share")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--bias-rate", type=float, default=5e-3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    directory = asked.out or Path(tempfile.mkdtemp())
    wrong = [what for each in asked.models for what in curve(each, asked.steps, asked.bias_rate, directory)]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
