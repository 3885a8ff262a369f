"""What the report says, small enough for one page: collected from the tables on the driver."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as fn

from postbus.model import instant
from postbus.spark.extent import reading
from postbus.spark.report import tables

if TYPE_CHECKING:
    import apsw
    from pyspark.sql import DataFrame, Row, SparkSession

    from postbus.store.folder import Folder

__all__ = ["Facts", "Latency", "Line", "Readers", "collect", "readers_of"]

BUCKETS = 96
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 604_800)
TOP = 6
ROWS = 15

# When each reader had settled how much; a reset moves back and is no settling.
COMMITS = """
    SELECT s.name, c.partition, c.consumer, c.committed_offset, c.committed_at_us
    FROM consumer_commits c JOIN stream_registry s USING (stream_id)
    WHERE c.kind = 'commit' AND NOT s.deleted AND substr(c.consumer, 1, 1) <> '_'
"""
GLOBS = "SELECT subscription, tenant, glob, dots FROM subscription_globs"
WAITING = """
    SELECT d.consumer, d.status, d.error, count(*) FROM delivery_rows d
    WHERE d.status IN ('waiting', 'failed') GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT 15
"""
WAKES = "SELECT name, sum(value) FROM wake_counters GROUP BY name ORDER BY name"
HAS_WAKES = "SELECT 1 FROM sqlite_schema WHERE name = 'wake_counters'"


class Line(msgspec.Struct, frozen=True):
    """One line of a plot: its name and a value per bucket."""

    name: str
    values: list[float]


class Latency(msgspec.Struct, frozen=True):
    """A spread of durations in seconds: the percentiles of ``tables.PERCENTILES``, and the longest."""

    name: str
    events: int
    percentiles: list[float]
    longest: float


class Facts(msgspec.Struct, kw_only=True):
    """Everything on the page."""

    events: int
    bytes: int
    first_us: int
    last_us: int
    bucket_s: int
    start_s: int
    rates: list[Line]
    topics: list[dict[str, Any]]
    settling: list[Latency]
    steps: list[Latency]
    lag: list[Line]
    dead: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    chain_count: int
    depths: dict[int, int]
    fan_out: int
    slowest: list[dict[str, Any]]
    tenants: list[dict[str, Any]]
    wakes: dict[str, int]


class Readers(msgspec.Struct, frozen=True):
    """What the store knows of its readers beside the events themselves."""

    commits: list[tuple[str, int, str, int, int]]
    patterns: list[tuple[str, str, str]]
    waiting: list[tuple[str, str, str | None, int]]
    wakes: dict[str, int]


def readers_of(folder: Folder) -> Readers:
    """Read what became of the events from the store."""
    with reading(folder) as db:
        return Readers(list(db.execute(COMMITS)), _patterns(db), list(db.execute(WAITING)), _wakes(db))


def _patterns(db: apsw.Connection) -> list[tuple[str, str, str]]:
    """Return (subscription, tenant, regular expression of its topics)."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for subscription, tenant, glob, dots in db.execute(GLOBS):
        words = glob.replace(".", "[.]").replace("*", ".*")
        found[subscription, tenant].append(f"(?=^[^.]*(?:[.][^.]*){{{dots}}}$)^{words}$")
    return [(*key, "|".join(words)) for key, words in found.items()]


def _wakes(db: apsw.Connection) -> dict[str, int]:
    return dict(db.execute(WAKES)) if db.execute(HAS_WAKES).get else {}


def width_of(first_us: int, last_us: int) -> int:
    """Return how many seconds a bucket has, so that there are at most ``BUCKETS`` of them."""
    span = (last_us - first_us) / 1e6
    return next((width for width in WIDTHS_S if span / width <= BUCKETS - 1), WIDTHS_S[-1])


def collect(spark: SparkSession, events: DataFrame, readers: Readers) -> tuple[Facts, dict[str, DataFrame]]:
    """Compute all tables; return what the page shows, and the tables themselves by name. ``events`` has some rows."""
    enriched = tables.enriched(events).cache()
    instants = (fn.unix_micros(fn.min("created_at")), fn.unix_micros(fn.max("created_at")))
    sums = (fn.count_if(~fn.col("dead")), fn.sum(fn.when(fn.col("dead"), 0).otherwise(fn.col("bytes"))))
    total: Any = enriched.agg(*sums, *instants).first()
    count, size, first, last = total
    width = width_of(first, last)
    start = first // 1_000_000 // width * width
    places = (last // 1_000_000 - start) // width + 1
    commits = spark.createDataFrame(_commit_rows(readers), tables.COMMITS).cache()
    patterns = spark.createDataFrame(readers.patterns, "consumer string, tenant string, topics string")
    made = {
        "rates": tables.rates(enriched, width),
        "topics": tables.topics(enriched),
        "tenants": tables.tenants(enriched),
        "dead_letters": tables.dead_letters(enriched),
        "chains": tables.chains(enriched),
        "steps": tables.steps(enriched),
        "settling": tables.settling_times(tables.settled(enriched, commits, patterns)),
    }
    made = {name: table.cache() for name, table in made.items()}
    chains = made["chains"]
    heads = tables.heads_over_time(enriched, width).collect()
    places_of = tables.settled_over_time(commits, width).collect()
    topics = made["topics"].collect()
    widest: Any = chains.agg(fn.max("fan_out")).first()
    facts = Facts(
        events=count,
        bytes=size,
        first_us=first,
        last_us=last,
        bucket_s=width,
        start_s=start,
        rates=_rates(made["rates"].collect(), [row.topic for row in topics[:TOP]], start, width, places),
        topics=[row.asDict() for row in topics[:ROWS]],
        settling=[_latency(row.consumer, row) for row in made["settling"].collect()],
        steps=[_latency(f"{row.from_topic} → {row.to_topic}", row) for row in made["steps"].limit(ROWS).collect()],
        lag=_lags(heads, places_of, start, width, places),
        dead=[row.asDict() for row in made["dead_letters"].limit(ROWS).collect()],
        waiting=[dict(zip(("consumer", "status", "error", "events"), row, strict=True)) for row in readers.waiting],
        chain_count=chains.count(),
        depths={row.depth: row["count"] for row in chains.groupBy("depth").count().collect()},
        fan_out=widest[0] or 0,
        slowest=[row.asDict() for row in chains.orderBy(fn.desc("took"), "correlation_id").limit(ROWS).collect()],
        tenants=[row.asDict() for row in made["tenants"].limit(ROWS).collect()],
        wakes=readers.wakes,
    )
    return facts, made


def _commit_rows(readers: Readers) -> list[tuple[Any, ...]]:
    return [(stream, part, consumer, through, instant(at)) for stream, part, consumer, through, at in readers.commits]


def _latency(name: str, row: Row) -> Latency:
    return Latency(name, row.events, list(row.percentiles), row.longest)


def _rates(rows: list[Row], names: list[str], start: int, width: int, places: int) -> list[Line]:
    """Return events per second and bucket for the largest topics, and one line for all others."""
    values: dict[str, list[float]] = {name: [0.0] * places for name in names}
    others = [0.0] * places
    for row in rows:
        values.get(row.topic, others)[(row.bucket - start) // width] += row.events / width
    lines = [Line(name, line) for name, line in values.items()]
    return [*lines, Line("all others", others)] if any(others) else lines


def _lags(heads: list[Row], settled: list[Row], start: int, width: int, places: int) -> list[Line]:
    """Return how far each reader was behind at the end of each bucket, over all partitions it had settled any of."""
    ends = _stairs(heads, ("stream", "partition"), "head")
    marks = _stairs(settled, ("consumer", "stream", "partition"), "next_offset")
    lines: dict[str, list[float]] = defaultdict(lambda: [0.0] * places)
    for (consumer, *where), moves in marks.items():
        for place in range(places):
            at = start + place * width
            if moves[0][0] <= at:
                lines[consumer][place] += max(0, _value(ends.get(tuple(where), []), at) - _value(moves, at))
    return [Line(name, values) for name, values in sorted(lines.items())]


def _stairs(rows: list[Row], key: tuple[str, ...], column: str) -> dict[tuple[Any, ...], list[tuple[int, int]]]:
    stairs: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        stairs[tuple(row[name] for name in key)].append((row.bucket, row[column]))
    return {name: sorted(steps) for name, steps in stairs.items()}


def _value(steps: list[tuple[int, int]], at: int) -> int:
    """Return the value of the last step at or before an instant; 0 before the first."""
    place = bisect_right(steps, at, key=lambda step: step[0])
    return steps[place - 1][1] if place else 0
