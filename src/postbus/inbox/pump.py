"""The pump: reads the log for inbox subscriptions, matches, and brings what agents are owed through the door.

One task per partition. Subscriptions at the same place form a cohort and are matched together; one that lags behind is
a cohort of its own that takes turns with the others until it has caught up, so that a long history delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from postbus.inbox.agents import Agents, beginning, end, reads
from postbus.inbox.cohort import Cohort, Member
from postbus.inbox.door import Delivered, deliver
from postbus.inbox.poison import bury_all, poisonous, prepare_grave, revive
from postbus.model import NotFound, PostbusError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.clock import Clock
    from postbus.inbox.agents import InboxSubscription
    from postbus.inbox.door import Match, Move
    from postbus.inbox.signals import Signals
    from postbus.log.sqlite import SqliteLog, Transaction
    from postbus.model import Consumer, Event, Stream

__all__ = ["Pump"]

logger = logging.getLogger("postbus.inbox")

BATCH = 500
SLICE = 32
SAVE_EVENTS = 20_000
NEAR_EVENTS = SAVE_EVENTS + BATCH
SAVE_S = 1.0
LOOK_S = 5.0
NOTICE_S = 0.05
RETRY_S = 0.5
PATIENCE_S = 30.0
CAUGHT_UP_S = 0.005
ATTEMPTS = 3


class Pump:
    """Serves the inbox subscriptions of all tenants on one log whose engine is ``live``."""

    def __init__(self, log: SqliteLog, clock: Clock, agents: Agents, signals: Signals) -> None:
        self._log = log
        self._clock = clock
        self._agents = agents
        self._signals = signals
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._members: dict[tuple[str, str], Member] = {}
        self._refused: set[tuple[str, str]] = set()
        self._following: asyncio.Task[None] | None = None
        self._refreshing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self.items = 0
        self.events = 0

    async def start(self) -> None:
        """Serve from now on. Idempotent."""
        if self._following is None:
            self._stopping.clear()
            await self.refresh()
            self._following = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Finish what is under way and save every place. Idempotent."""
        self._stopping.set()
        following, self._following = self._following, None
        if following is not None:
            await following
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.stop() for channel in channels))

    async def catch_up(self, patience_s: float = PATIENCE_S) -> bool:
        """Start, and serve until everything that is in the log by now has been read; False when patience is over."""
        await self.start()
        goals = [
            (channel, stats.high_water_mark)
            for (name, number), channel in list(self._channels.items())
            for stats in (await self._log.get_stream_stats(name)).partitions
            if stats.partition == number
        ]
        deadline = self._clock.monotonic_s() + patience_s
        while any(channel.behind(goal) for channel, goal in goals):
            if self._clock.monotonic_s() >= deadline:
                return False
            await self._clock.sleep(CAUGHT_UP_S)
        return True

    async def refresh(self) -> None:
        """Look again who subscribes to what and where everyone stands; call it after a change."""
        async with self._refreshing:
            streams = await self._log.streams()
            numbers = {(agent.tenant, agent.id): agent.no for agent in await self._agents.all()}
            members: dict[str, list[Member]] = {}
            known, self._members = self._members, {}
            for subscription in await self._agents.subscriptions():
                number = numbers.get((subscription.tenant, subscription.agent))
                if number is None or subscription.engine != "live":
                    continue
                member = known.get((subscription.tenant, subscription.id))
                if member is None or member.subscription != subscription or member.agent_no != number:
                    member = self._member(subscription, number)
                    if member is None:
                        continue
                self._members[subscription.tenant, subscription.id] = member
                for stream in streams:
                    if stream.name.startswith(f"{subscription.tenant}.") and reads(subscription, stream.name):
                        members.setdefault(stream.name, []).append(member)
            await self._arrange({stream.name: stream for stream in streams}, members)

    async def add(self, subscription: InboxSubscription, number: int, places: list[Consumer]) -> None:
        """Serve a subscription that was just made, without looking at all the others."""
        member = self._member(subscription, number) if subscription.engine == "live" else None
        if member is not None:
            async with self._refreshing:
                self._members[subscription.tenant, subscription.id] = member
                for place in places:
                    for key in ((place.stream, cursor.partition) for cursor in place.cursors):
                        if key not in self._channels:
                            self._channels[key] = _Channel(self, self._log, self._clock, *key, place.epoch)
                        await self._channels[key].join(member)

    def _member(self, subscription: InboxSubscription, number: int) -> Member | None:
        """Return a subscription with its filters compiled; None, and said once, for one that cannot be served."""
        key = (subscription.tenant, subscription.id)
        try:
            return Member(subscription, number)
        except PostbusError as error:
            if key not in self._refused:
                self._refused.add(key)
                logger.error("subscription %s of %s is not served: %s", subscription.id, subscription.tenant, error)  # noqa: TRY400 - no trace helps here
            return None

    async def _arrange(self, streams: dict[str, Stream], members: dict[str, list[Member]]) -> None:
        wanted = {(name, number) for name in members for number in range(streams[name].settings.partitions)}
        for key, channel in list(self._channels.items()):
            if key not in wanted or channel.epoch != streams[key[0]].epoch:
                await self._channels.pop(key).stop()
        for name, number in sorted(wanted):
            if (name, number) not in self._channels:
                epoch = streams[name].epoch
                self._channels[name, number] = _Channel(self, self._log, self._clock, name, number, epoch)
            with contextlib.suppress(NotFound):  # the stream was deleted meanwhile
                await self._channels[name, number].seat(members[name])

    async def _follow(self) -> None:
        """Notice streams that are made, and subscriptions that another process changes."""
        seen, looked, pause_s = self._log.foreign_changes, self._clock.monotonic_s(), NOTICE_S
        while not await self._clock.wait(self._stopping, pause_s):
            try:
                self._log.store.writer.notice()
                if seen != self._log.foreign_changes or self._clock.monotonic_s() - looked > LOOK_S:
                    seen, looked = self._log.foreign_changes, self._clock.monotonic_s()
                    await self.refresh()
                    # Others may write all the time: looking must stay a small part of the work.
                    pause_s = max(NOTICE_S, min(20 * (self._clock.monotonic_s() - looked), LOOK_S))
            except PostbusError:
                pass  # full, busy or failed: said elsewhere
            except Exception:
                logger.exception("looking for changes failed; it goes on")

    @property
    def busy(self) -> bool:
        """Whether some channel has something to do that waits for nothing."""
        return any(channel.busy for channel in self._channels.values())

    def delivered(self, channel: _Channel, done: Delivered) -> None:
        """Tell who waits for items, and put those elsewhere whose place was changed."""
        if done.agents:
            self._signals.changed(done.agents)
        for name in done.displaced:
            channel.displaced.add(name)


class _Channel:
    """The pump's work on one partition."""

    def __init__(self, pump: Pump, log: SqliteLog, clock: Clock, stream: str, partition: int, epoch: int) -> None:
        self._pump = pump
        self._log = log
        self._clock = clock
        self._stream = stream
        self.epoch = epoch
        self._partition = partition
        self._cohorts: list[Cohort] = []
        self._seating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._stopping = False
        self._resting = False
        self._saved_s = clock.monotonic_s()
        self._failures = 0
        self.displaced: set[str] = set()
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def busy(self) -> bool:
        """Whether it works or is about to."""
        return not self._resting and not self._task.done()

    def behind(self, goal: int) -> bool:
        """Whether somebody has not read that far."""
        return any(cohort.offset < goal for cohort in self._cohorts)

    async def stop(self) -> None:
        """End after the batch under way, with every place saved."""
        self._stopping = True
        self._changed.set()
        await self._task

    async def seat(self, members: list[Member]) -> None:
        """Serve exactly these members from now on, each from where its cursor is."""
        async with self._seating:
            wanted = {member.subscription.id: member for member in members}
            for cohort in self._cohorts:
                for name, member in list(cohort.members.items()):
                    known = wanted.get(name)
                    moved = name in self.displaced or known is None or known.subscription != member.subscription
                    saved = cohort.saved[name]
                    if moved or await self._place(name) not in range(saved, max(saved, cohort.offset) + 1):
                        cohort.remove(name)
                    else:
                        del wanted[name]
            self.displaced.clear()
            await self._take_in(wanted)
            await self._revive()
            self._changed.set()

    async def join(self, member: Member) -> None:
        """Serve one member more."""
        async with self._seating:
            if not any(member.subscription.id in cohort.members for cohort in self._cohorts):
                await self._take_in({member.subscription.id: member})
                self._changed.set()

    async def _take_in(self, members: dict[str, Member]) -> None:
        """Begin to serve members, each from where its cursor is and together with the others of its agent."""
        places: dict[str, int] = {}
        for name, member in members.items():
            offset = await self._place(name)
            if offset is None:
                try:
                    made = await self._log.transact(partial(self._begin, member))
                except NotFound:
                    continue  # it was removed meanwhile
                offset = made.cursors[self._partition].next_offset
            places[name] = offset
        agents = {members[name].agent_no for name in places}
        served = {
            name: (cohort, member)
            for cohort in self._cohorts
            for name, member in cohort.members.items()
            if member.agent_no in agents
        }
        known = {name: (member.agent_no, cohort.offset) for name, (cohort, member) in served.items()}
        starts = together(known | {name: (members[name].agent_no, offset) for name, offset in places.items()})
        for name, (cohort, member) in served.items():
            if starts[name] != cohort.offset:
                saved = cohort.saved[name]
                cohort.remove(name)
                self._cohort_at(starts[name]).add(member, saved)
        for name, offset in places.items():
            self._cohort_at(starts[name]).add(members[name], offset)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.members]

    async def _revive(self) -> None:
        """Deliver what an operator has replayed."""
        members = {name: member for cohort in self._cohorts for name, member in cohort.members.items()}
        for done in await revive(self._log, self._stream, self._partition, self.epoch, members):
            self._pump.delivered(self, done)

    def _begin(self, member: Member, tx: Transaction) -> Consumer:
        return beginning(tx, member.subscription, self._stream)

    async def _place(self, name: str) -> int | None:
        found = await self._log.get_consumer(self._stream, name)
        return None if found is None else found.cursors[self._partition].next_offset

    def _cohort_at(self, offset: int) -> Cohort:
        for cohort in self._cohorts:
            if cohort.offset == offset:
                return cohort
        made = Cohort(self._stream, offset)
        self._cohorts.append(made)
        return made

    # --- work ---

    async def _live(self) -> None:
        while not self._stopping:
            try:
                if not await self._turn():
                    await self._rest()
                self._failures = 0
            except NotFound:
                self._cohorts = []
                await self._pause()  # the stream is gone; the pump lets go of it when it looks again
            except StorageError:
                await self._pause()  # full, busy or failed: said elsewhere
            except Exception:
                logger.exception("materialising %s/%s failed; it goes on", self._stream, self._partition)
                await self._pause()
        with contextlib.suppress(PostbusError):
            async with self._seating:
                for cohort in self._cohorts:
                    await self._save(cohort)

    async def _pause(self) -> None:
        self._resting = True
        self._changed.clear()
        if not self._stopping:
            await self._clock.wait(self._changed, RETRY_S)
        self._resting = False

    async def _turn(self) -> bool:
        """Give each cohort one batch; say whether any had one."""
        async with self._seating:
            if self.displaced:
                return await self._reseat()
            worked = False
            for cohort in sorted(self._cohorts, key=lambda one: -one.offset):
                events = await self._log.fetch(self._stream, self._partition, cohort.offset, BATCH)
                if events:
                    worked = True
                    await self._advance(cohort, events)
                elif cohort.unsaved and self._clock.monotonic_s() - self._saved_s >= SAVE_S:
                    await self._save(cohort)
            self._merge()
        return worked

    async def _reseat(self) -> bool:
        """Go on from where somebody else has put members."""
        moved: dict[str, Member] = {}
        for cohort in self._cohorts:
            for name in self.displaced & set(cohort.members):
                moved[name] = cohort.members[name]
                cohort.remove(name)
        self.displaced.clear()
        await self._take_in(moved)
        return True

    def _merge(self) -> None:
        found: dict[int, Cohort] = {}
        for cohort in self._cohorts:
            if cohort.offset in found:
                found[cohort.offset].join(cohort)
            else:
                found[cohort.offset] = cohort
        self._cohorts = list(found.values())

    async def _rest(self) -> None:
        """Wait for events beyond the furthest cohort, for a change, or until places want to be saved."""
        self._changed.clear()
        head = max((cohort.offset for cohort in self._cohorts), default=None)
        unsaved = any(cohort.unsaved for cohort in self._cohorts)
        self._resting = not unsaved
        if head is None:
            await self._clock.wait(self._changed, LOOK_S)
        else:
            loop = asyncio.get_running_loop()
            grown = loop.create_task(self._log.wait(self._stream, self._partition, head, SAVE_S if unsaved else LOOK_S))
            changed = loop.create_task(self._changed.wait())
            await asyncio.wait({grown, changed}, return_when=asyncio.FIRST_COMPLETED)
            for task in (grown, changed):
                task.cancel()
            await asyncio.gather(grown, changed, return_exceptions=True)
        self._resting = False

    async def _advance(self, cohort: Cohort, events: list[Event]) -> None:
        matches: list[Match] = []
        ended: list[Member] = []
        touched: dict[str, None] = {}
        for number, event in enumerate(events):
            found, last = cohort.match(event)
            matches += found
            for match in found:
                touched.update(dict.fromkeys(match.matched_by))
            ended += last
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        following = events[-1].offset + 1
        cohort.unsaved += len(events)
        everyone = cohort.unsaved >= SAVE_EVENTS or self._clock.monotonic_s() - self._saved_s >= SAVE_S
        names = list(cohort.members) if everyone else list(touched)
        try:
            await self._deliver(cohort, matches, cohort.moves(names, following), ended)
        except Exception as error:
            if not poisonous(error):
                raise
            if len(events) == 1:  # otherwise the events before it must not wait for it
                await self._poisoned(cohort, events[0], matches, ended)
            else:
                half = len(events) // 2
                await self._advance(cohort, events[:half])
                await self._advance(cohort, events[half:])
            return
        self._pump.events += len(events)
        self._pump.items += len(matches)
        cohort.offset = following
        if everyone:
            cohort.unsaved, self._saved_s = 0, self._clock.monotonic_s()

    async def _deliver(
        self, cohort: Cohort, matches: list[Match], moves: list[Move], ended: Sequence[Member] = ()
    ) -> None:
        def write(tx: Transaction) -> Delivered:
            for member in ended:
                end(tx, member.subscription)
            return deliver(tx, self._stream, self._partition, matches, moves, epoch=self.epoch)

        if matches or moves:
            done = await self._log.transact(write, grows=bool(matches))
            for move in moves:
                if move.subscription not in done.displaced:
                    cohort.saved[move.subscription] = move.following
            self._pump.delivered(self, done)

    async def _poisoned(self, cohort: Cohort, event: Event, matches: list[Match], ended: list[Member]) -> None:
        """Try an event again that could not be materialised; after some attempts it is dead. Never skipped.

        Dead only for those agents whose item it is that cannot be made.
        """
        self._failures += 1
        if self._failures < ATTEMPTS:
            await self._save(cohort)
            raise RuntimeError(f"{event.id} could not be materialised (attempt {self._failures} of {ATTEMPTS})")
        names = [name for match in matches if not await self._possible(match) for name in match.matched_by]
        moves = cohort.moves(list(cohort.members), event.offset + 1)
        dead_stream = await prepare_grave(self._log, self._stream)

        def write(tx: Transaction) -> Delivered:
            bury_all(tx, event, sorted(names), dead_stream, self._failures)
            for member in ended:
                end(tx, member.subscription)
            return deliver(tx, self._stream, self._partition, [], moves, epoch=self.epoch)

        done = await self._log.transact(write)
        for move in moves:
            cohort.saved[move.subscription] = move.following
        cohort.offset = event.offset + 1
        self._failures = 0
        self._pump.delivered(self, done)

    async def _possible(self, match: Match) -> bool:
        """Deliver one item; False when it is this one that cannot be made."""
        try:
            done = await self._log.transact(
                lambda tx: deliver(tx, self._stream, self._partition, [match], [], epoch=self.epoch), grows=True
            )
        except Exception as error:
            if poisonous(error):
                return False
            raise
        self._pump.delivered(self, done)
        return True

    async def _save(self, cohort: Cohort) -> None:
        await self._deliver(cohort, [], cohort.moves(list(cohort.members), cohort.offset))
        cohort.unsaved, self._saved_s = 0, self._clock.monotonic_s()


def together(places: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Return where to begin, given each one's agent and its place.

    Subscriptions of one agent that are not far apart begin together, at the hindmost, so that its items keep the order
    of the log: places are saved now and then only, and one may have been reset. Nobody gets anything twice. One with a
    long history comes by itself, so that the others need not wait for it.
    """
    foremost: dict[int, int] = {}
    for agent, offset in places.values():
        foremost[agent] = max(offset, foremost.get(agent, 0))
    near = {name: pair for name, pair in places.items() if pair[1] >= foremost[pair[0]] - NEAR_EVENTS}
    hindmost: dict[int, int] = {}
    for agent, offset in near.values():
        hindmost[agent] = min(offset, hindmost.get(agent, offset))
    return {name: hindmost[agent] if name in near else offset for name, (agent, offset) in places.items()}
