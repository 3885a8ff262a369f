from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from postbus.kernel import ExtensionState, Kernel, Settings, inspect_extensions
from postbus.kernel.settings import KernelSettings
from postbus.kernel.status import is_alive, read_report
from postbus.model import Conflict, Invalid, NotFound
from postbus.testing import BusKit
from tests.kernel.kernel_kit import CHANNEL, ECHO, LISTENER, KernelKit, write_extension

DIARY = """
    DIARY = []

    class Life:
        async def initialize(self, context):
            self.name, self.ctx = context.extension_id, context
            self.page = context.config["page"]
            self.write("initialize")

        async def start(self):
            self.write("start")

        async def stop(self):
            self.write("stop")
            await self.ctx.emit("life.stopped", {"who": self.name})

        async def destroy(self):
            self.write("destroy")

        def write(self, word):
            with open(self.page, "a") as page:
                page.write(f"{self.name} {word}\\n")
"""


def life(folder: Path, id: str, page: Path, *needs: str) -> None:  # noqa: A002 - the word of the model
    write_extension(folder, id, DIARY, f"depends_on: [{', '.join(needs)}]\nconfig: {{page: {page}}}\n")


def broken(stage: str) -> str:
    return f"""
        class Broken:
            async def {stage}(self, *_):
                raise RuntimeError("no luck in {stage}")
    """


async def test_life_is_in_the_order_of_the_dependencies(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "diary"
    life(extensions, "a_last", page, "middle")
    life(extensions, "middle", page, "z_first")
    life(extensions, "z_first", page)
    async with KernelKit(extensions) as kit:
        assert page.read_text().splitlines() == [
            *(f"{name} initialize" for name in ("z_first", "middle", "a_last")),
            *(f"{name} start" for name in ("z_first", "middle", "a_last")),
        ]
        assert {status.state for status in kit.kernel.report().extensions} == {ExtensionState.RUNNING}
        page.unlink()
        await kit.kernel.stop()
        ends = [f"{name} {word}" for name in ("a_last", "middle", "z_first") for word in ("stop", "destroy")]
        assert page.read_text().splitlines() == ends
        assert [one["who"] for one in await kit.payloads("life.stopped")] == ["a_last", "middle", "z_first"]
        assert {status.state for status in kit.kernel.report().extensions} == {ExtensionState.STOPPED}


async def test_missing_cyclic_and_failed_dependencies_leave_the_others_running(extensions: Path) -> None:
    write_extension(extensions, "alone", LISTENER)
    write_extension(extensions, "orphan", LISTENER, "depends_on: [ghost]\n")
    write_extension(extensions, "chick", LISTENER, "depends_on: [egg]\n")
    write_extension(extensions, "egg", LISTENER, "depends_on: [chick]\n")
    write_extension(extensions, "breakfast", LISTENER, "depends_on: [egg]\n")
    write_extension(extensions, "bad", broken("initialize"))
    write_extension(extensions, "child", LISTENER, "depends_on: [bad]\n")
    write_extension(extensions, "grandchild", LISTENER, "depends_on: [child]\n")
    write_extension(extensions, "idle", LISTENER)
    write_extension(extensions, "needs_idle", LISTENER, "depends_on: [idle]\n")
    settings = Settings(kernel=KernelSettings(disabled=["idle"]))
    async with KernelKit(extensions, settings) as kit:
        states = {status.id: (status.state.value, status.reason) for status in kit.kernel.report().extensions}
        luck = "RuntimeError: no luck in initialize"
        assert states == {
            "alone": ("running", ""),
            "orphan": ("error", "it depends on ghost, which is not there"),
            "chick": ("error", "it depends on itself: chick → egg → chick"),
            "egg": ("error", "it depends on itself: egg → chick → egg"),
            "breakfast": ("error", "it depends on egg, which failed: it depends on itself: egg → chick → egg"),
            "bad": ("error", luck),
            "child": ("error", f"it depends on bad, which failed: {luck}"),
            "grandchild": ("error", f"it depends on child, which failed: it depends on bad, which failed: {luck}"),
            "idle": ("disabled", "the settings disable it"),
            "needs_idle": ("error", "it depends on idle, which is disabled"),
        }
        await kit.publish("note.new", {"n": 1})
        assert kit.kernel.instance("alone").seen == [{"n": 1}]
        with pytest.raises(NotFound, match="extension bad does not run: it is error, RuntimeError: no luck"):
            kit.kernel.instance("bad")
        told = await kit.payloads("system.extension.error")
        assert {(one["extension_id"], one["stage"]) for one in told} >= {("bad", "initialize"), ("orphan", "discover")}
        assert kit.status("bad").where.startswith(str(extensions / "bad" / "main.py") + ":")
        assert kit.status("orphan").where == f"{extensions / 'orphan' / 'manifest.yaml'}:4"


@pytest.mark.parametrize(
    ("code", "entrypoint", "reason", "line"),
    [
        ("def (", "main:X", "SyntaxError", "main.py:1"),
        ("x = 1\nimport not_there_at_all\n", "main:X", "ModuleNotFoundError", "main.py:2"),
        ("raise SystemExit(3)\n", "main:X", "SystemExit: 3", "main.py:1"),
        ("X = 5\n", "main:X", "there is no class X in main", "manifest.yaml:2"),
        ("class X:\n    def __init__(self, a):\n        pass\n", "main:X", "TypeError", ""),
        ("class X:\n    pass\n", "other:X", "there is no other.py for the entrypoint", "manifest.yaml:2"),
        ("class X:\n    pass\n", "main.deep:X", "there is no main/deep.py for the entrypoint", "manifest.yaml:2"),
    ],
)
async def test_code_that_cannot_be_loaded_is_in_error_with_its_place(
    extensions: Path, code: str, entrypoint: str, reason: str, line: str
) -> None:
    folder = extensions / "bad"
    folder.mkdir()
    (folder / "main.py").write_text(code)
    (folder / "manifest.yaml").write_text(f"id: bad\nentrypoint: {entrypoint}\n")
    write_extension(extensions, "good", LISTENER)
    async with KernelKit(extensions) as kit:
        status = kit.status("bad")
        assert (status.state, status.stage) == (ExtensionState.ERROR, "load")
        assert status.reason.startswith(reason)
        assert status.where.endswith(line)
        assert kit.status("good").state is ExtensionState.RUNNING
    assert [name for name in sys.modules if name.startswith("postbus_extension_")] == []


async def test_a_refused_manifest_is_shown_under_its_folder(extensions: Path) -> None:
    write_extension(extensions, "good", LISTENER)
    (extensions / "bad").mkdir()
    (extensions / "bad" / "manifest.yaml").write_text(
        "id: bad\nentrypoint: main:X\nevents: {subscribes: [{topic: no}]}\n"
    )
    write_extension(extensions, "copy", LISTENER).joinpath("manifest.yaml").write_text(
        "id: good\nentrypoint: main:Listener\n"
    )
    (extensions / "no manifest").mkdir()
    async with KernelKit(extensions) as kit:
        assert [status.id for status in kit.kernel.report().extensions] == ["bad", "good", "good#2"]
        assert kit.status("bad").where == f"{extensions / 'bad' / 'manifest.yaml'}:3"
        assert "'no' is a boolean" in kit.status("bad").reason
        assert "the id good is that of" in kit.status("good#2").reason


@pytest.mark.parametrize("stage", ["initialize", "start"])
async def test_what_fails_is_released_and_its_dependents_with_it(extensions: Path, tmp_path: Path, stage: str) -> None:
    page = tmp_path / "diary"
    code = f"""
        class Broken:
            async def initialize(self, context):
                context.subscribe_event("note.*", self.on_note)
                context.subscribe("user_message", print)
                self.{stage}_now = True
                if "{stage}" == "initialize":
                    raise RuntimeError("no luck")

            async def start(self):
                raise RuntimeError("no luck")

            async def on_note(self, event):
                raise AssertionError("it was released")
    """
    write_extension(extensions, "bad", code)
    life(extensions, "child", page, "bad")
    async with KernelKit(extensions) as kit:
        assert (kit.status("bad").state, kit.status("bad").stage) == (ExtensionState.ERROR, stage)
        assert kit.status("child").state is ExtensionState.ERROR
        assert kit.kernel.router._hooks["user_message"] == []
        await kit.publish("note.new", {"n": 1})
        assert await kit.kit.dead() == []
        expected = [] if stage == "initialize" else ["child initialize", "child destroy"]
        assert (page.read_text().splitlines() if page.exists() else []) == expected


@pytest.mark.parametrize("step", ["initialize", "start"])
async def test_what_never_comes_back_holds_up_nobody(extensions: Path, step: str) -> None:
    hanging = f"""
        import asyncio

        class Hanging:
            async def {step}(self, *_):
                await asyncio.Event().wait()
    """
    write_extension(extensions, "hanging", hanging)
    write_extension(
        extensions, "own", f"class Own:\n    async def {step}(self, *_):\n        raise TimeoutError('mine')\n"
    )
    write_extension(extensions, "still", "class Still:\n    pass\n")
    settings = Settings(kernel=KernelSettings(step_timeout_s=0.2))
    async with KernelKit(extensions, settings) as kit:
        assert kit.status("hanging").reason == f"TimeoutError: {step} took longer than 0.2s"
        assert kit.status("own").reason == "TimeoutError: mine"
        assert kit.status("still").state is ExtensionState.RUNNING


async def test_an_extension_that_does_not_say_how_it_is_is_not_well(extensions: Path) -> None:
    code = """
        class Ill:
            async def health(self):
                raise ConnectionError("no line")
    """
    write_extension(extensions, "ill", code)
    async with KernelKit(extensions) as kit:
        health = kit.status("ill").health
        assert health is not None
        assert (health.ok, health.detail) == (False, "ConnectionError: no line")


async def test_a_service_that_ends_badly_takes_its_dependents_along(extensions: Path, tmp_path: Path) -> None:
    code = """
        import asyncio

        class Service:
            async def initialize(self, context):
                self.go = asyncio.Event()

            async def run_background(self):
                await self.go.wait()
                raise ConnectionError("line cut")
    """
    page = tmp_path / "diary"
    write_extension(extensions, "service", code)
    life(extensions, "child", page, "service")
    write_extension(extensions, "other", LISTENER)
    async with KernelKit(extensions) as kit:
        assert kit.status("service").provides == ("ServiceProvider",)
        kit.kernel.instance("service").go.set()
        await kit.kit.until(lambda: kit.status("child").state is ExtensionState.ERROR)
        await kit.settle()
        assert (kit.status("service").stage, kit.status("service").reason) == (
            "background",
            "ConnectionError: line cut",
        )
        assert kit.status("other").state is ExtensionState.RUNNING
        assert page.read_text().splitlines()[-2:] == ["child stop", "child destroy"]
        assert "service" in {one["extension_id"] for one in await kit.payloads("system.extension.error")}


async def test_a_service_is_cancelled_at_the_end(extensions: Path) -> None:
    code = """
        import asyncio

        class Service:
            ended = False

            async def run_background(self):
                try:
                    await asyncio.Event().wait()
                finally:
                    self.ended = True
    """
    write_extension(extensions, "service", code)
    async with KernelKit(extensions) as kit:
        await asyncio.sleep(0)
        service = kit.kernel.instance("service")
    assert service.ended


async def test_what_is_provided_is_found(extensions: Path) -> None:
    tool = """
        from postbus.kernel import Health, ToolSpec

        class Tool:
            def get_tools(self):
                return [ToolSpec(name="add")]

            async def call_tool(self, call):
                return 1

            async def health(self):
                return Health(ok=False, detail="tired")
    """
    write_extension(extensions, "chat", CHANNEL)
    write_extension(extensions, "echo", ECHO)
    write_extension(extensions, "tool", tool)
    write_extension(extensions, "tool2", tool)
    async with KernelKit(extensions) as kit:
        report = kit.kernel.report()
        assert (report.channels, report.orchestrator, report.running) == (("chat",), "echo", True)
        assert kit.status("chat").provides == ("ChannelProvider",)
        assert kit.status("echo").provides == ("AgentProvider",)
        assert (kit.status("tool").tools, kit.status("tool").provides) == (("add",), ("ToolProvider",))
        assert kit.status("tool").health is not None
        assert kit.status("tool2").reason == "the tool add is provided by tool already"
        assert read_report(kit.kernel.state_dir) == report
        assert is_alive(report)
        folder = kit.kernel.state_dir
        await kit.kernel.stop()
        stopped = read_report(folder)
        assert stopped is not None
        assert not is_alive(stopped)


async def test_siblings_are_imported_and_nothing_is_on_the_path(extensions: Path) -> None:
    before = list(sys.path)
    folder = write_extension(
        extensions,
        "pair",
        """
        from .words import GREETING
        from .deep.inner import NUMBER

        class Pair:
            said = (GREETING, NUMBER)
        """,
    )
    (folder / "words.py").write_text("GREETING = 'hello'\n")
    (folder / "deep").mkdir()
    (folder / "deep" / "inner.py").write_text("NUMBER = 7\n")
    async with KernelKit(extensions) as kit:
        assert kit.kernel.instance("pair").said == ("hello", 7)
        assert sys.path == before
    assert not list(folder.rglob("__pycache__"))


async def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with BusKit() as kit:
        with pytest.raises(Invalid, match="there is no folder"):
            await Kernel(kit.bus, tmp_path / "none").start()
        settings = Settings(kernel=KernelSettings(shipped=["nonsense"]))
        with pytest.raises(Invalid, match="no extension nonsense comes with Postbus"):
            await Kernel(kit.bus, None, settings).start()


async def test_a_kernel_starts_once(extensions: Path) -> None:
    async with KernelKit(extensions) as kit:
        with pytest.raises(Conflict):
            await kit.kernel.start()


def test_extensions_are_looked_at_without_running_them(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "diary"
    life(extensions, "good", page)
    write_extension(extensions, "bad", "import nothing_like_this\n\nclass Bad:\n    pass\n")
    report = inspect_extensions(extensions)
    assert {one.id: one.state.value for one in report.extensions} == {"bad": "error", "good": "loaded"}
    assert not page.exists()
    assert [name for name in sys.modules if name.startswith("postbus_extension_")] == []


async def test_an_extension_folder_can_be_named_itself(extensions: Path) -> None:
    folder = write_extension(extensions, "one", LISTENER)
    write_extension(extensions, "two", LISTENER)
    async with KernelKit(folder) as kit:
        assert [status.id for status in kit.kernel.report().extensions] == ["one"]
