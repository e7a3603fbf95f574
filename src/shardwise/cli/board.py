"""``shardwise board``: the runs of a directory as a page that a browser on this machine shows while it runs."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli.board_pages import BoardPages
from shardwise.cli.board_server import BoardServer
from shardwise.cli.options import Common, misused
from shardwise.cli.runs import runs_in
from shardwise.cli.show import note, say
from shardwise.errors import Problem, UnavailableError


@dataclass
class Options(Common):
    """Show the runs of a directory in a browser on this machine, live.

    The address has a token in it, and is answered on 127.0.0.1 only. Runs of several machines are shown where they
    write into a directory that all of them share. Nothing is written. Ctrl-C ends it.
    """

    path: Annotated[Path, Argument(metavar="[DIRECTORY]", help="The directory that holds the runs.")] = Path("runs")
    port: Annotated[
        int,
        Option("--port", help="The port of 127.0.0.1 (default: one that is free).", show_default=False),
    ] = 0


def run(options: Options) -> None:
    """Print the address, and answer until Ctrl-C."""
    if not 0 <= options.port < 2**16:
        raise misused(f"no port {options.port}", "`--port` 1024 to 65535, or leave it out", "--port")
    runs_in(options.path)
    pages = BoardPages(options.path)
    try:
        server = BoardServer(pages.answer, options.port)
    except OSError as error:
        raise _refused(options.port, error) from None
    with server:
        say(json.dumps({"address": server.address}) if options.json else server.address)
        note(f"the runs of {options.path}, for whoever has this address; Ctrl-C ends it", as_json=options.json)
        server.serve_forever()


def _refused(port: int, error: OSError) -> UnavailableError:
    """NET003, for a port that cannot be had."""
    words = {errno.EADDRINUSE: "another program answers there", errno.EACCES: "this user may not have it"}
    reason = words.get(error.errno or 0, error.strerror or str(error))
    return UnavailableError(
        Problem("NET003", f"port {port} of 127.0.0.1: {reason}", "--port", "`--port` another, or leave it out")
    )
