"""The files of a run to which lines are added. Imports no torch: a launcher adds to them too."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from shardwise.spec.files import open_regular


class Lines:
    """A jsonl file that only grows, a flushed line at a time. A last line that was cut off is ended, so that it does
    not damage the next. Numbers that are not finite become null, since JSON has none."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        with open_regular(path) as file:
            file.seek(max(0, self._file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):
                self._file.write("\n")

    def write(self, record: Mapping[str, Any]) -> None:
        plain = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in record.items()
        }
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def event(self, kind: str, **facts: Any) -> None:
        """Write what happened, and when."""
        self.write({"time_s": round(time.time(), 3), "event": kind, **facts})

    def close(self) -> None:
        self._file.close()
