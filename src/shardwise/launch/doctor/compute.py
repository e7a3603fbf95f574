"""Measurements of what one device computes and moves, while the others of the machine do the same."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from shardwise.errors import OutputError
from shardwise.launch.doctor.stopwatch import Clock, Work
from shardwise.runtime.reduce import local_squares, scale_gradients
from shardwise.spec.measured import FLOAT8, AttentionTime, Pointwise, Product
from shardwise.spec.plan import Scales
from shardwise.techniques.float8.codes import coded
from shardwise.techniques.float8.scaled import block_sizes, multiplied
from shardwise.techniques.offload.scratch import Scratch, aligned
from shardwise.techniques.offload.sizes import BLOCK_BYTES, THREADS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCTS = {
    "cpu": (
        *((512, 8, 512), (512, 512, 8), (8, 512, 512)),
        *((64, 64, 64), (64, 256, 256), (64, 1024, 1024), (256, 256, 256), (256, 1024, 256), (256, 256, 1024)),
        *((512, 512, 512), (1024, 128, 128), (1024, 256, 256), (1024, 1024, 256), (1024, 256, 1024)),
        *((1024, 1024, 1024), (1024, 8192, 256), (2048, 256, 256), (2048, 1024, 1024), (4096, 512, 512)),
    ),
    "cuda": (
        *((64, 64, 64), (256, 256, 256), (512, 1024, 1024), (2048, 1024, 1024), (8192, 1024, 1024)),
        *((512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096), (2048, 14336, 4096), (8192, 14336, 4096)),
        *((2048, 4096, 14336), (8192, 4096, 14336), (8192, 8192, 8192), (8192, 1024, 8192), (8192, 8192, 1024)),
        *((4096, 65536, 4096), (16384, 2048, 2048)),
    ),
}
"""(m, n, k) of m x k by k x n: the thin products of adapters, the small ones of a small model, in which launches and
memory count, and the large ones of a large model."""
SCALED_PRODUCTS = ((8192, 14336, 4096), (8192, 8192, 8192))
"""Of those the two in which products in float8 are measured, from codes: the planner counts what makes these apart."""
FORMS = 3
ATTENTION = {
    "cpu": ((128, 32, 32), (256, 16, 64), (512, 8, 64), (1024, 4, 64), (2048, 2, 64)),
    "cuda": (
        *((512, 256, 128), (2048, 64, 128), (8192, 32, 128), (16384, 16, 128), (65536, 2, 128)),
        *((2048, 128, 64), (16384, 32, 64), (65536, 4, 64)),
    ),
}
"""(tokens, heads of all sequences, elements of a head)."""
POINTWISE = {
    "cpu": tuple(2**power for power in (16, 19, 21, 23, 25, 27)),
    "cuda": tuple(2**power for power in (20, 23, 26, 29, 31)),
}
"""Bytes read and written: from what caches hold to what only memory does."""
HELD_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""What a rank has touched since it last used a weight, or the memory of a new tensor: more than a cache holds, as in a
step, where what is saved for backward is kept. What was written last is read next, and may still be in a cache."""
COPIED_BYTES = 2**28
MEMORY_BYTES = 2**23
WRITTEN_BYTES = {"cpu": 2**25, "cuda": 2**28}
WRITES = READS = 3
READ_BYTES = {"cpu": 2**25, "cuda": 2**27}
HOST_NUMBERS, HOST_BYTES = 2**24, 40
"""Trained numbers on the host, of which weights, gradients and moments are 256 MiB; and the bytes of each that a step
reads and writes, as the planner counts them: of the gradient for its norm (4), as it is scaled (8) and for the update
(4), of weight and moments (24)."""


def launch_s(clock: Clock) -> float:
    """Return the seconds of an operation that has next to nothing to do."""
    one = torch.ones(1, device=clock.device)
    return clock.seconds(lambda: torch.add(one, 1.0))


def products(clock: Clock, dtypes: Sequence[str]) -> Iterator[Product]:
    """Products of each shape in each dtype: the mean over the forms in which layers compute them."""
    for dtype in dtypes:
        for m, n, k in PRODUCTS[clock.device.type]:
            works = _forms(clock, dtype, (m, n, k))
            yield Product(dtype, m, n, k, sum(clock.seconds(work, 1 / FORMS) for work in works) / FORMS)


def scaled_products(clock: Clock, each: Sequence[Scales]) -> Iterator[Product]:
    """Products in float8, with each of these kinds of scales, of codes that are there; not those that this torch
    refuses on some rank."""
    for scales in each:
        for m, n, k in SCALED_PRODUCTS:
            first, second = (
                coded(_drawn((size, k), "bf16", clock), *block)
                for size, block in zip((m, n), block_sizes(scales, k), strict=True)
            )
            work = partial(multiplied, first, second, torch.bfloat16)
            if not clock.slowest(float(_refused(work))):
                yield Product(f"{FLOAT8} {scales}", m, n, k, clock.seconds(work))


def _refused(work: Work) -> bool:
    try:
        work()
    except RuntimeError:
        return True
    return False


def _forms(clock: Clock, dtype: str, shape: tuple[int, int, int]) -> Iterator[Work]:
    """Forward (the weight is transposed), the gradient of the input (nothing is), that of the weight (the tokens are).
    The first factor was just made, the second was not used for long."""
    m, n, k = shape
    first, transposed = _drawn((m, k), dtype, clock), _drawn((k, m), dtype, clock)
    kept, stored = _held(_drawn((m, n), dtype, clock)), cycle(_held(_drawn((n, k), dtype, clock)))
    yield _keeping(kept, lambda: linear(first, next(stored)))
    second = cycle(_held(_drawn((k, n), dtype, clock)))
    yield _keeping(kept, lambda: torch.mm(first, next(second)))
    yield _keeping(kept, lambda: torch.mm(transposed.t(), next(second)))


def attention(clock: Clock, dtypes: Sequence[str]) -> Iterator[AttentionTime]:
    """Causal attention of each size in each dtype, forward and backward."""
    for dtype in dtypes:
        for tokens, heads, head_dim in ATTENTION[clock.device.type]:
            q, k, v = (_drawn((1, heads, tokens, head_dim), dtype, clock) for _ in range(3))
            forward_s = clock.seconds(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True))  # type: ignore[misc]
            yield AttentionTime(dtype, tokens, heads, head_dim, forward_s, _backward_s(clock, (q, k, v)))


def _backward_s(clock: Clock, inputs: tuple[torch.Tensor, ...]) -> float:
    with torch.enable_grad():
        q, k, v = (tensor.clone().requires_grad_() for tensor in inputs)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.ones_like(out)
        return clock.seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))


def pointwise(clock: Clock, work: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Pointwise]:
    """An operation that reads what was made last and writes a new tensor, as those of a model do."""
    for size in POINTWISE[clock.device.type]:
        kept = _held(torch.zeros(size // 8, device=clock.device))
        yield Pointwise(size, clock.seconds(_keeping(kept, lambda kept=kept: work(kept[-1]))))  # type: ignore[misc]


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the double of a tensor, as memory and caches bound it. (Of zeros: the results of many in a row stay
    numbers of the usual kind.)"""
    return torch.mul(tensor, 2.0)


def memory_bytes_per_s(clock: Clock) -> float:
    """The rate at which tensors that are in no cache are read, changed and written in place, as by an optimizer. A GPU
    is so much faster that launches are all that such pieces take: there :func:`pointwise` says what memory gives."""
    if clock.device.type != "cpu":
        return 0.0
    tensors = cycle(_held(torch.zeros(MEMORY_BYTES // 8, device=clock.device)))
    return MEMORY_BYTES / clock.seconds(lambda: next(tensors).mul_(2.0))


def _held(one: torch.Tensor) -> deque[torch.Tensor]:
    """Return so many copies of a tensor that they fill ``HELD_BYTES``; at least one."""
    count = max(1, HELD_BYTES[one.device.type] // one.nbytes)
    return deque([one.clone() for _ in range(count)], maxlen=count)


def _keeping(kept: deque[torch.Tensor], work: Callable[[], torch.Tensor]) -> Work:
    """``work``, whose result takes the place of the oldest of those that are kept."""
    return lambda: kept.append(work())


def copies_bytes_per_s(clock: Clock) -> tuple[float, float]:
    """Rates from page-locked memory of the host to the device, and back."""
    if clock.device.type != "cuda":
        return 0.0, 0.0
    host = torch.ones(COPIED_BYTES // 4, pin_memory=True)
    there = torch.ones(COPIED_BYTES // 4, device=clock.device)
    to_s = clock.seconds(lambda: there.copy_(host, non_blocking=True))
    return COPIED_BYTES / to_s, COPIED_BYTES / clock.seconds(lambda: host.copy_(there, non_blocking=True))


def host_bytes_per_s(clock: Clock) -> float:
    """The rate at which a rank's threads clip and update weights that are kept on the host; of CPUs, whose weights are
    there anyway, :func:`memory_bytes_per_s` says it."""
    if clock.device.type == "cpu":
        return 0.0
    weight, factor = torch.nn.Parameter(torch.zeros(HOST_NUMBERS)), torch.ones((), dtype=torch.float64)
    weight.grad = torch.ones(HOST_NUMBERS)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> None:
        local_squares([weight], 1)
        scale_gradients([weight], factor)
        optimizer.step()

    return HOST_NUMBERS * HOST_BYTES / clock.seconds(update)


def disk_bytes_per_s(clock: Clock, directory: Path, rank: int) -> float:
    """The rate at which a rank's file reaches the disk of ``directory``, while the other ranks write theirs; 0 where
    nothing can be written."""
    data, taken_s = os.urandom(WRITTEN_BYTES[clock.device.type]), []
    path = directory / f".doctor-{rank}-{os.getpid()}"
    for _ in range(WRITES):
        clock.slowest(0.0)
        taken_s.append(_write_s(path, data))
    return len(data) / clock.slowest(median(taken_s))


def disk_read_bytes_per_s(clock: Clock, directory: Path) -> float:
    """The rate at which a rank reads a file in ``directory`` as an optimizer on NVMe does, past the page cache, while
    the other ranks read theirs; 0 where it cannot."""
    view, _ = aligned(READ_BYTES[clock.device.type])
    view[:] = os.urandom(len(view))
    scratch, taken_s = None, []
    with suppress(OSError, OutputError):
        scratch = Scratch(directory, [len(view)])
        scratch.write(0, 0, view)
        scratch.settle()
    for _ in range(READS):
        clock.slowest(0.0)
        taken_s.append(_read_s(scratch, view) if scratch else math.inf)
    return len(view) / clock.slowest(median(taken_s))


def _read_s(scratch: Scratch, view: memoryview) -> float:
    scratch.settle()  # where the file system goes through the page cache after all, that is emptied
    began_s, begins = time.perf_counter(), range(0, len(view), BLOCK_BYTES)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda begin: scratch.read(0, begin, view[begin : begin + BLOCK_BYTES]), begins))
    return time.perf_counter() - began_s


def _write_s(path: Path, data: bytes) -> float:
    began_s = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return math.inf
    finally:
        taken_s = time.perf_counter() - began_s
        with suppress(OSError):
            path.unlink()
    return taken_s


def _drawn(shape: tuple[int, ...], dtype: str, clock: Clock) -> torch.Tensor:
    return torch.randn(shape, device=clock.device).to(DTYPES[dtype])
