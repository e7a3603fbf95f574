"""A certificate that was written before, read back: what it says of itself, and of what it is. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.prove.basis import Basis, digest
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import from_json

FORMAT = 2
FILE = "certificate.json"


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
class KeptCertificate:
    """The record that :meth:`Certificate.as_json` wrote of a certificate, without figures and plans."""

    holds: bool
    verdict: str
    recipe: str
    effort: str
    begun: str
    command: Command
    checks: list[Shown]
    shrunk: dict[str, Any] | None
    rows: str
    not_shown: list[str]
    basis: Basis


def read_kept(path: Path) -> tuple[Path, KeptCertificate]:
    """The certificate in ``path``, a file or the directory that it lies in, and the file. Raises MissingInputError
    (CFG011); DataError: CERT002 for what is damaged or no certificate, CERT003 for one of another format."""
    file = path / FILE if path.is_dir() else path
    again = "`shardwise prove` writes it anew"
    try:
        told = from_json(dict[str, Any], read_regular(file, NOTE_BYTES))
        if {"holds", "checks"} <= told.keys() and told.get("format") != FORMAT:
            what = f"{file} is of format {str(told.get('format', 1))[:20]}, and this version reads {FORMAT}"
            raise DataError(Problem("CERT003", what, str(file), again))
        if told.pop("sha256", None) != digest(told):
            raise ValueError("its content is not that of its checksum")
        return file, from_json(KeptCertificate, json.dumps(told))
    except OSError as error:
        fix = "a certificate.json that `shardwise prove` wrote, or its directory"
        raise MissingInputError(Problem("CFG011", f"cannot read {file}: {error.strerror}", str(file), fix)) from None
    except ValueError as error:
        what = f"{file} is damaged, or not a certificate: {error}"
        raise DataError(Problem("CERT002", what, str(file), again)) from None
