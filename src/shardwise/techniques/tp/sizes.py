"""The choices of tensor parallelism that depend on sizes. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from math import ceil

from shardwise.models.config import ModelSpec, flat, parameter_shapes
from shardwise.models.mixers import mixers_of
from shardwise.spec.plan import Plan
from shardwise.techniques.quantised import BLOCK, NF4_BLOCK, quantised


def own_head(ranks: int, key_heads: int, index: int) -> int | None:
    """Return the key head that a rank computes with, where each holds all of them; None where it has heads of its
    own."""
    return None if key_heads >= ranks else index * key_heads // ranks


def own_rows(layer: str, key_heads: int, width: int, ranks: int, index: int) -> slice | None:
    """The rows of k or v, held whole, or of its adapter's B, with which a rank multiplies; None: all that it holds."""
    head = own_head(ranks, key_heads, index)
    if head is None or layer.removesuffix(".lora_b").rpartition(".")[2] not in ("k", "v"):
        return None
    return slice(head * width, (head + 1) * width)


def travels_alone(size_bytes: int, plan: Plan) -> bool:
    """Return whether a gradient of so many bytes is summed by itself, and not in one all-reduce with the others."""
    return size_bytes >= plan.shard.bucket_bytes


def odd(spec: ModelSpec, plan: Plan, ranks: int) -> list[str]:
    """Return why sizes of the model cannot be divided among the ranks, a reason for each."""
    heads = spec.attention.num_attention_heads
    key_heads = spec.attention.num_key_value_heads
    ids = spec.vocab_size
    found = []
    if heads % ranks:
        found.append(f"{ranks} does not divide its {heads} query heads")
    if key_heads % ranks and ranks % key_heads:
        found.append(f"{ranks} does not divide its {key_heads} key heads, nor do they divide {ranks}")
    found += [f"{ranks} does not divide `intermediate_size` {size}" for size in spec.mlp_sizes if size % ranks]
    if spec.attention.qk_norm == "projection" and key_heads % ranks:
        found.append(f"{ranks} does not divide its {key_heads} key heads, which are normalised together")
    if (ranks - 1) * ceil(ids / ranks) >= ids:
        found.append(f"a vocabulary of {ids} cannot be split over {ranks} ranks")
    mixers = mixers_of(spec)
    found += [f"{ranks} does not divide `{field}` {size}" for field, size in _heads(spec).items() if size % ranks]
    inner = {layer: shape[1] for mixer in mixers for layer, (shape, _) in mixer.matrices(spec).items()}
    products = [(layer, inner[layer]) for mixer in mixers for layer in mixer.rows.split()]
    for layer, columns in [*products, *(("down", size) for size in spec.mlp_sizes)]:
        for what, block in _blocks(spec, plan, layer, columns).items():
            if ranks > 1 and columns % (ranks * block):
                what = f"{what} in blocks of {block}, and of `{layer}` a rank would have "
                found.append(f"{what}{columns / ranks:g} columns")
    return found


@lru_cache(maxsize=64)
def _heads(spec: ModelSpec) -> dict[str, int]:
    """The heads that mixers have beside those of attention, by the spec's field."""
    numbers = flat(spec)
    return {field: numbers[field] for mixer in mixers_of(spec) for field in mixer.heads.split()}


def _blocks(spec: ModelSpec, plan: Plan, layer: str, columns: int) -> dict[str, int]:
    """Return what stores one scale per block of columns of ``layer``, whose columns are cut; and the block's length. A
    cut within a block would change the scales, and make results depend on the layout."""
    lora, found = plan.lora, {}
    if lora is not None and lora.nf4:
        found["nf4 stores rows"] = NF4_BLOCK
    rows = spec.hidden_size if lora is None else lora.rank
    if plan.optim.spec.packed and quantised((rows, columns)) and _trains(spec, plan, layer):
        found[f"{plan.optim.name} keeps the moments of rows"] = BLOCK
    return found


def _trains(spec: ModelSpec, plan: Plan, layer: str) -> bool:
    """Return whether what reads the cut columns of ``layer`` is trained in any block: of an adapter, A does."""
    if plan.lora is not None:
        return not plan.lora.targets or layer in plan.lora.targets
    names = (name for name in parameter_shapes(spec) if name.endswith(f".{layer}.weight"))
    return any(not any(fnmatchcase(name, pattern) for pattern in plan.frozen) for name in names)
