"""Keys of services that a run needs, looked for before it starts: a tracker without one fails only after the ranks have
started, and in a terminal it waits for an answer."""

from __future__ import annotations

import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from shardwise.errors import Problem, UnavailableError
from shardwise.spec.recipe import Recipe

KEYLESS = ("offline", "disabled", "dryrun")
GIVEN = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")


def check_wandb(recipe: Recipe) -> None:
    """Raises UnavailableError TRK003 if ``run.trackers`` names wandb, and neither its variables nor its files (a
    netrc, settings) hold a key or say that it needs none."""
    needed = "wandb" in recipe.run.tracker_names and os.environ.get("WANDB_MODE", "").lower() not in KEYLESS
    if not needed or any(os.environ.get(name) for name in GIVEN):
        return
    settings = (Path(os.environ.get("WANDB_DIR", ".")) / "wandb/settings", Path.home() / ".config/wandb/settings")
    if any(path.is_file() for path in settings):  # wandb's to read
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    homes = [Path.home() / name for name in (".netrc", "_netrc")]
    for path in [Path(os.environ["NETRC"]).expanduser()] if os.environ.get("NETRC") else homes:
        try:
            if path.is_file() and netrc(str(path)).authenticators(host):
                return
        except (OSError, NetrcParseError):
            return  # wandb says what is wrong with it
    what = f"`run.trackers` names wandb, and there is no key for {host}"
    fix = "`wandb login`, or WANDB_API_KEY=...; WANDB_MODE=offline keeps the run on this disk"
    raise UnavailableError(Problem("TRK003", what, "run.trackers", fix))
