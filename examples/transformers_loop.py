"""Your own training loop around a transformers model.

    torchrun --nproc-per-node 2 examples/transformers_loop.py zero3 runs/example
    python examples/transformers_loop.py

Only the lines that mention shardwise or checkpoints are new; the rest is a plain loop. After Ctrl-C or SIGTERM it saves
and ends; started again, it continues from there.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ROWS, SEQ_LEN = 8, 24


def rows_of_step(step: int) -> torch.Tensor:
    """The whole batch of a step: in place of a data loader."""
    return torch.randint(SIZES["vocab_size"], (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))


def main(strategy: str, directory: str = "runs/transformers-loop", steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    plan = shardwise.make_plan(strategy)
    with shardwise.world(plan) as mesh:
        shardwise.parallelize(model, plan, mesh)
        optimizer = shardwise.optimizer(model, learning_rate=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)  # a warm-up
        checkpoints = shardwise.Checkpoints(directory, model, optimizer, scheduler=scheduler)
        first, losses = (checkpoints.resume() or {"step": 0})["step"], []
        for step in range(first, steps):
            ids = rows_of_step(step).chunk(plan.layout.dp)[dist.get_rank()].to(model.device)
            loss = model(input_ids=ids, labels=ids).loss
            shardwise.backward(model, loss)
            shardwise.clip_grad_norm(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / plan.layout.dp)
            if step + 1 == steps or checkpoints.stopping:
                checkpoints.save(step + 1)
            if checkpoints.stopping:
                break
        checkpoints.close()
        if dist.get_rank() == 0:
            print(*(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses, first)), sep="\n")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3] or ["ddp"])
