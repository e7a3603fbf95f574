"""The role of each parameter, told by its name. Techniques choose by role, never by module class."""

from __future__ import annotations

from shardwise.models.mixers import MIXERS

PLAIN = ("bias", "lora_m", "correction", *" ".join(mixer.cut for mixer in MIXERS.values()).split())
"""Parameters whose role is their own name, whichever layer has them."""


def role(name: str) -> str:
    """The role of the parameter with this canonical name, such as ``q`` for ``layers.3.attention.q.weight``: what its
    layer is called (embed, head, q, k, v, o, gate, up, down, router, shared_gate, expert_gate, expert_up, expert_down,
    lora_a, lora_b; in an HF model, as transformers calls it), ``norm`` for that of any norm, and of ``PLAIN`` their
    name."""
    layer, _, word = name.rpartition(".")
    module = layer.rpartition(".")[2]
    if word in PLAIN:
        return word
    if word != "weight":
        raise KeyError(f"no role for parameter {name!r}")
    return "norm" if "norm" in module or module.startswith("ln_") else module.removesuffix("_proj")


STACKED = ("expert_gate", "expert_up", "expert_down")
"""Roles of matrices of all experts of a layer, one expert's rows after another's."""
CHOOSING = ("router", "shared_gate")
"""Roles of the small matrices that decide how much of what experts make is taken."""


def is_expert(name: str) -> bool:
    """Return whether this parameter is an expert's, of which ranks may have different ones."""
    return ".experts." in name


def is_linear(name: str) -> bool:
    """Return whether this parameter is the weight of a linear layer of a block."""
    other = ("norm", "lora_a", "lora_b", *CHOOSING, *STACKED)
    return name.startswith("layers.") and name.endswith(".weight") and role(name) not in other


def is_stacked(name: str) -> bool:
    """Return whether this parameter is a matrix of all experts of a layer."""
    return is_expert(name) and name.endswith(".weight") and role(name) in STACKED


def is_adaptable(name: str) -> bool:
    """Return whether this parameter is a matrix, or one of all experts, that can have adapters and be kept in 4
    bits."""
    return is_linear(name) or is_stacked(name)


def router_of(name: str) -> str:
    """The weight of the router that chooses among the experts whose parameter this is: it has a row for each."""
    return name.partition(".experts.")[0] + ".router.weight"


MULTIPLIED = ("layers.", "embed.", "head.")
"""Prefixes of weights in matrix products; any other matrix of a model is a table that is looked up."""


def is_counted(name: str) -> bool:
    """Return whether this parameter follows from what a step counts, not from gradients: every rank holds all of it,
    in fp32 at least, for bf16 would lose most of its small steps."""
    return name.endswith(".router.correction")


def is_adapter(name: str) -> bool:
    """Return whether this parameter was added to the model by LoRA."""
    return ".lora_" in name
