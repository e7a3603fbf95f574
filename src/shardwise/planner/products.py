"""How fast this CPU multiplies matrices in fp32 and in bf16, measured once for each processor and each torch.

The instructions that a processor reports are no guide: some with bf16 instructions multiply more slowly in bf16 than in
fp32; some (AMD) multiply fp32 twice as fast through oneDNN, at fp32 accuracy; others (AMX) would compute that in bf16.
So measured errors and times decide. Imports torch only when it measures.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shardwise.data.whole import write_whole
from shardwise.spec.cluster import Products
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.host import processor

if TYPE_CHECKING:
    from torch import Tensor

CACHE = Path.home() / ".cache" / "shardwise" / "products"
FORMAT = 1
ROWS, WIDE_IN, WIDE_OUT = 256, 512, 512
ROUNDS = 8


def measured(cache_directory: Path = CACHE) -> Products:
    """The measurement for this processor and this torch: read from the cache, else made now and stored there."""
    torch = metadata.version("torch")
    identity = [FORMAT, processor(), torch]
    path = cache_directory / f"{xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())}.json"
    with suppress(OSError, ValueError, TypeError):  # a cache that cannot be read is made again
        return Products(**json.loads(read_regular(path, NOTE_BYTES))["products"])
    found = measure()
    with suppress(OSError):  # without a cache the next plan measures again
        record = {"processor": processor().splitlines(), "torch": torch, "products": asdict(found)}
        write_whole(path, json.dumps(record, indent=1) + "\n")
    return found


def measure() -> Products:
    """The three products of a linear layer (forward, gradient of its input, gradient of its weight) on one thread, in
    fp32 under torch's "highest" and "medium" and in bf16. In processor time, which other programs do not change; in
    turn, the best of each. Takes 0.1 to 0.3 s beside importing torch, and leaves torch's settings as they were."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDE_IN), (WIDE_OUT, WIDE_IN), (ROWS, WIDE_OUT))
    )
    wide = ((x, weight.mT), (grad, weight), (grad.mT, x))
    narrow = tuple((left.bfloat16(), right.bfloat16()) for left, right in wide)
    truth = [left.double() @ right.double() for left, right in wide]
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    errors: dict[str, float] = {}
    taken: dict[str, list[list[float]]] = {"highest": [], "medium": [], "bf16": []}
    try:
        torch.set_num_threads(1)
        for _ in range(ROUNDS):
            for setting, rounds in taken.items():
                torch.set_float32_matmul_precision("medium" if setting == "medium" else "highest")
                pairs = narrow if setting == "bf16" else wide
                if not rounds:
                    found = zip(pairs, truth, strict=True)
                    errors[setting] = max(float((left @ right - exact).abs().max()) for (left, right), exact in found)
                rounds.append([_product_s(*pair) for pair in pairs])
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    highest, medium, bf16 = (sum(map(min, zip(*rounds, strict=True))) for rounds in taken.values())
    return Products(highest, medium, bf16, errors["highest"], errors["medium"])


def _product_s(left: Tensor, right: Tensor) -> float:
    """Seconds of this thread that one product takes."""
    start = time.thread_time()
    left @ right
    return time.thread_time() - start
