"""The commands of the replies: sent through the delivery handles of events, from an outbox on disk."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli import output
from postbus.cli.desk import at_desk, decoded
from postbus.cli.options import (
    CLOCK,
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    Tenant,
    Url,
    address_of,
    examples,
    opened_store,
)
from postbus.cli.output import ago, count
from postbus.cli.sources import shown, until_told, values_of
from postbus.envelope import parse_instant

if TYPE_CHECKING:
    from postbus.cli.desk import Desk

__all__ = ["commands"]

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus deliveries send --event hello/0/3 'Thanks, fixed.'
        $ postbus deliveries list --state failed --json
        $ postbus deliveries run
        """
    ),
)
DeliveryId = Annotated[str, typer.Argument(metavar="ID", help="The delivery, as `postbus deliveries list` shows it.")]
OfEvent = Annotated[
    str | None, typer.Option("--event", metavar="ID", help="Through the handle of this event, as in hello/0/3.")
]
OfHandle = Annotated[str | None, typer.Option("--handle", metavar="JSON", help="Through this delivery handle.")]
Key = Annotated[
    str | None, typer.Option("--key", help="An idempotency key: the same reply under the same key is sent once.")
]


@commands.callback()
def deliveries() -> None:
    """Replies: what goes back through the delivery handle of an event, as comment, webhook, event or program.

    A reply is kept on disk and tried until it arrives; `postbus serve` carries them, and so does `postbus deliveries
    run`. What is given up on becomes a dead letter with the reason reply.

    Programs that handles may run are named in `POSTBUS_REPLY_COMMANDS`, separated by colons; webhooks may be inside
    your network with `POSTBUS_REPLY_ALLOW_PRIVATE=1`, and are signed with the secret in `POSTBUS_REPLY_SECRET`.
    """


def _to(tenant: str, event: str | None, handle: str | None) -> dict[str, Any]:
    """Return the part of a request that says through which handle it goes."""
    if (event is None) == (handle is None):
        raise typer.BadParameter("give --event or --handle, one of the two", param_hint="'--event'")
    namespace, name = tenant.split(".")
    whose = {"namespace": namespace, "tenant": name}
    if handle is None:
        return whose | {"event": address_of(event or "", tenant)}
    given = decoded(handle, "--handle")
    if not isinstance(given, dict):
        raise typer.BadParameter("a delivery handle is a JSON object", param_hint="'--handle'")
    return whose | {"handle": given}


def _whose(tenant: str) -> dict[str, Any]:
    namespace, name = tenant.split(".")
    return {"namespace": namespace, "tenant": name}


@commands.command(
    epilog=examples(
        """
        $ postbus deliveries send --event hello/0/3 'Thanks, fixed.'
        $ postbus deliveries send --handle '{"kind": "bus", "topic": "answers"}' '{"ok": true}' --value
        """
    )
)
def send(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say.")],
    *,
    value: Annotated[bool, typer.Option("--value", help="TEXT is a JSON value and is sent as such.")] = False,
    event: OfEvent = None,
    handle: OfHandle = None,
    key: Key = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Send a reply. It is on disk when this returns; whoever carries replies takes it from there."""
    body = _to(tenant, event, handle) | {"payload": decoded(text, "TEXT") if value else text, "key": key}
    _accepted(at_desk(lambda desk: desk.ask("POST", "/deliveries/send", body), data, url, api_key), as_json=json)


@commands.command(epilog=examples("$ postbus deliveries actions --event hello/0/3"))
def actions(
    *,
    event: OfEvent = None,
    handle: OfHandle = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Say what can be done through a handle, with the JSON Schemas of the arguments; the first is what `send` does."""
    body = _to(tenant, event, handle)
    found = at_desk(lambda desk: desk.ask("POST", "/deliveries/actions", body), data, url, api_key)
    if json:
        output.document(found)
    else:
        rows = [
            (one["name"], ", ".join(one["schema"].get("properties", {})) or "-", one["description"])
            for one in found["actions"]
        ]
        output.table(("ACTION", "ARGUMENTS", "WHAT IT DOES"), rows)


@commands.command(
    epilog=examples(
        """
        $ postbus deliveries invoke close --event hello/0/3 --set reason=not_planned
        $ postbus deliveries invoke label --event hello/0/3 --set 'add=["bug"]'
        """
    )
)
def invoke(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="What to do, as `postbus deliveries actions` says.")],
    *,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An argument; repeatable.")
    ] = None,
    event: OfEvent = None,
    handle: OfHandle = None,
    key: Key = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Do something through a handle, like closing the issue that an event is about."""
    body = _to(tenant, event, handle) | {"action": action, "arguments": values_of(pairs, "--set"), "key": key}
    _accepted(at_desk(lambda desk: desk.ask("POST", "/deliveries/invoke", body), data, url, api_key), as_json=json)


def _accepted(reply: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(reply)
    else:
        output.say(f"{reply['state']} {reply['id']}: {reply['handle']['kind']} {reply['action']}")


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus deliveries list
        $ postbus deliveries list --state failed --json
        """
    ),
)
def list_(
    *,
    state: Annotated[str | None, typer.Option("--state", help="Only those accepted, sent or failed.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="How many at most.")] = 100,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the replies, newest first."""
    query = _whose(tenant) | {"state": state, "limit": limit}
    found = at_desk(lambda desk: desk.ask("GET", "/deliveries", query=query), data, url, api_key)
    if json:
        output.document(found)
    elif found["deliveries"]:
        now_us = CLOCK.now_us()
        rows = [
            (
                one["id"],
                f"{one['handle']['kind']} {one['action']}",
                one["state"],
                one["attempts"],
                ago((now_us - parse_instant(one["created_at"])) / 1e6),
                " ".join((one["error"] or "").split()),
            )
            for one in found["deliveries"]
        ]
        output.table(("ID", "WHAT", "STATE", "ATTEMPTS", "AGE", "ERROR"), rows, cut=True)
    else:
        output.note("no deliveries")


@commands.command(epilog=examples("$ postbus deliveries show 0123456789abcdef0123456789abcdef"))
def show(
    delivery: DeliveryId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show one reply with every attempt that was made."""

    async def work(desk: Desk) -> dict[str, Any]:
        found: dict[str, Any] = await desk.ask("GET", f"/deliveries/{delivery}", query=_whose(tenant))
        tries = await desk.ask("GET", f"/deliveries/{delivery}/attempts", query=_whose(tenant))
        return found | {"tries": tries["attempts"]}

    facts = at_desk(work, data, url, api_key)
    if json:
        output.document(facts)
    else:
        shown(facts)


@commands.command(epilog=examples("$ postbus deliveries retry 0123456789abcdef0123456789abcdef"))
def retry(
    delivery: DeliveryId,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Try a failed reply again, attempts from 0."""

    async def work(desk: Desk) -> dict[str, Any]:
        found: dict[str, Any] = await desk.ask("POST", f"/deliveries/{delivery}/retry", query=_whose(tenant))
        return found

    _accepted(at_desk(work, data, url, api_key), as_json=json)


@commands.command(
    epilog=examples(
        """
        $ postbus deliveries run
        $ postbus deliveries run --once --json
        """
    )
)
def run(
    *,
    once: Annotated[bool, typer.Option("--once", help="Carry what is due now, and end.")] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Carry replies in the foreground, until SIGTERM or Ctrl-C. `postbus serve` does so by itself."""

    async def work() -> int:
        from postbus.inbox.replies import Replies, ReplyRules  # noqa: PLC0415 - takes as long to load as a command

        async with opened_store(data) as log:
            replies = Replies(log, CLOCK, tenant, rules=ReplyRules.from_environment())
            if once:
                return await replies.drain()
            async with replies:
                if json:
                    output.document({"pid": os.getpid(), "data": data, "tenant": tenant})
                else:
                    output.say("carrying replies; stop with Ctrl-C")
                await until_told()
            return 0

    tries = asyncio.run(work())
    if once:
        if json:
            output.document({"attempts": tries})
        else:
            output.say(f"made {count(tries, 'attempt')}")
