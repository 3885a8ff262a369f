"""The pass of each partition: a word in the subject that events come in on, changed to shut out what is on its way.

Whoever changes it knows, once the server has answered, that nothing sent with the old one can be stored any more.
``find`` needs that to say what will not come; a trim needs it so that an identity is looked for where it has gone.
A pass is never used twice, so a change that arrives late brings no old one back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.log.cursors import no_stream
from postbus.log.jetstream.link import ApiError, NoStream, parsed
from postbus.log.jetstream.names import pass_of
from postbus.log.jetstream.registry import STREAM_GONE
from postbus.model import Refused

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.log.jetstream.link import Link
    from postbus.log.jetstream.names import Names
    from postbus.log.jetstream.registry import Registry
    from postbus.model import Stream

__all__ = ["Gate", "Gates"]

NEVER = str(1 << 62)


class Gate(msgspec.Struct, frozen=True):
    """How to get in: the subject with its pass, and whether identities have to be looked up elsewhere first."""

    put: str
    moved: bool


class Gates:
    """The gates this process knows."""

    def __init__(self, link: Link, names: Names, registry: Registry, clock: Clock) -> None:
        self._link = link
        self._names = names
        self._registry = registry
        self._clock = clock
        self._known: dict[tuple[str, int, int], Gate] = {}

    async def get(self, stream: Stream, partition: int) -> Gate:
        """Return the gate of a partition, as it was when this process last looked."""
        return self._known.get((stream.name, stream.epoch, partition)) or await self._look(stream, partition)

    def forget(self, stream: Stream, partition: int) -> None:
        """Look again next time."""
        self._known.pop((stream.name, stream.epoch, partition), None)

    async def info(self, stream: Stream, partition: int) -> dict[str, Any]:
        """Return what JetStream says of a partition. Raises ``NotFound``."""
        name = self._names.partition(stream, partition)
        try:
            return await self._link.api(f"STREAM.INFO.{name}")
        except ApiError as error:
            if error.number != STREAM_GONE:
                raise
        await self._registry.check(stream)
        raise Refused(f"the JetStream stream {name} has gone", hint="somebody deleted it behind the log's back")

    async def change(self, stream: Stream, partition: int) -> dict[str, Any]:
        """Give the partition a new pass, and return its state when nothing sent with the old one can come any more."""
        self.forget(stream, partition)
        config = (await self.info(stream, partition))["config"]
        config["subjects"] = self._names.subjects(stream, partition, self._clock.new_id()[:12])
        try:
            await self._link.api(f"STREAM.UPDATE.{config['name']}", config, again=False)
        except ApiError as error:
            if error.number == STREAM_GONE:
                raise no_stream(stream.name) from None
            raise
        await self._settle(stream, partition)
        state: dict[str, Any] = (await self.info(stream, partition))["state"]
        return state

    async def _settle(self, stream: Stream, partition: int) -> None:
        """Wait until the server has worked off what came in before: what is refused in its turn comes after it."""
        subject = self._names.add(stream, partition)
        try:
            parsed((await self._link.ask(subject, b"", {"Nats-Expected-Last-Sequence": NEVER})).data)
        except NoStream:
            raise no_stream(stream.name) from None
        except ApiError:
            return

    async def _look(self, stream: Stream, partition: int) -> Gate:
        current = pass_of((await self.info(stream, partition))["config"])
        # Identities are moved before the pass is changed, so whoever knows the pass has to ask for them after it.
        moved = stream.settings.partitions == 1 and await self._any_moved(stream)
        gate = Gate(self._names.put(stream, partition, current), moved)
        self._known[stream.name, stream.epoch, partition] = gate
        return gate

    async def _any_moved(self, stream: Stream) -> bool:
        try:
            info = await self._link.api(f"STREAM.INFO.{self._names.identities(stream)}")
        except ApiError as error:
            if error.number != STREAM_GONE:
                raise
            return False
        return bool(info["state"]["messages"])
