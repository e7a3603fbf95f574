"""A rank that joins the others as a rank of ``shardwise train`` does, and waits with them: ``network_rank
<directory>``. It opens every kind of connection that a run has, and leaves a file when they stand."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shardwise.launch.worker import die_with_launcher


def main(directory: Path) -> int:
    """The exit code."""
    die_with_launcher()
    from shardwise.runtime.checkpoint.host_group import HostGroup
    from shardwise.runtime.world import process, world
    from shardwise.spec.layout import Layout

    me = process()
    with world(Layout(dp_shard=me.world_size), "cpu", 60.0):
        group = HostGroup.of(None)
        assert group.first(lambda: "told") == "told"
        (directory / f"store-{me.rank}").write_text(me.store)
        (directory / f"rank-{me.rank}").touch()
        while not (directory / "enough").exists():
            time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
