from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from postbus.kernel import Kernel, OutgoingMessage
from postbus.kernel.extensions.http import outbox as outbox_module
from postbus.kernel.extensions.http.outbox import Outbox
from tests.kernel.kernel_kit import write_extension
from tests.kernel.real_kernel import LIMIT_S, real_kernel, settings_of, until


@asynccontextmanager
async def channel(
    tmp_path: Path, extensions: Path | None = None, shipped: tuple[str, ...] = ("http", "echo"), **config: Any
) -> AsyncIterator[tuple[Kernel, httpx2.AsyncClient]]:
    settings = settings_of(kernel={"shipped": list(shipped)}, extensions={"http": {"port": 0, **config}})
    async with real_kernel(tmp_path, extensions, settings) as kernel:
        url = f"http://127.0.0.1:{kernel.instance('http')._serving.port}"
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            yield kernel, client


async def answers(client: httpx2.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    got = await client.get("/messages", params={"wait_ms": 60_000, **query})
    assert got.status_code == 200, got.text
    found: list[dict[str, Any]] = got.json()["messages"]
    return found


# --- talking ----------------------------------------------------------------------------------------------------------


async def test_what_is_posted_is_answered_by_long_poll(tmp_path: Path) -> None:
    async with channel(tmp_path) as (_, client):
        waiting = asyncio.create_task(answers(client))
        said = await client.post("/messages", json={"text": "hi", "user_id": "ann", "message_id": "m1"})
        assert said.status_code == 202
        assert said.json()["duplicate"] is False
        (message,) = await waiting
        assert message["text"] == "You said: hi"
        assert (message["sequence"], message["user_id"]) == (1, "ann")
        again = await client.post("/messages", json={"text": "hi", "user_id": "ann", "message_id": "m1"})
        assert again.json() == {"id": said.json()["id"], "duplicate": True}
        none = await client.get("/messages", params={"after": 1})
        assert none.json() == {"messages": [], "next": 1}


async def test_answers_are_for_their_session_and_stay_over_a_restart(tmp_path: Path) -> None:
    async with channel(tmp_path) as (kernel, client):
        for session in ("red", "blue"):
            await client.post("/messages", json={"text": f"from {session}", "session_id": session})
            await answers(client, session_id=session)
        await kernel.router.notify_user("for everybody")
        await until(lambda: kernel.instance("http").outbox.last == 3)
    async with channel(tmp_path) as (kernel, client):
        red = await answers(client, session_id="red")
        assert [row["text"] for row in red] == ["You said: from red", "for everybody"]
        everything = await answers(client)
        assert [row["sequence"] for row in everything] == [1, 2, 3]
        assert [row["text"] for row in await answers(client, after=1, limit=1)] == ["You said: from blue"]
        await client.post("/messages", json={"text": "more", "session_id": "red"})
        assert [row["sequence"] for row in await answers(client, after=3)] == [4]


async def test_a_stream_shows_an_answer_growing_and_resumes_where_it_was(tmp_path: Path) -> None:
    async with channel(tmp_path) as (_, client):
        async with client.stream("GET", "/stream", params={"session_id": "s"}) as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == ": connected"
            await client.post("/messages", json={"text": "one", "session_id": "s"})
            assert await _next_event(lines) == ("delta", None, {"text": "You said: one"})
            event, number, data = await _next_event(lines)
            assert (event, number, data["text"]) == ("message", "1", "You said: one")
        await client.post("/messages", json={"text": "two", "session_id": "s"})
        await answers(client, after=1)
        async with client.stream("GET", "/stream", headers={"last-event-id": "1"}) as stream:
            event, number, data = await _next_event(stream.aiter_lines())
            assert (event, number, data["text"]) == ("message", "2", "You said: two")


async def test_readers_are_let_go_when_it_stops(tmp_path: Path) -> None:
    settings = settings_of(kernel={"shipped": ["http", "echo"]}, extensions={"http": {"port": 0}})
    async with httpx2.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
        async with real_kernel(tmp_path, None, settings) as kernel:
            http = kernel.instance("http")
            url = f"http://127.0.0.1:{http._serving.port}"
            stream = asyncio.create_task(client.get(f"{url}/stream"))
            poll = asyncio.create_task(client.get(f"{url}/messages", params={"wait_ms": 60_000}))
            await until(lambda: http.listeners, "the reader")
        assert (await stream).text.startswith(": connected")
        ended = await asyncio.gather(poll, return_exceptions=True)
        assert isinstance(ended[0], httpx2.Response | httpx2.TransportError)


async def _next_event(lines: Any) -> tuple[str, str | None, Any]:
    fields: dict[str, str] = {}
    async for line in lines:
        name, _, value = line.partition(": ")
        if not line and "data" in fields:
            return fields.get("event", ""), fields.get("id"), json.loads(fields["data"])
        fields[name] = value
    raise AssertionError("the stream ended")


# --- approvals --------------------------------------------------------------------------------------------------------

CAREFUL = """
    from postbus.kernel import ToolSpec

    class Careful:
        def get_tools(self):
            return [ToolSpec(name="wipe", needs_approval=True)]

        async def call_tool(self, call):
            return "wiped"

        async def invoke(self, task, context):
            return await context.call_tool("wipe", {})
"""


async def test_a_human_answers_questions_over_http(tmp_path: Path, extensions: Path) -> None:
    write_extension(extensions, "careful", CAREFUL, "agent: {integration_mode: orchestrator}\n")
    async with channel(tmp_path, extensions, ("http",)) as (kernel, client):
        await client.post("/messages", json={"text": "wipe it", "user_id": "ann"})
        await until(lambda: kernel.instance("http").questions(), "the question")
        (question,) = (await client.get("/approvals")).json()["approvals"]
        assert (question["tool_name"], question["arguments"]) == ("wipe", {})
        path = f"/approvals/{question['request_id']}"
        wrong = await client.post(path, json={"approved": True, "user_id": "bob"})
        assert wrong.status_code == 403
        taken = await client.post(path, json={"approved": True, "user_id": "ann"})
        assert taken.json() == {"status": "taken"}
        assert [row["text"] for row in await answers(client)] == ["wiped"]
        late = await client.post(path, json={"approved": False, "user_id": "ann"})
        assert late.status_code == 409
        unknown = await client.post("/approvals/nothing", json={"approved": True, "user_id": "ann"})
        assert unknown.status_code == 404


# --- refusals ---------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[str, str, bytes, dict[str, str], int, str]] = [
    ("POST", "/messages", b"{", {}, 400, "invalid"),
    ("POST", "/messages", b'{"text": ""}', {}, 400, "invalid"),
    ("POST", "/messages", b'{"text": "a", "colour": 1}', {}, 400, "invalid"),
    ("POST", "/messages", b'{"text": "\xff"}', {}, 400, "invalid"),
    ("POST", "/messages", b'{"text": "a"}', {"content-type": "text/plain"}, 400, "invalid"),
    ("POST", "/messages", b" " * 300_000, {}, 400, "invalid"),
    ("GET", "/messages?after=-1", b"", {}, 400, "invalid"),
    ("GET", "/messages?wait_ms=99999999", b"", {}, 400, "invalid"),
    ("GET", "/messages?since=1", b"", {}, 400, "invalid"),
    ("GET", "/health", b"", {"host": "evil.example"}, 403, "forbidden_host"),
    ("GET", "/health", b"", {"origin": "http://evil.example"}, 403, "forbidden_origin"),
    ("GET", "/nowhere", b"", {}, 404, "no_route"),
    ("DELETE", "/messages", b"", {}, 405, "no_route"),
]


async def test_a_bad_request_is_refused_with_a_sentence_and_changes_nothing(tmp_path: Path) -> None:
    async with channel(tmp_path) as (kernel, client):
        log = await kernel.bus.open()
        before = (await log.get_stream_stats(kernel.bus.journal)).count
        for method, path, body, headers, status, code in REFUSED:
            sent = {"content-type": "application/json", **headers}
            got = await client.request(method, path, content=body, headers=sent)
            assert (got.status_code, got.json()["error"]["code"]) == (status, code), path
            assert got.json()["error"]["message"]
        assert (await log.get_stream_stats(kernel.bus.journal)).count == before


async def test_with_a_token_nobody_gets_in_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANNEL_TOKEN", "t0ken")
    async with channel(tmp_path, token_env="CHANNEL_TOKEN") as (_, client):  # noqa: S106 - the name of a variable
        assert (await client.get("/health")).status_code == 401
        wrong = await client.get("/health", headers={"authorization": "Bearer t0ke"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "unauthenticated")
        assert (await client.get("/health", headers={"authorization": "Bearer t0ken"})).status_code == 200


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"host": "0.0.0.0"}, "a token is needed"),  # noqa: S104 - it is refused
        ({"token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN is not set"),
        ({"prot": 1}, "unknown field"),
        ({"port": 70_000}, "config is wrong"),
        ({"host": "no-such-host.invalid", "token_env": "PATH"}, "cannot listen"),
    ],
)
async def test_a_channel_that_cannot_listen_is_in_error(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    settings = settings_of(kernel={"shipped": ["http", "echo"]}, extensions={"http": {"port": 0, **config}})
    async with real_kernel(tmp_path, None, settings) as kernel:
        states = {status.id: status for status in kernel.report().extensions}
        assert states["http"].state == "error"
        assert reason in states["http"].reason
        assert states["echo"].state == "running"


# --- the outbox -------------------------------------------------------------------------------------------------------


def _message(number: int) -> OutgoingMessage:
    return OutgoingMessage(id=f"m{number}", text=f"t{number}", channel_id="http")


async def test_an_outbox_keeps_a_message_once_and_survives_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "KEPT", 3)
    path = tmp_path / "messages.jsonl"
    outbox = Outbox(path)
    for number in range(8):
        outbox.add(_message(number))
        outbox.add(_message(number))
    assert outbox.last == 8
    with path.open("ab") as file:
        file.write(b'{"sequence": 9, "id": "to')
    again = Outbox(path)
    assert again.last == 8
    again.add(_message(8))
    assert [row.sequence for row in Outbox(path).after(6, None, 10)] == [7, 8, 9]
    assert len(path.read_bytes().splitlines()) < 8


async def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "messages.jsonl"
    outbox = Outbox(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            outbox.add(_message(1))
    assert (outbox.last, outbox.after(0, None, 10)) == (0, [])
    path.write_bytes(path.read_bytes()[:-5])  # not all of it got there
    outbox.add(_message(1))
    assert [row.text for row in Outbox(path).after(0, None, 10)] == ["t1"]
