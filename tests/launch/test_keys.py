"""A key for wandb is looked for before a run starts, where wandb looks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import UnavailableError
from shardwise.launch import service_keys
from shardwise.spec.recipe import Recipe

ASKED = Recipe.model_validate({"run": {"trackers": ["wandb"]}})


@pytest.fixture(autouse=True)
def no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and none of wandb's variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*service_keys.GIVEN, "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_without_a_key_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match=r"TRK003.*api\.wandb\.ai(.|\n)*`wandb login`"):
        service_keys.check_wandb(ASKED)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UnavailableError, match=r"TRK003.*wandb\.example\.org"):
        service_keys.check_wandb(ASKED)
    service_keys.check_wandb(Recipe())


@pytest.mark.parametrize(("name", "value"), [*((name, "x") for name in service_keys.GIVEN), ("WANDB_MODE", "offline")])
def test_a_variable_is_enough(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    service_keys.check_wandb(ASKED)


def test_so_are_a_netrc_with_the_host_and_wandbs_own_settings(no_keys: Path) -> None:
    (no_keys / ".netrc").write_text("machine github.com login user password x\n")
    with pytest.raises(UnavailableError):
        service_keys.check_wandb(ASKED)
    (no_keys / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    service_keys.check_wandb(ASKED)
    (no_keys / ".netrc").unlink()
    (no_keys / ".config/wandb").mkdir(parents=True)
    (no_keys / ".config/wandb/settings").write_text("[default]\nmode = offline\n")
    service_keys.check_wandb(ASKED)
