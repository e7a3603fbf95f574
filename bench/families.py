"""Step time and memory of families of models against transformers' own classes, in one process of one thread.

    python bench/families.py [--pairs 15] [--family deepseek_v3 ...] [--rows 2] [--length 512] [--json FILE]

A step is forward, cross entropy of all logits and backward, of the same weights and rows in fp32, without an optimizer
and without recomputation. transformers' class computes attention with sdpa and experts with grouped products
(``grouped_mm``); of gated delta nets it takes its path in torch, as fla has no kernels for a CPU. Losses and the
gradients of both are compared first.

The steps are taken in turn, in an order that changes from round to round. ``time`` is the median over rounds of
Shardwise's time over the other's, with quartiles, ``cpu`` the same of processor time, which other programs on the
machine disturb less, and ``A/A`` that of Shardwise against itself. ``peak`` is the ratio of the most that torch has
allocated at any time of a step, weights and gradients included, ``activations`` that without the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from shardwise.models import hf, init
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, from_hf, parameter_shapes, to_hf
from shardwise.models.decoder import Decoder
from shardwise.models.hf_names import locations, tensors

Loss = Callable[[torch.Tensor], torch.Tensor]
Sides = dict[str, tuple[nn.Module, Loss]]
"""By name, a module and the loss that it makes of ids [b,s]."""
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 2048}
HEADS = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "pad_token_id": None}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 256}
GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
LATENTS = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
CHOSEN = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": HEADS | EXPERTS | GROUPS | LATENTS | {"num_key_value_heads": 8, "head_dim": 32},
    "qwen3_next": HEADS | DELTA | CHOSEN | {"shared_expert_intermediate_size": 256, "partial_rotary_factor": 0.5},
    "glm4_moe": HEADS | EXPERTS | GROUPS | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "minimax_m2": HEADS
    | {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256, "rotary_dim": 32},
}
"""By ``model_type``, the sizes of each; what is not said is the family's default."""


def both(family: str) -> tuple[ModelSpec, Sides]:
    """The model, and both sides with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = AutoConfig.for_model(family, **FAMILIES[family]).to_dict()
    spec = from_hf(given, family)
    weights = {
        name: init.fill(name, shape, [slice(0, size) for size in shape], 0, spec)
        for name, shape in parameter_shapes(spec).items()
    }
    ours = Decoder(spec)
    ours.load_state_dict(weights)
    kernels: dict[str, Any] = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(spec)), **kernels).float().train()
    held = tensors(locations(spec, theirs.state_dict()))
    given = {name: hf.assembled(parts, weights.__getitem__) for name, parts in held.items()}
    assert not theirs.load_state_dict(given, strict=False).missing_keys
    assert theirs.config._experts_implementation == "grouped_mm"

    def ours_of(ids: torch.Tensor) -> torch.Tensor:
        return entropy(ours(ids, torch.arange(ids.shape[1]).expand(ids.shape), MaskSpec()), ids)

    def theirs_of(ids: torch.Tensor) -> torch.Tensor:
        return entropy(theirs(input_ids=ids, use_cache=False).logits, ids)

    return spec, {"ours": (ours, ours_of), "theirs": (theirs, theirs_of)}


def entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def delta_nets(sides: Sides) -> Sides:
    """The first block's gated delta net alone, of the embeddings of ids."""
    (ours, _), (theirs, _) = sides.values()
    net, other, rows = ours.layers[0].attention, theirs.model.layers[0].linear_attn, ours.embed.weight.detach()

    def loss(made: torch.Tensor) -> torch.Tensor:
        return made.square().mean()

    return {
        "ours": (net, lambda ids: loss(net(rows[ids].requires_grad_(), None, MaskSpec()))),
        "theirs": (other, lambda ids: loss(other(rows[ids].requires_grad_()))),
    }


def step(side: tuple[nn.Module, Loss], ids: torch.Tensor) -> float:
    """One forward and backward; the gradients stay until the next."""
    side[0].zero_grad()
    loss = side[1](ids)
    loss.backward()
    return float(loss.detach())


def peak_bytes(side: tuple[nn.Module, Loss], ids: torch.Tensor) -> int:
    """The most that a step has allocated at any time, without what stood before it."""
    side[0].zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step(side, ids)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    running = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        running += event.nbytes()
        highest = max(highest, running)
    return highest


def timed(sides: Sides, ids: torch.Tensor, pairs: int) -> dict[str, list[float]]:
    """The ratios of each round: of time, of processor time, and of time against ourselves."""
    found: dict[str, list[float]] = {"time": [], "cpu": [], "A/A": []}
    for number in range(pairs):
        taken = {}
        for name in ("ours", "theirs", "again") if number % 2 else ("again", "theirs", "ours"):
            began = time.perf_counter(), time.process_time()
            step(sides["ours" if name == "again" else name], ids)
            taken[name] = time.perf_counter() - began[0], time.process_time() - began[1]
        found["time"].append(taken["ours"][0] / taken["theirs"][0])
        found["cpu"].append(taken["ours"][1] / taken["theirs"][1])
        found["A/A"].append(taken["ours"][1] / taken["again"][1])
    return found


def compared(name: str, sides: Sides, ids: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Print a row, and return its figures."""
    losses = [step(side, ids) for side in sides.values()]
    held = [[p for p in side[0].parameters() if p.grad is not None] for side in sides.values()]
    norms = [float(nn.utils.get_total_norm([p.grad for p in each if p.grad is not None])) for each in held]
    for what, (a, b) in {"losses": losses, "gradients": norms}.items():
        assert abs(a - b) < 1e-3 * b, f"{what} of {name} are not the same: {a}, {b}"
    peaks = [peak_bytes(side, ids) for side in sides.values()]
    weights = 4 * sum(parameter.numel() for parameter in held[0])
    own = {"activations": peaks[0] / peaks[1], "peak": (peaks[0] + weights) / (peaks[1] + weights)}
    ratios = {what: statistics.quantiles(each, n=4) for what, each in timed(sides, ids, pairs).items()}
    low, middle, high = ratios["time"]
    row = f"time {middle:.2f} ({low:.2f} to {high:.2f})  cpu {ratios['cpu'][1]:.2f}  A/A {ratios['A/A'][1]:.2f}"
    print(f"{name:15} {row}  peak {own['peak']:.2f}  activations {own['activations']:.2f}", flush=True)
    return {"ratios": ratios, "losses": losses, "bytes": peaks, "weights": weights, **own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path, default=None)
    chosen, told = parser.parse_args(), dict[str, Any]()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for family in chosen.family:
        torch.manual_seed(0)
        spec, sides = both(family)
        ids = torch.randint(spec.vocab_size, (chosen.rows, chosen.length))
        told[family] = compared(family, sides, ids, chosen.pairs)
        if family == "qwen3_next":
            told["delta net"] = compared("  its delta net", delta_nets(sides), ids, chosen.pairs)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes lines between ours
    main()
