"""What each parameter is for, from its name. Techniques choose by role, never by module class."""

from __future__ import annotations

from fnmatch import fnmatchcase

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear layers of a block."""

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
    """The role of the parameter with this canonical name, such as ``q`` for ``layers.3.attention.q.weight``."""
    for pattern, value in ROLES.items():
        if fnmatchcase(name, pattern):
            return value
    raise KeyError(f"no role for parameter {name!r}")


def is_adapter(name: str) -> bool:
    """Whether this parameter was added to the model by LoRA."""
    return ".lora_" in name
