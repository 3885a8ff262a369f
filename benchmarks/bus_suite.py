"""The suite "bus": publish, handled, acknowledged: what it costs, how soon it happens, and whether it stays so."""

from __future__ import annotations

from functools import partial

from benchmarks.adr_loop import AdrHandling
from benchmarks.bus_ours import Backlog, BusHandling, FanOut
from benchmarks.bus_peers import BubusHandling, FastStreamHandling, HueyHandling, RedisHandling
from benchmarks.handling import Aside, Handling
from benchmarks.harness import Contender, Measure, Options, Race, loops

__all__ = ["races"]

ACKED = "publish to acked, 100 publishers"
END_TO_END = "end to end at a low rate, p50"


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    return [_delivery(options), _fan_out(options), _backlog(options)]


def _delivery(options: Options) -> Race:
    ours = {f"Postbus ({label})": loop for label, loop in loops().items()}
    best, loop = list(ours.items())[-1]  # peers get the loop we are best on
    normal = AdrHandling("the ADR's loop, synchronous=NORMAL (not synced)", options, "NORMAL", loop)
    bubus = BubusHandling("bubus, WAL (not synced)", options, loop)
    peers: list[Handling] = [
        normal,
        AdrHandling("the ADR's loop, synchronous=FULL", options, "FULL", loop),
        HueyHandling("huey, SQLite, fsync", options, loop),
        bubus,
        FastStreamHandling("FastStream over NATS JetStream", options, loop),
        RedisHandling("Redis Streams, consumer group", options, loop),
    ]
    contenders: list[Contender] = []
    measures: list[Measure] = []
    for name, own in ours.items():
        mine = BusHandling(name, options, own)
        only, publish = f"{name}, publish only", f"{name}, publish()"
        contenders += [mine, Aside(only, partial(mine.aside.__getitem__, "publish only"))]
        contenders += [Aside(publish, partial(mine.aside.__getitem__, "publish()"))]
        measures += [
            Measure(ACKED, "events_s", name, only, at_least=0.5),
            Measure(f"{ACKED}, CPU", "cpu_us", name, only, "µs/event"),
            Measure(END_TO_END, "p50_us", name, publish, "µs", at_most=1.5),
            Measure("end to end at a low rate, p99", "p99_us", name, publish, "µs"),
        ]
    relaxed = "Postbus, relaxed (not synced)"
    contenders += [BusHandling(relaxed, options, loop, durability="relaxed"), *peers]
    measures += [Measure(ACKED, "events_s", best, peer.name, at_least=1.0) for peer in peers]
    # Like with like: a commit that waits for the disk cannot be as quick as one that does not, and NORMAL does not.
    for peer in peers:
        limit = None if peer is normal else 1.0
        measures.append(Measure(END_TO_END, "p50_us", best, peer.name, "µs", at_most=limit))
    for peer in (normal, bubus):  # neither of them waits for the disk
        measures.append(Measure(ACKED, "events_s", relaxed, peer.name, at_least=1.0))
        measures.append(Measure(END_TO_END, "p50_us", relaxed, peer.name, "µs", at_most=1.0))
    about = "one subscriber whose handler counts: one event every few ms, then 100 publishers until all is acked"
    return Race("delivery", about, contenders, measures)


def _fan_out(options: Options) -> Race:
    one, hundred = "1 subscriber", "100 subscribers"
    loop = list(loops().values())[-1]
    contenders: list[Contender] = [
        FanOut(one, 1, options.pick(60_000, 4_000), loop),
        FanOut(hundred, 100, options.pick(200_000, 200_000), loop),
    ]
    measures = [
        Measure("cost of a delivery", "delivery_us", hundred, one, "µs", at_most=2.0),
        Measure("cost of a delivery, CPU", "delivery_cpu_us", hundred, one, "µs", at_most=2.0),
    ]
    return Race("fanout", "subscribers of one topic, each handling every event, saturated", contenders, measures)


def _backlog(options: Options) -> Race:
    events = options.pick(1_000_000, 200_000)
    last, first, slowest = "the last tenth", "the first tenth", "the slowest tenth"
    mine = Backlog(last, events, list(loops().values())[-1])
    contenders: list[Contender] = [mine, Aside(first, lambda: mine.first), Aside(slowest, lambda: mine.slowest)]
    measures = [
        Measure(f"drain of {events:,} events: not slower", "events_s", last, first, at_least=0.667),
        Measure(f"drain of {events:,} events: not faster", "events_s", last, first, at_most=1.5),
        Measure(f"drain of {events:,} events", "events_s", slowest, first),
    ]
    return Race("backlog", f"one subscriber that comes back to {events:,} events", contenders, measures)
