"""The systems whose files are read. One more is a file beside these, a table, and a line here; or comes from another
package (docs/extending.md)."""

from __future__ import annotations

from shardwise.interop import accelerate, axolotl, deepspeed, megatron, nemo, swift, torchtitan, torchtune, trainer
from shardwise.interop.system import System
from shardwise.spec.outside import with_others

_OURS = (
    accelerate.SYSTEM,
    deepspeed.SYSTEM,
    trainer.FSDP,
    axolotl.SYSTEM,
    trainer.LLAMAFACTORY,
    swift.SYSTEM,
    trainer.TRL,
    trainer.SYSTEM,
    megatron.SYSTEM,
    nemo.SYSTEM,
    torchtitan.SYSTEM,
    torchtune.SYSTEM,
)
SYSTEMS = [*with_others("shardwise.readers", System, {system.name: system for system in _OURS}).values()]
"""In the order in which several files of one run are read: what chooses the split first, since batches depend on
it."""
ENOUGH = 4
"""The likeness of a file that is one of a system's."""


def recognise(keys: set[str]) -> list[System]:
    """The systems that a file with these keys may be of, the likeliest first; none: it is not one of theirs."""
    found = sorted(((system.likeness(keys), system) for system in SYSTEMS), key=lambda pair: -pair[0])
    best = found[0][0]
    return [system for likeness, system in found if likeness == best] if best >= ENOUGH else []


def named(name: str) -> System | None:
    """The system of this name."""
    return next((system for system in SYSTEMS if system.name == name.lower().replace("_", "").replace("-", "")), None)
