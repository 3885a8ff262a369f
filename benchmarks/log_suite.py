"""The suite "log": what appending, reading and keeping events costs, against the raw ceiling and against peers."""

from __future__ import annotations

from benchmarks.bare import BareBatches, BareEvents, BareEventSingles, BareSingles, StdlibSingles
from benchmarks.growth import Grown, Stored
from benchmarks.harness import Contender, Measure, Options, Race, loops
from benchmarks.ours import BareReader, Batches, OnePublisher, Publishers, Reader
from benchmarks.peers import JetStreamOne, JetStreamPublishers, RedisClients, RedisOne, RedisPipeline
from benchmarks.trie import TrieLookups

__all__ = ["races"]

STDLIB = "sqlite3, one commit per event"


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    return [
        _publishers(options),
        _one_publisher(options),
        _batches(options),
        _reading(options),
        _growth(options),
        _trie(options),
    ]


def _publishers(options: Options) -> Race:
    ceiling, plain = "bare apsw, the same rows, 100 per commit", "bare apsw, payloads only, 100 per commit"
    ours = {f"Postbus ({label})": loop for label, loop in loops().items()}
    best, loop = list(ours.items())[-1]  # peers get the loop we are best on
    peers: list[Contender] = [
        RedisClients("Redis Streams, 100 clients", options, loop),
        RedisPipeline("Redis Streams, 100 per pipeline", options, loop),
        JetStreamPublishers("NATS JetStream, 100 publishers", options, loop),
    ]
    contenders: list[Contender] = [Publishers(name, options, loop) for name, loop in ours.items()]
    contenders += [BareEvents(ceiling, options, 100), BareBatches(plain, options, 100)]
    contenders += [StdlibSingles(STDLIB, options), *peers]
    measures = [Measure("100 publishers", "events_s", name, ceiling, at_least=0.5) for name in ours]
    measures += [Measure("100 publishers, CPU", "cpu_us", name, ceiling, "µs/event") for name in ours]
    others = (plain, STDLIB, *(peer.name for peer in peers))
    measures += [Measure("100 publishers", "events_s", best, peer) for peer in others]
    about = "100 concurrent publishers, each awaiting every append, on one stream"
    return Race("publishers", about, contenders, measures)


def _one_publisher(options: Options) -> Race:
    ceiling, plain = "bare apsw, the same row", "bare apsw, payload only"
    ours = {f"Postbus ({label})": loop for label, loop in loops().items()}
    best, loop = list(ours.items())[-1]
    peers: list[Contender] = [
        StdlibSingles(STDLIB, options),
        RedisOne("Redis Streams, one client", options, loop),
        JetStreamOne("NATS JetStream, one publisher", options, loop),
    ]
    contenders: list[Contender] = [OnePublisher(name, options, loop) for name, loop in ours.items()]
    contenders += [BareEventSingles(ceiling, options), BareSingles(plain, options), *peers]
    measures = [Measure("one publisher, p50", "p50_us", name, ceiling, "µs", at_most=1.5) for name in ours]
    measures += [Measure("one publisher, p99", "p99_us", name, ceiling, "µs") for name in ours]
    measures += [
        Measure("one publisher, p50", "p50_us", best, name, "µs") for name in (plain, *(p.name for p in peers))
    ]
    return Race("one", "one publisher that awaits every append", contenders, measures)


def _batches(options: Options) -> Race:
    ceiling, plain = "bare apsw, the same rows, 1,000 per commit", "bare apsw, payloads only, 1,000 per commit"
    contenders: list[Contender] = [
        Batches("Postbus", options, None),
        BareEvents(ceiling, options, 1_000),
        BareBatches(plain, options, 1_000),
    ]
    measures = [
        Measure("batches of 1,000", "events_s", "Postbus", ceiling, at_least=0.5),
        Measure("batches of 1,000, CPU", "cpu_us", "Postbus", ceiling, "µs/event"),
        Measure("batches of 1,000", "events_s", "Postbus", plain),
    ]
    return Race("batches", "one caller that appends 1,000 events at a time", contenders, measures)


def _reading(options: Options) -> Race:
    events = options.pick(200_000, 20_000)
    ceiling = "bare apsw, rows in lists"
    reader = Reader("Postbus", events)
    contenders: list[Contender] = [reader, BareReader(ceiling, reader, events)]
    measures = [Measure("sequential read", "events_s", "Postbus", ceiling, at_least=0.5)]
    about = f"a stream of {events:,} events read from the table, 1,000 at a time"
    return Race("reading", about, contenders, measures)


def _growth(options: Options) -> Race:
    small, large = 10_000, options.pick(5_000_000, 200_000)
    appended = options.pick(20_000, 4_000)
    at_small, at_large, full = f"at {small:,} events", f"at {large:,} events", "with key, correlation and native id"
    contenders: list[Contender] = [
        Grown(at_small, small, appended, copied=True),
        Grown(at_large, large, appended, copied=False),
        Stored(full, options.pick(200_000, 20_000)),
    ]
    measures = [
        Measure("append rate as the log grows", "events_s", at_large, at_small, at_least=0.8),
        Measure("lag as the log grows", "lag_us", at_large, at_small, "µs", at_most=1.5),
        Measure("head as the log grows", "head_us", at_large, at_small, "µs", at_most=1.5),
        Measure("first lag after opening", "first_lag_us", at_large, at_small, "µs", at_most=2.0),
        Measure("first head after opening", "first_head_us", at_large, at_small, "µs", at_most=2.0),
        Measure("opening", "open_ms", at_large, at_small, "ms"),
        Measure("size of a 500-byte event", "bytes_event", at_large, unit="bytes", at_most=700),
        Measure("size of a 500-byte event", "bytes_event", full, unit="bytes"),
    ]
    about = f"{appended:,} appends by 100 publishers to 20 streams of a store just reopened, and what is asked of it"
    return Race("growth", about, contenders, measures)


def _trie(options: Options) -> Race:
    cold, hot = "100,000 topics in turn", "1,000 topics in turn"
    contenders: list[Contender] = [TrieLookups(cold, options, 100_000), TrieLookups(hot, options, 1_000)]
    measures = [
        Measure("trie, cold-ish", "lookups_s", cold, unit="look-ups/s", at_least=300_000),
        Measure("trie, hot", "lookups_s", hot, unit="look-ups/s", at_least=2_000_000),
    ]
    return Race("trie", "look-ups among 10,000 patterns", contenders, measures)
