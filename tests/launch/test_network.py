"""What a run opens to a network, and to other users of the machine: nothing that they could reach or write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch.sockets import listening, network_addresses, stays_here
from tests.launch.test_local import ROOT, start, until


@pytest.mark.prove
@pytest.mark.timeout(200)
def test_a_running_run_listens_on_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interface the user's environment names, as that of a cluster does."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launcher = start(tmp_path, "network")
    try:
        until(lambda: launcher.poll() is not None or all((tmp_path / f"rank-{n}").exists() for n in range(2)), 150)
        ranks = [int(child) for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(ranks) == 2, launcher.communicate()[0]
        assert network_addresses(launcher.pid) == []
        for rank in ranks:
            assert listening(rank), "gloo's ranks connect to one another, so that each listens"
            assert all(map(stays_here, network_addresses(rank)))
        (store,) = {(tmp_path / f"store-{number}").read_text() for number in range(2)}
        private = Path(store).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700 and private.stat().st_uid == os.getuid()
    finally:
        (tmp_path / "enough").touch()
        launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert not private.exists(), "the store goes when the run ends"


def test_the_launcher_needs_no_torch(tmp_path: Path) -> None:
    program = "import sys; from shardwise.launch import local; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tempfile.gettempdir())
    assert done.stdout == "False\n", done.stderr
