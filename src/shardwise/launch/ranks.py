"""The question whether this process is a rank. Imports next to nothing: it is asked before anything else is loaded."""

import os


def is_worker() -> bool:
    """Say whether torchrun or our launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
