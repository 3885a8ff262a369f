"""HTTP to addresses that users gave: what may be reached, and that a name is still who it says it is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.model import Invalid, LimitExceeded, Unreachable
from postbus.outside import check_url, request
from postbus.outside import web as web_module
from postbus.outside.web import Answer, is_public, rate_limit_s, retry_after_s
from tests.sources.conftest import Web

NOW_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.0.8", False),
        ("0.0.0.0", False),  # noqa: S104 - judged, not bound
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:a00:1::", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("url", ["gopher://x/", "//x", "http:///x", "http://a b/", "http://u@x/", "javascript:1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        check_url(url)


def test_an_endless_address_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        check_url("http://example.com/" + "x" * 3000)


async def test_the_name_is_sent_along_although_the_address_is_called(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(web.url.rsplit(":", 1)[1])

    async def resolve(_: Any, host: str, *_args: Any, **_more: Any) -> list[Any]:
        assert host == "feed.example"
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    web.answer = lambda _: (200, {}, b"hi")
    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answer = await request("GET", f"http://feed.example:{port}/a?b=c", allow_private=True)
    assert answer.body == b"hi"
    assert (web.calls[0].headers["host"], web.calls[0].path) == (f"feed.example:{port}", "/a?b=c")


async def test_a_slow_or_endless_answer_is_given_up(web: Web) -> None:
    stop = threading.Event()

    def slow(_: Any) -> tuple[int, dict[str, str], bytes]:
        stop.wait(10)
        return 200, {}, b""

    web.answer = slow
    with pytest.raises(Unreachable, match=r"within 0\.3 s"):
        await request("GET", web.url, allow_private=True, timeout_s=0.3)
    stop.set()
    web.answer = lambda _: (200, {}, b"x" * 2000)
    with pytest.raises(Unreachable, match="larger than 1000"):
        await request("GET", web.url, allow_private=True, bytes_max=1000)


@pytest.mark.parametrize("sent", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"])
async def test_an_answer_that_is_none_is_said_to_be_so(sent: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unreachable):
        await request("GET", f"http://127.0.0.1:{port}/", allow_private=True)
    server.close()
    await server.wait_closed()


async def test_a_refused_connection_is_said_to_be_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="cannot be reached"):
        await request("GET", f"http://127.0.0.1:{port}/", allow_private=True)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A TLS server with a certificate for feed.example; gives its port and the certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=feed.example",
         "-addext", "subjectAltName=DNS:feed.example"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listening.accept()
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                    secure.recv(65_536)
                    secure.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")

    thread = threading.Thread(target=serve)
    thread.start()
    yield listening.getsockname()[1], certificate
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


@pytest.mark.parametrize(("name", "good"), [("feed.example", True), ("other.example", False)])
async def test_a_certificate_must_be_for_the_name_that_was_given(
    certified: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, name: str, good: bool
) -> None:
    port, certificate = certified

    async def resolve(*_: Any, **_more: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(web_module, "_trusted", lambda: ssl.create_default_context(cafile=str(certificate)))
    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)
    asked = request("GET", f"https://{name}:{port}/", allow_private=True)
    if good:
        assert (await asked).body == b"ok"
    else:
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await asked


# --- what an answer asks for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("999999999999", 86_400.0),
        ("Thu, 01 Jan 2026 00:01:00 GMT", 60.0),
        ("Thu, 01 Jan 2015 00:01:00 GMT", 0.0),
        ("soon", None),
        ("", None),
        ("-5", None),
    ],
)
def test_retry_after_is_read_in_both_forms(text: str, wanted: float | None) -> None:
    assert retry_after_s(Answer(503, {"retry-after": text}, b""), NOW_US) == wanted


@pytest.mark.parametrize(
    ("status", "headers", "body", "wanted"),
    [
        (200, {"x-ratelimit-remaining": "0"}, b"", None),
        (403, {}, b"forbidden", None),
        (403, {"x-ratelimit-remaining": "12"}, b"", None),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1767225700"}, b"", 100.0),
        (403, {"retry-after": "9"}, b"", 9.0),
        (403, {}, b"You have exceeded a secondary rate limit", 60.0),
        (429, {}, b"", 60.0),
        (429, {"retry-after": "x"}, b"", 60.0),
    ],
)
def test_a_rate_limit_is_told_from_a_refusal(
    status: int, headers: dict[str, str], body: bytes, wanted: float | None
) -> None:
    assert rate_limit_s(Answer(status, headers, body), NOW_US) == wanted
