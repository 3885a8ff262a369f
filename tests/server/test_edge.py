from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from postbus.server.edge import Edge
from postbus.server.protocol import HeadProtocol
from tests.server.conftest import RunningServer
from tests.server.wire import TIMEOUT_S, receive, request, statuses, talk

TOPIC = "agents.demo.orders"
PUBLISH = b'{"topic": "agents.demo.orders", "payload": 1}'


# --- hosts and origins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:7766", "127.0.0.1", "127.0.0.1:1", "[::1]:80", "192.168.1.7"])
def test_addresses_and_localhost_are_let_in(client: httpx2.Client, host: str) -> None:
    assert client.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:7766", "1.2.3"])
def test_a_name_that_was_made_to_point_here_is_refused(client: httpx2.Client, host: str) -> None:
    for method, path in (("GET", "/healthz"), ("POST", "/v1/bus/topics")):
        answer = client.request(method, path, headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")


@pytest.mark.parametrize("host", ["a b", "a@b", "http://a", "[::1", "a:b", "a:999999", "a" * 301])
def test_a_malformed_host_is_refused(server: RunningServer, host: str) -> None:
    assert statuses(talk(server.port, request("GET", "/healthz", host=host), answers=1)) == [400]


def test_a_missing_or_doubled_host_is_refused(server: RunningServer) -> None:
    assert statuses(talk(server.port, b"GET /healthz HTTP/1.1\r\n\r\n", answers=1)) == [400]
    doubled = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n"
    assert statuses(talk(server.port, doubled, answers=1)) == [400]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://localhost", "x"])
def test_a_page_of_another_origin_is_refused(client: httpx2.Client, origin: str) -> None:
    answer = client.post("/v1/bus/topics", json={"topic": TOPIC}, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    assert client.get(f"/v1/bus/topics/{TOPIC}").status_code == 404


def test_its_own_pages_are_let_in(server: RunningServer) -> None:
    answer = server.client.post("/v1/bus/topics", json={"topic": TOPIC}, headers={"origin": server.url})
    assert answer.status_code == 201
    assert "access-control-allow-origin" not in answer.headers


def test_names_and_origins_may_be_allowed(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    allowed = Edge(hosts=frozenset({"bus.example"}), origins=frozenset({"https://app.example"}))
    client = start_server(tmp_path / "other", allowed).client
    assert client.get("/healthz", headers={"host": "Bus.Example:80"}).status_code == 200
    assert client.get("/healthz", headers={"origin": "https://app.example"}).status_code == 200
    assert client.get("/healthz", headers={"host": "other.example"}).status_code == 403


# --- routes, types and sizes ------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods_are_refused(client: httpx2.Client) -> None:
    for path in ("/nothing", "/v1/bus", "/v1/bus/topics/", "/v1/bus/topics/a/b", "/healthz/"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    for method, path, allowed in (
        ("PUT", "/v1/bus/topics", "GET, POST"),
        ("DELETE", "/v1/bus/publish", "POST"),
        ("OPTIONS", "/v1/bus/publish", "POST"),
        ("POST", "/v1/bus/topics/a.b.c", "DELETE, GET"),
        ("HEAD", "/v1/bus/publish", "POST"),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    head = client.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_a_body_must_say_that_it_is_json(server: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = server.client.post("/v1/bus/topics", content=b'{"topic": "a.b.c"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert server.call(server.hub.log.streams()) == []


def test_json_may_name_its_charset(client: httpx2.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/bus/topics", content=b'{"topic": "a.b.c"}', headers=headers).status_code == 201


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"null", b"\xef\xbb\xbf{}", b"{} {}", b'{"topic": "a.b.c",}'])
def test_a_body_must_be_one_json_object(client: httpx2.Client, body: bytes) -> None:
    answer = client.post("/v1/bus/topics", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_a_large_body_is_refused_before_it_is_sent(server: RunningServer) -> None:
    head = request("POST", "/v1/bus/publish", content_type="application/json", content_length=str(100 << 20))
    answer = talk(server.port, head, answers=1)
    assert statuses(answer) == [413]
    assert b"connection: close" in answer


def test_an_endless_body_is_cut_off(server: RunningServer) -> None:
    """100 MB in chunks, without saying how much it will be: memory stays bounded."""
    before = memory_kib()
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as made:
        made.sendall(request("POST", "/v1/bus/publish", content_type="application/json", transfer_encoding="chunked"))
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(100 * 16):
                made.sendall(chunk)
                sent += 0x10000
        except ConnectionError:
            pass
        answer = receive(made)
    assert sent < 100 << 20
    assert statuses(answer) in ([413], [])  # the answer may be lost when the connection is reset
    assert memory_kib() - before < 64 * 1024
    assert server.client.get("/healthz").status_code == 200


def memory_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def test_a_body_may_come_in_chunks(server: RunningServer) -> None:
    server.topic(TOPIC)
    answer = server.client.post(
        "/v1/bus/publish", content=iter([PUBLISH[:10], PUBLISH[10:]]), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


def test_large_and_many_headers_are_refused(server: RunningServer) -> None:
    line = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    assert statuses(talk(server.port, line + b"x: " + b"a" * 40_000 + b"\r\n\r\n", answers=1)) == [431]
    assert statuses(talk(server.port, line, *[b"x: " + b"a" * 30_000] * 3, answers=1)) == [431]
    many = line + b"".join(b"x%d: 1\r\n" % n for n in range(200)) + b"\r\n"
    assert statuses(talk(server.port, many, answers=1)) == [431]
    assert statuses(talk(server.port, b"GET /" + b"a" * 30_000, b"b" * 30_000, answers=1)) == [431]
    assert server.client.get("/healthz").status_code == 200


# --- request smuggling ------------------------------------------------------------------------------------------------

HIDDEN = request("DELETE", f"/v1/bus/topics/{TOPIC}")
CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"


def post(*lines: bytes) -> bytes:
    head = [b"POST /v1/bus/publish HTTP/1.1", b"host: 127.0.0.1", b"content-type: application/json", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(
            post(b"content-length: %d" % (5 + len(HIDDEN)), b"transfer-encoding: chunked") + b"0\r\n\r\n" + HIDDEN,
            id="CL.TE",
        ),
        pytest.param(
            post(b"transfer-encoding: chunked", b"content-length: 4")
            + b"%x\r\n" % len(HIDDEN)
            + HIDDEN
            + b"\r\n0\r\n\r\n",
            id="TE.CL",
        ),
        pytest.param(
            post(b"transfer-encoding: xchunked", b"content-length: 5") + b"0\r\n\r\n" + HIDDEN,
            id="TE.TE obscured",
        ),
        pytest.param(
            post(b"transfer-encoding: chunked", b"transfer-encoding: identity") + b"0\r\n\r\n" + HIDDEN,
            id="TE.TE twice",
        ),
        pytest.param(
            post(b"content-length: 0", b"content-length: %d" % len(HIDDEN)) + HIDDEN,
            id="CL.CL",
        ),
        pytest.param(
            post(b"content-length : %d" % len(HIDDEN)) + HIDDEN,
            id="space before the colon",
        ),
        pytest.param(
            post(b"content-length: +0") + HIDDEN,
            id="signed length",
        ),
        pytest.param(
            post(b"transfer-encoding: chunked") + b"0x0\r\n\r\n" + HIDDEN,
            id="chunk size in another base",
        ),
        pytest.param(
            post(b"transfer-encoding:\x0bchunked", b"content-length: 0") + HIDDEN,
            id="vertical tab",
        ),
        pytest.param(
            post(b"x: y\r\n content-length: 3") + HIDDEN,
            id="folded header",
        ),
        pytest.param(
            post(b"transfer-encoding: chunked") + b"fffffffffffffffff\r\n" + HIDDEN,
            id="chunk size overflow",
        ),
    ],
)
def test_no_request_hides_in_the_body_of_another(server: RunningServer, sent: bytes) -> None:
    """The hidden request would remove the topic; whatever the server makes of the outer one, it must not."""
    server.topic(TOPIC)
    answer = talk(server.port, sent)
    found = statuses(answer)
    assert found == [] or found[0] >= 400
    assert 204 not in found
    assert server.client.get(f"/v1/bus/topics/{TOPIC}").status_code == 200


def test_the_hidden_request_would_work(server: RunningServer) -> None:
    server.topic(TOPIC)
    assert statuses(talk(server.port, HIDDEN, answers=1)) == [204]


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 99]
)
def test_what_is_not_http_is_refused(server: RunningServer, sent: bytes) -> None:
    assert statuses(talk(server.port, sent, answers=1)) == [400]
    assert server.client.get("/healthz").status_code == 200


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    server.topic(TOPIC)
    one = request("POST", "/v1/bus/publish", PUBLISH)
    answer = talk(server.port, one * 5 + request("GET", "/healthz"), answers=6)
    assert statuses(answer) == [200] * 6
    assert [b'"offset":%d' % number in part for number, part in enumerate(answer.split(b"HTTP/1.1 ")[1:6])] == [
        True
    ] * 5


# --- slow clients -----------------------------------------------------------------------------------------------------


def drip(port: int, sent: bytes, *, first: bytes = b"") -> bytes:
    """Send byte by byte until the server has had enough; return what it said."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as made:
        made.sendall(first)
        stop = threading.Event()

        def send() -> None:
            for byte in sent:
                try:
                    made.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.02):
                    return

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return receive(made)
        finally:
            stop.set()
            thread.join()


def test_a_head_that_is_dripped_is_cut_off(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadProtocol, "head_s_max", 0.3)
    endless = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 1000
    assert statuses(drip(server.port, endless)) == [408]
    # Also on a connection that has been used before.
    assert statuses(drip(server.port, endless, first=request("GET", "/healthz"))) == [200, 408]


def test_a_connection_that_says_nothing_is_closed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadProtocol, "head_s_max", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as made:
        assert made.recv(1) == b""


def test_what_is_left_of_an_answered_request_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that takes no body answers at once; the body that still comes is cut off without a second answer."""
    monkeypatch.setattr(HeadProtocol, "head_s_max", 0.3)
    head = request("GET", "/healthz", content_length="100000000")
    assert statuses(drip(server.port, b" " * 1000, first=head)) == [200]
    assert statuses(talk(server.port, head, *[b" " * 0x10000] * 10, pause_s=0.01)) in ([200], [])


def test_a_body_that_is_dripped_is_cut_off(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadProtocol, "body_s_max", 0.3)
    head = request("POST", "/v1/bus/publish", content_type="application/json", content_length="1000")
    assert statuses(drip(server.port, b" " * 1000, first=head)) == [408]


def test_many_slow_clients_do_not_keep_others_out(server: RunningServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) for _ in range(200)]
    try:
        for made in slow:
            made.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127")
        assert server.client.get("/healthz").status_code == 200
    finally:
        for made in slow:
            made.close()


def test_a_client_that_goes_away_is_no_trouble(server: RunningServer) -> None:
    server.topic(TOPIC)
    for cut in (10, 100, 150):
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as made:
            made.sendall(request("POST", "/v1/bus/publish", PUBLISH)[:cut])
    assert server.client.get("/healthz").status_code == 200
    assert server.call(server.hub.log.fetch(TOPIC, 0, 0)) == []


def test_an_endless_head_behind_a_running_request_is_cut_off(server: RunningServer) -> None:
    before = memory_kib()
    head = request("POST", "/v1/bus/publish", PUBLISH)
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as made:
        try:
            made.sendall(head * 3 + b"GET /healthz HTTP/1.1\r\nx: ")
            for _ in range(64 * 16):
                made.sendall(b"y" * 0x10000)
                sent += 0x10000
        except ConnectionError:
            pass
    assert sent < 64 << 20
    assert memory_kib() - before < 32 * 1024


def test_what_nobody_expected_tells_the_caller_nothing(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    server.topic(TOPIC)

    async def fail(_stream: str, _payload: bytes) -> None:
        raise RuntimeError("SELECT * FROM /some/where")

    server.hub.payload_checks.append(fail)
    answer = server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "unexpected"
    assert "SELECT" not in answer.text
    assert "Traceback" not in answer.text
    assert "SELECT * FROM /some/where" in caplog.text
    server.serving.app.undeclared.clear()
    server.hub.payload_checks.remove(fail)
    assert server.client.post("/v1/bus/publish", json={"topic": TOPIC, "payload": 1}).json()["offset"] == 0
