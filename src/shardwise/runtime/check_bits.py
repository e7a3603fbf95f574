"""Silent data corruption: every n steps, and before each save, ranks that should have the same bits compare them.

What several ranks hold (weights and moments of replicas, and of what tensor parallelism leaves whole) must be equal to
the bit. And all ranks compute one micro-batch alike: those that have the same stage, tokens of a row, slices of layers
and experts must make the same of it. Where something differs all compute it three times more: one rank that alone makes
something else then has erred once; what several make anew is not deterministic, and is left out from there on.

Nothing changes: no weight, moment or count, and no draw of random numbers. The host waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Literal

import torch

from shardwise.errors import Problem, TrainingError
from shardwise.models.blocks import spec_of
from shardwise.runtime.checkpoint.locate import newest
from shardwise.runtime.checkpoint.manifest import step_name, train_again
from shardwise.runtime.checksums import BEHIND_BLOCKS, FORWARD, Made, of_held, watching_passes
from shardwise.runtime.faults.bits import Odd, Place, RankBits, differing, odd_held, odd_made
from shardwise.runtime.fit import longest_batch
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.objects import broadcast, gather, may_travel
from shardwise.runtime.passes import StepRules
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import accumulate, let_go_of_gradients
from shardwise.runtime.world import process
from shardwise.spec.layout import Layout
from shardwise.techniques.compile import suspended

may_travel(RankBits, Odd)

LEAST_RANKS, EVERY = 64, 1000
"""From so many ranks on bits are compared every so many steps, unless the recipe says otherwise."""
RECOMPUTED = 3
"""How often what differs is computed again before a rank is accused."""


class BitsCheck:
    """The check of one rank; every rank calls it alike. ``every``: the steps between two; None where there is none."""

    def __init__(self, job: Job, state: TrainState, rules: StepRules, log: Log) -> None:
        self.every = steps_between(job.recipe.run.check_bits_steps, job.plan.layout)
        self.last_good: int | None = None
        self._compared: set[str] = set()
        self._job, self._state, self._rules, self._log = job, state, rules, log
        self._varying: set[str] = set()
        self._told: set[str] = set()

    def due(self, number: int) -> bool:
        """Return whether it is the turn of step ``number``, whatever is saved."""
        return self.every is not None and number % self.every == 0

    def after(self, number: int, saves: bool) -> bool:
        """Compare after step ``number``, if it is its turn or it ``saves``, which is returned. Raises TrainingError
        SDC001 where bits differ that must not."""
        if self.every is None or not (saves or self.due(number)):
            return saves
        begun_s = time.perf_counter()
        self._rules.enter("compare")
        if wrong := self._compare(number):
            raise TrainingError(wrong)
        self.last_good = number
        if saves:
            self._compared.add(step_name(number))
        self._log.event("bits compared", step=number, seconds=round(time.perf_counter() - begun_s, 3))
        self._log.start_clock()
        return saves

    def _compare(self, number: int) -> Problem | None:
        first = self._gather(number, of_held(self._state, self._job.meshes))
        held = odd_held(first)
        again, wrong = broadcast((held is None and bool(differing(first, self._varying)), self._problem(held, first)))
        rounds, odd, varying = [first], None, set[str]()
        while again:
            rounds.append(self._gather(number, {}))
            odd, varying = odd_made(rounds, self._varying)
            again = broadcast(odd is not None and len(rounds) <= RECOMPUTED)
        if varying:
            self._tell_varying(sorted(varying), number)
        self._varying |= varying
        if odd is not None and only_warns(self._job.device.type, self._job.recipe.run.deterministic):
            self._tell_odd(odd, first, number)
            odd = None
        return wrong or broadcast(self._problem(odd, first))

    def _problem(self, odd: Odd | None, found: Sequence[RankBits]) -> Problem | None:
        """SDC001: who has other bits, in what, and what is known to be good."""
        if odd is None:
            return None
        last = newest(self._job.directory / "checkpoints")
        fix = "test these devices and their memory (dcgmi diag -r 3), and leave out what is bad; then: "
        fix += train_again(self._job.directory)
        fix += f"; {standing(last.name if last else None, self._compared)}"
        known = "not compared before in this start" if self.last_good is None else f"last alike at {self.last_good:,}"
        return Problem("SDC001", in_words(odd, found), f"step {self._state.step:,}; {known}", fix)

    def _gather(self, number: int, holds: dict[str, int]) -> list[RankBits]:
        """The bits of all ranks, on the first."""
        device = self._job.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        place = f"cuda:{process().local_rank}" if device.type == "cuda" else "cpu"
        layout = self._job.plan.layout
        made = self._made(number) if twins(layout) > 1 else {}
        role = " ".join(f"{axis}{layout.index(self._job.rank, axis)}" for axis in ("pp", "cp", "tp", "ep"))
        role += f" threads{torch.get_num_threads()}"  # sums are cut among them
        return gather(RankBits(process().host, place, f"{role} {name}", holds, made))

    def _made(self, number: int) -> dict[Place, int]:
        """What this rank makes of the micro-batch that all are given, of which ``number`` says the tokens."""
        state, meshes = self._state, self._job.meshes
        rules = replace(self._rules, enter=lambda phase: None)  # all of it is one phase, which may take long
        plan = rules.plan
        if plan.compile and plan.layout.pp == 1:  # eager blocks need more memory
            plan = replace(plan, batch=replace(plan.batch, micro_batch_size=1))
        batch = longest_batch(plan, self._job.spec.vocab_size, torch.device("cpu"), first=number)
        batch = batch.looking_ahead() if spec_of(state.parts).predictors else batch
        batch = batch.cut(meshes.row_share).to(self._job.device)
        batches = [batch] * (plan.batch.accumulation if plan.layout.pp > 1 else 1)
        made, cards = Made(), [self._job.device] if self._job.device.type == "cuda" else []
        with torch.random.fork_rng(cards), suspended(), watching_passes(state.parts, made):
            torch.manual_seed(number)
            loss, _ = accumulate(state, batches, sum(each.terms() for each in batches), rules)
        let_go_of_gradients(state)
        made.add((FORWARD, BEHIND_BLOCKS + 1, "the loss"), loss.value)
        return made.read()

    def _tell_varying(self, names: list[str], number: int) -> None:
        """Say, on the first rank, what is compared no more."""
        what = f"kernels are not deterministic: {names[0]}"
        what += f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        what += " other bits each time it is computed, and cannot be compared"
        fix = "run.deterministic=true, or leave it: what ranks hold, and what is the same each time, is still compared"
        self._log.say(f"warning[SDC002]: {what}\nfix:   {fix}")
        self._log.event("bits vary", step=number, names=names)

    def _tell_odd(self, odd: Odd, found: Sequence[RankBits], number: int) -> None:
        """Say, on the first rank and once of each place, who made other bits where that does not end the run."""
        if odd.name not in self._told:
            self._told.add(odd.name)
            fix = "test these devices (dcgmi diag -r 3), or leave it: kernels may differ; with run.deterministic=true "
            fix += "this ends the run"
            what = in_words(odd, found)
            self._log.say(f"warning[SDC002]: {what}\nwhere: step {number:,}\nfix:   {fix}")
            self._log.event("bits differ", step=number, name=odd.name, ranks=[*odd.ranks])


def steps_between(asked: int | Literal["auto"] | None, layout: Layout) -> int | None:
    """Return how many steps lie between two checks; None: there are none, as on one rank."""
    if asked == "auto":
        asked = EVERY if layout.world >= LEAST_RANKS else None
    return asked if layout.world > 1 else None


def standing(last: str | None, compared: Set[str]) -> str:
    """Return what is known of the newest checkpoint, by the names of those that this start compared before a save."""
    if last is None:
        return "there is no checkpoint to go on from"
    how = "after bits were compared" if last in compared else "by an earlier start, and not compared in this one"
    return f"{last} was saved {how}"


def only_warns(device: str, deterministic: bool) -> bool:
    """Return whether what ranks make in different ways is told, and does not end the run: kernels of GPUs may vary."""
    return device == "cuda" and not deterministic


def twins(layout: Layout) -> int:
    """Return how many ranks compute the same of a micro-batch that all are given."""
    roles = {tuple(layout.index(rank, axis) for axis in ("pp", "cp", "tp", "ep")) for rank in range(layout.world)}
    return layout.world // len(roles)


def in_words(odd: Odd, found: Sequence[RankBits]) -> str:
    """Return who differs from whom, and in what."""

    def named(ranks: Sequence[int]) -> str:
        devices = ", ".join(dict.fromkeys(f"host {found[rank].host}, {found[rank].device}" for rank in ranks))
        return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} ({devices})"

    does = "held" if odd.again is None else "made"
    if not odd.certain:
        what = f"{named(odd.ranks)} and {named(odd.others)} have {does} different bits"
    else:
        what = f"{named(odd.ranks)} {'have' if len(odd.ranks) > 1 else 'has'} {does} wrong bits"
    how = {None: "", True: ", again and again", False: ", and others when they were computed again"}[odd.again]
    return f"{what} of {odd.name}{how}"
