"""The certificate: what was proved of a plan, how, and what was not; as Markdown for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.models.config import parameter_count
from shardwise.prove.asked import TOLERANCE as RATE_TOLERANCE
from shardwise.prove.basis import Basis, digest, digests
from shardwise.prove.beside import TOLERANCE as MODEL_TOLERANCE
from shardwise.prove.certify import Certification, Check, Effort, drift_ranks, micro_batches
from shardwise.prove.documents import OF_EXPERTS
from shardwise.prove.drift import PEAK_FROM_BYTES, PEAK_TOLERANCE
from shardwise.prove.kept import FORMAT, Command
from shardwise.prove.parity import TOLERANCE
from shardwise.prove.reading import few
from shardwise.prove.rounding import MOMENTS, SHARED, UPDATE, WHOLE
from shardwise.prove.shrink import Shrunk
from shardwise.prove.slopes import TOLERANCE as SLOPE_TOLERANCE
from shardwise.prove.smallest import Smallest
from shardwise.spec.units import counted, markdown_table, show_bytes, show_count, show_seconds

MARKS = {"fails": "**fails**", "left out": "left out", "holds": "holds"}
ALWAYS_UNSEEN = "that training goes well: how large the learning rate is, how long, and what the texts say"


@dataclass(frozen=True)
class Facts:
    """The facts about a certificate: what was asked, in words, and the ``command``; ``begun``: when, in UTC; ``basis``:
    what it rests on."""

    recipe: str
    cluster: str
    plan: str
    effort: Effort
    begun: str
    command: Command
    basis: Basis


@dataclass(frozen=True)
class Certificate:
    """A certificate of a plan. ``smallest``: by proof that failed, the smallest layout in which it does."""

    subject: Certification
    facts: Facts
    checks: list[Check]
    smallest: dict[str, Smallest]

    @property
    def holds(self) -> bool:
        return not any(check.problems for check in self.checks)

    @property
    def verdict(self) -> str:
        failed = sorted({check.proof for check in self.checks if check.problems})
        if failed:
            return f"does not hold: {', '.join(failed)} failed"
        return "holds" if self.subject.small else "what could be shown holds"

    def unseen(self) -> list[str]:
        """Return what the certificate does not show."""
        plan, small = self.subject.plan, self.subject.small
        looked = len(drift_ranks(plan.layout, self.facts.effort))
        found = [f"all proofs but drift, data and recipe: {self.subject.why}"] if small is None else []
        if looked < plan.layout.world:
            found.append(f"drift on {plan.layout.world - looked:,} of {plan.layout.world:,} ranks")
        if (run := micro_batches(plan)) < plan.batch.accumulation:
            after = f"after the first {run} of {plan.batch.accumulation}, which they repeat"
            found.append(f"drift of micro-batches {after}")
        if isinstance(self.subject.read, str):
            found.append(f"which rows ranks read: {self.subject.read}")
        for check in self.checks:
            if missed := int(check.figures.get("not judged", 0)):
                of = counted(int(check.figures["tensors"]), "tensor")
                found.append(f"derivatives along {missed} of {of}: the loss is not smooth in any direction tried")
            if check.left_out:
                found.append(f"the {check.proof} beside transformers' class: {check.left_out}")
            if asked := self.subject.asked if check.proof == "recipe" else None:
                found += [f"rates of the warm-up `{asked.optim.warmup_shape}`"] * (asked.rise() is None)
                found += [f"rates of the schedule `{asked.optim.schedule}`"] * (asked.fall() is None)
            if looked := int(check.figures.get("ranks", 0)):
                ranks, most = int(check.figures["of ranks"]), few(plan).accumulation
                found += [f"what is read on {ranks - looked} of {ranks} data-parallel ranks"] * (looked < ranks)
                if most < plan.batch.accumulation:
                    found.append(f"reading of more than {most} of {plan.batch.accumulation} micro-batches of a step")
            if blind := int(check.figures.get("blind", 0)):
                of = counted(int(check.figures["updates"]), "weight")
                found.append(f"updates of {blind} of {of}: storing rounds them by as much as they change")
        if self.facts.effort == "quick" and small is not None:
            found.append("steps in the plan's own dtypes, and one that is not finite (left out by --quick)")
        return [*found, *self.subject.lost, *(small.unseen if small else ()), ALWAYS_UNSEEN]

    def as_json(self) -> dict[str, Any]:
        """Return everything, for a program. ``sha256`` is of all the rest."""
        told = self._told()
        return told | {"sha256": digest(told)}

    def _told(self) -> dict[str, Any]:
        small = self.subject.small
        told = {
            "format": FORMAT,
            "command": asdict(self.facts.command),
            "holds": self.holds,
            "verdict": self.verdict,
            "recipe": self.facts.recipe,
            "model": {"name": self.subject.spec.name, "parameters": parameter_count(self.subject.spec)},
            "cluster": self.facts.cluster,
            "plan": asdict(self.subject.plan),
            "effort": self.facts.effort,
            "begun": self.facts.begun,
            "checks": [asdict(check) for check in self.checks],
            "smallest_failing": {
                proof: {"words": found.words, "passes_without": found.needed, "plan": asdict(found.plan)}
                for proof, found in self.smallest.items()
            },
            "shrunk": {"changed": small.changed, "blocks": small.blocks, "plan": asdict(small.plan)} if small else None,
            "rows": self.subject.rows,
            "not_shown": self.unseen(),
            "tolerances": {
                "derivatives": SLOPE_TOLERANCE,
                "model": MODEL_TOLERANCE,
                "documents": OF_EXPERTS,
                "float64": TOLERANCE,
                "own dtypes": {"whole rows": WHOLE, "shared": SHARED, "update": [UPDATE, MOMENTS]},
                "peak": PEAK_TOLERANCE,
            },
            "basis": self.facts.basis,
            "digests": digests(self.facts.basis),
        }
        return json.loads(json.dumps(told))

    def markdown(self) -> str:
        """Return the certificate as Markdown, for people."""
        subject, small = self.subject, self.subject.small
        parameters = show_count(parameter_count(subject.spec))
        facts = {
            "recipe": self.facts.recipe,
            "model": f"{subject.spec.name}, {parameters} parameters",
            "machines": self.facts.cluster,
            "plan": self.facts.plan,
            "begun": f"{self.facts.begun}, took {show_seconds(sum(check.seconds for check in self.checks))}",
            "versions": ", ".join(f"{name} {version}" for name, version in self.facts.basis["versions"].items()),
            "SHA-256 of all that it rests on": digests(self.facts.basis)["all"],
        }
        words = [f"{MARKS[mark(one)]}: {result(one)}" for one in self.checks]
        rows = [
            (one.proof, one.case, said, show_seconds(one.seconds)) for one, said in zip(self.checks, words, strict=True)
        ]
        parts = [
            f"# Certificate of `{self.facts.recipe}`: {self.verdict}",
            markdown_table(("", ""), list(facts.items())),
            "## What was proved\n\n" + markdown_table(("proof", "case", "result", "time"), rows),
        ]
        if not self.holds:
            parts.append("## What failed\n\n" + "\n".join(f"* {line}" for line in self.failures()))
        if small is not None:
            parts.append("## What was made smaller\n\n" + self.smaller(small))
        parts.append("## What this does not show\n\n" + "\n".join(f"* {line}" for line in self.unseen()))
        return "\n\n".join([*parts, "## Tolerances\n\n" + TOLERANCES]) + "\n"

    def smaller(self, small: Shrunk) -> str:
        """Return what the small runs were of."""
        blocks = ", ".join(map(str, small.blocks))
        lines = ["For all proofs but drift, data and recipe:", "", *(f"* {line}" for line in small.changed)]
        lines += [f"* the small model's {len(small.blocks)} blocks stand for the model's blocks {blocks}"]
        for one, _ in self.subject.others:
            axes = ", ".join(f"{axis} {ranks}" for axis, ranks in one.plan.layout.axes())
            lines.append(f"* beside it, for parity, {axes} alone: {'; '.join(one.changed)}")
        return "\n".join([*lines, f"* rows: {self.subject.rows}"])

    def failures(self) -> list[str]:
        """Each failure, and the smallest layout that has it."""
        lines = [f"{one.proof}, {one.case}: {problem}" for one in self.checks for problem in one.problems]
        lines += [f"the smallest layout in which {proof} fails: {found}" for proof, found in self.smallest.items()]
        return lines


TOLERANCES = f"""\
* drift: every collective, byte of state and saved byte is equal; a peak of {show_bytes(PEAK_FROM_BYTES)} and more is
  within {100 * PEAK_TOLERANCE:g} %
* data: which rows a rank reads, their tokens, labels and documents are equal to what is stored
* recipe: rates within {RATE_TOLERANCE:g} of the full one
* derivatives: within {SLOPE_TOLERANCE:g} (relative to the gradient), and what rounding of the loss makes of its
  differences
* model: logits and gradients within {MODEL_TOLERANCE:g} (relative) of those of transformers' class
* parity: losses and what is reported with them, norms, first gradients and last weights within {TOLERANCE:g}
  (relative); what several ranks hold of a weight is equal to the bit after every step
* dtypes: gradients are at most {WHOLE.together:g} times as far from float64 as those of one process in the same dtypes,
  any of them {WHOLE.alone:g} times and the loss {WHOLE.loss:g} times; where ranks share rows, or there are adapters,
  {SHARED.together:g}, {SHARED.alone:g} and {SHARED.loss:g} times, so that a loss in bf16 may not be seen there; updates
  within {UPDATE:g} of what float64 makes of the same gradients, and what weights and moments in fewer bits round
* documents: equal to the bit; of layers with experts, and of transformers' own modules, within {OF_EXPERTS:g}
* checkpoint: every weight and moment is equal to the bit, losses after it within {TOLERANCE:g}

docs/prove.md says what each proof compares, and what it cannot show."""


def mark(check: Check) -> str:
    """Return whether it holds, in a word."""
    return "fails" if check.problems else "left out" if check.left_out else "holds"


def result(check: Check) -> str:
    """Return what came of a check, in a few words."""
    if check.problems:
        return check.problems[0]
    found = check.figures
    if check.left_out:
        return check.left_out
    if check.proof == "drift":
        sent = counted(int(found["collectives"]), "collective")
        return f"equal: {sent}, {show_bytes(found['sent bytes'])} sent, {show_bytes(found['state bytes'])} of state"
    if check.proof == "data":
        rows = counted(int(found["rows"]), "row")
        tokens, of = show_count(int(found.get("tokens", 0))), counted(int(found["of ranks"]), "data-parallel rank")
        return f"{rows} once each; {tokens} tokens on {int(found['ranks'])} of {of} as they are stored"
    if check.proof == "recipe":
        looked, pairs = int(found["steps"]), int(found.get("pairs", 0))
        pulled = f"; {counted(pairs, 'pair')} of answers pulled apart, the chosen ones up" if pairs else ""
        if not looked:
            return f"transformers has no such schedule{pulled}"
        like = f"within {found['rate']:.0e} of" if found["rate"] else "equal to"
        return f"{looked:,} of {int(found['of steps']):,} rates {like} transformers'{pulled}"
    if check.proof == "derivatives":
        missed = int(found["not judged"])
        judged = counted(int(found["tensors"]) - missed, "tensor") + f", {missed} more not judged" * (missed > 0)
        return f"within {found['derivative']:.0e} of the loss's differences: {judged}"
    if check.proof == "model":
        return f"within {found['model']:.0e}: {counted(int(found['tensors']), 'tensor')}"
    if check.proof == "documents":
        error = found["document"]
        how = f"within {error:.0e}" if error else "equal to the bit"
        return f"{how}: {counted(int(found['tensors']), 'tensor')}"
    if check.proof == "checkpoint":
        return f"{counted(int(found['tensors']), 'tensor')} equal, losses within {found['loss']:.0e}"
    if check.proof == "dtypes":
        rounded = f"rounds {found['times']:.2f} times what one process does"
        return f"{rounded}: {counted(int(found['tensors']), 'tensor')}, updates within {found['update']:.0e}"
    return f"within {max(found.values()):.0e}"
