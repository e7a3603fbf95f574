"""The manifest of a checkpoint: what is said of one that is damaged."""

from __future__ import annotations

import hashlib

import pytest

from shardwise.runtime.manifest import Rejected, parse


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
        assert problem.what == f"the manifest is damaged: its contents do not match its sha256 ({shown}...)"
