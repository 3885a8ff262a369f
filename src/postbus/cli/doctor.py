"""The commands that look at extensions: which there are, and why something of them is missing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.bus.stats import subscription_states
from postbus.cli import output
from postbus.cli.host import Config, Extensions, HostData, With, extension_folders, host_settings
from postbus.cli.options import CLOCK, Json, examples, folder_of, opened_store
from postbus.cli.output import ago, count
from postbus.model import NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postbus.bus.stats import SubscriptionState
    from postbus.kernel import ExtensionStatus, KernelReport, Settings

__all__ = ["commands"]

commands = typer.Typer()


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be. ``about``: bus, host, or extension."""

    about: str
    message: str
    hint: str | None = None
    serious: bool = True


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """All that was looked at."""

    data: str
    bus: str
    subscriptions: list[SubscriptionState]
    host: KernelReport | None
    report: KernelReport
    findings: list[Finding]


# --- extensions -------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Extensions",
    epilog=examples(
        """
        $ postbus extensions
        $ postbus extensions --extensions ./extensions --json
        """
    ),
)
def extensions(
    *,
    extensions: Extensions = None,
    config: Config = None,
    shipped: With = None,
    data: HostData = None,
    json: Json = False,
) -> None:
    """List extensions: those of the host that runs on the data folder, else those that one would load.

    When no host runs their code is imported, to see whether it can be, but not started.
    """
    settings = host_settings(config, shipped, data)
    host = _host(settings)
    report = host or _inspect(extension_folders(extensions), settings)
    if json:
        output.document({"running": host is not None, "extensions": report.extensions})
        return
    rows = [_row(status) for status in report.extensions]
    output.table(("EXTENSION", "STATE", "PROVIDES", "TOOLS", "REASON"), rows, cut=True)
    output.note("of the host that runs" if host is not None else "no host runs on this data folder")
    loaded = {status.id for status in report.extensions}
    others = [name for name in _shipped() if name not in loaded]
    if others:
        output.note(f"also come with Postbus: {', '.join(others)} (--with NAME, or kernel.shipped in the settings)")


def _row(status: ExtensionStatus) -> tuple[str, ...]:
    provides = ", ".join(name.removesuffix("Provider").lower() for name in status.provides)
    reason = f"{status.where}: {status.reason}" if status.where else status.reason
    return status.id, status.state, provides or "-", ", ".join(status.tools) or "-", reason or "-"


def _shipped() -> list[str]:
    from postbus.kernel.discovery import SHIPPED  # noqa: PLC0415 - as in host.py

    return sorted(path.parent.name for path in SHIPPED.glob("*/manifest.yaml"))


def _host(settings: Settings) -> KernelReport | None:
    """Return the report of the host that runs on the data folder."""
    from postbus.kernel.status import is_alive, read_report  # noqa: PLC0415 - as in host.py

    report = read_report(Path(folder_of(settings.event_bus.db_path)) / "kernel")
    return report if report is not None and is_alive(report) else None


def _inspect(folders: list[Path], settings: Settings) -> KernelReport:
    from postbus.kernel import inspect_extensions  # noqa: PLC0415 - as in host.py

    return inspect_extensions(folders, settings)


# --- doctor -----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Extensions",
    epilog=examples(
        """
        $ postbus doctor
        $ postbus doctor --tool schedule_once
        """
    ),
)
def doctor(
    *,
    tool: Annotated[
        str | None, typer.Option("--tool", metavar="NAME", help="Say why agents do not have this tool.")
    ] = None,
    extensions: Extensions = None,
    config: Config = None,
    shipped: With = None,
    data: HostData = None,
    json: Json = False,
) -> None:
    """Say what is wrong: with the bus, with the host, or with an extension.

    A channel can work while a tool is missing: then the bus is healthy, and the extension that provides the tool did
    not load. Exits with 1 when something is wrong.
    """
    found = asyncio.run(_examine(host_settings(config, shipped, data), extension_folders(extensions)))
    verdict = None if tool is None else _about_tool(tool, found)
    wrong = any(finding.serious for finding in found.findings) or (verdict is not None and not verdict[0])
    if json:
        output.document(_facts(found, verdict))
    else:
        _print(found, verdict)
    if wrong:
        raise typer.Exit(1)


async def _examine(settings: Settings, folders: list[Path]) -> Examined:
    place, findings = settings.event_bus.db_path, []
    states: list[SubscriptionState] = []
    try:
        async with opened_store(place) as log:
            states = await subscription_states(log, CLOCK, settings.event_bus.tenant)
        bus = "healthy"
    except NotFound as error:
        bus = "empty"
        findings.append(Finding("bus", error.message, "a host makes it when it starts", serious=False))
    except PostbusError as error:
        bus = "unusable"
        findings.append(Finding("bus", error.message, error.hint))
    host = _host(settings)
    report = host or _inspect(folders, settings)
    findings += [*_of_bus(states, host), *_of_host(host), *_of_extensions(report)]
    if any(finding.about == "bus" and finding.serious for finding in findings) and bus == "healthy":
        bus = "in trouble"
    return Examined(data=place, bus=bus, subscriptions=states, host=host, report=report, findings=findings)


def _of_bus(states: list[SubscriptionState], host: KernelReport | None) -> Iterator[Finding]:
    known = {"kernel"} if host is None else {"kernel", *(status.id for status in host.extensions)}
    for state in states:
        name = state.registered.id
        if state.dead:
            hint = "`postbus dlq list` shows why; `postbus dlq replay` tries again"
            yield Finding("bus", f"{name} gave up on {count(state.dead, 'event')}", hint, serious=False)
        waiting = state.pending + state.waiting
        if waiting and not state.owners:
            message = f"{count(waiting, 'event')} wait for {name}, which nobody works on"
            serious = host is not None and name.partition(".")[0] in known
            yield Finding("bus", message, None if host is not None else "no host runs", serious=serious)


def _of_host(host: KernelReport | None) -> Iterator[Finding]:
    if host is None:
        yield Finding("host", "no host runs on this data folder", "start one with `postbus host`", serious=False)
        return
    if host.orchestrator is None:
        hint = "load an agent with integration_mode: orchestrator, or name one under kernel.orchestrator"
        yield Finding("host", "no agent answers users", hint)
    if not host.channels:
        yield Finding("host", "there is no channel to the user", "load one, as in --with terminal", serious=False)


def _of_extensions(report: KernelReport) -> Iterator[Finding]:
    for status in report.extensions:
        if status.state == "error":
            where = f"{status.where}: " if status.where else ""
            yield Finding("extension", f"{status.id} failed to {_step(status)}: {where}{status.reason}")
        elif status.health is not None and not status.health.ok:
            yield Finding("extension", f"{status.id} is not well: {status.health.detail}")
        for warning in status.warnings:
            yield Finding("extension", f"{status.id}: {warning}", serious=False)


def _step(status: ExtensionStatus) -> str:
    steps = {"discover": "be read", "depends_on": "load", "background": "go on", "": "load"}
    return steps.get(status.stage, status.stage)


def _about_tool(name: str, found: Examined) -> tuple[bool, str]:
    """Return whether agents have a tool, and the sentence that says why or why not."""
    report, running = found.report, found.host is not None
    owner = next((status for status in report.extensions if name in status.tools), None)
    if owner is not None and owner.state != "error":
        return True, f"{name} is provided by {owner.id}, which is {owner.state}"
    failed = [status for status in report.extensions if status.state in ("error", "disabled")]
    likely = [status for status in failed if _mentions(Path(status.folder), name)]
    health = "the bus is healthy" if found.bus in ("healthy", "empty") else f"the bus is {found.bus}"
    for status in likely:
        return False, f"{name} is missing though {health}: {status.id} names it, and is {status.state}: {status.reason}"
    if failed:
        names = ", ".join(status.id for status in failed)
        return False, f"{name} is missing though {health}: no extension provides it; these did not load: {names}"
    if not running:
        able = [status.id for status in report.extensions if _mentions(Path(status.folder), name)]
        who = f"{', '.join(able)} could be loaded, and names it" if able else "no extension names it"
        return False, f"{name} is not there: no host runs; {who}"
    unwell = [status for status in report.extensions if status.health is not None and not status.health.ok]
    more = "".join(f"; {status.id} is not well: {status.health.detail}" for status in unwell if status.health)
    return False, f"{name} is missing though {health}: no extension that runs provides it{more}"


def _mentions(folder: Path, name: str) -> bool:
    """Say whether the code of an extension has a word in it."""
    with contextlib.suppress(OSError):
        files = (path for path in folder.rglob("*") if path.suffix in (".py", ".yaml"))
        return any(name in path.read_text("utf-8", errors="replace") for path in files)
    return False


def _facts(found: Examined, verdict: tuple[bool, str] | None) -> dict[str, Any]:
    facts = {
        "data": found.data,
        "bus": found.bus,
        "host": None if found.host is None else {"pid": found.host.pid, "orchestrator": found.host.orchestrator},
        "findings": found.findings,
        "extensions": found.report.extensions,
    }
    return facts if verdict is None else facts | {"tool": {"available": verdict[0], "reason": verdict[1]}}


def _print(found: Examined, verdict: tuple[bool, str] | None) -> None:
    output.say(f"bus         {found.bus}: {found.data}")
    if found.host is None:
        output.say("host        none")
    else:
        age = ago((CLOCK.now_us() - found.host.written_at_us) / 1e6)
        channels = ", ".join(found.host.channels) or "none"
        agent = found.host.orchestrator or "none"
        output.say(f"host        process {found.host.pid}, as of {age} ago; agent {agent}; channels {channels}")
    states = ", ".join(f"{status.id} {status.state}" for status in found.report.extensions)
    output.say(f"extensions  {states or 'none'}")
    for finding in found.findings:
        output.say(f"{'problem' if finding.serious else 'note':<10}  {finding.message}")
        if finding.hint:
            output.say(f"            {finding.hint}")
    if verdict is not None:
        output.say(f"tool        {verdict[1]}")
    if not any(finding.serious for finding in found.findings):
        output.say("all is well" if verdict is None or verdict[0] else "nothing else is wrong")
