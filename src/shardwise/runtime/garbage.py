"""Python's garbage collector runs at the same steps on every rank. By itself it would run wherever a rank has made some
hundred objects, each rank elsewhere, and every pause of one is a pause of all that wait for it in a collective."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50
"""Steps between two collections. Tensors are not garbage in this sense: they go with their last reference."""


@contextmanager
def collecting() -> Iterator[Callable[[int], None]]:
    """Within the block the collector runs only in calls of the function that is yielded, of which each is told the
    step. What is there at the beginning, all of torch with it, is not looked at again until the end."""
    by_itself = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()

    def collect(step: int) -> None:
        if step % EVERY == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if by_itself:
            gc.enable()
