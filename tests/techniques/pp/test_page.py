"""The drawings of docs/techniques/pp.md. Make them again: ``python -m tests.techniques.pp.test_page`` prints them."""

from __future__ import annotations

import pytest

from shardwise.cli.timeline import text
from shardwise.techniques.pp.actions import SCHEDULES, Action, actions
from tests.style.source import ROOT
from tests.techniques.pp.replays import replay

STAGES = {"interleaved": 2, "zbv": 2, "dualpipev": 2, "looped_bfs": 2}
RANKS, MICRO_BATCHES = 4, 8
SECONDS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Of a rank's whole share of the model."""


def drawn(schedule: str) -> str:
    """A step of four ranks and eight micro-batches, in which the halves of a backward take as long as a forward."""
    each = STAGES.get(schedule, 1)

    def seconds(action: Action) -> float:
        return SECONDS[action.kind] / each

    rows = text(replay(actions(schedule, RANKS, each, MICRO_BATCHES), seconds), 91)
    return "\n".join(f"    {row}".rstrip() for row in rows[:-1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_page_draws_every_schedule_as_it_runs(schedule: str) -> None:
    assert drawn(schedule) in (ROOT / "docs" / "techniques" / "pp.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    for name in SCHEDULES:
        print(name, drawn(name), sep="\n\n", end="\n\n")
