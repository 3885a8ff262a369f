"""``Replies``: accepted on disk, carried by a worker, tried again until they arrive or are given up on, on record."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from postbus import strict_json
from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.dead import grave
from postbus.envelope import draft
from postbus.inbox.replies.actions import (
    Action,
    BusHandle,
    actions_of,
    check_arguments,
    default_action,
    lane_of,
    parse_handle,
)
from postbus.inbox.replies.couriers import Couriers, Parcel
from postbus.inbox.replies.ledger import (
    ATTEMPTS,
    Attempt,
    Claimed,
    Reply,
    accept,
    claim,
    fail,
    is_due,
    load,
    lookup,
    next_due,
    page,
    postpone,
    reopen,
    sent,
)
from postbus.inbox.replies.rules import ReplyRules
from postbus.model import Conflict, Invalid, NotFound, PostbusError, RetryPolicy, Trust, Unreachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.inbox.replies.actions import Handle
    from postbus.log.sqlite import SqliteLog, Transaction

    Check = Callable[[str, bytes], Awaitable[None]]
    """Refuses a payload that a stream does not take, with ``Invalid``."""

__all__ = ["Check", "Replies", "Reply"]

logger = logging.getLogger("postbus.replies")

ACCEPTED = "delivery.accepted"
SOURCE = "replies"
JOURNAL = "journal"
PATIENCE = RetryPolicy(max_attempts=20, backoff_s=5.0, backoff_s_max=3600.0)
AT_ONCE = 8
LOOK_S = 0.5
LEASE_S = 60.0
PAGE_MAX = 1_000
SETTINGS = "SELECT kind, settings FROM source_registry WHERE tenant = ? AND source = ?"


class Replies:
    """The replies of one tenant. ``async with replies:`` runs the worker that carries them.

    A reply is durable when ``send`` or ``invoke`` returns; several processes may carry, each attempt is made by one of
    them and written down before it begins. Replies through one handle go out in the order they were accepted.
    """

    def __init__(
        self,
        log: SqliteLog,
        clock: Clock,
        tenant: str,
        *,
        rules: ReplyRules | None = None,
        retry: RetryPolicy = PATIENCE,
        lease_s: float = LEASE_S,
        checks: tuple[Check, ...] = (),
    ) -> None:
        self._log = log
        self._clock = clock
        self._tenant = tenant
        self._rules = rules or ReplyRules()
        self._retry = retry
        self._lease_s = lease_s
        self._checks = checks
        self._journal = f"{tenant}.{JOURNAL}"
        self._couriers = Couriers(clock, self._rules, self._settings)
        self._wake = asyncio.Event()
        self._stopping = False
        self._worker: asyncio.Task[None] | None = None

    # --- what an agent does ---

    async def send(self, handle: Any, payload: Any, *, key: str | None = None) -> Reply:
        """Accept a reply through a handle; text for people, or any JSON. Raises ``Invalid``, ``NotFound``.

        ``key``: an idempotency key of the caller's; the same reply under the same key is accepted once.
        """
        parsed = parse_handle(handle, self._rules)
        return await self._accept(parsed, *default_action(parsed, payload), key)

    async def actions(self, handle: Any) -> list[Action]:
        """Return what can be done through a handle, with the JSON Schemas of the arguments."""
        parsed = parse_handle(handle, self._rules)
        await self._check_source(parsed)
        return actions_of(parsed)

    async def invoke(
        self, handle: Any, action: str, arguments: dict[str, Any] | None = None, *, key: str | None = None
    ) -> Reply:
        """Accept an action through a handle. Raises ``Invalid`` for arguments that do not fit, ``NotFound``."""
        return await self._accept(parse_handle(handle, self._rules), action, arguments or {}, key)

    async def _accept(self, handle: Handle, action: str, given: Any, key: str | None) -> Reply:
        arguments = check_arguments(handle, action, given)
        await self._check_source(handle)
        name = self._clock.new_id() if key is None else _name(self._tenant, key)
        plain = msgspec.to_builtins(handle)
        payload = {"delivery": name, "handle": plain, "action": action, "arguments": arguments}
        event = draft(
            ACCEPTED,
            SOURCE,
            payload,
            native_id=f"delivery:{name}",
            correlation_id=handle.correlation_id if isinstance(handle, BusHandle) else None,
            trust=Trust.UNTRUSTED,
        )
        published = None
        if isinstance(handle, BusHandle):
            published = draft(
                handle.topic,
                SOURCE,
                arguments["payload"],
                native_id=f"delivery:{name}:reply",
                correlation_id=handle.correlation_id,
                trust=Trust.UNTRUSTED,
            )
        await self._log.ensure_stream(self._journal)
        target = self._journal
        if isinstance(handle, BusHandle) and await self._own_stream(handle.topic):
            target = handle.topic
        if published is not None:
            for check in self._checks:
                await check(target, published.payload_json)

        def write(tx: Transaction) -> Reply:
            known = lookup(tx.db, self._tenant, name)
            if known is not None:
                if known.handle == plain and known.action == action and known.arguments == arguments:
                    return known
                raise Conflict("another reply was accepted under this key", hint="use a new key for a new reply")
            receipt = tx.append(self._journal, [event])[0]
            lane = lane_of(self._tenant, handle)
            accept(tx, self._tenant, name, receipt, plain, lane, action, arguments)
            if published is not None:
                place = tx.append(target, [published])[0]
                sent(tx, name, 0, {"event": place.id})
            return load(tx.db, self._tenant, name)

        reply = await self._log.transact(write, grows=True)
        self._wake.set()
        return reply

    async def _own_stream(self, topic: str) -> bool:
        if topic.startswith(f"{self._tenant}."):
            return await self._log.has_stream(topic)
        if topic.count(".") == self._journal.count(".") and await self._log.has_stream(topic):
            raise Invalid(f"delivery handle: {topic} is not a topic of {self._tenant}")
        return False

    async def _check_source(self, handle: Handle) -> None:
        source = getattr(handle, "source", None)
        if source is not None:
            kind = "github" if hasattr(handle, "repo") else "webhook"
            settings = await self._settings(source, kind)
            if kind == "github" and settings["repo"].lower() != getattr(handle, "repo", "").lower():
                raise Invalid(f"delivery handle: the source {source} does not read that repository")

    async def _settings(self, source: str, kind: str) -> dict[str, Any]:
        row = await self._log.store.read(lambda db: db.execute(SETTINGS, (self._tenant, source)).fetchone())
        if row is None or row[0] != kind:
            raise Invalid(f"delivery handle: there is no {kind} source {source}")
        found: dict[str, Any] = strict_json.parse(bytes(row[1]))
        return found

    # --- what became of them ---

    async def get(self, delivery: str) -> Reply:
        """Return a reply by its id; raises ``NotFound``."""
        return await self._log.store.read(lambda db: load(db, self._tenant, delivery))

    async def find(self, *, state: str | None = None, after: str | None = None, limit: int = 100) -> list[Reply]:
        """Return replies, newest first; ``after`` is the id of the last one of the page before."""
        if state not in (None, "accepted", "sent", "failed"):
            raise Invalid(f"a reply is accepted, sent or failed, not {str(state)[:60]!r}")
        if not 1 <= limit <= PAGE_MAX:
            raise Invalid(f"limit is 1 to {PAGE_MAX}, not {limit}")
        return await self._log.store.read(lambda db: page(db, self._tenant, state, after, limit))

    async def attempts(self, delivery: str) -> list[Attempt]:
        """Return every try of a reply, oldest first; raises ``NotFound``."""
        await self.get(delivery)
        rows = await self._log.store.read(lambda db: list(db.execute(ATTEMPTS, (delivery,))))
        return [Attempt(*row) for row in rows]

    async def retry(self, delivery: str) -> Reply:
        """Carry a failed reply again, attempts from 0; raises ``NotFound``, or ``Conflict`` when it did not fail."""

        def write(tx: Transaction) -> Reply:
            if load(tx.db, self._tenant, delivery).state != "failed":
                raise Conflict(f"delivery {delivery} has not failed")
            reopen(tx, delivery)
            return load(tx.db, self._tenant, delivery)

        reply = await self._log.transact(write)
        self._wake.set()
        return reply

    # --- the worker ---

    async def drain(self) -> int:
        """Carry everything that is due now and return how many tries were made."""
        tries = 0
        while claimed := await self._claim():
            await asyncio.gather(*(self._carry(one) for one in claimed))
            tries += len(claimed)
        return tries

    async def run(self) -> None:
        """Carry replies as they come due, until ``stop``."""
        while not self._stopping:
            self._wake.clear()
            try:
                await self.drain()
                due_us = await self._log.store.read(lambda db: next_due(db, self._tenant))
            except PostbusError as error:
                logger.warning("replies of %s: %s", self._tenant, error)
                due_us = None
            left_s = LOOK_S if due_us is None else (due_us - self._clock.now_us()) / 1e6
            # Those accepted by other processes are looked for now and then.
            await self._clock.wait(self._wake, min(max(left_s, 0.01), LOOK_S))

    async def start(self) -> None:
        """Run the worker beside the caller."""
        self._stopping = False
        self._worker = asyncio.get_running_loop().create_task(self.run())

    async def stop(self) -> None:
        """Finish what is being carried and end. Idempotent."""
        self._stopping = True
        self._wake.set()
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker

    async def __aenter__(self) -> Replies:  # noqa: PYI034 - it is final
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    async def _claim(self) -> list[Claimed]:
        now_us, lease_us = self._clock.now_us(), round(self._lease_s * 1e6)
        if not await self._log.store.read(lambda db: is_due(db, self._tenant, self._journal, now_us)):
            return []
        return await self._log.transact(lambda tx: claim(tx, self._tenant, self._journal, now_us, lease_us, AT_ONCE))

    async def _carry(self, claimed: Claimed) -> None:
        """Make one try and write down what came of it."""
        attempt = claimed.reply.attempts
        if attempt > self._retry.max_attempts:
            ended = Unreachable("given up: the process that tried it ended each time", permanent=True)
            await self._failed(claimed.reply, ended)
            return
        try:
            async with asyncio.timeout(self._lease_s):
                result = await self._couriers.carry(_parcel(claimed, self._rules))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is written down and tried again
            await self._failed(claimed.reply, error)
        else:
            await self._log.transact(lambda tx: sent(tx, claimed.reply.id, attempt, result))

    async def _failed(self, reply: Reply, error: Exception) -> None:
        if isinstance(error, PostbusError):
            text = error.message if error.hint is None else f"{error.message} ({error.hint})"
        else:
            text = f"{type(error).__name__}: {error}"
        permanent = isinstance(error, Invalid) or getattr(error, "permanent", False)
        if not permanent and reply.attempts < self._retry.max_attempts:
            wait_s = max(retry_delay_s(self._retry, reply.attempts), getattr(error, "retry_after_s", None) or 0.0)
            due_us = self._clock.now_us() + round(wait_s * 1e6)
            await self._log.transact(lambda tx: postpone(tx, reply, text, due_us))
            return
        logger.error("reply %s of %s failed: %s", reply.id, self._tenant, text)
        dead = grave(self._journal)
        await self._log.ensure_stream(dead)
        with contextlib.suppress(NotFound):
            await self._log.transact(lambda tx: fail(tx, reply, text, dead), grows=True)


def _name(tenant: str, key: str) -> str:
    if not 1 <= len(key.encode(errors="replace")) <= 200:  # noqa: PLR2004 - the limit of other ids
        raise Invalid("an idempotency key has 1 to 200 bytes")
    return hashlib.sha256(f"{tenant}\n{key}".encode(errors="replace")).hexdigest()[:32]


def _parcel(claimed: Claimed, rules: ReplyRules) -> Parcel:
    reply = claimed.reply
    return Parcel(
        delivery=reply.id,
        handle=parse_handle(reply.handle, rules),
        action=reply.action,
        arguments=reply.arguments,
        attempt=claimed.tries,
        created_at_us=reply.created_at_us,
    )
