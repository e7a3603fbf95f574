"""What the ranks of a pipeline hold by its lists of actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.techniques.pp.actions import Action, Lists


class Held(NamedTuple):
    """The most at any moment, of each rank: (stage, micro-batch) pairs whose forward is done and whose backward is not,
    W included; likewise, but only to the end of B or I; and receives that are posted and whose tensors are not used
    yet."""

    alive: tuple[int, ...]
    alive_to_input: tuple[int, ...]
    buffers: tuple[int, ...]


def held(lists: Lists) -> Held:
    """What ranks hold that do these actions."""
    return Held(*zip(*map(_most, lists), strict=True))


def _most(order: Sequence[Action]) -> tuple[int, int, int]:
    """Return the most at any moment, on the rank of this list: alive, alive to the gradient of the input, receive
    buffers."""
    backward = [action for action in order if action.kind in ("B", "I", "W")]
    last = {(action.stage, action.micro): action for action in backward}
    received = {action.takes for action in order if action.kind in ("RECV_F", "RECV_B")}
    alive = to_input = buffers = 0
    most = (0, 0, 0)
    for action in order:
        key = (action.stage, action.micro)
        if action.kind == "F" and key in last:
            alive, to_input = alive + 1, to_input + 1
        buffers += not action.computes and action.takes in received
        most = (max(most[0], alive), max(most[1], to_input), max(most[2], buffers))
        alive -= last.get(key) == action
        to_input -= action.kind in ("B", "I")
        buffers -= action.computes and action.takes in received
    return most
