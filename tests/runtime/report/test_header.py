"""The lines that a run begins with."""

from __future__ import annotations

from dataclasses import replace

from shardwise.runtime.report.header import execution
from shardwise.spec.plan import Batch, Plan, Remat


def test_the_cost_of_compiling_is_said() -> None:
    plan = Plan(batch=Batch(2, 3, 512), remat=Remat("full"))
    eager = "micro-batch 2 x 512, accumulation 3, recompute full"
    assert execution(plan) == eager
    assert execution(replace(plan, compile=True)) == (
        f"{eager}, blocks compiled (adds half a minute or more to the first step, seconds if torch has them cached; "
        "`compile=false` runs them uncompiled)"
    )
