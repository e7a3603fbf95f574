"""The process that traces units: it serves one plan after another, and says why where it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.models.config import model_spec
from shardwise.planner import apart
from shardwise.planner.sheets import name_of, unpack_unit
from shardwise.planner.variants import chosen
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind


@pytest.mark.prove
def test_one_process_traces_what_is_asked_for_in_turn_and_tells_it_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = model_spec("small", 500, 32, 80, 3, 4, 2, 8)
    names = [name_of(chosen(spec, Plan(), RankKind(), unit).variant) for unit in ("head", "embedding")]
    found = [unit for name in names for unit in apart.traced_apart([name], tmp_path)]
    assert [unpack_unit(unit).name for unit in found] == ["head", "embedding"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "once" in line and str(tmp_path) in line
    with pytest.raises(RuntimeError, match="Invalid JSON"):
        apart.traced_apart(["{no name"], tmp_path)
    assert apart._process.cache_info().currsize == 0  # and the next plan has another
