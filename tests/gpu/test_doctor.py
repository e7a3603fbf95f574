"""``shardwise doctor`` on real GPUs: what it measures lies between a tenth of the table's figures and all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.launch.doctor.compute import PRODUCTS
from shardwise.spec.cluster_file import load_cluster

pytestmark = pytest.mark.gpu


def test_every_gpu_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "doctor", "--json", "-o", "cluster.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told, cluster = json.loads(done.stdout), load_cluster(tmp_path / "cluster.yaml")
    assert cluster.kind == "cuda" and cluster.world == torch.cuda.device_count() and told["machine"]["driver"]
    measured = cluster.measured
    assert measured is not None and len(measured.products) == 2 * len(PRODUCTS["cuda"])
    assert bool(measured.sent) == (cluster.world > 1)
    for line in told["compared"]:
        assert line["found"] > 0
        assert not line["expected"] or 0.1 < line["found"] / line["expected"] < 1.3, line["what"]
