"""Serves the status page to browsers on this machine.

The server is read-only: it answers GET with the page, which has the current data inside, with these data (once, or as
server-sent events) and with metrics for Prometheus. It listens on the loopback interface only. Other users of the
machine and other web sites in the user's browser can reach that interface, too; so each request needs the token of the
URL, and a request that another site has caused is refused by its `Host`, `Origin` or `Sec-Fetch-Site` header.

A slow or idle client costs one thread and never delays the run. It has `request_timeout_s` to send its request, and
`answer_timeout_s` to read each part of the answer. At most `max_clients` that have the token are answered at a time.
Clients that have not sent a request yet take none of these places; if there are more than `max_clients`, the oldest is
disconnected. The page's data are rendered once per interval for all clients, and only while there is a client. Each
request of `/metrics` reads the counters once.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from farstep.errors import ConfigError, RunError

log = logging.getLogger("farstep")

_INTERVAL_S = 1.0
"""Seconds between two renderings of a live run."""
_MAX_REQUEST_BYTES = 1 << 16
_POLL_S = 0.05
"""Seconds after which the server notices that it was closed."""
_JOIN_S = 10.0
"""Seconds that `close` waits for the server's thread."""
_DISCONNECT_S = 0.5
"""Seconds that `close` gives clients to read the last data."""
SERVER_NAME = "farstep"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_OTHER_SITES = ("cross-site", "same-site")
_NEEDS_TOKEN = "This page needs the complete address that farstep printed, with its token.\n"
_TOO_MANY_CLIENTS = (
    "{} clients are connected, which is the limit. Close other windows with this page, then reload it.\n"
)
_NEEDS_LOCAL_NAME = "This page needs an address with the host 127.0.0.1 or localhost, as farstep printed it.\n"


class Source(Protocol):
    """What the page shows."""

    @property
    def is_live(self) -> bool:
        """Whether the data still change."""
        ...

    def read(self) -> dict[str, Any]:
        """Return the data as plain JSON values."""
        ...

    def metrics(self) -> str:
        """Return the metrics in OpenMetrics' text form."""
        ...


class PageServer:
    """Serves the page of one run until `close`.

    Args:
        source: What to show.
        port: Port to listen on; 0: a free one.
        max_clients: Number of clients with the token that are answered at a time.
        request_timeout_s: Seconds in which a client must send its whole request.
        answer_timeout_s: Seconds in which a client must read each part of the answer.

    Raises:
        RunError: The port is taken.
    """

    def __init__(
        self,
        source: Source,
        port: int = 0,
        *,
        max_clients: int = 32,
        request_timeout_s: float = 10.0,
        answer_timeout_s: float = 10.0,
    ) -> None:
        self._token = secrets.token_urlsafe(18)
        self._feed = _Feed(source)
        try:
            self._http = _Server(
                ("127.0.0.1", port),
                self._token,
                self._feed,
                source.metrics,
                max_clients=max_clients,
                request_timeout_s=request_timeout_s,
                answer_timeout_s=answer_timeout_s,
            )
        except OSError as error:
            where = f"port {port}" if port else "a free port"
            raise RunError(f"the status page cannot listen on {where}: {error.strerror}. Choose another.") from error
        self._pid = os.getpid()
        serve = partial(self._http.serve_forever, poll_interval=_POLL_S)
        self._thread = threading.Thread(target=serve, name="farstep-status", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/?token={self._token}"

    def close(self) -> None:
        """Stop the server and disconnect its clients. May be called more than once, and from any thread."""
        if os.getpid() != self._pid:  # a fork: the threads are in the other process
            self._http.server_close()
            return
        self._feed.close()
        if threading.current_thread() is self._thread:  # a garbage collection there: it would wait for itself
            threading.Thread(target=self._http.shutdown, daemon=True).start()
        else:
            self._http.shutdown()
            self._thread.join(_JOIN_S)
        self._http.server_close()
        self._http.disconnect_all(_DISCONNECT_S)


class _Feed:
    """Renders the data once per interval for all clients that wait for it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._json = (b"", b"")
        self._rendered_s = -math.inf
        self._showed_live = True
        self._closed = threading.Event()

    @property
    def is_live(self) -> bool:
        return self._source.is_live and not self._closed.is_set()

    def read(self) -> tuple[bytes, bytes]:
        """Return the data without events, and the events, as JSON; at most one interval old."""
        with self._lock:
            is_old = time.monotonic() - self._rendered_s >= _INTERVAL_S
            if is_old or self._showed_live != self._source.is_live:
                self._showed_live = self._source.is_live
                data = self._source.read()
                events = data.pop("events", [])
                self._json = as_json(data), as_json(events)
                self._rendered_s = time.monotonic()
            return self._json

    def read_all(self) -> bytes:
        """Return the data with the events, as JSON."""
        data, events = self.read()
        return b'{"events":' + events + b"," + data[1:]

    def wait(self) -> None:
        """Wait for the next interval, or for `close`."""
        self._closed.wait(_INTERVAL_S)

    def close(self) -> None:
        self._closed.set()


def as_json(value: object) -> bytes:
    """Return data of a `Source` as JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        feed: _Feed,
        metrics: Callable[[], str],
        *,
        max_clients: int,
        request_timeout_s: float,
        answer_timeout_s: float,
    ) -> None:
        self.token, self.feed, self.metrics = token, feed, metrics
        self.request_timeout_s, self.answer_timeout_s = request_timeout_s, answer_timeout_s
        self.max_clients = max_clients
        self._waiting: dict[socket.socket, None] = {}
        """Clients that have not sent a valid request yet, oldest first."""
        self._clients: set[socket.socket] = set()
        """Clients that have sent a valid request."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._waiting) >= self.max_clients:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _disconnect(oldest)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def admit(self, request: socket.socket) -> bool:
        """Give a client that has sent a valid request one of `max_clients` places; return whether one was free."""
        with self._lock:
            if len(self._clients) >= self.max_clients:
                return False
            self._waiting.pop(request, None)
            self._clients.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._waiting.pop(request, None)
            self._clients.discard(request)
        super().shutdown_request(request)

    def disconnect_all(self, wait_s: float) -> None:
        """Close all connections: of clients that are being answered at the latest after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while self._clients and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for client in (*self._waiting, *self._clients):
                _disconnect(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a request; a connection that broke concerns only its client."""
        if not isinstance(sys.exception(), OSError):
            log.exception("the status page could not answer a request")


def _disconnect(client: socket.socket) -> None:
    """End the connection; the thread that serves it then closes the socket."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = SERVER_NAME, ""
    error_message_format, error_content_type = "%(explain)s.\n", "text/plain; charset=utf-8"
    """Of errors that the base class answers, such as another method than GET."""

    def handle(self) -> None:
        """Receive the request before its deadline, then answer it. Every answer ends the connection."""
        deadline, received = time.monotonic() + self.server.request_timeout_s, b""
        while b"\r\n\r\n" not in received and len(received) <= _MAX_REQUEST_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self.connection.settimeout(left_s)
            part = self.connection.recv(4096)
            if not part:
                return
            received += part
        self.connection.settimeout(self.server.answer_timeout_s)
        if b"\r\n\r\n" not in received:
            self.requestline = self.request_version = self.command = ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self.rfile.close()
        self.rfile = io.BytesIO(received)
        self.handle_one_request()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answers = {
            "/": self._page,
            "/data": self._data,
            "/events": self._events,
            "/metrics": self._metrics,
        }
        if (refusal := self._refused(parse_qs(url.query).get("token", [""])[0])) is not None:
            status, text = refusal
            self._answer(status, text.encode(), "text/plain")
        elif not self.server.admit(self.connection):
            text = _TOO_MANY_CLIENTS.format(self.server.max_clients)
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode(), "text/plain")
        elif (answer := answers.get(url.path)) is None:
            self._answer(HTTPStatus.NOT_FOUND, b"", "text/plain")
        else:
            answer()

    def _refused(self, token: str) -> tuple[HTTPStatus, str] | None:
        """Return status and text of a refusal; None if the request has the token and no other site has caused it."""
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _LOCAL_NAMES and host not in _LOCAL_NAMES:
            return HTTPStatus.MISDIRECTED_REQUEST, _NEEDS_LOCAL_NAME  # a name of another site that resolves here
        origin = self.headers.get("Origin")
        if (origin is not None and origin != f"http://{host}") or (
            self.headers.get("Sec-Fetch-Site") in _OTHER_SITES and self.headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            return HTTPStatus.FORBIDDEN, ""
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN, _NEEDS_TOKEN
        return None

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(12)
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        body = page(self.server.feed.read_all(), nonce).encode()
        self._answer(HTTPStatus.OK, body, "text/html", {"Content-Security-Policy": policy})

    def _data(self) -> None:
        self._answer(HTTPStatus.OK, self.server.feed.read_all(), "application/json")

    def _metrics(self) -> None:
        try:
            text = self.server.metrics()
        except ConfigError as error:  # an optional package is missing
            self._answer(HTTPStatus.NOT_IMPLEMENTED, f"{error}\n".encode(), "text/plain")
            return
        self._answer(HTTPStatus.OK, text.encode(), "application/openmetrics-text; version=1.0.0")

    def _events(self) -> None:
        """Send the data once per interval, and the run's events when they have changed; end after the last change."""
        feed, sent = self.server.feed, b""
        self._head(HTTPStatus.OK, "text/event-stream", {})
        while True:
            was_live = feed.is_live
            data, events = feed.read()
            if events != sent:
                self.wfile.write(b"event: happened\ndata: " + events + b"\n\n")
                sent = events
            self.wfile.write(b"data: " + data + b"\n\n")
            if not was_live:
                self.wfile.write(b"event: end\ndata: {}\n\n")
                return
            feed.wait()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self._head(status, kind, {"Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        charset = "" if "charset" in kind else "; charset=utf-8"
        common = {
            "Content-Type": kind + charset,
            "Cache-Control": "no-store",
            "Connection": "close",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing: the terminal belongs to the run."""


def page(data: bytes, nonce: str = "") -> str:
    """Return the page with its style, script and data inside. If the run is live, the page then follows its server.

    Args:
        data: The data to show first, as JSON (see `as_json`).
        nonce: Value that the content security policy allows for style and script.

    Returns:
        The HTML text.
    """
    files = resources.files("farstep.observe.status")
    text = (files / "page.html").read_text(encoding="utf-8")
    parts = {
        "NONCE": nonce,
        "/*STYLE*/": (files / "page.css").read_text(encoding="utf-8"),
        "/*SCRIPT*/": "".join((files / name).read_text(encoding="utf-8") for name in ("cluster.js", "page.js")),
        "/*DATA*/": data.decode().replace("<", "\\u003c"),  # a text may have the tag that ends the script
    }
    return re.sub("|".join(map(re.escape, parts)), lambda mark: parts[mark.group()], text)
