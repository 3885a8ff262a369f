"""For tests of wakes: a store on a fake clock with a waker on it, and a web server that agents are woken at."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from postbus.envelope import draft
from postbus.inbox import Digest, Inboxes, Target
from postbus.inbox.door import Match, put_items
from postbus.inbox.wakes import Counters, TargetState, Waker
from postbus.log.sqlite import SqliteLog, Transaction
from postbus.testing import FakeClock

__all__ = ["TENANT", "Receiver", "WakeKit"]

TENANT = "local.default"
QUIET_STEPS = 3


class Receiver:
    """A web server that remembers what it was sent. It answers with the next of ``statuses``, then with ``status``.

    While ``hold`` is set it reads requests and does not answer.
    """

    def __init__(self, status: int = 204) -> None:
        self.status = status
        self.statuses: list[int] = []
        self.answer_headers: list[str] = []
        self.hold: asyncio.Event | None = None
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/wake"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        if self.hold is not None:
            self.hold.set()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.headers.append(headers)
            self.bodies.append(body)
            self.received.append(json.loads(body)["data"])
            if self.hold is not None:
                await self.hold.wait()
            status = self.statuses.pop(0) if self.statuses else self.status
            extra = "".join(f"{line}\r\n" for line in self.answer_headers)
            writer.write(f"HTTP/1.1 {status} -\r\n{extra}connection: close\r\ncontent-length: 0\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @property
    def counts(self) -> list[int]:
        """How many new items each call announced."""
        return [call["new_item_count"] for call in self.received]

    @property
    def ids(self) -> list[str]:
        return [call["activation"] for call in self.received]


class WakeKit:
    """A store, its inboxes (not filled by a pump) and a waker, on a fake clock."""

    def __init__(self, folder: Path, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.folder = folder
        self.log = SqliteLog.open(folder, clock=self.clock, durability="relaxed")
        self.inboxes = Inboxes(self.log, self.clock)
        self.waker = Waker(self.log, self.clock, self.inboxes.signals)

    async def __aenter__(self) -> Self:
        await self.waker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.waker.stop()
        await self.log.close()

    async def agent(self, *targets: Target, name: str = "alpha") -> None:
        await self.inboxes.create_agent(TENANT, name, targets)

    async def number(self, agent: str = "alpha") -> int:
        return (await self.inboxes.agents.get(TENANT, agent)).no

    async def send(self, count: int = 1, agent: str = "alpha") -> list[str]:
        """Put that many items into an inbox, one after the other, and let it settle."""
        made = [(await self.inboxes.send(TENANT, agent, f"message {n}"))[0] for n in range(count)]
        await self.settle()
        return made

    async def digest(self, count: int, resource: str = "pr-1", agent: str = "alpha") -> None:
        """Put items into a digest; nothing shows them yet."""
        stream = await self.inboxes.messages.stream(TENANT)
        number = await self.number(agent)
        for _ in range(count):
            receipt = (await self.log.append(stream, [draft("test.item", "test", {"n": 1})]))[0]

            def put(tx: Transaction, offset: int = receipt.offset) -> None:
                match = Match(offset, number, ("sub",), "digest", Digest(), resource)
                put_items(tx, tx.stream(stream).stream_id, 0, [match])

            await self.log.transact(put, grows=True)
        self.inboxes.signals.changed([number])
        await self.settle()

    async def show(self, agent: str = "alpha") -> None:
        """Make a revision of every digest."""
        self.inboxes.signals.changed(await self.inboxes.digests.flush(TENANT, agent))
        await self.settle()

    async def ack(self, *items: str, agent: str = "alpha", everything: bool = False) -> int:
        acked = await self.inboxes.items.ack(TENANT, agent, items=items or None, everything=everything)
        await self.settle()
        return acked

    async def settle(self) -> None:
        """Wait until everything that can happen without time passing has happened."""
        quiet = 0
        async with asyncio.timeout(300):
            while quiet < QUIET_STEPS:
                await asyncio.sleep(0.0005)
                quiet = 0 if self.waker.busy else quiet + 1

    async def advance(self, seconds: float) -> None:
        """Let time pass from one thing that comes due to the next."""
        left = seconds
        while True:
            await self.settle()
            following = self.waker.next_in_s
            if following is None or following > left:
                break
            self.clock.advance(following)
            left -= following
        self.clock.advance(left)
        await self.settle()

    async def state(self, target: str = "default", agent: str = "alpha") -> TargetState:
        return next(one for one in await self.waker.state(TENANT, agent) if one.target == target)

    async def counters(self, target: str = "default", agent: str = "alpha") -> Counters:
        return (await self.waker.counters(TENANT, agent))[target]

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return await self.log.store.read(lambda db: list(db.execute(statement, values)))
