"""A real browser, where one is installed: pages are opened in Chromium and asked what they look like.

It is driven over its debugging pipe (two file descriptors), with nothing but the standard library.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-dev-shm-usage",
)
ANSWER_S = 60.0


def program() -> str | None:
    """The first of these programs that is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """One page of a browser. ``events`` are all that it has told so far."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.sent, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol, and return its result. Raises RuntimeError where it fails."""
        self.sent += 1
        call = {"id": self.sent, "method": method, "params": parameters}
        call |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(call).encode() + b"\0")
        while (message := self.next_message()).get("id") != self.sent:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    def next_message(self) -> dict[str, Any]:
        until = time.monotonic() + ANSWER_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, until - time.monotonic()))
            if not ready or not (read := os.read(self.from_browser, 2**20)):
                raise RuntimeError("the browser does not answer")
            self.rest += read
        first, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """Show a file in a window of so many pixels, for people who like ``light`` or ``dark``."""
        self.visit(page.absolute().as_uri(), width, scheme)

    def visit(self, address: str, width: int, scheme: str = "light") -> None:
        """As :meth:`open`, of an address."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next_message())
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def picture(self, target: Path) -> None:
        """Write the whole page into a PNG file."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        target.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What the browser has said of the pages: errors and warnings of the console, and of what they load."""
        told = [event for event in self.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
        return [json.dumps(event["params"]) for event in told]

    def loaded(self) -> set[str]:
        """The addresses that the pages have asked for."""
        asked = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return {event["params"]["request"]["url"] for event in asked}


@contextmanager
def tab() -> Iterator[Tab]:
    """A browser with one page, which is closed at the end."""
    (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
    found = program()
    assert found is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        script = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        command = ["bash", "-c", script, "bash", found, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        given = {"pass_fds": (read_there, write_there), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(command, **given)  # type: ignore[call-overload]
        for end in (read_there, write_there):
            os.close(end)
        try:
            yield Tab(write_here, read_here)
        finally:
            os.close(write_here)  # it ends when nobody can ask it any more
            os.close(read_here)
            try:
                browser.wait(timeout=20)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
