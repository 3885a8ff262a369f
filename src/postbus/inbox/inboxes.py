"""``Inboxes``: everything an agent's mailbox needs, on one log. The rooms above talk to this."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal, Self

from postbus.inbox.agents import Agents, Cleanup, Digest, InboxSubscription
from postbus.inbox.digests import DigestEntry, Digests
from postbus.inbox.items import Item, Items
from postbus.inbox.messages import Messages, Timers
from postbus.inbox.pump import Pump
from postbus.inbox.signals import Signals
from postbus.inbox.tidy import Tidy
from postbus.inbox.wakes import Waker, reachable
from postbus.model import Conflict, NotFound, PostbusError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

    from postbus.clock import Clock
    from postbus.inbox.agents import Agent
    from postbus.inbox.targets import Target
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Consumer, ConsumerLag, Receipt, Start

__all__ = ["Inboxes"]

logger = logging.getLogger("postbus.inbox")

CHORES_S = 1.0
TIDY_S = 60.0
FOREIGN_S = 0.2


class Inboxes:
    """The agents, subscriptions, items, digests, messages and timers on one log.

    Reading, acking and sending work as soon as it exists; between ``start`` and ``stop`` it also fills inboxes, wakes
    agents, fires timers and tidies up. Several processes may do so on one store.
    """

    def __init__(self, log: SqliteLog, clock: Clock) -> None:
        self.log = log
        self.clock = clock
        self.signals = Signals()
        self.agents = Agents(log)
        self.items = Items(log, self.signals)
        self.digests = Digests(log)
        self.messages = Messages(log, self.signals)
        self.timers = Timers(log, self.messages, self.signals)
        self.pump = Pump(log, clock, self.agents, self.signals)
        self.tidy = Tidy(log, self.agents)
        self.waker = Waker(log, clock, self.signals)
        self._chores: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # --- life ---

    async def start(self) -> None:
        """Fill inboxes from now on. Idempotent."""
        if self._chores is None:
            self._stopping.clear()
            await self.pump.start()
            await self.waker.start()
            self._chores = asyncio.get_running_loop().create_task(self._do_chores())

    async def stop(self) -> None:
        """Finish what is under way. Idempotent; the log stays open."""
        self._stopping.set()
        chores, self._chores = self._chores, None
        if chores is not None:
            await chores
        await self.waker.stop()
        await self.pump.stop()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def _do_chores(self) -> None:
        """Show digests, fire timers, end subscriptions and remove what is over, when their time comes."""
        tidied = self.clock.monotonic_s()
        while not self._stopping.is_set():
            try:
                await self.timers.fire_due()
                self.signals.changed(await self.digests.flush_due())
                if self.clock.monotonic_s() - tidied >= TIDY_S:
                    tidied = self.clock.monotonic_s()
                    await self.tidy.collect()
                if await self.tidy.end_subscriptions():
                    await self.pump.refresh()
            except PostbusError as error:
                logger.warning("chores of the inboxes wait: %s", error.message)
            except Exception:
                logger.exception("a chore of the inboxes failed; they go on")
            await self.clock.wait(self._stopping, CHORES_S)

    # --- agents and subscriptions ---

    async def create_agent(self, tenant: str, agent: str, targets: tuple[Target, ...]) -> Agent:
        """See ``Agents.create``."""
        return await self.agents.create(tenant, agent, targets)

    async def retarget(self, tenant: str, agent: str, targets: tuple[Target, ...]) -> Agent:
        """See ``Agents.retarget``; woken there from now on."""
        changed = await self.agents.retarget(tenant, agent, targets)
        self.signals.changed([changed.no])
        return changed

    async def remove_agent(self, tenant: str, agent: str) -> None:
        """See ``Agents.remove``."""
        number = (await self.agents.get(tenant, agent)).no
        await self.agents.remove(tenant, agent)
        await self._refresh()
        self.signals.changed([number])

    async def subscribe(
        self,
        tenant: str,
        agent: str,
        pattern: str,
        *,
        digest: Digest | None = None,
        cleanup: Cleanup | None = None,
        **settings: Any,
    ) -> tuple[InboxSubscription, list[Consumer]]:
        """See ``Agents.subscribe``; served at once. Raises ``Conflict`` when no target of the agent can be reached."""
        found = await self.agents.get(tenant, agent)
        if not await self.log.store.read(lambda db: reachable(db, found.no, found.targets)):
            message = f"every target of agent {agent} is offline"
            raise Conflict(message, hint="put one back with `postbus agents revive`, or change its targets")
        made, places = await self.agents.subscribe(tenant, agent, pattern, digest=digest, cleanup=cleanup, **settings)
        if self._chores is not None:
            await self.pump.add(made, found.no, places)
        return made, places

    async def unsubscribe(self, tenant: str, name: str) -> None:
        """See ``Agents.unsubscribe``."""
        await self.agents.unsubscribe(tenant, name)
        await self._refresh()

    async def reset(self, tenant: str, name: str, start: Start) -> list[Consumer]:
        """See ``Agents.reset``; served from the new place at once."""
        moved = await self.agents.reset(tenant, name, start)
        await self._refresh()
        return moved

    async def hand_over(self, tenant: str, name: str, engine: Literal["live", "spark"]) -> InboxSubscription:
        """See ``Agents.hand_over``; served or let go at once."""
        moved = await self.agents.hand_over(tenant, name, engine)
        await self._refresh()
        return moved

    async def hand_over_all(self, tenant: str, engine: Literal["live", "spark"]) -> list[str]:
        """See ``Agents.hand_over_all``; served or let go at once."""
        changed = await self.agents.hand_over_all(tenant, engine)
        await self._refresh()
        return changed

    async def lag(self, tenant: str, name: str) -> list[ConsumerLag]:
        """Return how far a subscription is behind in each stream it reads."""
        await self.agents.subscription(tenant, name)
        return [await self.log.get_consumer_lag(stream, name) for stream in await self.agents.places(tenant, name)]

    async def _refresh(self) -> None:
        if self._chores is not None:
            await self.pump.refresh()

    # --- reading ---

    async def entries(self, tenant: str, agent: str, limit: int = 100) -> tuple[list[DigestEntry], list[Item]]:
        """Return the digests, and the items that belong to none, that are not acked."""
        digests = await self.digests.entries(tenant, agent)
        return digests, await self.items.read(tenant, agent, limit=limit, loose=True)

    async def flush(self, tenant: str, agent: str) -> None:
        """Show what waits in an agent's digests now."""
        self.signals.changed(await self.digests.flush(tenant, agent))

    async def send(self, tenant: str, agent: str, message: Any, *, sender: str = "operator") -> tuple[str, Receipt]:
        """See ``Messages.send``."""
        return await self.messages.send(tenant, agent, message, sender=sender)

    async def wait(self, tenant: str, agent: str, timeout_s: float, *, after: str | None = None) -> bool:
        """Wait until there is an unacked item (after one, if given); False when the time is over."""
        number = (await self.agents.get(tenant, agent)).no
        deadline = self.clock.monotonic_s() + timeout_s
        with self.signals.watching(number) as changed:
            while True:
                seen = self._look(changed)
                if await self.items.read(tenant, agent, after=after, limit=1, mark=False):
                    return True
                left = deadline - self.clock.monotonic_s()
                if left <= 0:
                    return False
                await self._changed(changed, seen, left)

    async def watch(
        self, tenant: str, agent: str, *, after: str | None = None, heartbeat_s: float = 15.0
    ) -> AsyncGenerator[list[Item]]:
        """Yield the unacked items there are, then new ones as they come; an empty list is a heartbeat.

        No gap and no repetition between the first list and what follows. Ends when the agent is removed. Raises
        ``NotFound`` for an unknown agent, or an ``after`` that never was.
        """
        number = (await self.agents.get(tenant, agent)).no
        quiet_since = self.clock.monotonic_s()
        place = after
        with self.signals.watching(number) as changed:
            while True:
                seen = self._look(changed)
                if not await self._lives(tenant, agent, number):
                    return
                items = await self.items.read(tenant, agent, after=place)
                if items:
                    place = items[-1].id
                    yield items
                    quiet_since = self.clock.monotonic_s()
                    continue
                left = heartbeat_s - (self.clock.monotonic_s() - quiet_since)
                if left <= 0:
                    yield []
                    quiet_since = self.clock.monotonic_s()
                    continue
                await self._changed(changed, seen, left)

    async def _lives(self, tenant: str, agent: str, number: int) -> bool:
        try:
            return (await self.agents.get(tenant, agent)).no == number
        except NotFound:
            return False

    def _look(self, changed: asyncio.Event) -> int:
        """Begin to look for changes: whatever comes from now on ends the next ``_changed``."""
        changed.clear()
        return self.log.foreign_changes

    async def _changed(self, changed: asyncio.Event, seen: int, left_s: float) -> None:
        """Wait for a change in this process; what other processes do is looked for a few times a second."""
        deadline = self.clock.monotonic_s() + left_s
        while (left := deadline - self.clock.monotonic_s()) > 0 and seen == self.log.foreign_changes:
            if await self.clock.wait(changed, min(FOREIGN_S, left)):
                return
            self.log.store.writer.notice()
