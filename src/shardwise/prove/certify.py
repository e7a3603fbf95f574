"""The proofs of a plan that somebody is about to run, before it runs.

``drift``: at the plan's own degrees and dimensions, in a fake world, what its ranks send, hold and save, against what
the plan says. ``data``: at this size too, that ranks read the recipe's rows once, each its part (prove/reading.py).
``recipe``: that rates of steps, and which way pairs of answers pull, are what it asks for (prove/asked.py).
``derivatives``: of the plan's model made small (prove/shrink.py), the plain loop's gradients against differences of its
loss, in float64. ``model``: this model beside transformers' own class (prove/beside.py). ``parity``: the small plan and
model, trained on CPU ranks in float64, against this plain loop in one process; and small plans of one axis
(prove/further.py). ``documents``: what one of them is trained to, with other tokens in the others of its row.
``dtypes``: whether steps in the plan's own dtypes round as little as one process in them, and their updates
(prove/rounding.py). ``checkpoint``: a run that is saved and goes on under another layout. Where one fails, the smallest
layout that fails is looked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Literal

from shardwise.errors import ShardwiseError, first_line
from shardwise.models.config import ModelSpec
from shardwise.prove import asked, beside, documents, moves, parity, reading, rounding, slopes
from shardwise.prove.asked import Requested
from shardwise.prove.drift import drift
from shardwise.prove.further import further
from shardwise.prove.moves import SavedRun
from shardwise.prove.parity import COMPARED, TOLERANCE
from shardwise.prove.pool import RankFailure, Ranks
from shardwise.prove.reading import Read
from shardwise.prove.shrink import Shrunk, real_name, shrink
from shardwise.prove.smallest import Outcome, Smallest, smallest
from shardwise.prove.workload import STEPS, Setting, job_of, read_of, setting_of, steps_of
from shardwise.spec.layout import MESH, Axis, Layout
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Recipe

Effort = Literal["quick", "normal", "thorough"]
SOON_S = 10.0
"""A rank whose drift at the plan's own size takes longer is not measured again and again."""
SHOWN = 6
"""Lines about one failure."""


class NotCompared(Exception):
    """Nothing that a case could be compared with is there; says why."""


@dataclass(frozen=True)
class Check:
    """One proof of one case: it holds if there are no ``problems``. ``figures`` are what was compared. ``raised``: it
    did not come to an end. ``left_out``: why nothing was compared."""

    proof: Literal["drift", "data", "recipe", "derivatives", "model", "parity", "documents", "dtypes", "checkpoint"]
    case: str
    problems: tuple[str, ...]
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    raised: bool = False
    left_out: str = ""


@dataclass(frozen=True)
class Certification:
    """A plan that is to be proved, and what its proofs run on. ``small``: None where nothing small enough has all that
    the plan does; ``why`` says so. ``rows``: those of the small one, in words. ``others``: small plans of one axis,
    whose parity shows what the small one lacks for want of ranks; ``lost``: what no such plan shows, and why. ``read``:
    what a run reads, if that is prepared; ``asked``: the recipe's numbers."""

    spec: ModelSpec
    plan: Plan
    small: Shrunk | None
    setting: Setting
    rows: str = ""
    why: str = ""
    others: tuple[tuple[Shrunk, Setting], ...] = ()
    lost: tuple[str, ...] = ()
    read: Read | str = "not asked for"
    asked: Requested | None = None

    @property
    def ranks(self) -> int:
        """The most CPU ranks that one of its proofs takes: those of a small plan, or of the layout under which a saved
        run goes on."""
        layouts = [small.plan.layout for small, _ in self.others] + ([self.small.plan.layout] if self.small else [])
        return max([2, *(layout.world for layout in layouts)])

    def cases(self, effort: Effort) -> list[tuple[str, int]]:
        """The proofs to be run, in their order, with the rank whose drift is looked at."""
        ranks = [("drift", rank) for rank in drift_ranks(self.plan.layout, effort)]
        left = {"dtypes"} if effort == "quick" else set()
        left |= set() if self.setting.packed else {"documents"}
        ranks += [("data", 0)] * isinstance(self.read, Read) + [("recipe", 0)] * (self.asked is not None)
        return ranks + [(proof, 0) for proof in PROOFS if self.small is not None and proof not in left]


def subject_of(
    recipe: Recipe, spec: ModelSpec, plan: Plan, most_ranks: int, effort: Effort = "normal"
) -> Certification:
    """``plan`` of ``recipe``, and what is left of it on at most so many ranks: with effort on up to four along each
    axis."""
    read = read_of(recipe, plan)
    asks = Requested(recipe.optim, recipe.method, steps_of(recipe, read), plan.lora.codes if plan.lora else "")
    subject = partial(Certification, spec, plan, read=read, asked=asks)
    try:
        small = shrink(spec, plan, 4 if effort == "thorough" else 2)
        if small.plan.layout.world > most_ranks:
            small = shrink(spec, plan)
    except ShardwiseError as error:
        return subject(None, Setting(), why=error.problems[0].what)
    if (world := small.plan.layout.world) > most_ranks:
        why = f"{world} ranks are the fewest with this layout, and this machine has the memory for {most_ranks}"
        return subject(None, Setting(), why=why)
    small, more, lost = further(spec, plan, small, most_ranks)
    setting, words = setting_of(recipe, small.spec, small.plan.batch.seq_len)
    others = tuple((one, setting_of(recipe, one.spec, one.plan.batch.seq_len)[0]) for one in more)
    return subject(small, setting, words, others=others, lost=lost)


def certify(
    subject: Certification,
    effort: Effort,
    ranks: Ranks,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
    show: Callable[[Check], None] = lambda check: None,
) -> tuple[list[Check], dict[str, Smallest]]:
    """Run all proofs; return them, and by proof that failed the smallest layout in which it does. ``tell`` is called
    before each, with how many are done and how many there are; ``show`` after it."""
    cases = subject.cases(effort)
    checks = list[Check]()
    least = dict[str, Smallest]()
    for done, (proof, rank) in enumerate(cases):
        tell(f"{proof} of rank {rank}" if proof == "drift" else proof, done, len(cases))
        checks.append(run(subject, proof, rank, ranks))
        show(checks[-1])
    for failed in checks:
        if failed.problems and failed.proof not in ("data", "recipe") and failed.proof not in least:
            tell("the smallest layout that fails", len(cases), len(cases))
            if found := smallest_failing(subject, failed, ranks):
                least[failed.proof] = found
    return checks, least


def drift_ranks(layout: Layout, effort: Effort) -> list[int]:
    """The ranks whose drift is looked at: the first and the last; with more effort, on the first, a middle and the
    last rank of each pipeline the first and last of every other axis, all at once; or all ranks."""
    if effort == "thorough":
        return list(range(layout.world))
    if effort == "quick":
        return sorted({0, layout.world - 1})
    others: list[Axis] = [axis for axis in MESH if axis != "pp"]
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    ends = [{axis: last * (layout.degree(axis) - 1) for axis in others} for last in (0, 1)]
    return sorted({layout.rank({"pp": stage, **end}) for stage, end in product(stages, ends)})


def run(subject: Certification, proof: str, rank: int, ranks: Ranks) -> Check:
    """Run one proof. Whatever it raises is a problem of the plan."""
    began = time.perf_counter()
    case = _case(subject, proof, rank)
    figures = dict[str, float]()
    raised = True
    try:
        if proof == "drift":
            problems = _drift(subject.spec, subject.plan, rank, figures)
        elif proof == "data":
            assert isinstance(subject.read, Read)
            problems = list(reading.prove(subject.read, subject.plan, figures))
        elif proof == "recipe":
            assert subject.asked is not None
            problems = list(asked.prove(subject.asked, figures))
        else:
            assert subject.small is not None
            problems = []
            for small, setting in ((subject.small, subject.setting), *(subject.others if proof == "parity" else ())):
                own = dict[str, float]()
                problems += [_named(small, line) for line in PROOFS[proof](small, setting, ranks, own)]
                figures |= {name: max(value, figures.get(name, 0.0)) for name, value in own.items()}
        raised = False
    except NotCompared as why:
        return Check(proof, case, (), time.perf_counter() - began, left_out=str(why))  # type: ignore[arg-type]
    except RankFailure as error:
        problems = [f"rank {each}: {_cause(text)}" for each, text in error.reports.items()]
    except Exception as error:
        problems = [f"{type(error).__name__}: {first_line(error)}"]
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    told = tuple(problems[:SHOWN] + more)
    return Check(proof, case, told, time.perf_counter() - began, figures, raised)  # type: ignore[arg-type]


def _cause(report: str) -> str:
    """The line of a traceback that names the exception: the first after the last frame. The first line of any other
    report."""
    lines = report.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return lines[frames[-1] + 1] if frames and frames[-1] + 1 < len(lines) else lines[0]


def _case(subject: Certification, proof: str, rank: int) -> str:
    if proof == "drift":
        layout = subject.plan.layout
        where = ", ".join(f"{axis} {layout.coordinate(rank, axis)}" for axis, _ in layout.axes())
        return f"rank {rank} of {layout.world}" + f" ({where})" * bool(where)
    if proof == "data":
        return "at the plan's own size, the first step, a resumed one, the last of the first epoch and of the run"
    if proof == "recipe":
        return "the learning rate of its steps; drawn pairs of answers, and a matrix in 4 bits, where it has such"
    assert subject.small is not None
    world = subject.small.plan.layout.world
    those = f"{world} CPU rank" + "s" * (world > 1)
    if proof == "derivatives":
        return "float64, one CPU rank, a random direction of each trained weight and of hidden states at each block"
    if proof == "model":
        theirs = f"the class of transformers {version('transformers')}"
        return f"float64, one CPU rank, logits and every gradient beside {theirs}"
    if proof == "parity":
        axes = (" x ".join(f"{axis} {ranks}" for axis, ranks in one.plan.layout.axes()) for one, _ in subject.others)
        alone = "".join(f", and {words} alone" for words in axes)
        return f"float64, {those}{alone}, {STEPS} steps of {subject.plan.optim.spec.title} and one of SGD"
    if proof == "documents":
        return f"float64, {those}, one document of each row, with other tokens in the others"
    if proof == "dtypes":
        steps = f"{rounding.DRAWS} steps' gradients, {rounding.UPDATES} updates and a step to be skipped"
        return f"{subject.small.own.precision.compute}, {those}, {steps}"
    other = moves.elsewhere(subject.small.plan)
    return f"saved by {those}, goes on as {other.shard.strategy} over {other.layout.world}, and the other way round"


def micro_batches(plan: Plan) -> int:
    """Return how many micro-batches of a step drift runs: as many as it takes for the rest to repeat them. Without a
    pipeline a first, another and the last; with one, as many as can be on their way, twice, and what is left over a
    round."""
    count, ranks = plan.batch.accumulation, plan.layout.pp
    if ranks == 1:
        return min(count, 3)
    enough = 2 * len(plan.pipeline.split)
    return min(count, enough + (count - enough) % ranks)


def _drift(spec: ModelSpec, plan: Plan, rank: int, figures: dict[str, float]) -> list[str]:
    """Compare what a rank sends, holds and saves with what the plan says. Blocks that are compiled cannot run on fake
    ranks, and kernels of GPUs not here: neither changes what is sent. Fake numbers are in no file: what is on NVMe is
    on the host instead."""
    batch = replace(plan.batch, accumulation=micro_batches(plan))
    plan = replace(plan, offload=plan.offload.without_files)
    found = drift(spec, replace(plan, batch=batch, compile=False, attention="auto"), rank)
    figures["collectives"] = sum(found.measured.sent.values())
    figures["sent bytes"] = sum(size * calls for (_, _, size), calls in found.measured.sent.items())
    figures["state bytes"] = sum(found.measured.state.values())
    figures["peak bytes"] = found.measured.peak_bytes
    figures["peak error"] = found.peak_error
    return found.differences()


def _derivatives(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> list[str]:
    """Judge the gradients of the first step's loss, in the plain loop that parity trusts."""
    [found] = ranks.run(slopes.prove_on_rank, job_of(small.spec, small.plan, 1, setting), world=1)
    figures["derivative"] = max(slope.error for slope in found)
    figures["tensors"], figures["not judged"] = len(found), sum(not slope.judged for slope in found)
    return [str(slope) for slope in found if not slope.error <= slope.allowed]


def _model(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> list[str]:
    """Compare the small model with transformers' class of its family."""
    if isinstance(own := beside.counterpart(small.spec), str):
        raise NotCompared(own)
    [found] = ranks.run(beside.on_rank, job_of(own, small.plan, 1, setting), world=1)
    if found.why:
        raise NotCompared(found.why)
    figures["model"], figures["tensors"] = max([found.logits, *found.gradients.values()]), len(found.gradients)
    return found.problems()


def _parity(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> list[str]:
    [found] = parity.prove(ranks, small.spec, [small.plan], STEPS, setting)
    figures |= {key: vars(found)[key].error for key in COMPARED}
    return found.wrong(TOLERANCE)


def _documents(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> list[str]:
    """Compare what one document of a row is trained to, with other tokens in the others."""
    given, world = (small.spec, small.plan, setting), small.plan.layout.world
    found: list[documents.Unmoved] = ranks.run(documents.prove_on_rank, *given, world=world)
    figures["document"] = max((one.error for rank in found for one in rank.changed), default=0.0)
    figures["tensors"] = sum(rank.tensors for rank in found)
    return [line for rank in found for line in rank.leaks()] or ["nothing is trained"] * (not figures["tensors"])


def _dtypes(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> list[str]:
    """Compare steps in the plan's own dtypes with the plain loop in these and in float64."""
    found = rounding.prove(ranks, small.spec, small.own, setting)
    figures["times"], figures["tensors"] = found.together, len(found.each)
    figures["update"] = max((error for error, _ in found.updates.values()), default=0.0)
    figures["updates"], figures["blind"] = len(found.updates), found.blind
    return found.problems()


def _checkpoint(small: Shrunk, setting: Setting, ranks: Ranks, figures: dict[str, float]) -> Iterator[str]:
    """Have the plan's ranks save a run, and others read it under another layout and train on, and the other way round;
    compare it with a loop that nothing interrupts."""
    spec, plan = small.spec, small.plan
    right = parity.plain(job_of(spec, plan, 2 * moves.STEPS, replace(setting, sgd=False))).losses
    other = moves.elsewhere(plan)
    for source, target in ((plan, other), (other, plan)):
        with tempfile.TemporaryDirectory(prefix="certificate-") as directory:
            runs = (source, SavedRun(directory)), (target, SavedRun(directory, moves.STEPS))
            saved, loaded = (ranks.run(moves.go, spec, of, run, setting, world=of.layout.world) for of, run in runs)
        figures["tensors"] = len({name for stretch in saved for name in stretch.after})
        yield from moves.differences(saved, loaded)
        for rank, stretch in enumerate(loaded):
            for number, (known, loss) in enumerate(zip(right[moves.STEPS :], stretch.losses, strict=True), 1):
                error = abs(loss - known) / abs(known)
                figures["loss"] = max(error, figures.get("loss", 0.0))
                if not error <= TOLERANCE:
                    at = f"loss of step {number} after loading"
                    yield f"{at}: {known:.9g} expected, {loss:.9g} found on rank {rank} (relative error {error:.1e})"


PROOFS: dict[str, Callable[[Shrunk, Setting, Ranks, dict[str, float]], Iterable[str]]]
PROOFS = {
    "derivatives": _derivatives,
    "model": _model,
    "parity": _parity,
    "documents": _documents,
    "dtypes": _dtypes,
    "checkpoint": _checkpoint,
}


def _named(small: Shrunk, line: str) -> str:
    """``line`` with the block of the model for which the named one stands, where that has another number."""
    words = next((word.strip(":,[]").partition("[")[0] for word in line.split() if "layers." in word), "")
    name = words[words.find("layers.") :] if words else ""
    real = real_name(name, small.blocks) if name and small.blocks else name
    return line if real == name else f"{line}; it stands for {real}"


def _started(small: Shrunk, proof: str) -> Plan:
    """Return what is made smaller: of derivatives a plan of one rank, since its layout is no part of them."""
    plan = small.own if proof in ("drift", "dtypes") else small.plan
    if proof not in ("derivatives", "model"):
        return plan
    batch = Batch(plan.batch.global_batch_size(plan.layout.dp), 1, plan.batch.seq_len)
    return Plan(Layout(), batch, precision=plan.precision, frozen=plan.frozen, lora=plan.lora, loss=plan.loss)


def smallest_failing(subject: Certification, failed: Check, ranks: Ranks) -> Smallest | None:
    """Return what is left of a case that fails, with everything switched off without which it still does: of a small
    one or, where drift shows only at the plan's own size, of that, if a rank of it takes seconds. None where none of
    these fails."""
    small, drifts = subject.small, failed.proof == "drift"

    def outcome(setting: Setting, spec: ModelSpec, plan: Plan) -> Outcome:
        try:
            if drifts:
                looked = drift_ranks(plan.layout, "quick" if spec is subject.spec else "normal")
                found = any(_drift(spec, plan, rank, {}) for rank in looked)
            else:
                found = any(PROOFS[failed.proof](Shrunk(spec, plan, plan, (), (), ()), setting, ranks, {}))
        except NotCompared:
            return "cannot be"
        except Exception:  # whatever a rank raises: it does not come to an end, for which there may be another cause
            return "fails" if failed.raised else "fails otherwise"
        return "passes" if not found else "fails otherwise" if failed.raised else "fails"

    cases = [(subject.setting, small.spec, _started(small, failed.proof))] if small else []
    if failed.proof == "parity":
        cases += [(setting, one.spec, one.plan) for one, setting in subject.others]
    if drifts and failed.seconds < SOON_S:
        cases.append((subject.setting, subject.spec, replace(subject.plan, compile=False, attention="auto")))
    of = ((partial(outcome, setting), case) for setting, *case in cases)
    return next((smallest(*case, told) for told, case in of if told(*case) == "fails"), None)  # type: ignore[arg-type,call-arg]
