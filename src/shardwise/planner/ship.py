"""Makes the units that ship with the package: ``python -m shardwise.planner.ship``. A test makes some again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from shardwise.models.config import ModelSpec, from_hf
from shardwise.models.families import ACTIVATIONS, FAMILIES, FULL, SLIDING
from shardwise.models.rope import REQUIRED
from shardwise.planner.features import What, name_of, templates
from shardwise.planner.sheets import SHIPPED, code_digest, pack_unit
from shardwise.planner.trace import trace_cell, trace_template
from shardwise.techniques.cells import NAMES

VARIANTS = ("narrow", "wide")
LAYERS = 4
HEADS: tuple[tuple[int, int], ...] = ((4, 2), (4, 1), (1, 1))
"""Query heads and key heads."""
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "head_dim": 16}
BLOCKS: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACTIVATIONS),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "no_rope_layers": ([1] * LAYERS, [0] * LAYERS, [1, 0] * (LAYERS // 2)),
    "partial_rotary_factor": (1.0, 0.5),
    "residual_multiplier": (1.0, 0.5),
    "logits_scaling": (1.0, 2.0),
}
STEMS: dict[str, tuple[Any, ...]] = {
    "rope_parameters": (None, *REQUIRED),
    "embedding_multiplier": (1.0, 2.0),
    "layer_types": ([FULL] * LAYERS, [SLIDING] * LAYERS, [FULL, SLIDING] * 2, [SLIDING, FULL] * 2),
    "no_rope_layers": BLOCKS["no_rope_layers"],
    "partial_rotary_factor": BLOCKS["partial_rotary_factor"],
}
"""What a config.json may say of blocks and tail, and of the stem: keys of any family, which the others do not read."""


def reachable() -> dict[tuple[What, ModelSpec], None]:
    """The templates of all units that models of the decoder's families can have."""
    specs = (spec for family in FAMILIES for switches in (BLOCKS, STEMS) for spec in _specs(family, switches))
    return {template: None for spec in specs for template in templates(spec)}


def _specs(family: str, switches: dict[str, tuple[Any, ...]]) -> Iterator[ModelSpec]:
    for (heads, key_heads), *values in product(HEADS, *switches.values()):
        config = SIZES | dict(zip(switches, values, strict=True))
        kind = config.pop("rope_parameters", None)
        config |= {"model_type": family, "num_attention_heads": heads, "num_key_value_heads": key_heads}
        config |= {"sliding_window": 8, "use_sliding_window": True}
        if kind is not None:
            pairs = int(16 * config["partial_rotary_factor"]) // 2 if family == "phi3" else 8
            factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs, "factor": 2.0}
            lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
            config["rope_scaling"] = {"rope_type": kind} | factors | lengths
        yield from_hf(config, "reachable")


def make(wanted: dict[tuple[What, ModelSpec], None]) -> dict[str, str]:
    """Packed units by name, and the cells."""
    units = {
        name_of(what, template, variant): trace_template(variant, what, template)
        for (what, template), variant in product(wanted, VARIANTS)
    }
    units |= {f"{name} {variant}": trace_cell(variant, name) for name, variant in product(NAMES, VARIANTS)}
    return {name: json.dumps(pack_unit(unit), separators=(",", ":")) for name, unit in units.items()}


def main() -> None:
    """Write the file that the package carries."""
    # Units that end alike are alike, and as neighbours they compress to half of what they take sorted by name.
    made = sorted(make(reachable()).items(), key=lambda item: item[1][::-1])
    lines = [code_digest(), *(f"{name}\t{packed}" for name, packed in made)]
    Path(__file__).with_name(SHIPPED).write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


if __name__ == "__main__":
    main()
