"""A certificate that was written before, read back: what it says of itself, and of what it is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.prove.basis import Basis, digest
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import from_json

FORMAT = 2
FILE = "certificate.json"
AGAIN = "`shardwise prove` writes it anew"


@dataclass(frozen=True)
class Command:
    """The command of a proof: its ``words``, files and settings, and the options that say of what it is."""

    words: list[str] = field(default_factory=list)
    cluster: str | None = None
    plan: str | None = None
    system: str | None = None
    set: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shown:
    """A proof, and of what case; it holds if there are no ``problems``."""

    proof: str
    case: str
    problems: list[str]


@dataclass(frozen=True)
class Small:
    """What the small runs were of: lines of what was made smaller."""

    changed: list[str]


@dataclass(frozen=True)
class KeptCertificate:
    """Of a certificate what :meth:`Certificate.as_json` wrote, without figures and plans."""

    format: int
    holds: bool
    verdict: str
    recipe: str
    effort: str
    begun: str
    command: Command
    checks: list[Shown]
    shrunk: Small | None
    rows: str
    not_shown: list[str]
    basis: Basis
    digests: dict[str, str]
    sha256: str


def read_kept(path: Path) -> tuple[Path, KeptCertificate]:
    """The certificate in ``path``, a file or the directory that it lies in, and the file. Raises MissingInputError
    (CFG011); DataError: CERT002 for what is damaged or no certificate, CERT003 for one of another format."""
    file = path / FILE if path.is_dir() else path
    try:
        text = read_regular(file, NOTE_BYTES)
    except OSError as error:
        fix = "a certificate.json that `shardwise prove` wrote, or its directory"
        raise MissingInputError(Problem("CFG011", f"cannot read {file}: {error.strerror}", str(file), fix)) from None
    try:
        told = from_json(dict[str, Any], text)
    except ValueError as error:
        raise _damaged(file, str(error)) from None
    if not {"holds", "checks", "not_shown"} <= told.keys():
        raise _damaged(file, "it is no certificate: it says nothing of proofs")
    if told.get("format") != FORMAT:
        newer = isinstance(told.get("format"), int) and told["format"] > FORMAT
        what = f"{file} was written by {'a newer' if newer else 'an older'} version, in another format than {FORMAT}"
        raise DataError(Problem("CERT003", what, str(file), AGAIN))
    try:
        found = from_json(KeptCertificate, text)
    except ValueError as error:
        raise _damaged(file, str(error)) from None
    if found.sha256 != digest({key: value for key, value in told.items() if key != "sha256"}):
        raise _damaged(file, "its content is not that of its checksum")
    return file, found


def _damaged(file: Path, why: str) -> DataError:
    return DataError(Problem("CERT002", f"{file} is damaged, or not a certificate: {why}", str(file), AGAIN))
