from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus.kernel import ExtensionState, PostbusError, Settings, Unreachable, inspect_extensions
from postbus.model import SchemaMismatch
from tests.kernel.kernel_kit import write_extension
from tests.kernel.real_kernel import Chat, real_kernel, settings_of, until

DESK = str(Path(__file__).with_name("mcp_desk.py"))
SERVER = {"command": sys.executable, "args": [DESK]}
CHANNEL = """
    class Channel:
        channel_id = "chat"

        def __init__(self):
            self.sent, self.asked, self.secrets = [], [], []

        async def initialize(self, context):
            self.ctx = context

        async def send(self, message):
            self.sent.append(message)

        async def show_approval(self, prompt):
            self.asked.append(prompt)

        async def read_secret(self, request):
            self.secrets.append(request)
            return "s3cret"

        async def invoke(self, task, context):
            return str(await context.call_tool("desk__add", {"a": 20, "b": 22}))
"""


@pytest.fixture(autouse=True)
def _mcp() -> None:
    if importlib.util.find_spec("mcp") is None:
        sentence = "the package mcp is not installed: pip install 'postbus[mcp]'"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)


@pytest.fixture
def project(extensions: Path) -> Path:
    write_extension(extensions, "chat", CHANNEL, "agent: {integration_mode: orchestrator}\n")
    return extensions


def servers(**found: dict[str, Any]) -> Settings:
    return settings_of(kernel={"shipped": ["mcp"]}, extensions={"mcp": {"servers": found}})


async def test_tools_of_a_server_are_called_after_a_human_allowed_it(tmp_path: Path, project: Path) -> None:
    desk = {**SERVER, "unasked": ["refuse", "leave"], "tools": ["add", "refuse", "leave"]}
    gone = {"command": "no-such-program-anywhere"}
    async with real_kernel(tmp_path, project, servers(desk=desk, gone=gone)) as kernel:
        await until(lambda: len(kernel.tools.specs()) == 3, "the server")
        offered = {spec.name: spec.needs_approval for spec in kernel.tools.specs()}
        assert offered == {"desk__add": True, "desk__refuse": False, "desk__leave": False}
        health = await kernel.instance("mcp").health()
        assert (health.ok, health.detail) == (False, "gone: there is no such program or folder")

        chat = Chat(kernel)
        await chat.say("add them")
        (question,) = await until(lambda: chat.channel.asked, "the question")
        assert (question.tool_name, question.server_alias) == ("desk__add", "desk")
        assert question.arguments == {"a": 20, "b": 22}
        assert chat.sent == []
        await chat.channel.ctx.answer_approval(question.request_id, "ann", approved=True)
        await until(lambda: chat.sent, "the answer")
        assert chat.sent == ["{'result': 42}"]

        with pytest.raises(PostbusError, match="refuse of desk failed"):
            await kernel.call_tool("desk__refuse", {"why": "no"}, caller="test")
        with pytest.raises(SchemaMismatch):
            await kernel.call_tool("desk__refuse", {"why": 7}, caller="test")

        with pytest.raises(Unreachable, match="ended during the call of leave"):
            await kernel.call_tool("desk__leave", {}, caller="test")
        await until(lambda: any(spec.name == "desk__add" for spec in kernel.tools.specs()), "the server to be back")
        with pytest.raises(PostbusError, match="refuse of desk failed"):
            await kernel.call_tool("desk__refuse", {"why": "again"}, caller="test")
    log = tmp_path / "data" / "kernel" / "extensions" / "mcp" / "desk.log"
    assert "the desk is open" in log.read_text()


async def test_a_server_behind_a_url_that_ends_and_comes_back(tmp_path: Path, project: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, DESK, str(port)]
    desk = {"url": f"http://127.0.0.1:{port}/mcp", "approval": "never"}
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - our own server
    try:
        async with real_kernel(tmp_path, project, servers(desk=desk)) as kernel:
            await until(kernel.tools.specs, "the server")
            assert await kernel.call_tool("desk__add", {"a": 1, "b": 2}, caller="test") == {"result": 3}
            with pytest.raises(PostbusError, match="refuse of desk failed"):
                await kernel.call_tool("desk__refuse", {"why": "no"}, caller="test")
            child.kill()
            child.wait()
            with pytest.raises(PostbusError):
                await kernel.call_tool("desk__add", {"a": 1, "b": 2}, caller="test")
            child = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - as above
            answer = None
            async with asyncio.timeout(120):
                while answer is None:
                    with contextlib.suppress(PostbusError):
                        answer = await kernel.call_tool("desk__add", {"a": 2, "b": 2}, caller="test")
                    await asyncio.sleep(0.05)
            assert answer == {"result": 4}
    finally:
        child.kill()
        child.wait()


async def test_a_secret_is_asked_for_and_reaches_only_the_server(tmp_path: Path, project: Path) -> None:
    desk = {**SERVER, "approval": "never", "secret_env": {"DESK_KEY": "desk_key"}, "ask_on": "chat", "env": {"A": "b"}}
    async with real_kernel(tmp_path, project, servers(desk=desk)) as kernel:
        await until(kernel.tools.specs, "the secret and the server")
        (asked,) = kernel.instance("chat").secrets
        assert asked.target_channel == "chat"
        assert await kernel.call_tool("desk__variable", {"name": "DESK_KEY"}, caller="test") == {"result": "s3cret"}
        assert await kernel.call_tool("desk__variable", {"name": "A"}, caller="test") == {"result": "b"}
        assert await kernel.call_tool("desk__variable", {"name": "NOT_INHERITED"}, caller="test") == {"result": ""}
        specs = {spec.name: spec for spec in kernel.tools.specs()}
        assert specs["desk__add"].needs_approval is False


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"a b": SERVER}, "'a b' is no alias"),
        ({"desk": {}}, "needs a command or a url"),
        ({"desk": {**SERVER, "url": "http://x.example"}}, "one of the two"),
        ({"desk": {**SERVER, "approval": "sometimes"}}, "config is wrong"),
        ({"desk": {**SERVER, "shell": True}}, "unknown field"),
    ],
)
async def test_a_wrong_config_is_refused(tmp_path: Path, found: dict[str, Any], reason: str) -> None:
    async with real_kernel(tmp_path, None, servers(**found)) as kernel:
        (status,) = kernel.report().extensions
        assert status.state is ExtensionState.ERROR
        assert reason in status.reason


def test_without_the_package_the_extension_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "mcp" or name.startswith("mcp.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    (status,) = inspect_extensions(None, servers()).extensions
    assert status.state is ExtensionState.ERROR
    assert "pip install 'postbus[mcp]'" in status.reason
