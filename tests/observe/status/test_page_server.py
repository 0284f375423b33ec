"""The server of the status page: access control, and clients that misbehave."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from farstep.errors import RunError
from farstep.observe.status.page_server import PageServer, as_json, page

DEADLINE_S = 20.0


class CountingSource:
    """A run whose data count how often they were read."""

    def __init__(self) -> None:
        self.is_live = True
        self.reads = 0

    def read(self) -> dict[str, Any]:
        self.reads += 1
        return {"live": self.is_live, "reads": self.reads, "events": [{"text": "</script>"}]}

    def metrics(self) -> str:
        return "farstep_steps_total 3\n# EOF\n"


@pytest.fixture
def source() -> CountingSource:
    return CountingSource()


@pytest.fixture
def server(source: CountingSource) -> Iterator[PageServer]:
    with closing(PageServer(source)) as server:
        yield server


def get(
    server: PageServer, path: str = "/", method: str = "GET", token: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with the server's token, unless another one is given."""
    url = urlsplit(server.url)
    query = url.query if token is None else f"token={token}"
    connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=DEADLINE_S)
    try:
        connection.putrequest(method, f"{path}?{query}", skip_host=True)
        for name, value in ({"Host": url.netloc} | {k.replace("_", "-"): v for k, v in headers.items()}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def is_plain(headers: dict[str, str]) -> bool:
    """Whether an answer is plain text that scripts of other origins cannot read."""
    shared = [name for name in headers if name.lower().startswith("access-control")]
    return headers["Content-Type"].startswith("text/plain") and not shared


def test_page_is_self_contained_and_allows_nothing_else(server: PageServer) -> None:
    status, headers, body = get(server)
    assert status == 200 and b"<!doctype html>" in body
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"


def test_page_has_the_current_data_which_cannot_end_their_script(server: PageServer) -> None:
    text = get(server)[2].decode()
    (embedded,) = re.findall(r'<script [^>]*id="data">(.*?)</script>', text)
    assert json.loads(embedded) == {"live": True, "reads": 1, "events": [{"text": "</script>"}]}
    assert text.count("</script>") == 2


def test_data_and_metrics_are_plain_answers(server: PageServer) -> None:
    data = json.loads(get(server, "/data")[2])
    assert data == {"live": True, "reads": 1, "events": [{"text": "</script>"}]}
    assert get(server, "/metrics")[2].endswith(b"# EOF\n")


@pytest.mark.parametrize("path", ["/", "/data", "/events", "/metrics"])
def test_wrong_token_gets_nothing(server: PageServer, source: CountingSource, path: str) -> None:
    for token in ("", "x", "%C3%A9", server.url.rpartition("=")[2][:-1]):
        status, headers, body = get(server, path, token=token)
        assert status == 403 and is_plain(headers)
        assert body == b"This page needs the complete address that farstep printed, with its token.\n"
    assert source.reads == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:80"])
def test_other_host_gets_nothing(server: PageServer, source: CountingSource, host: str) -> None:
    """The name of an attacker's site may resolve to this machine (DNS rebinding)."""
    status, headers, body = get(server, "/data", Host=host)
    assert status == 421 and is_plain(headers)
    assert body == b"This page needs an address with the host 127.0.0.1 or localhost, as farstep printed it.\n"
    assert source.reads == 0


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "localhost"])
def test_page_works_through_a_forwarded_port(server: PageServer, host: str) -> None:
    assert get(server, "/data", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_other_origin_gets_nothing(server: PageServer, source: CountingSource, headers: dict[str, str]) -> None:
    assert get(server, "/data", **headers)[::2] == (403, b"")
    assert source.reads == 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_server_is_read_only(server: PageServer, source: CountingSource, method: str) -> None:
    status, headers, body = get(server, "/data", method)
    assert status == 501 and is_plain(headers)
    assert body == b"Server does not support this operation.\n"
    assert source.reads == 0


def test_server_listens_only_on_the_loopback_address(server: PageServer) -> None:
    """A server that listened on all interfaces would accept every address of this machine."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", urlsplit(server.url).port or 0), timeout=DEADLINE_S)


def test_unknown_paths_are_not_found(server: PageServer) -> None:
    for path in ("/favicon.ico", "/../page.py", "/data/", "//evil.example/data"):
        assert get(server, path)[0] == 404


def read_events(server: PageServer, count: int) -> list[dict[str, Any]]:
    url = urlsplit(server.url)
    with socket.create_connection(("127.0.0.1", url.port or 0), timeout=DEADLINE_S) as client:
        client.sendall(f"GET /events?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        with client.makefile("rb") as stream:
            found: list[dict[str, Any]] = []
            for line in stream:
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
            return found


@pytest.mark.slow
def test_events_follow_the_run_and_end_with_it(server: PageServer, source: CountingSource) -> None:
    first, second = read_events(server, 2)
    assert second["reads"] > first["reads"]
    source.is_live = False
    *_, last, end = read_events(server, 100)  # the server ends the stream
    assert not last["live"] and end == {}


def test_events_of_the_run_are_sent_only_when_they_change(server: PageServer) -> None:
    url = urlsplit(server.url)
    with socket.create_connection(("127.0.0.1", url.port or 0), timeout=DEADLINE_S) as client:
        client.sendall(f"GET /events?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        received = b""
        while received.count(b"data: {") < 3:
            received += client.recv(65536)
    assert received.count(b"event: happened") == 1


def test_failed_reading_is_logged_and_harms_no_other_request(
    server: PageServer, source: CountingSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(source, "read", lambda: 1 / 0)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            get(server, "/data")
    assert "could not answer a request" in caplog.text
    assert get(server, "/data")[0] == 200


def test_fork_closes_its_copy_without_waiting(server: PageServer) -> None:
    child = os.fork()
    if not child:
        server.close()
        os._exit(0)
    deadline = time.monotonic() + DEADLINE_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits")
        time.sleep(0.01)
    assert get(server, "/data")[0] == 200


@pytest.mark.slow
def test_many_clients_cost_one_reading_per_interval(server: PageServer, source: CountingSource) -> None:
    began = time.monotonic()
    threads = [threading.Thread(target=read_events, args=(server, 2)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert source.reads <= 2 + (time.monotonic() - began)


def connect(server: PageServer, path: str = "") -> socket.socket:
    """Connect a client and, if a path is given, request it. The client buffers few bytes."""
    url = urlsplit(server.url)
    client = socket.socket()
    client.settimeout(DEADLINE_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", url.port or 0))
    if path:
        client.sendall(f"GET {path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
    return client


def wait_until_admitted(server: PageServer) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (status := get(server, "/metrics")[0]) != 200:
        assert status == 503 and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b"GET /"])
def test_incomplete_requests_do_not_block_other_clients(source: CountingSource, sent: bytes) -> None:
    with closing(PageServer(source, max_clients=3, request_timeout_s=10 * DEADLINE_S)) as server:
        slow = [connect(server) for _ in range(3)]
        try:
            for client in slow:
                client.sendall(sent)
            assert get(server, "/data")[0] == 200
            assert slow[0].recv(1) == b""  # the oldest has made room
        finally:
            for client in slow:
                client.close()


def test_request_that_comes_byte_by_byte_has_a_deadline(source: CountingSource) -> None:
    deadline = time.monotonic() + DEADLINE_S
    with closing(PageServer(source, request_timeout_s=0.5)) as server, connect(server) as client:
        client.settimeout(0.05)
        while True:
            assert time.monotonic() < deadline, "still connected"
            try:
                client.sendall(b"x")
                if not client.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


@pytest.mark.slow
def test_client_that_never_reads_is_disconnected(source: CountingSource, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (1 << 25)  # more than the buffers of the sockets hold
    monkeypatch.setattr(source, "read", lambda: {"live": True, "text": text})
    with (
        closing(PageServer(source, max_clients=1, answer_timeout_s=0.5)) as server,
        connect(server, "/events") as client,
    ):
        assert client.recv(1) == b"H"  # it has the only place
        wait_until_admitted(server)
        received = 0
        try:
            while part := client.recv(1 << 20):
                received += len(part)
        except ConnectionError:
            pass
        assert received < len(text)


def test_slow_reader_delays_no_other_client(source: CountingSource, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (1 << 25)
    monkeypatch.setattr(source, "read", lambda: {"live": True, "text": text})
    with closing(PageServer(source, answer_timeout_s=10 * DEADLINE_S)) as server, connect(server, "/events") as client:
        assert client.recv(1) == b"H"
        assert b"data" in get(server, "/")[2]
        assert get(server, "/data")[0] == 200


@pytest.mark.slow
def test_clients_beyond_the_limit_are_refused(source: CountingSource) -> None:
    with closing(PageServer(source, max_clients=2)) as server:
        readers = [connect(server, "/events") for _ in range(2)]
        try:
            for client in readers:
                assert client.recv(1) == b"H"
            status, headers, body = get(server, "/data")
            assert status == 503 and is_plain(headers)
            assert body.startswith(b"2 clients are connected") and b"Close other windows" in body
        finally:
            for client in readers:
                client.close()
        wait_until_admitted(server)


def test_request_without_an_end_is_refused(source: CountingSource) -> None:
    with closing(PageServer(source, request_timeout_s=10 * DEADLINE_S)) as server, connect(server) as client:
        client.sendall(b"x" * ((1 << 16) + 1))  # all of it is read, so the answer is not lost
        assert client.recv(12) == b"HTTP/1.1 431"
    assert source.reads == 0


def test_port_that_is_taken_is_named(server: PageServer, source: CountingSource) -> None:
    port = urlsplit(server.url).port or 0
    with pytest.raises(RunError, match=f"port {port}"):
        PageServer(source, port)


def test_embedded_data_cannot_end_their_script() -> None:
    text = page(as_json({"text": "</script><b>"}))
    assert "</script><b>" not in text and "\\u003c/script>\\u003cb>" in text


def test_close_may_be_called_twice_and_disconnects(source: CountingSource) -> None:
    server, deadline = PageServer(source, request_timeout_s=10 * DEADLINE_S), time.monotonic() + DEADLINE_S
    with connect(server) as silent:
        reader = threading.Thread(target=read_events, args=(server, 100))
        reader.start()
        while not source.reads:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.close()
        server.close()
        assert silent.recv(1) == b""
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
