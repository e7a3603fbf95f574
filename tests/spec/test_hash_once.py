"""A hash that is kept is that of the fields, of this object and of this process alone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

from shardwise.planner.figures import alike
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan

UNPICKLED = """
import pickle, sys
from shardwise.spec.plan import Batch, Plan
plan = pickle.load(sys.stdin.buffer)
assert plan == Plan(batch=Batch(2), attention="flash") and plan in {Plan(batch=Batch(2), attention="flash")}
"""


def test_equal_plans_are_found_by_one_another() -> None:
    plan, other = Plan(batch=Batch(2)), Plan(batch=Batch(2))
    known = {plan: 1}
    assert known[other] == 1 and known[deepcopy(plan)] == 1
    changed = replace(plan, batch=Batch(4), layout=Layout(dp_shard=2))
    assert changed not in known and hash(changed) == hash(replace(changed))
    assert "_hash" in vars(plan) and plan == other and repr(plan) == repr(Plan(batch=Batch(2)))


def test_another_process_makes_its_own() -> None:
    plan = Plan(batch=Batch(2), attention="flash")
    hash(plan)
    hash(plan.layout)
    assert alike(plan) == alike(replace(plan, layout=Layout(dp_shard=8)))
    assert "_alike" in vars(plan) and "_alike" not in vars(deepcopy(plan))
    beside = {**os.environ, "PYTHONHASHSEED": "12345"}  # strings have other hashes
    subprocess.run([sys.executable, "-c", UNPICKLED], input=pickle.dumps(plan), env=beside, check=True)
