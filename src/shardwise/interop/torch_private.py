"""The only place that uses torch's private names. Each says what for, and what breaks when the name goes."""

from __future__ import annotations


def forget_sharding() -> None:
    """Empty DTensor's caches of propagated shardings.

    They hold meshes, and through them the names of process groups. After the default group is destroyed and made again
    the same names mean other groups, so that a cached answer would send to the wrong ranks.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
