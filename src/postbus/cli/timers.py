"""The commands of timers: messages to agents that are to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli import output
from postbus.cli.desk import at_desk, decoded, own
from postbus.cli.options import DATA, TENANT, ApiKey, Data, Json, Tenant, Url, age_of, examples

if TYPE_CHECKING:
    from postbus.cli.desk import Desk

__all__ = ["commands"]

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus timers add standup ann 'what did you do?' --cron '0 9 * * 1-5' --zone Europe/Amsterdam
        $ postbus timers list --json
        """
    ),
)
TimerName = Annotated[str, typer.Argument(metavar="TIMER", help="The timer's id.")]


@commands.callback()
def timers() -> None:
    """Timers: messages that reach an agent's inbox at an instant, at an interval, or by cron.

    They fire where inboxes are filled: under `postbus serve`, or `postbus inbox watch` for as long as it runs.
    """


@commands.command(
    epilog=examples(
        """
        $ postbus timers add reminder ann 'call back' --at 2030-01-31T12:00:00Z
        $ postbus timers add check ann '{"do": "check"}' --value --every 15m --until 2030-01-31T18:00:00Z
        $ postbus timers add standup ann 'what did you do?' --cron '0 9 * * 1-5' --zone Europe/Amsterdam
        """
    )
)
def add(
    timer: TimerName,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Whose inbox it goes to.")],
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The text.")],
    *,
    at: Annotated[str | None, typer.Option(metavar="INSTANT", help="Once, then.")] = None,
    every: Annotated[str | None, typer.Option(metavar="AGE", help="Again and again, from 60s up.")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="Minute, hour, day, month and weekday, as in '0 9 * * 1-5'.")
    ] = None,
    zone: Annotated[str, typer.Option(metavar="NAME", help="The time zone of --cron.")] = "UTC",
    until: Annotated[str | None, typer.Option(metavar="INSTANT", help="The last time it may fire.")] = None,
    value: Annotated[bool, typer.Option("--value", help="The message is a JSON value, not text.")] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Add a timer. One that was due while nothing ran fires once, late, and goes on with its next time."""
    if (at is not None) + (every is not None) + (cron is not None) != 1:
        raise typer.BadParameter("give one of --at, --every and --cron", param_hint="'--at'")
    namespace, name = tenant.split(".")
    body: dict[str, Any] = {
        "id": timer,
        "agent": agent,
        "message": decoded(message, "MESSAGE") if value else message,
        "namespace": namespace,
        "tenant": name,
        "at": at,
        "every": None if every is None else age_of(every, "--every"),
        "cron": cron,
        "zone": zone,
        "until": until,
    }
    made = at_desk(lambda desk: desk.ask("POST", "/timers", body), data, url, api_key)
    if json:
        output.document(made)
    else:
        output.say(f"added {timer}, due {made['due_at']}")


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus timers list
        $ postbus timers list --agent ann --json
        """
    ),
)
def list_(
    *,
    agent: Annotated[str | None, typer.Option(metavar="AGENT", help="Only those of this agent.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the timers and when each is due; one that is paused, or over, is not."""
    namespace, name = tenant.split(".")

    async def work(desk: Desk) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"namespace": namespace, "tenant": name, "agent": agent, "limit": 1000}
        while True:
            page = await desk.ask("GET", "/timers", query=query)
            found += page["timers"]
            if page["next"] is None:
                return found
            query["after"] = page["next"]

    found = at_desk(work, data, url, api_key)
    if json:
        output.document({"timers": found})
    elif found:
        rows = [(one["id"], one["agent"], _when(one), one["due_at"] or "-", one["fired"]) for one in found]
        output.table(("TIMER", "AGENT", "WHEN", "DUE", "FIRED"), rows)
    else:
        output.note("no timers")


def _when(timer: dict[str, Any]) -> str:
    if timer["at"] is not None:
        return f"at {timer['at']}"
    return f"every {timer['every']:g}s" if timer["every"] is not None else f"{timer['cron']} {timer['zone']}"


@commands.command(
    epilog=examples(
        """
        $ postbus timers remove standup
        """
    )
)
def remove(
    timer: TimerName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove a timer."""
    at_desk(lambda desk: desk.ask("DELETE", own(tenant, "timers", timer)), data, url, api_key)
    if json:
        output.document({"removed": timer})
    else:
        output.say(f"removed {timer}")


@commands.command(
    epilog=examples(
        """
        $ postbus timers pause standup
        """
    )
)
def pause(
    timer: TimerName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Let a timer rest."""
    found = at_desk(lambda desk: desk.ask("POST", own(tenant, "timers", timer, "pause")), data, url, api_key)
    if json:
        output.document(found)
    else:
        output.say(f"paused {timer}")


@commands.command(
    epilog=examples(
        """
        $ postbus timers resume standup
        """
    )
)
def resume(
    timer: TimerName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Let a timer go on with its next time."""
    found = at_desk(lambda desk: desk.ask("POST", own(tenant, "timers", timer, "resume")), data, url, api_key)
    if json:
        output.document(found)
    else:
        output.say(f"resumed {timer}, due {found['due_at'] or 'never again'}")
