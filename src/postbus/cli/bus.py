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
    SOURCE,
    TENANT,
    ApiKey,
    Data,
    Json,
    OccurredAt,
    Source,
    Tenant,
    Url,
    Yes,
    address_of,
    connected,
    examples,
    headers_of,
    moment_of,
    opened_bus,
    opened_store,
)
from postbus.cli.output import count, short
from postbus.envelope import draft
from postbus.model import DeliveryStatus, Invalid, NotFound, instant
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from postbus.bus.requeue import Requeued
    from postbus.bus.search import Found
    from postbus.bus.stats import SubscriptionState
    from postbus.model import Event, Receipt

__all__ = ["commands", "state_facts", "state_rows"]

NUMBER_CHARS_MAX = 18
FOLLOW_PATIENCE_S = 600.0
NAME_DOTS = 2
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
    source: Source = None,
    key: Annotated[str | None, typer.Option(help="Events with the same key are handled in order.")] = None,
    native_id: Annotated[
        str | None, typer.Option(help="The producer's own id: publishing it again changes nothing.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Which variant of the native id this is.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="Facts about the event, a JSON object.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="What joins events of one conversation.")] = None,
    occurred_at: OccurredAt = None,
    no_create: Annotated[
        bool, typer.Option("--no-create", help="Refuse a data folder without a store instead of making one.")
    ] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Publish an event; it is durable when the command returns, and handlers of running processes are woken.

    It goes to the stream that is registered under exactly this topic, else to the tenant's journal. A server only takes
    registered topics (see `postbus topics`): namespace.tenant.name, or just NAME for one of the tenant's.
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
    draft(topic, source or SOURCE, raw, **facts)  # whatever is wrong with it is said before anything is made

    async def run() -> Receipt:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return await server.publish(_registered(topic), raw, source=source, **facts)
        async with opened_bus(data, tenant, create=not no_create) as bus:
            return await bus.publish(topic, source or SOURCE, raw, **facts)

    output.receipt(asyncio.run(run()), "published", as_json=json)


def _registered(topic: str) -> str:
    """Return a topic that a server may have; refuses those that only a journal takes."""
    if topic.count(".") in (0, NAME_DOTS):
        return topic
    message = f"a server takes registered topics only, and {topic} cannot be one"
    raise Invalid(message, hint="give NAME or namespace.tenant.name; see `postbus topics create --help`")


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
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print the last events that were published, one per line, and with `--follow` the next ones.

    Looks at the journal and at every stream of the tenant but the dead letters (see `postbus dlq`). Nothing changes:
    no subscription moves. A server that cannot be reached for a while is waited for, and nothing is missed.
    """
    check_pattern(pattern)
    topic = None if pattern == ">" else pattern
    query = EventQuery(tenant=tenant, topic=topic, limit=limit)

    def show(page: list[Event]) -> None:
        output.events(page, as_json=json, name=lambda event: short(event.id, tenant))

    def end(latest: list[Found]) -> None:
        if not follow_ and not latest and not json:
            output.note("no events there")

    async def run_there(url: str) -> None:
        async with connected(url, api_key, tenant) as server:
            found = await server.find(query)
        show([one.event for one in found.events])
        end(found.events)
        if follow_:
            async with connected(url, api_key, tenant, patience_s=FOLLOW_PATIENCE_S) as server:
                async for page in server.news(query, found.end):
                    show(page)

    async def run() -> None:
        async with opened_store(data) as log:
            places = await ends(log, tenant)
            latest = await find_events(log, query) if limit else []
            epochs = {name: epoch for name, epoch, _ in places}
            page = [found.event for found in latest]
            # What came since the ends were noted is seen while following.
            show([e for e in page if e.offset < places.get((e.stream, epochs.get(e.stream, -1), e.partition), 0)])
            end(latest)
            if follow_:
                async for page in follow(log, tenant, places):
                    show([event for event in page if matches(pattern, event.topic)])

    asyncio.run(run() if url is None else run_there(url))


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
    url: Url = None,
    api_key: ApiKey = None,
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
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return (await server.find(query)).events
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
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the subscriptions: what they read, how far they are, and which process works on them.

    Lag counts the events it has not passed yet, whatever their topic. Pending are those among them that match, running
    those in the hands of a handler, waiting those that wait for a retry, dead those with an open dead letter. The owner
    is the process that calls the handlers now.
    """

    async def run() -> list[SubscriptionState]:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return await server.states()
        async with opened_store(data) as log:
            return await subscription_states(log, CLOCK, tenant)

    async def forget(name: str) -> None:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                await server.forget(name)
            return
        async with opened_bus(data, tenant) as bus:
            await bus.delete_subscription(name)

    found = asyncio.run(run())
    if delete is not None:
        state = _chosen(found, delete, ask=not yes)
        asyncio.run(forget(delete))
        if json:
            output.document({"deleted": state_facts(state)})
        else:
            output.say(f"deleted {delete}")
        return
    if json:
        output.document({"subscriptions": [state_facts(state) for state in found]})
    elif found:
        output.table(STATE_COLUMNS, state_rows(found))
    else:
        output.note("no subscriptions yet; a program that subscribes makes them")


def _chosen(states: list[SubscriptionState], name: str, *, ask: bool) -> SubscriptionState:
    """Return the subscription of that id, once it is certain that it is to go."""
    state = next((state for state in states if state.registered.id == name), None)
    if state is None:
        raise NotFound(f"there is no subscription {name}", hint="see `postbus subscriptions`")
    if ask:
        facts = f"lag {state.lag:,}, {state.waiting:,} waiting, {count(state.dead, 'open dead letter')}"
        owned = f"; process {state.owners[0]} works on it now" if state.owners else ""
        output.confirm(f"Forget the subscription {name} and its place ({facts}{owned})?")
    return state


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
