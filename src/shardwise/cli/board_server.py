"""Answers a browser on this machine, and nobody else: on 127.0.0.1, to who knows the token, one small request a
connection. What a request says is compared, and never a path of a file."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from socketserver import TCPServer
from typing import Any

from shardwise.errors import first_line

HOST = "127.0.0.1"
MOST_HEAD_BYTES = 8192
HEAD_S, ANSWER_S = 5.0, 10.0
"""In how many seconds a request must have come, and its answer have been taken."""
MOST_CONNECTIONS = 32
"""So many are answered at once. Who comes then waits until the one that has been slowest to ask is cut off."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class BoardAnswer:
    """A page, and after how many seconds the browser asks for it again; 0: never."""

    html: bytes
    again_s: int = 0


class BoardServer(ThreadingHTTPServer):
    """``answer`` gives the page of a path below the token, or None where there is none."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, answer: Callable[[str], BoardAnswer | None], port: int) -> None:
        self.answer = answer
        self.token = secrets.token_urlsafe(32)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._asking: dict[socket.socket, None] = {}  # which have not sent all of their request, the oldest first
        self._said = ""
        super().__init__((HOST, port), BoardRequest)

    def server_bind(self) -> None:
        """Bind, without asking a name server what 127.0.0.1 is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def knows(self, host: str) -> bool:
        """Whether a request's ``Host`` is this machine: another name that leads here is another site's."""
        port = "" if self.server_port == 80 else f":{self.server_port}"
        return host.lower() in (f"{HOST}{port}", f"localhost{port}", f"{HOST}:{self.server_port}")

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._room.acquire(timeout=0.05):
            with suppress(StopIteration, OSError, RuntimeError):
                slowest = next(iter(self._asking))
                self.asked(slowest)
                slowest.shutdown(socket.SHUT_RDWR)
        self._asking[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self.asked(request)
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.asked(request)
            self._room.release()

    def asked(self, request: socket.socket) -> None:
        """Note that this connection has sent all of its request."""
        self._asking.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell a defect of ours, once; who goes away while he is answered is none."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Print a line about ``error``, unless it was the last."""
        said = f"warning[REP001]: a page cannot be drawn: {type(error).__name__}: {first_line(error)}"
        if said != self._said:
            self._said = said
            print(said, file=sys.stderr, flush=True)


class BoardRequest(BaseHTTPRequestHandler):
    """One request. A refusal says its number and no more."""

    server: BoardServer
    timeout = ANSWER_S

    def setup(self) -> None:
        super().setup()
        self.rfile = BytesIO(_head(self.connection))
        self.server.asked(self.connection)

    def do_GET(self) -> None:
        hosts, (token, below, rest) = self.headers.get_all("Host", []), self.path.lstrip("/").partition("/")
        if len(hosts) != 1 or not self.server.knows(hosts[0]):
            return self.send_error(HTTPStatus.FORBIDDEN)
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self.send_error(HTTPStatus.FORBIDDEN)
        try:
            found = self.server.answer(rest) if below else None
        except Exception as error:
            self.server.tell(error)
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
        if found is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        more = {"Refresh": str(found.again_s)} if found.again_s else {}
        return self._send(HTTPStatus.OK, found.html, "text/html; charset=utf-8", more)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse. What Python has to say of a request repeats parts of it."""
        self.request_version = "HTTP/1.0"  # of what could not be read it is 0.9, whose answers have no number
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(status, f"{status} {status.phrase}\n".encode(), "text/plain; charset=utf-8", {})

    def _send(self, status: HTTPStatus, body: bytes, kind: str, more: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, **more, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "shardwise"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what strangers ask for is not the user's business, and addresses have the token."""


def _head(connection: socket.socket) -> bytes:
    """The head of a request; nothing of one that is too large, or takes too long."""
    until, found = time.monotonic() + HEAD_S, b""
    try:
        while b"\r\n\r\n" not in found and b"\n\n" not in found:
            connection.settimeout(max(0.001, until - time.monotonic()))
            part = connection.recv(MOST_HEAD_BYTES)
            found += part
            if not part or len(found) > MOST_HEAD_BYTES:
                return b""
        connection.settimeout(ANSWER_S)
    except OSError:
        return b""
    return found
