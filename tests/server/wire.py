"""Bytes on a socket, for what no proper client would send."""

from __future__ import annotations

import contextlib
import socket
import time

TIMEOUT_S = 60
SILENCE_S = 0.3


def talk(port: int, *parts: bytes, pause_s: float = 0.0, answers: int = 0) -> bytes:
    """Send the parts, and return everything that comes until the server closes, or is silent after so many answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as made:
        for part in parts:
            with contextlib.suppress(ConnectionError):
                made.sendall(part)
            if pause_s:
                time.sleep(pause_s)
        found = b""
        with contextlib.suppress(ConnectionError):
            while found.count(b"HTTP/1.1 ") < answers and (block := made.recv(65536)):
                found += block
        made.settimeout(SILENCE_S)
        return found + receive(made)


def receive(made: socket.socket) -> bytes:
    """Return what comes until the other side closes or is silent."""
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while block := made.recv(65536):
            found += block
    return found


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of the responses in a stream of bytes."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return a request as bytes; underscores in header names stand for dashes, None leaves one out."""
    given = {"host": "127.0.0.1"} | (
        {"content-type": "application/json", "content-length": str(len(body))} if body else {}
    )
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in (given | headers).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
