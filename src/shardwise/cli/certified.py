"""Certificates that ``shardwise prove`` wrote before: whether one is of what is here, and of what it is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.cli.length import known_windows
from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.prove.basis import Basis, Change, basis_of, changed, plan_digest
from shardwise.prove.kept import FILE, KeptCertificate, read_kept
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

DIRECTORY = Path("certificates")
"""Where certificates are written unless `-o` says otherwise."""
NAMED = 3
"""So many changes of a part are named in a line."""


@dataclass(frozen=True)
class BesideHere:
    """A certificate in ``file``, and what one would rest on ``here``."""

    file: Path
    kept: KeptCertificate
    here: Basis

    @cached_property
    def changes(self) -> dict[str, dict[str, Change]]:
        """The values that are others now, by part and name, as (then, now)."""
        return changed(self.kept.basis, self.here)

    @property
    def good(self) -> bool:
        """Return whether it holds and matches what is here."""
        return self.kept.holds and not self.changes

    @property
    def verdict(self) -> str:
        """Return what it says, or in which parts it does not match."""
        if not self.changes:
            return f"{self.kept.verdict} and matches"
        differences = [f"{part}: {_listed(changes)}" for part, changes in self.changes.items()]
        return f"does not match: {'; '.join(differences)}"

    def lines(self) -> Iterator[str]:
        """Return what it covers, what it could not show, and every change."""
        kept = self.kept
        yield f"certificate {self.file} of `{kept.recipe}`: {kept.verdict} ({kept.effort}, begun {kept.begun})"
        for check in kept.checks:
            yield f"  {check.proof:<11}  {'fails' if check.problems else 'holds'}  {check.case}"
            yield from (f"               {problem}" for problem in check.problems)
        smaller = [*kept.shrunk["changed"], f"rows: {kept.rows}"] if kept.shrunk else []
        yield from _listing("made smaller", smaller)
        yield from _listing("not shown", kept.not_shown)
        if not kept.basis.get("data"):
            yield "it is of no data: they were not prepared"
        for part, changes in self.changes.items():
            yield from _listing(f"another {part}", [_change(name, change) for name, change in changes.items()])
        yield f"it {'does not match' if self.changes else 'matches'} what is here"

    def as_json(self) -> dict[str, Any]:
        """Return the whole for a program, each change as ``then`` and ``now``."""
        changes = {
            part: {name: dict(zip(("then", "now"), change, strict=True)) for name, change in each.items()}
            for part, each in self.changes.items()
        }
        return asdict(self.kept) | {"certificate": str(self.file), "matches": not changes, "changed": changes}


def rests_on(recipe: Recipe, spec: ModelSpec, plan: Plan) -> Basis:
    """Return what a certificate of it rests on, with the length that data give which are prepared."""
    from shardwise.data.epochs import settled

    windows = known_windows(recipe)
    return basis_of(recipe if windows is None else settled(recipe, windows), spec, plan)


def told_of_run(recipe: Recipe, spec: ModelSpec, plan: Plan, names: list[str], command: str) -> str | None:
    """A line about the certificate that `prove` wrote of this run, or where none is of it, about the newest that it
    wrote under one of these names; None where there is none. Raises ConfigError (CERT001) where the recipe requires one
    that holds: ``command`` writes it."""
    required = recipe.run.certificate == "require"
    files = [*DIRECTORY.glob(f"*-{plan_digest(plan)[:8]}/{FILE}")]
    stems = {stem for name in names for stem in (name, re.sub(r"-\d+$", "", name))}
    files += [file for file in DIRECTORY.glob(f"*/{FILE}") if file.parent.name.rpartition("-")[0] in stems]
    files = sorted({file for file in files if file.is_file()}, key=lambda file: file.stat().st_mtime, reverse=True)
    basis = rests_on(recipe, spec, plan) if files else {}
    found = list[BesideHere]()
    unread = ""
    for file in files:
        try:
            found.append(BesideHere(*read_kept(file), basis))
        except ShardwiseError as error:
            unread = unread or error.problems[0].what
    best = min(found, key=lambda each: (not each.good, bool(each.changes)), default=None)
    said = f"{best.file.parent} {best.verdict}" if best else unread
    if required and not (best and best.good):
        what = f"`run.certificate` is `require`, and {said or f'no certificate of this run is in {DIRECTORY}'}"
        raise ConfigError(Problem("CERT001", what, "run.certificate", f"`{command}`, then start the run again"))
    return f"certificate {said}" if said else None


def _listed(changes: dict[str, Change]) -> str:
    first = ", ".join(_change(name, change) for name, change in [*changes.items()][:NAMED])
    return first + f" and {len(changes) - NAMED} more" * (len(changes) > NAMED)


def _change(name: str, change: Change) -> str:
    then, now = (f"{text[:60]}..." if len(text := str(value)) > 64 else text for value in change)
    return f"{name} {then} -> {now}"


def _listing(head: str, lines: list[str]) -> list[str]:
    return [f"{head}:", *(f"  {line}" for line in lines)] if lines else []
