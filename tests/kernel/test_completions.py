from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from postbus.clock import SystemClock
from postbus.kernel.completions import Completions
from postbus.model import Invalid, Refused, Unreachable
from tests.kernel.model_server import ModelServer, Reply, call


class Hasty(SystemClock):
    """Sleeps for no time and remembers how long it should have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer().running() as running:
        yield running


class Asker:
    def __init__(self, server: ModelServer, **options: Any) -> None:
        self.clock = Hasty()
        self.pieces: list[str] = []
        self.api = Completions(server.base_url, self.clock, **options)

    async def ask(self, *, stream: bool = True, key: str | None = None) -> Any:
        async def take(text: str) -> None:
            self.pieces.append(text)

        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        try:
            return await self.api.ask(body, key, take)
        finally:
            await self.api.close()


async def test_a_streamed_answer_comes_in_pieces_and_whole(server: ModelServer) -> None:
    server.replies = [Reply(["Hel", "lo\u2028", "wörld \x85!"])]
    asker = Asker(server)
    answer = await asker.ask(key="k-1")
    assert answer.text == "Hello\u2028wörld \x85!"
    assert asker.pieces == ["Hel", "lo\u2028", "wörld \x85!"]
    assert (answer.finish, answer.calls) == ("stop", ())
    assert server.headers[0]["authorization"] == "Bearer k-1"


async def test_an_answer_that_is_not_streamed_is_taken_whole(server: ModelServer) -> None:
    server.replies = [Reply(["all at once"])]
    asker = Asker(server)
    answer = await asker.ask(stream=False)
    assert (answer.text, asker.pieces, answer.usage) == ("all at once", ["all at once"], {"total_tokens": 7})
    assert "authorization" not in server.headers[0]


async def test_tool_calls_are_put_together_from_their_pieces(server: ModelServer) -> None:
    server.replies = [Reply(calls=[call("add", {"a": 1, "b": 22}), call("say", {"text": "x"}, "c2")])]
    answer = await Asker(server).ask()
    assert [(one.id, one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("c1", "add", {"a": 1, "b": 22}),
        ("c2", "say", {"text": "x"}),
    ]


async def test_tool_calls_without_numbers_are_told_apart_by_their_ids(server: ModelServer) -> None:
    chunks = [
        {"tool_calls": [{"id": "a", "function": {"name": "one", "arguments": '{"n"'}}]},
        {"tool_calls": [{"function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "two", "arguments": {}}}]},
    ]
    lines = [f"data: {json.dumps({'choices': [{'delta': chunk}]})}\r\n\r\n" for chunk in chunks]
    server.replies = [Reply(raw="".join([*lines, "data: [DONE]\r\n\r\n"]).encode())]
    answer = await Asker(server).ask()
    assert [(one.id, one.name, one.arguments) for one in answer.calls] == [("a", "one", '{"n": 1}'), ("b", "two", "{}")]


async def test_it_comes_back_as_late_as_the_server_asks(server: ModelServer) -> None:
    server.replies = [
        Reply(status=429, headers={"retry-after": "7"}),
        Reply(status=503, headers={"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}),
        Reply(status=500),
        Reply(["done"]),
    ]
    asker = Asker(server)
    assert (await asker.ask()).text == "done"
    assert asker.clock.slept == [7.0, 0.0, 2.0]
    assert len(server.asked) == 4


async def test_a_server_may_not_ask_for_an_hour(server: ModelServer) -> None:
    server.replies = [Reply(status=429, headers={"retry-after": "3600"}), Reply(["done"])]
    asker = Asker(server)
    await asker.ask()
    assert asker.clock.slept == [60.0]


@pytest.mark.parametrize(
    "broken",
    [
        Reply(["half of"], cut=True),
        Reply(raw=b'data: {"choices": [{"del\n\n'),
        Reply(raw=b"data: 7\n\n"),
        Reply(raw=b'data: {"error": {"message": "overloaded"}}\n\n'),
        Reply(raw=b""),
    ],
    ids=["cut", "half a chunk", "no object", "error", "nothing"],
)
async def test_a_broken_stream_is_asked_for_again(server: ModelServer, broken: Reply) -> None:
    server.replies = [broken, Reply(["whole"])]
    asker = Asker(server)
    assert (await asker.ask()).text == "whole"
    assert asker.clock.slept == [0.5]


async def test_a_stream_without_its_last_line_is_whole_when_the_model_had_finished(server: ModelServer) -> None:
    choice = {"delta": {"content": "done"}, "finish_reason": "stop"}
    server.replies = [Reply(raw=f"data: {json.dumps({'choices': [choice]})}\n\n".encode())]
    assert (await Asker(server).ask()).text == "done"


async def test_in_the_end_it_gives_up_and_says_why(server: ModelServer) -> None:
    server.fallback = lambda _: Reply(status=502, body=b"<html>bad gateway</html>")
    with pytest.raises(Unreachable, match=r"HTTP 502: <html>bad gateway</html>"):
        await Asker(server, attempts=3).ask()
    assert len(server.asked) == 3


async def test_nobody_listening_is_said(server: ModelServer) -> None:
    with ModelServer().running() as gone:
        url = gone.base_url
    asker = Asker(server, attempts=2)
    asker.api._url = Completions(url, asker.clock)._url
    with pytest.raises(Unreachable, match="does not answer"):
        await asker.ask()


@pytest.mark.parametrize(("status", "hint"), [(401, "API key"), (404, "name of the model"), (400, None)])
async def test_a_refusal_is_not_repeated(server: ModelServer, status: int, hint: str | None) -> None:
    server.replies = [Reply(status=status, body=b'{"error": {"message": "no such thing"}}')]
    with pytest.raises(Refused, match=f"HTTP {status}: no such thing") as refused:
        await Asker(server).ask()
    assert len(server.asked) == 1
    assert hint is None or hint in str(refused.value.hint)


async def test_an_endless_answer_is_refused(server: ModelServer) -> None:
    server.replies = [Reply(raw=b"data: " + b"x" * (2 << 20))]
    with pytest.raises(Refused, match="too long"):
        await Asker(server).ask()


@pytest.mark.parametrize("url", ["", "models.example/v1", "ftp://models.example", "http://"])
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(Invalid, match="no base URL"):
        Completions(url, SystemClock())
