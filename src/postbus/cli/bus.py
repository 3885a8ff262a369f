"""The commands of the bus: publish, tail, events, subscriptions, requeue."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.bus.follow import ends, follow
from postbus.bus.requeue import requeue as requeue_events
from postbus.bus.search import EventQuery, find_events
from postbus.bus.stats import subscription_states
from postbus.cli import output
from postbus.cli.log import STDIN_BYTES_MAX
from postbus.cli.options import (
    CLOCK,
    DATA,
    TENANT,
    Data,
    Json,
    Tenant,
    Yes,
    address_of,
    examples,
    headers_of,
    moment_of,
    opened_bus,
    opened_store,
)
from postbus.cli.output import count, short
from postbus.envelope import draft
from postbus.model import DeliveryStatus, NotFound, instant
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from postbus.bus.requeue import Requeued
    from postbus.bus.search import Found
    from postbus.bus.stats import SubscriptionState
    from postbus.model import Event, Receipt

__all__ = ["commands", "state_facts", "state_rows"]

NUMBER_CHARS_MAX = 18
STATE_COLUMNS = ("SUBSCRIPTION", "PATTERNS", "LAG", "PENDING", "RUNNING", "WAITING", "DEAD", "OWNER")

commands = typer.Typer()


# --- publish ----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus publish order.paid '{"order": 17}' --source shop
        $ postbus publish order.paid '{"order": 17}' --key customer-9 --native-id stripe-evt-123
        $ postbus publish order.paid - < order.json
        """
    ),
)
def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The event's topic, as in order.paid.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="The payload, kept byte for byte; - reads it from stdin.")
    ],
    *,
    source: Annotated[str, typer.Option(help="What produced the event, as in github:owner/repo.")] = "cli",
    key: Annotated[str | None, typer.Option(help="Events with the same key are handled in order.")] = None,
    native_id: Annotated[
        str | None, typer.Option(help="The producer's own id: publishing it again changes nothing.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Which variant of the native id this is.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="Facts about the event, a JSON object.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="What joins events of one conversation.")] = None,
    occurred_at: Annotated[
        str | None, typer.Option(metavar="INSTANT", help="When it happened, as in 2026-01-31T12:00:00Z. Default: now.")
    ] = None,
    no_create: Annotated[
        bool, typer.Option("--no-create", help="Refuse a data folder without a store instead of making one.")
    ] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Publish an event; it is durable when the command returns, and handlers of running processes are woken.

    It goes to the stream that is registered under exactly this topic, else to the tenant's journal.
    """
    raw = sys.stdin.buffer.read(STDIN_BYTES_MAX) if payload == "-" else os.fsencode(payload)
    facts: dict[str, Any] = {
        "variant": variant or "",
        "key": key,
        "metadata": None if metadata is None else os.fsencode(metadata),
        "headers": headers_of(header or []),
        "correlation_id": correlation_id,
        "native_id": native_id,
        "occurred_at": occurred_at,
    }
    draft(topic, source, raw, **facts)  # whatever is wrong with it is said before anything is made

    async def run() -> Receipt:
        async with opened_bus(data, tenant, create=not no_create) as bus:
            return await bus.publish(topic, source, raw, **facts)

    output.receipt(asyncio.run(run()), "published", as_json=json)


# --- tail -------------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus tail
        $ postbus tail 'email.*' --follow
        $ postbus tail --limit 0 --follow --json
        """
    ),
)
def tail(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Only topics that match: * is one token, > one or more at the end.")
    ] = ">",
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="How many of the last events to print.")] = 10,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events as they come.")] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Print the last events that were published, one per line, and with `--follow` the next ones.

    Looks at the journal and at every stream of the tenant but the dead letters (see `postbus dlq`). Nothing changes:
    no subscription moves.
    """
    check_pattern(pattern)

    def show(page: list[Event]) -> None:
        output.events(page, as_json=json, name=lambda event: short(event.id, tenant))

    async def run() -> None:
        async with opened_store(data) as log:
            places = await ends(log, tenant)
            latest: list[Found] = []
            if limit:
                topic = None if pattern == ">" else pattern
                latest = await find_events(log, EventQuery(tenant=tenant, topic=topic, limit=limit))
            epochs = {name: epoch for name, epoch, _ in places}
            page = [found.event for found in latest]
            # What came since the ends were noted is seen while following.
            show([e for e in page if e.offset < places.get((e.stream, epochs.get(e.stream, -1), e.partition), 0)])
            if not follow_ and not latest and not json:
                output.note("no events there")
            if follow_:
                async for page in follow(log, tenant, places):
                    show([event for event in page if matches(pattern, event.topic)])

    asyncio.run(run())


# --- events -----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus events --status failed
        $ postbus events --topic 'order.*' --since 2h
        $ postbus events --since 2026-01-31T12:00:00Z --until 2026-01-31T13:00:00Z --json
        $ postbus events --correlation local.default.journal/0/17
        """
    ),
)
def events(
    *,
    topic: Annotated[str | None, typer.Option(metavar="PATTERN", help="Only topics that match.")] = None,
    correlation: Annotated[str | None, typer.Option(metavar="ID", help="Only this correlation.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Happened at or after: an instant, or an age like 10m, 2h, 3d.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Happened before: an instant or an age.")] = None,
    status: Annotated[
        DeliveryStatus | None, typer.Option(help="Only this status, the worst over the event's subscriptions.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most: the latest ones.")] = 100,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Find events and what became of them; the latest ones that fit, oldest first.

    The status is the worst over an event's subscriptions: failed, processing, pending or done. An event nobody
    subscribes to is done once a running bus has passed it.
    """
    query = EventQuery(
        tenant=tenant,
        topic=topic if topic is None else check_pattern(topic),
        correlation_id=None if correlation is None else address_of(correlation, tenant),
        since_us=moment_of(since, "--since"),
        until_us=moment_of(until, "--until"),
        status=status,
        limit=limit + 1,
    )

    async def run() -> list[Found]:
        async with opened_store(data) as log:
            return await find_events(log, query)

    found = asyncio.run(run())
    more, found = len(found) > limit, found[-limit:]
    if json:
        output.document({"events": [_found_facts(one) for one in found], "more": more})
        return
    for one in found:
        output.events([one.event], as_json=False, name=lambda e, s=one.status: f"{s:<10}  {short(e.id, tenant)}")  # type: ignore[misc]  # mypy cannot infer a default's type
        if one.error:
            output.say(f"            {one.error}")
    if more:
        output.note(f"there are older ones; --limit shows more than {limit}")
    elif not found:
        output.note("no events fit")


def _found_facts(found: Found) -> msgspec.Raw:
    """Return the event as ``read`` prints it, with what became of it."""
    processed = found.processed_at_us
    more = {
        "journal_id": found.journal_id,
        "status": found.status,
        "error": found.error,
        "processed_at": None if processed is None else instant(processed),
    }
    return msgspec.Raw(found.event.to_json()[:-1] + b"," + msgspec.json.encode(more)[1:])


# --- subscriptions ----------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus subscriptions
        $ postbus subscriptions --delete kitchen
        """
    ),
)
def subscriptions(
    *,
    delete: Annotated[
        str | None, typer.Option(metavar="ID", help="Forget this subscription, its place and its deliveries.")
    ] = None,
    yes: Yes = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """List the subscriptions: what they read, how far they are, and which process works on them.

    Lag counts the events it has not passed yet, whatever their topic. Pending are those among them that match, running
    those in the hands of a handler, waiting those that wait for a retry, dead those with an open dead letter. The owner
    is the process that calls the handlers now.
    """
    if delete is not None:
        _delete(delete, tenant, data, ask=not yes, as_json=json)
        return

    async def run() -> list[SubscriptionState]:
        async with opened_store(data) as log:
            return await subscription_states(log, CLOCK, tenant)

    found = asyncio.run(run())
    if json:
        output.document({"subscriptions": [state_facts(state) for state in found]})
    elif found:
        output.table(STATE_COLUMNS, state_rows(found))
    else:
        output.note("no subscriptions yet; a program that subscribes makes them")


def _delete(name: str, tenant: str, data: str, *, ask: bool, as_json: bool) -> None:
    async def look() -> SubscriptionState:
        async with opened_store(data) as log:
            for state in await subscription_states(log, CLOCK, tenant):
                if state.registered.id == name:
                    return state
        raise NotFound(f"there is no subscription {name}", hint="see `postbus subscriptions`")

    state = asyncio.run(look())
    if ask:
        facts = f"lag {state.lag:,}, {state.waiting:,} waiting, {count(state.dead, 'open dead letter')}"
        owned = f"; process {state.owners[0]} works on it now" if state.owners else ""
        output.confirm(f"Forget the subscription {name} and its place ({facts}{owned})?")

    async def forget() -> None:
        async with opened_bus(data, tenant) as bus:
            await bus.delete_subscription(name)

    asyncio.run(forget())
    if as_json:
        output.document({"deleted": state_facts(state)})
    else:
        output.say(f"deleted {name}")


def state_facts(state: SubscriptionState) -> dict[str, Any]:
    """Return a subscription's state for programs."""
    counts = ("lag", "pending", "running", "waiting", "dead", "owners")
    return {**msgspec.to_builtins(state.registered), **{name: getattr(state, name) for name in counts}}


def state_rows(states: list[SubscriptionState]) -> list[tuple[object, ...]]:
    """Return the rows of subscriptions under ``STATE_COLUMNS``."""
    return [
        (
            state.registered.id,
            " ".join(state.registered.patterns),
            state.lag,
            state.pending,
            state.running,
            state.waiting,
            state.dead,
            " ".join(f"pid {pid}" for pid in state.owners) or "-",
        )
        for state in states
    ]


# --- requeue ----------------------------------------------------------------------------------------------------------


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus requeue 17
        $ postbus requeue journal/0/16 journal/0/18
        """
    ),
)
def requeue(
    event: Annotated[
        list[str],
        typer.Argument(metavar="EVENT", help="Numbers in event_journal, or addresses stream/partition/offset."),
    ],
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Deliver failed events again to the subscriptions they failed for, with attempts from 0.

    All of them or none. A running process takes them up at once, otherwise the next one that starts.
    """
    wanted: list[int | str] = [
        int(text) if text.isascii() and text.isdigit() and len(text) <= NUMBER_CHARS_MAX else address_of(text, tenant)
        for text in dict.fromkeys(event)
    ]

    async def run() -> list[Requeued]:
        async with opened_store(data) as log:
            return await requeue_events(log, wanted)

    done = asyncio.run(run())
    if json:
        output.document({"requeued": done})
        return
    for one in done:
        output.say(f"requeued {one.id} for {', '.join(one.subscriptions)}")
