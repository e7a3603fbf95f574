"""Processor time of the output layer and the loss, forward and backward, by the number of tokens in a chunk.

    python bench/loss.py [--tokens 1024] [--vocabulary 8192] [--hidden 512] [--rounds 12]

One thread. ``plain`` is a linear layer and ``cross_entropy`` on all logits in fp32. The programs take turns; the least
and the median of their times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.methods.loss import Output, linear_cross_entropy

CHUNKS = (128, 256, 512, 1024, 2048, 4096)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
    functional.cross_entropy(logits, labels, reduction="sum").backward()


def chunked(chunk: int, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    linear_cross_entropy(hidden, Output(weight), labels, chunk).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 1024, "vocabulary": 8192, "hidden": 512, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    programs: dict[str, Callable[..., None]] = {"plain": plain}
    programs |= {f"{chunk}": partial(chunked, chunk) for chunk in CHUNKS if chunk <= chosen.tokens}
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(chosen.tokens, chosen.hidden, dtype=dtype, requires_grad=True)
        weight = (torch.randn(chosen.vocabulary, chosen.hidden) * 0.02).requires_grad_()
        labels = torch.randint(chosen.vocabulary, (chosen.tokens,))
        taken: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(chosen.rounds + 1):
            for name, program in programs.items():
                hidden.grad = weight.grad = None
                begun = time.thread_time()
                program(hidden, weight, labels)
                if number:
                    taken[name].append(1e3 * (time.thread_time() - begun))
        told = (f"{name} {min(each):.0f} ({statistics.median(each):.0f})" for name, each in taken.items())
        print(f"{dtype}, {chosen.tokens:,} x {chosen.vocabulary:,}, ms: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
