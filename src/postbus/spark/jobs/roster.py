"""Who is to be served by Spark, and from where: the subscriptions of that engine as cohorts over the partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.inbox.agents import Agents, beginning, reads
from postbus.inbox.cohort import Member
from postbus.inbox.door import Move
from postbus.inbox.pump import together
from postbus.model import Invalid, NotFound
from postbus.spark.extent import extents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from postbus.log import SqliteLog
    from postbus.model import Consumer
    from postbus.spark.extent import Extent

__all__ = ["Group", "Roster"]


class Group:
    """Members of one cohort, to be brought from ``offset`` of a partition to ``end``.

    ``saved`` is where their cursors are, ``head`` as far as there is something to read.
    """

    def __init__(self, extent: Extent, offset: int, head: int) -> None:
        self.extent = extent
        self.offset = offset
        self.head = head
        self.end = head
        self.members: dict[str, Member] = {}
        self.saved: dict[str, int] = {}

    def add(self, member: Member, saved: int) -> None:
        """Take a member in; its cursor is at ``saved``."""
        self.members[member.subscription.id] = member
        self.saved[member.subscription.id] = saved

    def moves(self, names: Iterable[str], following: int) -> list[Move]:
        """Return the moves that bring members' cursors to an offset."""
        return [Move(name, self.saved[name], following) for name in names if self.saved[name] < following]

    def moved(self, moves: Iterable[Move], following: int) -> None:
        """The group has come to an offset, and these cursors with it."""
        self.offset = following
        for move in moves:
            self.saved[move.subscription] = following


class Roster:
    """The subscriptions whose engine is ``spark``: all, those of a tenant, or some of that tenant by their names."""

    def __init__(self, log: SqliteLog, tenant: str | None = None, names: Collection[str] | None = None) -> None:
        if names is not None and tenant is None:
            raise Invalid("subscriptions are named within a tenant", hint="name the tenant too")
        self._log = log
        self._agents = Agents(log)
        self._tenant = tenant
        self._names = names
        self._members: dict[tuple[str, str], Member] = {}
        self.readers: list[tuple[Extent, dict[str, Member]]] = []

    async def check(self) -> None:
        """Raise ``NotFound`` for a name that there is not, ``Invalid`` for one that the live pump serves."""
        for name in self._names or ():
            if (await self._agents.subscription(self._tenant or "", name)).engine != "spark":
                raise Invalid(f"{name} is served by the live pump", hint="hand it over, or use a backfill")

    async def extents(self) -> list[Extent]:
        """Return how far the log reaches."""
        self._log.store.writer.notice()
        return await self._log.store.read(extents)

    async def plan(self, goals: dict[str, int] | None = None) -> list[Group]:
        """Return who has something to read, up to the goals or the end: by partition, the furthest first.

        Those that read a stream which was made after them get their place in it. ``readers`` then says who reads what.
        """
        found = await self.extents()
        members = await self._served()
        consumers = {(each.stream, each.id): each for each in await self._log.consumers()}
        planned: list[Group] = []
        self.readers = []
        for extent in found:
            head = extent.head if goals is None else min(extent.head, goals.get(extent.key, 0))
            tenant = ".".join(extent.stream.split(".")[:2])
            readers = [one for one in members.get(tenant, ()) if reads(one.subscription, extent.stream)]
            places: dict[str, tuple[int, int]] = {}
            for member in readers:
                name = member.subscription.id
                consumer = consumers.get((extent.stream, name)) or await self._begin(member, extent)
                if consumer is not None and consumer.epoch == extent.epoch:
                    places[name] = (member.agent_no, consumer.cursors[extent.partition].next_offset)
            if readers:
                self.readers.append((extent, {member.subscription.id: member for member in readers}))
                planned += _groups(extent, head, readers, places)
        return planned

    async def _served(self) -> dict[str, list[Member]]:
        """Return the members by tenant, with filters that are compiled once."""
        numbers = {(agent.tenant, agent.id): agent.no for agent in await self._agents.all(self._tenant)}
        now = self._log.store.clock.now_us()
        known, self._members = self._members, {}
        served: dict[str, list[Member]] = {}
        for one in await self._agents.subscriptions(self._tenant):
            number = numbers.get((one.tenant, one.agent))
            chosen = one.engine == "spark" and (self._names is None or one.id in self._names)
            over = one.ends_at_us is not None and one.ends_at_us <= now
            if number is None or over or not chosen:
                continue
            member = known.get((one.tenant, one.id))
            if member is None or member.subscription != one or member.agent_no != number:
                member = Member(one, number)
            self._members[one.tenant, one.id] = member
            served.setdefault(one.tenant, []).append(member)
        return served

    async def _begin(self, member: Member, extent: Extent) -> Consumer | None:
        """Give a member its place in a stream that was made after it."""
        try:
            return await self._log.transact(lambda tx: beginning(tx, member.subscription, extent.stream))
        except NotFound:
            return None  # one of them was removed meanwhile


def _groups(extent: Extent, head: int, readers: list[Member], places: dict[str, tuple[int, int]]) -> list[Group]:
    groups: dict[int, Group] = {}
    starts = together(places)
    for member in readers:
        name = member.subscription.id
        if name in places and places[name][1] < head:
            offset = max(starts[name], extent.first)
            groups.setdefault(offset, Group(extent, offset, head)).add(member, places[name][1])
    return sorted(groups.values(), key=lambda group: -group.offset)
