"""How many wakes a day of events costs: ``python -m benchmarks.wake_economy [--out DIR]``.

A trace of 770 events in a day goes through the real log, pump, filters, inbox and waker to a real web server, on a fake
clock. One agent with five overlapping subscriptions is woken there; each time it works for one to four minutes, then
reads and acks everything it sees. Beside it, from the same deliveries: what an agent would be woken for that is woken
once per delivered batch, and once per poll of five seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from postbus.bus import EventBus
from postbus.inbox import Inboxes, Target
from postbus.inbox.wakes import Counters, Waker
from postbus.log.sqlite import SqliteLog
from postbus.testing import FakeClock

__all__ = ["Result", "Turns", "run"]

HERE = Path(__file__).parent
TRACE = HERE / "data" / "wake_trace.jsonl"
RESULTS = HERE / "results"
TENANT, AGENT = "local.default", "alpha"
BUFFER_S, LEASE_S = 3.0, 600.0
WAKES_MAX = 150
POLL_S = 5.0
QUIET_STEPS = 3
INSTANT_S = 1e-5
SUBSCRIPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "api": ("github.>", {"metadata": {"repo": "acme/api"}}),
    "mentions": (
        "github.>",
        {"expr": '"alpha" in metadata.mentions && (variant.contains("review") || variant.contains("comment"))'},
    ),
    "failures": ("github.workflow_run.*", {"metadata": {"conclusion": "failure"}}),
    "prs": (">", {"metadata": {"number": [101, 102, 103]}}),
    "chat": ("chat.>", {}),
}


class Turns(NamedTuple):
    """What an agent's day was like: how often it was woken, and how often it then found nothing."""

    wakes: int
    empty: int


class Result(NamedTuple):
    """The figures of one run. ``late``: items announced later than their target's policy allows."""

    events: int
    items: int
    ours: Turns
    late: int
    slowest_s: float
    per_batch: Turns
    per_poll: Turns
    counters: Counters


def work_s(turn: int) -> float:
    """Return how long the agent works on its n-th turn: one to four minutes."""
    return random.Random(turn).uniform(60, 240)


class Day:
    """One run of the trace."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.log = SqliteLog.open(folder, clock=self.clock, durability="relaxed")
        self.bus = EventBus(tenant=TENANT, clock=self.clock, log=self.log)
        self.inboxes = Inboxes(self.log, self.clock)
        self.waker = Waker(self.log, self.clock, self.inboxes.signals)
        self.start_s = self.clock.monotonic_s()
        self.published = 0
        self.turns: list[float] = []
        self.wakes: list[float] = []
        self.acks: list[float] = []
        self.empty = 0

    @property
    def now_s(self) -> float:
        """Seconds since the day began."""
        return self.clock.monotonic_s() - self.start_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be the agent's web server: a wake begins a turn."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
        self.wakes.append(self.now_s)
        self.turns.append(max([self.now_s, *self.turns[-1:]]) + work_s(len(self.wakes)))
        writer.write(b"HTTP/1.1 204 -\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def go(self, url: str) -> None:
        """Let the day pass: from event to timer to the end of a turn."""
        target = Target(kind="webhook", url=url, allow_private=True, buffer_s=BUFFER_S, lease_s=LEASE_S)
        await self.bus.open()
        await self.inboxes.create_agent(TENANT, AGENT, (target,))
        for name, (pattern, content) in SUBSCRIPTIONS.items():
            await self.inboxes.subscribe(TENANT, AGENT, pattern, id=name, filter=content)
        await self.inboxes.pump.start()
        await self.waker.start()
        for line in TRACE.read_text("utf-8").splitlines():
            event = json.loads(line)
            await self.until(event["t"])
            chat = event["source"] == "chat"
            topic = event["variant"] if chat else f"github.{event['variant']}"
            facts = {name: event[name] for name in ("native_id", "variant", "metadata")}
            await self.bus.publish(topic, event["source"], event["payload"], **facts)
            self.published += 1
            await self.settle()
        await self.until(self.now_s + 2 * LEASE_S)
        await self.waker.stop()
        await self.inboxes.pump.stop()

    async def until(self, then_s: float) -> None:
        """Let time pass up to an instant."""
        while (left := then_s - self.now_s) > INSTANT_S:
            following = self.waker.next_in_s
            steps = [left, *([following] if following is not None else [])]
            steps += [turn - self.now_s for turn in self.turns[len(self.acks) :][:1]]
            self.clock.advance(max(min(steps), 0.0))
            await self.settle()
            if len(self.turns) > len(self.acks) and self.now_s >= self.turns[len(self.acks)] - INSTANT_S:
                await self.end_turn()

    async def end_turn(self) -> None:
        """Read and ack everything there is."""
        items = await self.inboxes.items.read(TENANT, AGENT, limit=1000)
        self.acks.append(self.now_s)
        self.empty += not items
        if items:
            await self.inboxes.items.ack(TENANT, AGENT, through=items[-1].id)
        await self.settle()

    async def settle(self) -> None:
        """Wait until everything that can happen without time passing has happened."""
        quiet = 0
        async with asyncio.timeout(60):
            while quiet < QUIET_STEPS:
                await asyncio.sleep(0.0002)
                resting = self.inboxes.pump.events == self.published and not self.waker.busy
                quiet = quiet + 1 if resting else 0


def lateness(day: Day, created_s: float, delivered_s: float) -> float:
    """Return how much later than allowed an item was announced or read; the lease in force decides what is allowed."""
    allowed = created_s + BUFFER_S
    for number, woken in enumerate(day.wakes):
        acked = day.acks[number] if number < len(day.acks) else woken + LEASE_S
        if woken - INSTANT_S <= created_s < min(acked, woken + LEASE_S):
            allowed = max(allowed, min(acked, woken + LEASE_S) + BUFFER_S)
    return delivered_s - allowed


def naive(arrivals: list[float], wakes: list[float]) -> Turns:
    """Return the turns of an agent that is woken at these times, one turn after the other, whatever is there."""
    end, acked, empty = 0.0, 0, 0
    for number, wake in enumerate(wakes):
        end = max(end, wake) + work_s(number + 1)
        seen = sum(arrival <= end for arrival in arrivals)
        empty += seen == acked
        acked = seen
    return Turns(len(wakes), empty)


async def run() -> Result:
    """Let the day pass and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        day = Day(Path(folder))
        batches: list[float] = []
        deliver = day.inboxes.pump.delivered

        def delivered(channel: Any, done: Any) -> None:
            if done.agents:
                batches.append(day.now_s)
            deliver(channel, done)

        day.inboxes.pump.delivered = delivered  # type: ignore[method-assign]  # only listens
        server = await asyncio.start_server(day.serve, "127.0.0.1", 0)
        try:
            await day.go(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
            rows = await day.log.store.read(
                lambda db: list(db.execute("SELECT created_at, delivered_at FROM inbox_items ORDER BY sequence"))
            )
            counters = (await day.waker.counters(TENANT, AGENT))["default"]
        finally:
            server.close()
            await server.wait_closed()
            await day.bus.stop()
            await day.log.close()
    start = day.clock.now_us() / 1e6 - day.now_s
    arrivals = [created - start for created, _ in rows]
    announced = [delivered - start for _, delivered in rows]
    late = [lateness(day, *pair) for pair in zip(arrivals, announced, strict=True)]
    polls = sorted({POLL_S * (arrival // POLL_S + 1) for arrival in arrivals})
    return Result(
        events=day.published,
        items=len(rows),
        ours=Turns(len(day.wakes), day.empty),
        late=sum(seconds > 0.001 for seconds in late),
        slowest_s=max(told - came for came, told in zip(arrivals, announced, strict=True)),
        per_batch=naive(arrivals, batches),
        per_poll=naive(arrivals, polls),
        counters=counters,
    )


def page(result: Result) -> str:
    """Return the result for people."""
    rows = [
        ("Postbus", result.ours),
        ("one wake per delivered batch", result.per_batch),
        (f"one wake per poll of {POLL_S:g} s", result.per_poll),
    ]
    table = "\n".join(f"| {name} | {turns.wakes} | {turns.empty} |" for name, turns in rows)
    avoided = ", ".join(f"{count} {reason}" for reason, count in sorted(result.counters.avoided.items()))
    return f"""# Wakes in a day

Made by `python -m benchmarks.wake_economy`, on a fake clock: the figures do not depend on the machine.

{result.events} events in a day, of which five overlapping subscriptions of one agent make {result.items} items. Buffer
{BUFFER_S:g} s or 20 items, lease {LEASE_S:g} s; on each wake the agent works 60 to 240 s, then reads and acks all.

| | wakes | that found nothing |
|---|---:|---:|
{table}

Target: at most {WAKES_MAX} wakes, none that finds nothing, every item announced within its policy. Items announced
later than that: {result.late}. The longest an item waited, behind an agent at work: {result.slowest_s:.0f} s.

Counters of the target: {result.counters.items} items from {result.counters.events} matches, {result.counters.wakes}
wakes, avoided: {avoided}.
"""


def main() -> int:
    """Run, show and keep; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wake_economy", description="Wakes in a day.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    given = parser.parse_args()
    result = asyncio.run(run())
    given.out.mkdir(parents=True, exist_ok=True)
    facts = {
        **result._asdict(),
        **{name: getattr(result, name)._asdict() for name in ("ours", "per_batch", "per_poll")},
        "counters": {name: getattr(result.counters, name) for name in result.counters.__struct_fields__},
    }
    (given.out / "wakes.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    (given.out / "wakes.md").write_text(page(result), "utf-8")
    print(page(result))
    return int(result.ours.wakes > WAKES_MAX or result.ours.empty > 0 or result.late > 0)


if __name__ == "__main__":
    sys.exit(main())
