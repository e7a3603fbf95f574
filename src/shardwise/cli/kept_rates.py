"""Keep what ``shardwise doctor`` measured on this machine, and read it back for later plans and runs here."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from socket import gethostname

from shardwise import __version__
from shardwise.data.whole import write_whole
from shardwise.errors import MissingInputError, ShardwiseError
from shardwise.planner.seconds.history import machine_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.cluster_file import dump_cluster, load_cluster
from shardwise.spec.units import show_age

DIRECTORY = "machines"


def file_of(cluster: Cluster, state: Path) -> Path:
    """Return where the rates of this machine are kept below the directory ``state``: its name tells the host, the
    devices, how many ranks measured at the same time, and the versions of shardwise and torch. Other ranks and other
    versions have files of their own."""
    machine = machine_of(replace(cluster, measured=None))
    name = f"{gethostname()} {machine} shardwise {__version__} torch {version('torch')}"
    return state / DIRECTORY / (re.sub(r"[^\w.+]+", "-", name) + ".yaml")


def keep(measured: Cluster, head: tuple[str, ...], state: Path) -> Path:
    """Write the machine with its rates, below ``head`` as comments, in place of what was measured before; return the
    file. Raises OSError."""
    path = file_of(measured, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, dump_cluster(measured, head))
    return path


def with_kept(cluster: Cluster, state: Path) -> Cluster:
    """Return this machine with the rates that were kept, if any, and how old they are in place of what was assumed of
    its links. Memory stays as it is now. A file that cannot be used is named among the assumptions."""
    path = file_of(cluster, state)
    try:
        found = load_cluster(path)
        age = show_age(time.time() - path.stat().st_mtime)
    except (MissingInputError, FileNotFoundError, NotADirectoryError):
        return cluster
    except (ShardwiseError, OSError) as error:
        reason = error.problems[0].what if isinstance(error, ShardwiseError) else str(error)
        assumed = f"rates of the table of devices: {reason}; `shardwise doctor` measures again"
        return replace(cluster, assumptions=(*cluster.assumptions, assumed))
    memory = cluster.assumptions[:1] if cluster.kind == "cpu" else ()
    return replace(
        cluster,
        link_bytes_per_s=found.link_bytes_per_s,
        network_bytes_per_s=found.network_bytes_per_s,
        measured=found.measured,
        assumptions=(*memory, f"rates {', '.join(found.assumptions)} ({age})"),
    )
