"""What each parameter is for, from its name. Techniques choose by role, never by module class."""

from __future__ import annotations

from fnmatch import fnmatchcase

ROLES = {
    "*.bias": "bias",
    "embed.weight": "embed",
    "head.weight": "head",
    "*norm.weight": "norm",
    "*.attention.q.weight": "q",
    "*.attention.k.weight": "k",
    "*.attention.v.weight": "v",
    "*.attention.o.weight": "o",
    "*.mlp.gate.weight": "gate",
    "*.mlp.up.weight": "up",
    "*.mlp.down.weight": "down",
    "*.lora_a.weight": "lora_a",
    "*.lora_b.weight": "lora_b",
    "*.lora_m": "lora_m",
}


def role(name: str) -> str:
    """The role of the parameter with this canonical name, such as ``q`` for ``layers.3.attention.q.weight``; in a
    foreign model, what transformers calls the layer."""
    for pattern, value in ROLES.items():
        if fnmatchcase(name, pattern):
            return value
    layer, _, word = name.rpartition(".")
    module = layer.rpartition(".")[2]
    if word != "weight":
        raise KeyError(f"no role for parameter {name!r}")
    return "norm" if "norm" in module or module.startswith("ln_") else module.removesuffix("_proj")


def is_linear(name: str) -> bool:
    """Whether this parameter is the weight of a linear layer of a block."""
    return name.startswith("layers.") and name.endswith(".weight") and role(name) not in ("norm", "lora_a", "lora_b")


MULTIPLIED = ("layers.", "embed.", "head.")
"""Where the weights of matrix products are: what else a model has is looked up."""


def is_adapter(name: str) -> bool:
    """Whether this parameter was added to the model by LoRA."""
    return ".lora_" in name
