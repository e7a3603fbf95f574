"""The sizes of what passes through the host: in what pieces, and how many at a time, an optimizer goes through a file;
how many gradients come at once; and through how many rooms inputs of blocks pass."""

from __future__ import annotations

THREADS = 3
"""Each has one block, from its read to its write."""
BLOCK_BYTES = 4 * 2**20
"""Of a weight, and of each of its moments: from 3 to 12 MiB of all three, with 2 to 4 threads, a disk is as fast."""
PAGE_BYTES = 4096
"""To which places and lengths of what goes past the page cache are aligned."""
BUFFER_BYTES = THREADS * (3 * BLOCK_BYTES + PAGE_BYTES)
"""Of all threads together; what is aligned begins within a page more."""
STAGED_BLOCKS = 2
"""On their way from a file: one is read while the one before it is copied to the device."""
SUM_BUFFERS = 2
"""For gradients on their way to their sums: one comes while the other is added."""
ROOMS = 3
"""For inputs of blocks on their way to a file: one comes, one is written, one is free for the next."""


def whole_pages(size: int) -> int:
    """Return ``size`` bytes, rounded up to pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
