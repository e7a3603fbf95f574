"""Your own training loop around a vision model: a small transformer classifies images with one of four stripes.

torchrun --nproc-per-node 2 examples/vision_loop.py zero2 runs/example
python examples/vision_loop.py

The sampler's position is kept in the checkpoint. After Ctrl-C or SIGTERM it saves and ends;
started again, it continues from there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise

ROWS, SIZE, WIDTH, CLASSES = 16, 16, 32, 4


class Classifier(nn.Module):
    """Patches of 4 x 4 through two transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, (SIZE // 4) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """images [b,1,16,16] -> logits [b,4]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(tokens).mean(1))


def batch_of_step(step: int) -> tuple[Tensor, Tensor]:
    """Noise with one bright row in the quarter that the label names."""
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (ROWS,), generator=draw)
    images = torch.randn(ROWS, 1, SIZE, SIZE, generator=draw)
    for image, label in zip(images, labels, strict=True):
        image[0, int(label) * SIZE // CLASSES] += 3.0
    return images, labels


class Sampler:
    """In place of a data loader's: all rows of the steps from ``step`` on. What it returns as its state is saved."""

    def __init__(self) -> None:
        self.step = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.step += 1
        return batch_of_step(self.step - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(strategy: str, directory: str = "runs/vision-loop", steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = Classifier()
    plan = shardwise.make_plan(strategy)
    with shardwise.world(plan) as mesh:
        shardwise.parallelize(model, plan, mesh)
        optimizer = shardwise.optimizer(model, learning_rate=3e-3)
        device = next(model.parameters()).device
        sampler = Sampler()
        checkpoints = shardwise.Checkpoints(directory, model, optimizer, sampler=sampler)
        checkpoints.resume()
        first, losses = sampler.step, []
        for step in range(first, steps):
            images, labels = (x.chunk(plan.layout.dp)[dist.get_rank()].to(device) for x in next(sampler))
            loss = nn.functional.cross_entropy(model(images), labels)
            shardwise.backward(model, loss)
            shardwise.clip_grad_norm(model, 1.0)
            optimizer.step()
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
