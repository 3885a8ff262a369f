"""The commands of the spool: how much waits for a remote, and sending it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.broker import Relay, Spool
from postbus.bus.outlet import outlet_of
from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, Tenant, examples, opened_store
from postbus.cli.output import ago, count
from postbus.model import Invalid, NotFound, Unreachable, instant

if TYPE_CHECKING:
    from postbus.broker import SpoolStatus
    from postbus.broker.nats_link import NatsLink
    from postbus.log.sqlite import SqliteLog

__all__ = ["commands"]

LOOK_S = 0.2

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus spool status
        $ postbus spool drain
        """
    ),
)


@commands.callback()
def spool() -> None:
    """The spool: events that wait on disk for a remote that could not be reached."""


@commands.command(
    epilog=examples(
        """
        $ postbus spool status
        $ postbus spool status --json
        """
    )
)
def status(*, tenant: Tenant = TENANT, data: Data = DATA, json: Json = False) -> None:
    """Say how much waits, since when, and how many events were given up on."""

    async def run() -> SpoolStatus:
        async with opened_store(data) as log:
            return await Spool(log, tenant=tenant).status()

    found = asyncio.run(run())
    if json:
        output.document(_facts(found))
        return
    if found.rows:
        waiting = ago((CLOCK.now_us() - (found.oldest_at_us or 0)) / 1e6)
        output.say(f"{count(found.rows, 'event')} waiting, {found.bytes:,} bytes, the oldest for {waiting}")
    else:
        output.say("nothing is waiting")
    if found.dead:
        output.say(f"{count(found.dead, 'dead letter')}: see `postbus dlq list --subscription _spool`")


def _facts(found: SpoolStatus) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.structs.asdict(found)
    oldest = facts.pop("oldest_at_us")
    return facts | {"oldest_at": None if oldest is None else instant(oldest)}


@commands.command(
    epilog=examples(
        """
        $ postbus spool drain
        $ postbus spool drain --to nats://127.0.0.1:4222
        $ postbus spool drain --to nats://127.0.0.1:4222 --stream ORDERS --timeout 600
        """
    )
)
def drain(
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A NATS server, as in nats://host:4222. Default: the remote log of the folder."
        ),
    ] = None,
    stream: Annotated[str, typer.Option(help="The JetStream stream that keeps the events.")] = "POSTBUS",
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long to try.")] = 60.0,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Send what waits to the remote log that the folder follows, or to a NATS server, in order, until nothing is left.

    A process that is doing so already goes on, and this one waits for it.
    """

    async def run() -> _Drained:
        async with opened_store(data) as log:
            return await _drain(log, to, stream, timeout, tenant)

    done = asyncio.run(run())
    if json:
        output.document(msgspec.structs.asdict(done))
        return
    output.say(f"sent {count(done.sent, 'event')}")
    if done.dead:
        output.note(f"{count(done.dead, 'event')} became dead letters: see `postbus dlq list --subscription _spool`")


class _Drained(msgspec.Struct, frozen=True):
    """What became of the events that waited."""

    sent: int
    dead: int
    left: int


async def _drain(log: SqliteLog, to: str | None, stream: str, timeout_s: float, tenant: str) -> _Drained:
    outlet = outlet_of(log)
    if to is None:
        if outlet is None:
            raise Invalid("the folder follows no remote log", hint="name a NATS server with --to")
        return await _emptied(outlet.relay, await outlet.relay.spool.status(), timeout_s)
    if outlet is not None:
        raise Invalid("the folder follows a remote log, and what waits is for that", hint="leave --to out")
    link, remote = _connect(to, stream)
    await link.start()
    try:
        await link.ready(min(timeout_s, 5.0))
        relay = Relay(log, remote, tenant=tenant)
        before = await relay.spool.status()
        async with relay:
            return await _emptied(relay, before, timeout_s)
    finally:
        await link.close()


async def _emptied(relay: Relay, before: SpoolStatus, timeout_s: float) -> _Drained:
    """Wait until nothing is left; what this process sent before it looked counts, too."""
    deadline = CLOCK.monotonic_s() + timeout_s
    with output.progress("sending") as advance:
        while not await relay.drained(LOOK_S):
            left = (await relay.spool.status()).rows
            advance(before.rows - left, before.rows)
            if CLOCK.monotonic_s() > deadline:
                raise Unreachable(f"{count(left, 'event')} could not be sent within {timeout_s:g} s")
    after = await relay.spool.status()
    dead = after.dead - before.dead
    return _Drained(max(relay.sent, before.rows - after.rows - dead), dead, after.rows)


def _connect(to: str, stream: str) -> tuple[NatsLink, Any]:
    try:
        from postbus.broker.nats_link import NatsLink  # noqa: PLC0415 - needs the extra
        from postbus.broker.nats_remote import NatsRemote  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        raise NotFound("nats-py is not installed", hint="pip install 'postbus[nats]'") from error
    link = NatsLink(to)
    return link, NatsRemote(link, stream=stream)
