from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from postbus.kernel import ExtensionState, Settings
from postbus.kernel.settings import KernelSettings
from postbus.kernel.strict_yaml import InvalidFile
from postbus.model import Conflict, Invalid, NotFound
from tests.kernel.kernel_kit import CHANNEL, ECHO, LISTENER, KernelKit, write_extension


def writer(version: int, page: Path, topic: str = "note.*") -> str:
    return f"""
        class Writer:
            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("{topic}", self.on_note)

            async def on_note(self, event):
                with open("{page}", "a") as page:
                    page.write(f"v{version} {{event.payload['n']}}\\n")
    """


async def test_handlers_are_replaced_the_place_stays_and_nothing_is_lost(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_extension(extensions, "writer", writer(1, page))
    write_extension(extensions, "other", LISTENER)
    async with KernelKit(extensions) as kit:
        other = kit.kernel.instance("other")
        await kit.publish("note.new", {"n": 1})
        for version in (2, 3):  # at once, and with files of the same size: no stale code may come back
            write_extension(extensions, "writer", writer(version, page))
            reloading = asyncio.create_task(kit.kernel.reload("writer"))
            await kit.kit.publish("note.new", {"n": version * 10})
            status = await reloading
            await kit.publish("note.new", {"n": version * 10 + 1})
            assert (status.state, status.generation) == (ExtensionState.RUNNING, version)
        lines = page.read_text().splitlines()
        assert [int(line.split()[1]) for line in lines] == [1, 20, 21, 30, 31]
        assert (lines[0], lines[2], lines[4]) == ("v1 1", "v2 21", "v3 31")
        assert kit.kernel.instance("other") is other
        assert [one["n"] for one in other.seen] == [1, 20, 21, 30, 31]


async def test_a_running_handler_ends_before_the_new_one_begins(extensions: Path) -> None:
    code = """
        import asyncio

        class Slow:
            VERSION = {version}

            def __init__(self):
                self.began, self.go = asyncio.Event(), asyncio.Event()
                self.life = []

            async def initialize(self, context):
                self.ctx = context
                context.subscribe_event("note.*", self.on_note)

            async def on_note(self, event):
                self.began.set()
                await self.go.wait()
                self.life.append("handled")
                await self.ctx.emit("done", {{"by": self.VERSION, "n": event.payload["n"]}})

            async def stop(self):
                self.life.append("stop")

            async def destroy(self):
                self.life.append("destroy")
    """
    write_extension(extensions, "slow", code.format(version=1))
    async with KernelKit(extensions) as kit:
        old = kit.kernel.instance("slow")
        await kit.kit.publish("note.new", {"n": 1})
        async with asyncio.timeout(60):
            await old.began.wait()
        write_extension(extensions, "slow", code.format(version=2))
        reloading = asyncio.create_task(kit.kernel.reload("slow"))
        await kit.kit.publish("note.new", {"n": 2})
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reloading.done()
        old.go.set()
        await reloading
        handled = old.life.count("handled")  # the second too, if it came before the old one was detached
        assert old.life == ["handled"] * handled + ["stop", "destroy"]
        assert handled in {1, 2}
        kit.kernel.instance("slow").go.set()
        await kit.settle()
        assert await kit.payloads("done") == [{"by": 1, "n": 1}, {"by": 1 if handled == 2 else 2, "n": 2}]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("def (", "SyntaxError"), ("x = 1\n", "there is no class Writer"), ("import nothing_here\n", "ModuleNotFound")],
)
async def test_code_that_cannot_be_loaded_leaves_the_old_one_at_work(
    extensions: Path, tmp_path: Path, code: str, sentence: str
) -> None:
    page = tmp_path / "page"
    folder = write_extension(extensions, "writer", writer(1, page))
    async with KernelKit(extensions) as kit:
        (folder / "main.py").write_text(code)
        with pytest.raises(Invalid) as caught:
            await kit.kernel.reload("writer")
        assert sentence in caught.value.message
        assert str(folder) in caught.value.message
        await kit.publish("note.new", {"n": 1})
        assert page.read_text() == "v1 1\n"
        assert (kit.status("writer").state, kit.status("writer").generation) == (ExtensionState.RUNNING, 1)


async def test_a_manifest_that_is_refused_leaves_the_old_one_at_work(extensions: Path, tmp_path: Path) -> None:
    folder = write_extension(extensions, "writer", writer(1, tmp_path / "page"))
    write_extension(extensions, "child", LISTENER, "depends_on: [writer]\n")
    write_extension(extensions, "bad", "class Bad:\n    async def start(self):\n        raise RuntimeError\n")
    async with KernelKit(extensions) as kit:
        for text, kind in (
            ("id: writer\nentrypoint: main:Writer\nnonsense: 1\n", InvalidFile),
            ("id: writer\nentrypoint: main:Writer\ndepends_on: [ghost]\n", InvalidFile),
            ("id: writer\nentrypoint: main:Writer\ndepends_on: [child]\n", InvalidFile),
            ("id: writer\nentrypoint: main:Writer\ndepends_on: [bad]\n", Conflict),
            ("id: other\nentrypoint: main:Writer\n", Conflict),
        ):
            (folder / "manifest.yaml").write_text(text)
            with pytest.raises(kind):
                await kit.kernel.reload("writer")
        assert kit.status("writer").state is ExtensionState.RUNNING
        with pytest.raises(NotFound):
            await kit.kernel.reload("ghost")


async def test_what_cannot_start_waits_in_error_and_misses_nothing(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_extension(extensions, "writer", writer(1, page))
    async with KernelKit(extensions) as kit:
        await kit.publish("note.new", {"n": 1})
        failing = "class Writer:\n    async def initialize(self, context):\n        raise RuntimeError('no luck')\n"
        write_extension(extensions, "writer", failing)
        status = await kit.kernel.reload("writer")
        assert (status.state, status.stage, status.reason) == (
            ExtensionState.ERROR,
            "initialize",
            "RuntimeError: no luck",
        )
        await kit.publish("note.new", {"n": 2})
        write_extension(extensions, "writer", writer(3, page))
        assert (await kit.kernel.reload("writer")).state is ExtensionState.RUNNING
        await kit.settle()
        assert page.read_text().splitlines() == ["v1 1", "v3 2"]
        assert [one["extension_id"] for one in await kit.payloads("system.extension.error")] == ["writer"]


async def test_what_depends_on_it_falls_and_rises_with_it(extensions: Path) -> None:
    write_extension(extensions, "base", LISTENER)
    write_extension(extensions, "child", LISTENER, "depends_on: [base]\n")
    write_extension(extensions, "grandchild", LISTENER, "depends_on: [child]\n")
    async with KernelKit(extensions) as kit:
        child = kit.kernel.instance("child")
        await kit.kernel.reload("base")
        assert kit.kernel.instance("child") is child
        failing = "class Base:\n    async def start(self):\n        raise RuntimeError('no luck')\n"
        write_extension(extensions, "base", failing)
        await kit.kernel.reload("base")
        assert {one.id: one.state.value for one in kit.kernel.report().extensions} == dict.fromkeys(
            ("base", "child", "grandchild"), "error"
        )
        await kit.publish("note.new", {"n": 1})
        assert child.seen == []
        write_extension(extensions, "base", LISTENER)
        await kit.kernel.reload("base")
        await kit.settle()
        assert {one.state for one in kit.kernel.report().extensions} == {ExtensionState.RUNNING}
        for name in ("base", "child", "grandchild"):
            assert kit.kernel.instance(name).seen == [{"n": 1}]


async def test_another_process_can_ask_for_a_reload(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_extension(extensions, "writer", writer(1, page))
    async with KernelKit(extensions) as kit:
        write_extension(extensions, "writer", writer(2, page))
        await kit.publish("system.extension.reload", {"extension_id": "writer"})
        await kit.publish("note.new", {"n": 1})
        assert page.read_text() == "v2 1\n"
        (extensions / "writer" / "main.py").write_text("def (")
        await kit.publish("system.extension.reload", {"extension_id": "writer"})
        await kit.publish("system.extension.reload", {"extension_id": "ghost"})
        await kit.publish("note.new", {"n": 2})
        assert page.read_text() == "v2 1\nv2 2\n"
        told = [(one["extension_id"], one["stage"]) for one in await kit.payloads("system.extension.error")]
        assert told == [("writer", "reload"), ("ghost", "reload")]


async def test_an_agent_is_not_taken_down_at_work_nor_missed_while_it_is_away(extensions: Path, tmp_path: Path) -> None:
    code = """
        import asyncio
        from pathlib import Path

        class Agent:
            def __init__(self):
                self.began, self.go, self.life = asyncio.Event(), asyncio.Event(), []

            async def initialize(self, context):
                while Path(context.config["gate"]).exists():
                    await asyncio.sleep(0.001)

            async def invoke(self, task, context):
                self.began.set()
                await self.go.wait()
                self.life.append("answered")
                return f"{version} {task} {context.attempt}"

            async def destroy(self):
                self.life.append("destroy")
    """
    gate = tmp_path / "gate"
    manifest = f"config: {{gate: {gate}}}\n"
    write_extension(extensions, "agent", code.replace("{version}", "v1"), manifest)
    async with KernelKit(extensions) as kit:
        old = kit.kernel.instance("agent")
        first = asyncio.create_task(kit.kernel.invoke_agent("one", caller="test", session_id="s1"))
        async with asyncio.timeout(60):
            await old.began.wait()
        gate.touch()
        write_extension(extensions, "agent", code.replace("{version}", "v2"), manifest)
        reloading = asyncio.create_task(kit.kernel.reload("agent"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert old.life == []
        old.go.set()
        assert (await first).text == "v1 one 1"
        await kit.kit.until(lambda: old.life == ["answered", "destroy"])
        await kit.kit.publish("user.message", {"text": "two", "user_id": "ann", "channel_id": "chat"})
        await kit.settle()
        assert not reloading.done()
        gate.unlink()
        await reloading
        kit.kernel.instance("agent").go.set()
        await kit.settle()
        assert [one["text"] for one in await kit.payloads("system.user.notify")] == ["v2 two 1"]


async def test_what_is_started_by_a_reload_derives_from_nothing(extensions: Path) -> None:
    code = """
        import asyncio

        class Service:
            async def initialize(self, context):
                self.ctx, self.go = context, asyncio.Event()

            async def run_background(self):
                await self.go.wait()
                await self.ctx.emit("beat", {})
    """
    write_extension(extensions, "service", code)
    async with KernelKit(extensions) as kit:
        request = {"extension_id": "service"}
        await kit.publish("system.extension.reload", request, correlation_id="c1", trust="untrusted")
        kit.kernel.instance("service").go.set()
        await kit.settle()
        [beat] = await kit.events("beat")
        assert (beat.correlation_id, beat.trust, beat.headers) == (None, "trusted", {})


async def test_channels_agents_and_tools_are_replaced(extensions: Path) -> None:
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "echo", ECHO)
    async with KernelKit(extensions) as kit:
        old = kit.kernel.instance("chat")
        write_extension(extensions, "echo", ECHO.replace("echo:", "ECHO:"))
        await kit.kernel.reload("echo")
        await kit.kernel.reload("chat")
        assert (await kit.kernel.invoke_agent("x", caller="test")).text == "ECHO: x"
        assert kit.kernel.router.choose("chat") is kit.kernel.instance("chat") is not old
        assert kit.kernel.report().channels == ("chat",)


async def test_a_new_extension_can_be_loaded_and_a_broken_one_mended(extensions: Path, tmp_path: Path) -> None:
    folder = extensions / "bad"
    folder.mkdir()
    (folder / "manifest.yaml").write_text("id: bad\nentrypoint: main:X\noops: 1\n")
    async with KernelKit(extensions) as kit:
        assert kit.status("bad").state is ExtensionState.ERROR
        page = tmp_path / "page"
        write_extension(extensions, "bad", writer(1, page))
        write_extension(extensions, "fresh", LISTENER)
        assert (await kit.kernel.reload("bad")).state is ExtensionState.RUNNING
        assert (await kit.kernel.reload("fresh")).state is ExtensionState.RUNNING
        await kit.publish("note.new", {"n": 1})
        assert page.read_text() == "v1 1\n"
        assert kit.kernel.instance("fresh").seen == [{"n": 1}]


async def test_one_that_was_known_by_its_folder_gets_its_name(extensions: Path) -> None:
    folder = write_extension(extensions, "listener", LISTENER).rename(extensions / "odd")
    manifest = (folder / "manifest.yaml").read_text()
    (folder / "manifest.yaml").write_text(manifest + "oops: 1\n")
    async with KernelKit(extensions) as kit:
        assert [one.id for one in kit.kernel.report().extensions] == ["odd"]
        (folder / "manifest.yaml").write_text(manifest)
        with pytest.raises(Conflict, match="is now listener, not odd"):
            await kit.kernel.reload("odd")
        await kit.kernel.reload("listener")
        assert [(one.id, one.state.value) for one in kit.kernel.report().extensions] == [("listener", "running")]


async def test_what_is_disabled_is_not_loaded_by_a_reload(extensions: Path) -> None:
    write_extension(extensions, "listener", LISTENER)
    async with KernelKit(extensions, Settings(kernel=KernelSettings(disabled=["listener"]))) as kit:
        with pytest.raises(Conflict, match="the settings disable listener"):
            await kit.kernel.reload("listener")
        assert kit.status("listener").state is ExtensionState.DISABLED


async def test_a_topic_that_is_gone_is_no_longer_handled(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_extension(extensions, "writer", writer(1, page, "note.old"))
    async with KernelKit(extensions) as kit:
        write_extension(extensions, "writer", writer(2, page, "note.new"))
        await kit.kernel.reload("writer")
        await kit.publish("note.old", {"n": 1})
        await kit.publish("note.new", {"n": 2})
        assert page.read_text() == "v2 2\n"


async def test_nothing_is_reloaded_when_the_kernel_is_over(extensions: Path) -> None:
    write_extension(extensions, "listener", LISTENER)
    async with KernelKit(extensions) as kit:
        await kit.kernel.stop()
        with pytest.raises(Conflict, match="the kernel does not run"):
            await kit.kernel.reload("listener")
