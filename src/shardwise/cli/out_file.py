"""The files that an option names: a page, a certificate, a list of answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.data.whole import write_whole
from shardwise.errors import OutputError, Problem, ShardwiseError
from shardwise.launch.writable import check_writable, nearest
from shardwise.pages.page import MARK
from shardwise.spec.files import open_regular


def write_out(path: Path, text: str, option: str) -> None:
    """Write the file that ``option`` names, whole, and make its directory. Raises OutputError (OUT002)."""
    with writing(path, option):
        write_whole(path, text)


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Write the file that ``option`` names. Raises OutputError (OUT002)."""
    try:
        yield
    except OSError as error:
        what, fix = f"cannot write {path}: {error.strerror or error}", f"`{option}` a file in a directory of yours"
        raise OutputError(Problem("OUT002", what, option, fix)) from None


def check_file(path: Path, option: str) -> None:
    """Raises OutputError, before any work: OUT001 where something is there already, OUT002 where no file can be
    written."""
    check_writable(nearest(path.absolute().parent), option)
    with writing(path, option):
        there = path.exists()
    if there:
        raise OutputError(Problem("OUT001", f"{path} exists; nothing is overwritten", option, f"another {option}"))


def check_page(path: Path, option: str, kind: str) -> None:
    """Raises OutputError, before any work: OUT001 where something other than a page of ours of this ``kind`` is there,
    OUT002 where no file can be written."""
    check_writable(nearest(path.absolute().parent), option)
    try:
        with open_regular(path) as file:
            ours = MARK.format(kind).encode() in file.read(1024)
    except FileNotFoundError:
        return
    except (OSError, ShardwiseError):
        ours = False
    if not ours:
        what = f"{path} exists, and is no page of a {kind} that Shardwise wrote; it is not overwritten"
        raise OutputError(Problem("OUT001", what, option, f"`{option}` another file"))
