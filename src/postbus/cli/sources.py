"""The commands of the sources: what feeds the log from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.cli import output
from postbus.cli.desk import at_desk, decoded, own
from postbus.cli.options import CLOCK, DATA, TENANT, ApiKey, Data, Json, Tenant, Url, Yes, examples, opened_store
from postbus.cli.output import ago, count, short
from postbus.envelope import parse_instant
from postbus.model import Invalid

if TYPE_CHECKING:
    from postbus.cli.desk import Desk

__all__ = ["commands", "shown", "until_told", "values_of"]

FAILED = 1
KINDS = "bus, command, feed, file, github, timer or webhook"
TURNS_MAX = 1_000

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus sources add hello github --set repo=octo/hello --set token_env=GITHUB_TOKEN
        $ postbus sources list --json
        $ postbus sources run
        """
    ),
)
SourceId = Annotated[str, typer.Argument(metavar="ID", help="The source, as `postbus sources list` shows it.")]


@commands.callback()
def sources() -> None:
    """Sources: GitHub repositories, webhooks, feeds, files, programs, timers and other buses that feed the log.

    Each writes to a stream of its own, as namespace.tenant.ID, and remembers how far it has read. `postbus serve` hosts
    them; without a server `postbus sources run` does.
    """


def values_of(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """Return values from texts NAME=VALUE; a value is JSON where it can be, else text."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=f"'{option}'")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def shown(facts: dict[str, Any]) -> None:
    """Print facts, one on each line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        text = msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
        output.say(f"{name:<{width}}  {'-' if text is None else text}")


@commands.command(
    epilog=examples(
        """
        $ postbus sources add hello github --set repo=octo/hello
        $ postbus sources add news feed --set url=https://example.com/feed.xml --set interval_s=600
        $ postbus sources add jobs file --set path=/var/log/jobs.jsonl
        $ postbus sources add disk command --set 'argv=["df", "--output=json"]'
        $ postbus sources add morning timer --set 'cron=0 9 * * 1-5' --set zone=Europe/Berlin
        $ postbus sources add shop webhook --set secret_env=SHOP_SECRET
        """
    )
)
def add(
    source: Annotated[str, typer.Argument(metavar="ID", help="What to call it; its stream is called so too.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{KINDS}.")],
    *,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of that kind; repeatable.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option("--settings", metavar="JSON", help="All settings as one JSON object.")
    ] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Register a source. It runs from then on, wherever the sources are hosted.

    Secrets are never kept: settings name the environment variables that hold them.
    """
    given = {} if settings is None else decoded(settings, "--settings")
    if not isinstance(given, dict):
        raise typer.BadParameter("this is no JSON object", param_hint="'--settings'")
    namespace, name = tenant.split(".")
    body = {
        "id": source,
        "kind": kind,
        "settings": given | values_of(pairs, "--set"),
        "namespace": namespace,
        "tenant": name,
    }
    made = at_desk(lambda desk: desk.ask("POST", "/sources", body), data, url, api_key, create=True)
    if json:
        output.document(made)
    else:
        output.say(f"added {made['id']}, which writes to {made['topic']}")


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus sources list
        $ postbus sources list --json
        """
    ),
)
def list_(
    *, tenant: Tenant = TENANT, data: Data = DATA, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """List the sources and how they fare."""
    namespace, name = tenant.split(".")
    query = {"namespace": namespace, "tenant": name}
    found = at_desk(lambda desk: desk.ask("GET", "/sources", query=query), data, url, api_key)
    if json:
        output.document(found)
    elif found["sources"]:
        rows = [
            (
                one["id"],
                one["kind"],
                "failing" if one["failures"] and one["state"] == "running" else one["state"],
                one["events"],
                "-" if one["last_ok_at"] is None else f"{_age(one['last_ok_at'])} ago",
                short(one["topic"], tenant),
                " ".join((one["last_error"] or "").split()),
            )
            for one in found["sources"]
        ]
        output.table(("ID", "KIND", "STATE", "EVENTS", "LAST OK", "STREAM", "ERROR"), rows, cut=True)
    else:
        output.note("no sources")


def _age(text: str) -> str:
    return ago((CLOCK.now_us() - parse_instant(text)) / 1e6)


@commands.command(epilog=examples("$ postbus sources show hello"))
def show(
    source: SourceId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show one source: its settings, how far it has read, and its last error."""
    found = at_desk(lambda desk: desk.ask("GET", own(tenant, "sources", source)), data, url, api_key)
    if json:
        output.document(found)
    else:
        shown(found)


@commands.command(epilog=examples("$ postbus sources pause hello"))
def pause(
    source: SourceId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Stop a source where it is. Nothing is lost: it goes on from there."""
    path = f"{own(tenant, 'sources', source)}/pause"
    _changed(at_desk(lambda desk: desk.ask("POST", path), data, url, api_key), "paused", as_json=json)


@commands.command(epilog=examples("$ postbus sources resume hello"))
def resume(
    source: SourceId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Let a paused source go on."""
    path = f"{own(tenant, 'sources', source)}/resume"
    _changed(at_desk(lambda desk: desk.ask("POST", path), data, url, api_key), "resumed", as_json=json)


def _changed(source: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        output.document(source)
    else:
        output.say(f"{what} {source['id']}")


@commands.command(epilog=examples("$ postbus sources remove hello --yes"))
def remove(
    source: SourceId,
    *,
    yes: Yes = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Forget a source and how far it has read. Its stream and events stay."""
    path = own(tenant, "sources", source)
    at_desk(lambda desk: desk.ask("GET", path), data, url, api_key)
    if not yes:
        output.confirm(f"Remove the source {source}?")
    at_desk(lambda desk: desk.ask("DELETE", path), data, url, api_key)
    if json:
        output.document({"removed": source})
    else:
        output.say(f"removed {source}")


@commands.command(epilog=examples("$ postbus sources poll hello"))
def poll(
    source: SourceId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Look at a source now, until it has nothing more, and say what came. Works on a paused one too."""

    async def work(desk: Desk) -> dict[str, Any]:
        events = duplicates = 0
        for _ in range(TURNS_MAX):
            turn = await desk.ask("POST", f"{own(tenant, 'sources', source)}/poll")
            events += len(turn["events"])
            duplicates += turn["duplicates"]
            if not turn["more"]:
                break
        return {"source": source, "events": events, "duplicates": duplicates, "error": turn["error"]}

    done = at_desk(work, data, url, api_key)
    if json:
        output.document(done)
    else:
        output.say(f"{count(done['events'], 'new event')}, {done['duplicates']:,} known already")
        if done["error"] is not None:
            output.note(done["error"])
    if done["error"] is not None:
        raise typer.Exit(FAILED)


@commands.command(
    epilog=examples(
        """
        $ postbus sources run
        $ postbus sources run --tenant acme.prod
        """
    )
)
def run(
    *,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only its sources. Default: those of all tenants.")
    ] = None,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Host the sources in the foreground, until SIGTERM or Ctrl-C. `postbus serve` does so by itself."""
    if tenant is not None and tenant.count(".") != 1:
        raise Invalid(f"{tenant!r} is no tenant", hint="as in local.default")

    async def work() -> None:
        from postbus.schemas import Schemas  # noqa: PLC0415 - what speaks HTTP takes as long to load as a command
        from postbus.sources import SourceHost  # noqa: PLC0415

        async with opened_store(data) as log, SourceHost(log, CLOCK, tenant=tenant, checks=(Schemas(log).check,)):
            if json:
                output.document({"pid": os.getpid(), "data": data, "tenant": tenant})
            else:
                output.say("hosting the sources; stop with Ctrl-C")
            await until_told()

    asyncio.run(work())


async def until_told() -> None:
    """Wait for SIGTERM or Ctrl-C."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()
