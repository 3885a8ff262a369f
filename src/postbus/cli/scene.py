"""The story the demo plays: emails arrive for an assistant, something fails, a fix is deployed, nothing is lost.

The mailbox is a bus of its own that only publishes, as another program would. The office is the bus with the three
subscribers; it is stopped and started again in the middle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from postbus.bus import Context, EventBus
from postbus.bus.follow import follow
from postbus.bus.stats import subscription_states
from postbus.model import PostbusError, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from postbus.bus.stats import SubscriptionState
    from postbus.clock import Clock
    from postbus.model import Event

__all__ = ["LENGTH_S", "SUBSCRIBERS", "Picture", "Scene", "Screen"]

LENGTH_S = 18.0
BEATS = 20.0
LOOK_S = 0.1
PATIENCE_S = 20.0
TENANT = "local.default"


class Subscriber(NamedTuple):
    """One of the three, as a newcomer meets it."""

    pattern: str
    duty: str


SUBSCRIBERS = {
    "archive": Subscriber("email.*", "files every email"),
    "assistant": Subscriber("email.received", "reads and answers it"),
    "calendar": Subscriber("meeting.*", "notes the meetings"),
}


class Email(NamedTuple):
    """What arrives; ``time`` makes it a meeting."""

    sender: str
    subject: str
    time: str | None = None


BEFORE = (
    Email("anna", "Minutes of Monday"),
    Email("bob", "Lunch on Friday, 12:30?", "12:30"),
    Email("shop", "Your parcel is on its way"),
    Email("carla", "A call tomorrow at 9:15?", "9:15"),
)
POISON = Email("dave", "Shall we meet at noon?", "noon")
BESIDE = (Email("emma", "Holiday photos"), Email("bob", "Draft of the budget"))
MEANWHILE = (
    Email("anna", "Review on Tuesday, 14:00?", "14:00"),
    Email("shop", "Invoice 1042"),
    Email("carla", "Call moved to 10:00", "10:00"),
)
AFTERWARDS = (Email("emma", "More photos"),)


class Picture(NamedTuple):
    """What there is to see at one moment: the subscriptions as the store knows them, and what their handlers did."""

    states: list[SubscriptionState]
    done: Counter[str]
    failed: Counter[str]


class Screen(Protocol):
    """Where the scene is shown."""

    def say(self, sentence: str, *, mood: str = "") -> None:
        """Say in one plain sentence what is happening now."""

    def happened(self, event: Event) -> None:
        """Show an event that was appended."""

    def look(self, picture: Picture) -> None:
        """Show where everybody is."""


class Scene:
    """Plays the story once in a data folder, in about ``seconds``."""

    def __init__(self, folder: Path, screen: Screen, clock: Clock, seconds: float = LENGTH_S) -> None:
        self._folder = folder
        self._screen = screen
        self._clock = clock
        self._beat_s = seconds / BEATS
        self._mailbox = EventBus(folder)
        self._fixed = False
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.poison_id = ""

    async def play(self) -> Picture:
        """Play it all and return the last picture."""
        watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            await self._mailbox.open()
            await self._first_day()
            await self._second_day()
            return await self._picture()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._mailbox.stop()

    # --- the acts ---

    async def _first_day(self) -> None:
        """Emails arrive; one of them is more than the calendar can take."""
        screen = self._screen
        screen.say("Emails arrive and are appended to a log on disk. Three subscribers read it, each at its own place.")
        async with self._office():
            await self._beats(1.5)
            for number, email in enumerate(BEFORE):
                await self._arrive(email)
                await self._beats(0.8)
                if number == 0:
                    screen.say("assistant answers each email with a new event: a reply, or a meeting for calendar.")
            self.poison_id = await self._arrive(POISON)
            await self._until(lambda picture: picture.failed["calendar"] >= 1)
            screen.say("calendar cannot read “noon” and fails. It is tried again; nobody else waits.", mood="bad")
            for email in BESIDE:
                await self._beats(1.0)
                await self._arrive(email)
            await self._until(lambda picture: _dead(picture) == 1)
            screen.say(
                "After 3 attempts calendar gives up: the event is now a dead letter, kept with its error.", mood="bad"
            )
            await self._beats(2.5)
            screen.say("The office stops to deploy a fix. Everything it was doing is on disk.", mood="stopped")
        await self._beats(1.0)

    async def _second_day(self) -> None:
        """Emails go on arriving, the office comes back, and the dead letter is replayed."""
        screen = self._screen
        screen.say(
            "Emails go on arriving while nobody is there to read them: the subscribers fall behind.", mood="stopped"
        )
        for email in MEANWHILE:
            await self._arrive(email)
            await self._beats(0.7)
        await self._beats(1.0)
        self._fixed = True
        screen.say("Started again, with the fix. Each subscriber goes on exactly where it was.", mood="good")
        async with self._office() as office:
            await self._until(_idle)
            await self._beats(1.5)
            for email in AFTERWARDS:
                await self._arrive(email)
            letters = await office.dead_letters.find()
            screen.say(
                f"Now the dead letter is replayed to calendar, as `postbus dlq replay {_short(letters[0].id)}` does."
            )
            await self._beats(1.2)
            await office.dead_letters.replay(letters)
            await self._until(lambda picture: _idle(picture) and _dead(picture) == 0)
            screen.say("calendar has noted the meeting at noon. Nothing was lost, nothing was done twice.", mood="good")
            await self._beats(1.0)

    # --- the subscribers ---

    def _office(self) -> EventBus:
        """Return a new bus with the three subscribers, as the program has after each start."""
        office = EventBus(self._folder)
        handlers: dict[str, Callable[..., Awaitable[None]]] = {
            "archive": self._file,
            "assistant": self._read,
            "calendar": self._note,
        }
        retry = RetryPolicy(max_attempts=3, backoff_s=self._beat_s, jitter=0)
        for name, subscriber in SUBSCRIBERS.items():
            office.subscribe(subscriber.pattern, self._counted(name, handlers[name]), name, retry=retry)
        return office

    def _counted(self, name: str, handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def call(event: Event, ctx: Context) -> None:
            try:
                await handler(event, ctx)
            except ValueError:
                self.failed[name] += 1
                raise
            self.done[name] += 1

        return call

    async def _file(self, event: Event, ctx: Context) -> None:
        """Put the email into the archive."""

    async def _read(self, event: Event, ctx: Context) -> None:
        await self._beats(0.3)
        email = event.payload
        if email["time"] is None:
            await ctx.publish("reply.drafted", {"to": email["from"], "subject": f"Re: {email['subject']}"})
        else:
            await ctx.publish("meeting.asked", {"with": email["from"], "time": email["time"]})

    async def _note(self, event: Event, _ctx: Context) -> None:
        await self._beats(0.2)
        time = event.payload["time"]
        if ":" not in time and not self._fixed:
            raise ValueError(f"cannot read the time {time!r}")

    # --- time and what is seen ---

    async def _arrive(self, email: Email) -> str:
        facts: dict[str, Any] = {"from": email.sender, "subject": email.subject, "time": email.time}
        return (await self._mailbox.publish("email.received", "mailbox", facts)).id

    async def _beats(self, count: float) -> None:
        await self._clock.sleep(count * self._beat_s)

    async def _until(self, holds: Callable[[Picture], bool]) -> None:
        deadline = self._clock.monotonic_s() + PATIENCE_S
        while True:
            picture = await self._picture()
            self._screen.look(picture)
            if holds(picture):
                return
            if self._clock.monotonic_s() > deadline:
                raise PostbusError("the demo does not get on: is this machine very busy?", hint="run it again")
            await self._clock.sleep(LOOK_S / 2)

    async def _picture(self) -> Picture:
        states = await subscription_states(await self._mailbox.open(), self._clock, TENANT)
        return Picture(states, self.done, self.failed)

    async def _watch(self) -> None:
        """Show every event, and now and then where everybody is."""

        async def events() -> None:
            async for page in follow(await self._mailbox.open(), TENANT, {}):
                for event in page:
                    self._screen.happened(event)

        following = asyncio.get_running_loop().create_task(events())
        try:
            while True:
                with suppress(PostbusError):
                    self._screen.look(await self._picture())
                await self._clock.sleep(LOOK_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _dead(picture: Picture) -> int:
    return sum(state.dead for state in picture.states)


def _idle(picture: Picture) -> bool:
    """Say whether nothing is left to do."""
    return not any(state.pending + state.running + state.waiting for state in picture.states)


def _short(address: str) -> str:
    return address.removeprefix(f"{TENANT}.")
