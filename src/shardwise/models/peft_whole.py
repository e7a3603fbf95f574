"""The weights that are trained whole beside an adapter, as PEFT has them: its ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.models.hf_names import name_in_model
from shardwise.spec.complaints import show_value
from shardwise.spec.plan import Lora

ENDS = ("embed", "head")
"""What may be trained whole beside the adapters."""


def whole_names(lora: Lora, spec: ModelSpec) -> dict[str, str]:
    """Return every parameter that is trained whole beside the adapters, by PEFT's name. One that is embedding and
    output layer has both names: PEFT makes two of it."""
    names = {f"{end}.weight": "embed.weight" if spec.tie_word_embeddings else f"{end}.weight" for end in ENDS}
    return {f"base_model.model.{name_in_model(end, spec)}": name for end, name in names.items() if lora.saves(end)}


def whole_ends(config: Mapping[str, Any], spec: ModelSpec) -> list[str] | str:
    """Return those of ``ENDS`` that the adapter has whole; if it has anything else, what its config says, as text."""
    given = config.get("modules_to_save") or []
    ours = {name_in_model(f"{end}.weight", spec).split(".")[-2]: end for end in ENDS}
    named = isinstance(given, list) and all(isinstance(name, str) for name in given)
    ends = {ours.get(name.rpartition(".")[2], "") for name in given} if named else {""}
    if ends and spec.tie_word_embeddings and config.get("ensure_weight_tying"):
        ends |= {*ENDS}  # of which PEFT names one
    return sorted(ends) if all(ends) else show_value(given)


def ends_differ(config: Mapping[str, Any], lora: Lora, spec: ModelSpec, where: str) -> Iterator[Problem]:
    """Yield a problem unless the adapter has those ends of the model whole that the recipe names."""
    theirs = whole_ends(config, spec)
    if isinstance(theirs, str):
        what = f"the adapter uses modules_to_save {theirs}, which is not supported"
        yield Problem("CKPT003", what, where, "give an adapter with embedding and output layer beside it at most")
    elif theirs != sorted(lora.modules_to_save):
        had, wanted = (", ".join(each) or "nothing" for each in (theirs, lora.modules_to_save))
        what = f"the adapter has {had} whole beside it, the recipe {wanted}"
        yield Problem("CKPT003", what, where, "leave out lora.modules_to_save: it is then the adapter's")
