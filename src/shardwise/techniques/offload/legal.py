"""The rules of when gradients may leave the device, and of what is refused."""

from __future__ import annotations

from shardwise.errors import Problem
from shardwise.spec.plan import TIER_WORDS, Plan


def leave_early(plan: Plan) -> bool:
    """Return whether a gradient leaves the device as soon as backward has it. Where ranks add up what each has, after
    backward, it leaves after that."""
    alone = plan.layout.size("loss") == 1
    return plan.offload.optimizer != "none" and plan.layout.tp == plan.layout.pp == 1 and (plan.sharded or alone)


def leave_each(plan: Plan) -> bool:
    """Return whether the gradients of each micro-batch can leave as backward makes them: ranks have added them up by
    then."""
    return leave_early(plan) and plan.shard.strategy != "zero1" and plan.layout.dp_replicate == 1


def return_beside(plan: Plan) -> bool:
    """Return whether a block's new weights come while the blocks before it compute. From NVMe they come while others
    are read; stages, which gather some of theirs before they run, wait for all."""
    outside = plan.offload
    return outside.optimizer == "host" and outside.weights == "none" and plan.layout.pp == 1


def problems(plan: Plan, blocks: int) -> list[Problem]:
    """Return what is wrong with a plan of a model of so many blocks (PLAN028)."""
    return [
        *_check_optimizer(plan),
        *_check_fraction(plan, blocks),
        *_check_activations(plan),
        *_check_weights(plan),
        *_check_sums(plan),
    ]


def _check_fraction(plan: Plan, blocks: int) -> list[Problem]:
    fraction, fix = plan.offload.optimizer_fraction, "leave it out: the optimizer of all blocks is then there"
    if fraction == 1 or plan.offload.optimizer == "none":
        return []
    if not any(map(plan.offload.moves, range(blocks))):
        what = f"a fraction of {fraction} of {blocks} blocks is less than one of them"
        fix = f"at least {-(-1000 // blocks) / 1000}"
    elif plan.offload.optimizer == "nvme":
        what = f"a fraction of {fraction} of the optimizer can be on the host, not on NVMe"
        fix = f"`offload.optimizer=host`, or {fix}"
    elif plan.offload.weights != "none":
        what = f"weights that wait on the host are updated there, all of them, and not a fraction of {fraction}"
    else:
        return []
    return [Problem("PLAN028", what, "offload.optimizer_fraction", fix)]


def _check_activations(plan: Plan) -> list[Problem]:
    if plan.offload.activations == "none":
        return []
    where = TIER_WORDS[plan.offload.activations]
    if plan.remat.mode != "full":
        what = f"only the inputs of blocks wait on {where}, and `recompute: {plan.remat.mode}` keeps more than these"
        return [Problem("PLAN028", what, "offload.activations", "none, or `recompute=full`")]
    return []


def _check_weights(plan: Plan) -> list[Problem]:
    if plan.offload.weights == "none":
        return []
    dial = plan.shard
    if plan.lora is None and not plan.frozen and plan.offload.optimizer == "none":
        where = plan.offload.weights
        what = f"weights wait on {TIER_WORDS[where]} if they are frozen or updated there; here the device updates all"
        fix = f"offload.optimizer={where}" if plan.optim.streamed else "offload.optimizer=host offload.weights=host"
    elif plan.offload.weights == "nvme" and plan.offload.optimizer == "host":
        what, fix = "what the host updates in its memory does not wait on NVMe", "offload.optimizer=nvme"
        fix = fix if plan.lora is None else "offload.optimizer=none"
    elif plan.sharded and (dial.strategy != "zero3" or dial.reshard_after_forward is not True):
        kept, fix = f"strategy: {dial.strategy}", "parallel.strategy=zero3"
        if dial.strategy == "zero3":
            kept, fix = f"reshard_after_forward: {dial.reshard_after_forward}".lower(), "reshard_after_forward=true"
        what = f"weights come from the host a block ahead, and `{kept}` keeps them gathered"
    else:
        return []
    return [Problem("PLAN028", what, "offload.weights", f"none, or `{fix}`")]


def _check_sums(plan: Plan) -> list[Problem]:
    if plan.offload.sums == "device" or leave_each(plan):
        return []
    what = "gradients are added up on the host where those of a micro-batch leave as backward makes them: with the "
    what += "optimizer there, on one rank, or under zero2 or zero3 without replicas, tensor parallelism and stages"
    return [Problem("PLAN028", what, "offload.sums", "device")]


def _check_optimizer(plan: Plan) -> list[Problem]:
    if plan.offload.optimizer == "nvme" and not plan.optim.streamed:
        moments = f"optim.moments: {plan.optim.moments}"
        kept = moments if plan.optim.spec.streamed else f"optim.name: {plan.optim.name}"
        what = f"AdamW goes through files in the dtype of the weights, and not with `{kept}`"
        fix = "`offload.optimizer=host`, or AdamW with moments in the dtype of the weights"
        return [Problem("PLAN028", what, "offload.optimizer", fix)]
    return []
