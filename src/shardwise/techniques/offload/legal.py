"""The rules of when gradients may leave the device, and of what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.errors import Problem
from shardwise.spec.plan import TIER_WORDS, Plan


def leave_early(plan: Plan) -> bool:
    """Return whether a gradient leaves the device as soon as backward has it. Where ranks add up what each has, after
    backward, it leaves after that."""
    alone = plan.layout.size("loss") == 1
    return plan.offload.optimizer != "none" and plan.layout.tp == plan.layout.pp == 1 and (plan.sharded or alone)


def leave_at_once(plan: Plan) -> bool:
    """Return whether all gradients do, in every micro-batch: none waits for those of others."""
    return leave_early(plan) and (plan.batch.accumulation == 1 or plan.offload.sums == "host")


def leave_each(plan: Plan) -> bool:
    """Return whether the gradients of each micro-batch can leave as backward makes them: ranks have added them up by
    then."""
    return leave_early(plan) and not plan.shard.accumulates and plan.layout.dp_replicate == 1


def with_sums(plan: Plan) -> list[Plan]:
    """Return the plan, and where its micro-batches' gradients can be added up on the host, with that besides."""
    if plan.batch.accumulation == 1 or not leave_each(plan):
        return [plan]
    why = {**plan.why, "offload.sums": "searched"}
    return [plan, replace(plan, offload=replace(plan.offload, sums="host"), why=why)]


def return_beside(plan: Plan) -> bool:
    """Return whether a block's new weights come while the blocks before it compute. From NVMe they come while others
    are read; stages, which gather some of theirs before they run, wait for all."""
    outside = plan.offload
    return outside.optimizer == "host" and outside.weights == "none" and plan.layout.pp == 1


def problems(plan: Plan, blocks: int) -> list[Problem]:
    """Return what is wrong with a plan of a model of so many blocks (PLAN028)."""
    return [Problem("PLAN028", what, f"offload.{key}", fix) for key, what, fix in _wrong(plan, blocks)]


def _wrong(plan: Plan, blocks: int) -> Iterator[tuple[str, str, str]]:
    """Yield the setting that is wrong, why, and what to write instead."""
    outside = plan.offload
    if outside.optimizer == "nvme" and not plan.optim.streamed:
        moments = f"optim.moments: {plan.optim.moments}"
        kept = moments if plan.optim.spec.streamed else f"optim.name: {plan.optim.name}"
        what = f"AdamW goes through files in the dtype of the weights, and not with `{kept}`"
        yield "optimizer", what, "`offload.optimizer=host`, or AdamW with moments in the dtype of the weights"
    if outside.optimizer_fraction != 1 and outside.optimizer != "none":
        yield from _wrong_fraction(plan, blocks)
    if outside.activations != "none" and plan.remat.mode != "full":
        where, kept = TIER_WORDS[outside.activations], f"`recompute: {plan.remat.mode}` keeps more than these"
        what = f"only the inputs of blocks wait on {where}, and {kept}"
        yield "activations", what, "none, or `recompute=full`"
    if outside.weights != "none":
        yield from _wrong_weights(plan)
    if outside.sums != "device" and not leave_each(plan):
        what = "gradients are added up on the host where those of a micro-batch leave as backward makes them: with the "
        what += "optimizer there, on one rank, or under zero2 or zero3 without replicas, tensor parallelism and stages"
        yield "sums", what, "device"


def _wrong_fraction(plan: Plan, blocks: int) -> Iterator[tuple[str, str, str]]:
    fraction, fix = plan.offload.optimizer_fraction, "leave it out: the optimizer of all blocks is then there"
    if not any(map(plan.offload.moves, range(blocks))):
        what = f"a fraction of {fraction} of {blocks} blocks is less than one of them"
        yield "optimizer_fraction", what, f"at least {-(-1000 // blocks) / 1000}"
    elif plan.offload.optimizer == "nvme":
        what = f"a fraction of {fraction} of the optimizer can be on the host, not on NVMe"
        yield "optimizer_fraction", what, f"`offload.optimizer=host`, or {fix}"
    elif plan.offload.weights != "none":
        what = f"weights that wait on the host are updated there, all of them, and not a fraction of {fraction}"
        yield "optimizer_fraction", what, fix


def _wrong_weights(plan: Plan) -> Iterator[tuple[str, str, str]]:
    shard, where = plan.shard, plan.offload.weights
    if plan.lora is None and not plan.frozen and plan.offload.optimizer == "none":
        what = f"weights wait on {TIER_WORDS[where]} if they are frozen or updated there; here the device updates all"
        fix = f"offload.optimizer={where}" if plan.optim.streamed else "offload.optimizer=host offload.weights=host"
        yield "weights", what, f"none, or `{fix}`"
    elif where == "nvme" and plan.offload.optimizer == "host":
        fix = "nvme" if plan.lora is None else "none"
        what = "what the host updates in its memory does not wait on NVMe"
        yield "weights", what, f"none, or `offload.optimizer={fix}`"
    elif plan.sharded and (shard.strategy != "zero3" or shard.reshard_after_forward is not True):
        kept, fix = f"strategy: {shard.strategy}", "parallel.strategy=zero3"
        if shard.strategy == "zero3":
            kept, fix = f"reshard_after_forward: {shard.reshard_after_forward}".lower(), "reshard_after_forward=true"
        what = f"weights come from the host a block ahead, and `{kept}` keeps them gathered"
        yield "weights", what, f"none, or `{fix}`"
