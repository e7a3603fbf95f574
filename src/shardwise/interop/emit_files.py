"""A plan in the terms of another system: what it cannot say there stands above, as a comment. Read again, it pins the
same.

``tables/emitted.csv`` has the words. A row counts ``if`` all values are so and no row above it has said the ``pins``
that it says; ``{parallel.tp}`` is the plan's. What a row is ``called`` stands on the page of a plan; those of a
system's ``script`` are what a program has to do, and no file says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardwise.interop.system import lines_of
from shardwise.spec.document import resolve
from shardwise.spec.keys import nested
from shardwise.spec.load import dump_settings
from shardwise.spec.plan import Offload, Plan

EMITTED = ("deepspeed", "accelerate", "megatron", "torchtitan")
"""The systems in whose terms a plan is written."""
NAMED = {"PyTorch": "pytorch", "DeepSpeed": "deepspeed", "Megatron": "megatron"}
"""The systems whose words for a plan its page has."""
SPLIT = ("parallel.", "offload.")
"""The beginnings of keys without which a system has no name for a plan."""


def named_elsewhere(plan: Plan) -> str:
    """One line: what the plan is called in other systems, of which one is named where it has all of the plan's parts,
    in that combination."""
    if plan.layout.world == 1 and not plan.offload.words:
        return "elsewhere  nothing is split, on one device"
    found = []
    for title, system in NAMED.items():
        left, words = _pins(plan), list[str]()
        for row in _rows(plan, left, system, f"{system} script"):
            words += [row["called"]] if row["called"] else []
        if words and not any(key.startswith(SPLIT) for key in left):
            found.append(f"{title}: {', '.join(words)}")
    return f"elsewhere  {' · '.join(found) or 'none of PyTorch, DeepSpeed and Megatron has all of this at once'}"


def _rows(plan: Plan, left: dict[str, Any], *systems: str) -> Iterator[dict[str, str]]:
    """The rows that count, with the plan's values in their words; what they say is taken out of ``left``."""
    known = _values(plan) | left
    for row in lines_of("emitted"):
        if row["system"] in systems and _holds(row["if"], known) and _holds(row["pins"], left):
            for pin in row["pins"].split():
                del left[pin.partition("=")[0]]
            yield {key: re.sub(r"\{([\w.]+)\}", lambda name: str(known[name[1]]), value) for key, value in row.items()}


def emitted(plan: Plan, system: str) -> str:
    """The plan as a file of one of ``EMITTED``."""
    left, said = _pins(plan), dict[str, Any]()
    for row in _rows(plan, left, system):
        for key, _, value in (pair.partition("=") for pair in row["says"].split()):
            said[key] = resolve(value)
    words = ", ".join(f"{key} {value}" for key, value in left.items())
    head = f"A plan for {plan.layout.world} processes" + f"; not said here: {words}" * bool(left)
    if system == "accelerate":
        return dump_settings({key: (value, "") for key, value in said.items()}, head)
    if system == "megatron":
        flags = " \\\n".join(f"    --{key}" + f" {value}" * (value is not True) for key, value in said.items())
        start = f"torchrun --nproc_per_node {plan.layout.ranks_per_node} pretrain_gpt.py"
        return f"#!/bin/bash\n# {head}\n{start} \\\n{flags}\n"
    sections = nested(said)
    if system == "deepspeed":
        return json.dumps({"_comment": head, **sections}, indent=2) + "\n"
    parts = [
        [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
        for name, keys in sections.items()
    ]
    return "\n\n".join([f"# {head}", *map("\n".join, parts)]) + "\n"


def _pins(plan: Plan) -> dict[str, Any]:
    """Return what another plan could have otherwise, by the recipe's keys."""
    layout, pipeline = plan.layout, plan.pipeline
    degrees = {f"parallel.{axis}": vars(layout)[axis] for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")}
    alone = layout.world == 1 and plan.offload.words  # on one device all strategies are one, and these have words
    found: dict[str, Any] = {"parallel.strategy": "zero3" if alone else plan.shard.strategy}
    found |= {key: degree for key, degree in degrees.items() if degree > 1}
    found |= {"parallel.sequence_parallel": plan.sequence_parallel} if layout.tp > 1 else {}
    found |= {"parallel.cp_kind": plan.cp_kind} if layout.cp > 1 else {}
    if layout.pp > 1:
        found |= {"parallel.schedule": pipeline.schedule, "parallel.stages_per_rank": pipeline.stages_per_rank}
    found["recompute.mode"] = plan.remat.mode
    found |= {"recompute.every": plan.remat.every} if plan.remat.every > 1 else {}
    outside, usual = asdict(plan.offload), asdict(Offload())
    found |= {f"offload.{key}": value for key, value in outside.items() if value != usual[key] and key != "sums"}
    return found | {"train.micro_batch_size": plan.batch.micro_batch_size}


def _values(plan: Plan) -> dict[str, Any]:
    """Return what rows may ask for, or write, that is no pin or not always one."""
    found: dict[str, Any] = {axis: vars(plan.layout)[axis] for axis in ("tp", "pp", "cp", "ep", "dp_replicate")}
    found |= {"world": plan.layout.world, "dp": plan.layout.dp, "accumulation": plan.batch.accumulation}
    found |= {"seq_len": plan.batch.seq_len, "precision": plan.precision.compute, "compile": str(plan.compile).lower()}
    found["nodes"] = plan.layout.world // plan.layout.ranks_per_node
    found["fraction"] = plan.offload.optimizer_fraction
    found |= {"loss": plan.layout.size("loss"), "offloaded": bool(plan.offload.words), "sharded": plan.sharded}
    found["global"] = plan.batch.global_batch_size(plan.layout.dp)
    return found | {"rows": plan.batch.micro_batch_size * plan.batch.accumulation}


def _holds(conditions: str, values: dict[str, Any]) -> bool:
    """Return whether each key has one of its values; any is ``*``."""
    pairs = (pair.partition("=") for pair in conditions.split())
    return all(key in values and (of == "*" or str(values[key]) in of.split("|")) for key, _, of in pairs)
