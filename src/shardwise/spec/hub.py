"""Files of a repository on the Hugging Face Hub."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from shardwise.errors import MissingInputError, Problem, UnavailableError, first_line


def fetch(source: str, revision: str | None, patterns: Sequence[str], where: str, *, here: bool = False) -> Path:
    """The directory with the files of ``source`` that match ``patterns``, from the cache or, unless they have to be
    ``here``, the network. Raises MOD002 when the Hub gives none, MOD003 when it cannot be reached."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    at = source if revision is None else f"{source} at revision {revision}"
    offline = here or not _reachable(constants.ENDPOINT)
    try:
        wanted = list(patterns)
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        fix = "check the network, or download it elsewhere and give its directory"
        what = f"{source} is not a local directory, and the Hub could not be reached for {at}"
        raise UnavailableError(Problem("MOD003", what, where, fix)) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        what = f"{source} is not a local directory, and the Hub does not provide it: {first_line(error)}"
        fix = "check the name and the revision; `hf auth login` if it is gated"
        raise MissingInputError(Problem("MOD002", what, where, fix)) from error


def _reachable(url: str) -> bool:
    """Say whether the name of ``url``'s host can be resolved, or a proxy may resolve it. Without a network, this avoids
    half a minute of retries."""
    host = urlsplit(url).hostname
    if getproxies() or host is None:
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
