"""The commands of the dead letters: list, show, replay, purge."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.bus.purge import dead_letters
from postbus.bus.purge import purge as purge_letters
from postbus.bus.requeue import parse_address
from postbus.cli import output
from postbus.cli.options import (
    CLOCK,
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    Tenant,
    Url,
    Yes,
    address_of,
    connected,
    examples,
    opened_store,
)
from postbus.cli.output import ago, count, short
from postbus.model import Conflict, instant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.cli.remote import Remote
    from postbus.delivery.dead import DeadEntry
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Event

__all__ = ["commands"]

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus dlq list
        $ postbus dlq show journal-dlq/0/3
        $ postbus dlq replay journal-dlq/0/3
        $ postbus dlq purge --topic 'test.>' --export purged.jsonl
        """
    ),
)

Letters = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Dead letters by id, as in journal-dlq/0/3.")]
Subscription = Annotated[
    str | None, typer.Option("--subscription", metavar="ID", help="Only what died for this subscription.")
]
Topic = Annotated[str | None, typer.Option("--topic", metavar="PATTERN", help="Only topics that match.")]
Reason = Annotated[
    str | None,
    typer.Option("--reason", help="Only what died for this reason: max_attempts, rejected, loop, crash."),
]


@commands.callback()
def dlq() -> None:
    """Dead letters: events that a subscription was given up on, with the reason.

    Each is kept in the stream `…-dlq` and in the state open until it is replayed or purged.
    """


class _Folder:
    """The dead letters in a data folder, with the calls that a server has."""

    def __init__(self, log: SqliteLog, tenant: str) -> None:
        self._log = log
        self._tenant = tenant
        self._letters = dead_letters(log, CLOCK, tenant)

    async def find_letters(
        self, *, subscription: str | None, topic: str | None, reason: str | None, state: str | None, limit: int | None
    ) -> list[DeadEntry]:
        return await self._letters.find(subscription=subscription, topic=topic, reason=reason, state=state, limit=limit)

    async def letter(self, letter: str) -> DeadEntry:
        return await self._letters.show(letter)

    async def letter_event(self, entry: DeadEntry) -> Event | None:
        stream, partition, offset = parse_address(entry.id)
        found = await self._log.fetch(stream, partition, offset, 1)
        return found[0] if found and found[0].offset == offset else None

    async def replay_letters(self, entries: list[DeadEntry], per_second: float | None) -> int:
        return await self._letters.replay(entries, per_second=per_second)

    async def purge_letters(self, entries: list[DeadEntry]) -> int:
        return await purge_letters(self._log, CLOCK, self._tenant, entries, "cli")


@asynccontextmanager
async def _opened(data: str, url: str | None, api_key: str | None, tenant: str) -> AsyncIterator[_Folder | Remote]:
    """Open the dead letters of a data folder, or of a server if there is a URL."""
    if url is not None:
        async with connected(url, api_key, tenant) as server:
            yield server
    else:
        async with opened_store(data) as log:
            yield _Folder(log, tenant)


# --- list -------------------------------------------------------------------------------------------------------------


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus dlq list
        $ postbus dlq list --subscription billing --reason max_attempts
        $ postbus dlq list --all --json
        """
    ),
)
def list_(
    *,
    subscription: Subscription = None,
    topic: Topic = None,
    reason: Reason = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that were replayed or purged.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="How many at most: the oldest ones. Default: all.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the open dead letters, oldest first."""

    async def run() -> list[DeadEntry]:
        async with _opened(data, url, api_key, tenant) as letters:
            return await letters.find_letters(
                subscription=subscription, topic=topic, reason=reason, state=None if every else "open", limit=limit
            )

    found = asyncio.run(run())
    if json:
        output.document({"dead_letters": [_facts(entry) for entry in found]})
    elif found:
        now_s = CLOCK.now_us() / 1e6
        rows = [
            (
                short(entry.id, tenant),
                entry.subscription,
                entry.topic,
                entry.state if every else entry.reason,
                ago(now_s - entry.created_at),
                " ".join(entry.error.split()),
            )
            for entry in found
        ]
        columns = ("ID", "SUBSCRIPTION", "TOPIC", "STATE" if every else "REASON", "AGE", "ERROR")
        output.table(columns, rows, cut=True)
    else:
        output.note("no dead letters" if every else "no open dead letters")


def _facts(entry: DeadEntry) -> dict[str, Any]:
    facts = msgspec.structs.asdict(entry)
    facts["payload"] = msgspec.Raw(entry.payload.encode())
    return facts | {"origin": entry.origin_id, "created_at": instant(round(entry.created_at * 1e6))}


# --- show -------------------------------------------------------------------------------------------------------------


@commands.command(epilog=examples("$ postbus dlq show journal-dlq/0/3"))
def show(
    letter: Annotated[str, typer.Argument(metavar="ID", help="The dead letter, as in journal-dlq/0/3.")],
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show one dead letter: what died, for whom, why, and the event itself."""

    async def run() -> tuple[DeadEntry, Event | None]:
        async with _opened(data, url, api_key, tenant) as letters:
            entry = await letters.letter(address_of(letter, tenant))
            return entry, await letters.letter_event(entry)

    entry, event = asyncio.run(run())
    if json:
        output.document(_exported(entry, event))
        return
    facts = {
        "id": entry.id,
        "state": entry.state,
        "origin": entry.origin_id,
        "topic": entry.topic,
        "subscription": entry.subscription,
        "reason": entry.reason,
        "attempts": entry.attempts,
        "died": f"{instant(round(entry.created_at * 1e6)):%Y-%m-%dT%H:%M:%SZ}",
        "error": entry.error,
    }
    if event is not None:
        given = {name: value for name, value in event.headers.items() if not name.startswith("postbus.")}
        facts |= {
            "source": event.source,
            "occurred": f"{event.occurred_at:%Y-%m-%dT%H:%M:%SZ}",
            "correlation": event.correlation_id or "-",
        }
        facts |= {f"header {name}": value for name, value in given.items()}
    for name, value in facts.items():
        output.say(f"{name:<13} {value}")
    output.say(f"{'payload':<13} {' '.join(entry.payload.splitlines())}")


def _exported(entry: DeadEntry, event: Event | None) -> dict[str, Any]:
    """Return everything there is to know of a dead letter."""
    return {**_facts(entry), "event": None if event is None else msgspec.Raw(event.to_json())}


# --- replay -----------------------------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """
        $ postbus dlq replay journal-dlq/0/3 journal-dlq/0/4
        $ postbus dlq replay --subscription billing --rate 5
        $ postbus dlq replay --topic '>'
        """
    )
)
def replay(
    letter: Letters = None,
    *,
    subscription: Subscription = None,
    topic: Topic = None,
    reason: Reason = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="At most that many a second.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Deliver dead letters again to the subscription they came from, with attempts from 0.

    Those named, or all open ones that fit; `--topic '>'` means every one. A running process takes them up at once,
    otherwise the next one that starts.
    """
    if not letter and subscription is None and topic is None and reason is None:
        message = "name dead letters, or choose them with --subscription, --topic or --reason"
        raise typer.BadParameter(message, param_hint="'ID'")

    async def run() -> tuple[int, int]:
        async with _opened(data, url, api_key, tenant) as letters:
            chosen = await _chosen(letters, letter, subscription, topic, reason, tenant)
            with output.progress("replaying"):
                return await letters.replay_letters(chosen, rate), len(chosen)

    done, chosen = asyncio.run(run())
    if json:
        output.document({"replayed": done, "passed_over": chosen - done})
        return
    output.say(f"replayed {count(done, 'dead letter')}")
    if chosen > done:
        left = count(chosen - done, "dead letter")
        output.note(f"passed over {left}: the subscription is gone, or somebody else was faster")


async def _chosen(
    letters: _Folder | Remote,
    letter: list[str] | None,
    subscription: str | None,
    topic: str | None,
    reason: str | None,
    tenant: str,
) -> list[DeadEntry]:
    """Return the open dead letters that are named, or that fit; refuses a name that is not of an open one."""
    if not letter:
        return await letters.find_letters(
            subscription=subscription, topic=topic, reason=reason, state="open", limit=None
        )
    if subscription is not None or topic is not None or reason is not None:
        raise typer.BadParameter("give ids or a filter, one of the two", param_hint="'ID'")
    named = [await letters.letter(address_of(one, tenant)) for one in dict.fromkeys(letter)]
    for entry in named:
        if entry.state != "open":
            raise Conflict(f"dead letter {entry.id} was {entry.state} already", hint="see `postbus dlq list`")
    return named


# --- purge ------------------------------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """
        $ postbus dlq purge journal-dlq/0/3
        $ postbus dlq purge --reason rejected --export purged.jsonl --yes
        """
    )
)
def purge(
    letter: Letters = None,
    *,
    subscription: Subscription = None,
    topic: Topic = None,
    reason: Reason = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="First write them to a new file, one JSON object on each line.")
    ] = None,
    yes: Yes = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Put dead letters away for good: those named, or all open ones that fit, or simply all open ones.

    Asks first. An event on the topic `audit.dlq.purged` keeps record of it.
    """

    async def look() -> list[DeadEntry]:
        async with _opened(data, url, api_key, tenant) as letters:
            return await _chosen(letters, letter, subscription, topic, reason, tenant)

    chosen = asyncio.run(look())
    if chosen and not yes:
        output.confirm(f"Put away {count(len(chosen), 'open dead letter')} for good?")

    async def run() -> int:
        async with _opened(data, url, api_key, tenant) as letters:
            if export is not None:
                await _write(letters, chosen, export)
            return await letters.purge_letters(chosen)

    done = asyncio.run(run())
    if json:
        output.document({"purged": done, "exported": None if export is None else str(export)})
        return
    kept = "" if export is None else f"; written to {export}"
    output.say(f"purged {count(done, 'dead letter')}{kept}")


async def _write(letters: _Folder | Remote, chosen: list[DeadEntry], path: Path) -> None:
    """Write dead letters to a new file, which is on disk when this returns."""
    try:
        file = path.open("xb")
    except FileExistsError:
        message = f"{path} exists already"
        raise Conflict(message, hint="name a new file; nothing was purged") from None
    with file, output.progress("exporting") as advance:
        for number, entry in enumerate(chosen):
            advance(number, len(chosen))
            file.write(msgspec.json.encode(_exported(entry, await letters.letter_event(entry))) + b"\n")
        file.flush()
        os.fsync(file.fileno())
