"""The manifest of a checkpoint: what is said of one that is damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shardwise.runtime.checkpoint.manifest import Rejected, parse, train_again


def test_a_manifest_that_is_not_what_its_sum_says() -> None:
    body = b'{"format": 1}'
    digest = hashlib.sha256(body).hexdigest()
    frame = f'{{"sha256":"{digest}","manifest":'.encode()
    for data, shown in (
        (frame + body.replace(b"1", b"2") + b"}\n", digest[:12]),
        (b"\xff" * 200, "�" * 12),
        (b"", ""),
    ):
        with pytest.raises(Rejected) as caught:
            parse(data, "step-1/manifest.json")
        [problem] = caught.value.problems
        assert f"sha256 ({shown}...)" in problem.what


def test_the_command_that_goes_on_with_a_run(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    assert train_again(run) == f"shardwise train '{run}'"
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert train_again(run) == f"shardwise train --resume '{run}'"
