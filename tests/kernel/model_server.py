"""A server that speaks the chat completions API on a real socket, and says what the test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT_S = 60


@dataclass
class Reply:
    """One answer: a text in pieces, tools to call, or an error; ``cut``: the stream ends without an end.

    With a ``gate`` it stops after ``gate_after`` pieces until the test opens it.
    """

    pieces: Sequence[str] = ()
    calls: Sequence[dict[str, Any]] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": {"message": "not now"}}'
    cut: bool = False
    raw: bytes | None = None
    gate: threading.Event | None = None
    gate_after: int = 0


def call(name: str, arguments: dict[str, Any] | str, call_id: str = "c1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def last_said(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


class ModelServer:
    """Takes its replies from a list, then from ``fallback``; keeps what it was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.fallback: Callable[[dict[str, Any]], Reply] = lambda body: Reply([f"model: {last_said(body)}"])
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.came = threading.Semaphore(0)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/chat/completions"
                outer.asked.append(body)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                reply = outer.replies.pop(0) if outer.replies else outer.fallback(body)
                outer.came.release()
                if reply.gate is not None and not reply.gate_after:
                    assert reply.gate.wait(LIMIT_S)
                try:
                    outer._answer(self, body, reply)
                except OSError:  # whoever asked was killed
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], reply: Reply) -> None:
        streamed = bool(body.get("stream")) and reply.status == 200
        handler.send_response(reply.status)
        handler.send_header("content-type", "text/event-stream" if streamed else "application/json")
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.end_headers()  # HTTP/1.0: the end of the connection is the end of the body
        if not streamed:
            handler.wfile.write(reply.raw or (reply.body if reply.status != 200 else _whole(reply)))
            return
        for block in [reply.raw] if reply.raw is not None else _stream(reply):
            handler.wfile.write(block)
            handler.wfile.flush()

    @contextmanager
    def running(self) -> Iterator[ModelServer]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(LIMIT_S)


def _whole(reply: Reply) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(reply.pieces) or None}
    if reply.calls:
        message["tool_calls"] = list(reply.calls)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.calls else "stop"}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 7}}).encode()


def _stream(reply: Reply) -> Iterator[bytes]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"

    yield b": hello\n\n" + chunk({"role": "assistant", "content": ""})
    for index, piece in enumerate(reply.pieces):
        if reply.gate is not None and index == reply.gate_after:
            assert reply.gate.wait(LIMIT_S)
        yield chunk({"content": piece})
    for index, one in enumerate(reply.calls):
        text, function = one["function"]["arguments"], one["function"]
        head = {**one, "index": index, "function": {"name": function["name"], "arguments": text[:3]}}
        yield chunk({"tool_calls": [head]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": text[3:]}}]})
    if not reply.cut:
        yield chunk({}, "tool_calls" if reply.calls else "stop")
        yield b"data: [DONE]\n\n"
