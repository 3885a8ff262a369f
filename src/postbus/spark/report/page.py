"""The page: one HTML file with everything in it, readable on a telephone, on paper and in the dark."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from postbus.model import instant
from postbus.spark.report import plots
from postbus.spark.report.plots import duration, number

if TYPE_CHECKING:
    from datetime import datetime

    from postbus.spark.report.facts import Facts, Latency

__all__ = ["page"]


def page(facts: Facts, title: str, made_at_us: int) -> str:
    """Return the report as one HTML document."""
    style = resources.files("postbus.spark.report").joinpath("style.css").read_text(encoding="utf-8")
    span_s = (facts.last_us - facts.first_us) / 1e6
    sections = [_rates(facts), _settling(facts), _lag(facts), _steps(facts), _failures(facts), _chains(facts)]
    sections += [_tenants(facts), _wakes(facts), _topics(facts)]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p>{_moment(instant(facts.first_us))} to {_moment(instant(facts.last_us))} UTC, {duration(span_s)}</p>
{_cards(facts, span_s)}
{"".join(sections)}
<footer>Made by <code>postbus pipeline report</code> at {_moment(instant(made_at_us))} UTC.</footer>
</main>
</body>
</html>
"""


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _cards(facts: Facts, span_s: float) -> str:
    dead = sum(row["dead"] for row in facts.tenants)
    slowest = max((row.percentiles[2] for row in facts.settling), default=None)
    shown = [
        (number(facts.events), "events"),
        (f"{number(facts.events / span_s)}/s" if span_s else "none", "on average"),
        (_size(facts.bytes), "of payloads"),
        ("none" if slowest is None else duration(slowest), "p95 of the slowest reader"),
        (number(dead), "dead letters"),
        (number(facts.chain_count), "causal chains"),
    ]
    return (
        f'<div class="cards">{"".join(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in shown)}</div>'
    )


def _size(size: float) -> str:
    for power, unit in enumerate(("B", "kB", "MB", "GB", "TB")):
        if size < 1000 ** (power + 1) or unit == "TB":
            return f"{size / 1000**power:.3g} {unit}"
    raise AssertionError(size)


def _section(title: str, about: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(about)}</p>{content}</section>\n"


def _rates(facts: Facts) -> str:
    drawn = plots.areas("events per second", facts.rates, facts.start_s, facts.bucket_s)
    about = f"Events appended per second, by topic, in steps of {duration(facts.bucket_s)}."
    return _section("How much happened", about, drawn)


def _settling(facts: Facts) -> str:
    if not facts.settling:
        return _section("From append to settled", "No subscription has settled anything yet.", "")
    about = (
        "How long from an event's append until its reader had settled it, which includes waiting, handling and the "
        "commit. Bar: p50 to p99, mark: p95, dot: longest; right: events."
    )
    drawn = plots.spreads("from append to settled", facts.settling)
    return _section("From append to settled", about, drawn + _latencies("reader", facts.settling))


def _steps(facts: Facts) -> str:
    if not facts.steps:
        return ""
    about = "How long from an event until the event that a handler derived from it. Bar: p50 to p99, mark: p95."
    return _section("What handlers take", about, plots.spreads("from cause to effect", facts.steps))


def _latencies(what: str, rows: list[Latency]) -> str:
    head = (what, "events", "p50", "p90", "p95", "p99", "longest")
    cells = [[row.name, f"{row.events:,}", *map(duration, row.percentiles), duration(row.longest)] for row in rows]
    return _table(head, cells, numbers=6)


def _lag(facts: Facts) -> str:
    if not facts.lag:
        return ""
    about = "How many events each reader was behind at the end of each step, from the first one it settled on."
    return _section("Who fell behind", about, plots.lines("lag over time", facts.lag, facts.start_s, facts.bucket_s))


def _failures(facts: Facts) -> str:
    if not facts.dead and not facts.waiting:
        return _section("What failed", "Nothing: no dead letter and no event waiting for a retry.", "")
    content = ""
    if facts.dead:
        content += plots.bars("dead letters by reason", [_dead(row) for row in facts.dead], colour="#e45756")
        names = ("reason", "subscription", "origin_topic", "error", "events")
        content += _table(("reason", "subscription", "topic", "last error", "events"), _cells(facts.dead, names))
    if facts.waiting:
        states = ("consumer", "status", "error", "events")
        content += _table(("subscription", "now", "error", "events"), _cells(facts.waiting, states))
    return _section("What failed", "Dead letters by reason, and what waits for a retry right now.", content)


def _dead(row: dict[str, Any]) -> tuple[str, float]:
    return f"{row['reason']} · {row['subscription']} · {row['origin_topic']}", float(row["events"])


def _cells(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[list[Any]]:
    return [[f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in names] for row in rows]


def _chains(facts: Facts) -> str:
    if not facts.chain_count:
        return ""
    rows = [(f"{depth} deep", float(count)) for depth, count in sorted(facts.depths.items())]
    content = plots.bars("depth of causal chains", rows, colour="#54a24b")
    cells = [
        [
            row["correlation_id"],
            row["first_topic"],
            f"{row['events']:,}",
            row["depth"],
            row["fan_out"],
            duration(row["took"]),
        ]
        for row in facts.slowest
    ]
    content += _table(("slowest chains", "began with", "events", "depth", "fan-out", "took"), cells, numbers=4)
    about = f"Events that led to others: {facts.chain_count:,} chains, at most {facts.fan_out} effects of one event."
    return _section("What led to what", about, content)


def _tenants(facts: Facts) -> str:
    cells = [
        [row["tenant"], row["streams"], f"{row['events']:,}", _size(row["bytes"]), f"{row['dead']:,}"]
        for row in facts.tenants
    ]
    content = _table(("tenant", "streams", "events", "payloads", "dead letters"), cells, numbers=4)
    return _section("Who used it", "Per tenant, by number of events.", content)


def _wakes(facts: Facts) -> str:
    if not facts.wakes:
        return ""
    rows = [(name, float(value)) for name, value in sorted(facts.wakes.items())]
    about = "Wakes that were made, and wakes that were avoided, by reason."
    return _section("Waking agents", about, plots.bars("wakes", rows, colour="#b279a2"))


def _topics(facts: Facts) -> str:
    cells = [
        [row["topic"], row["sources"], f"{row['events']:,}", _size(row["bytes"]), duration(row["late_p95"])]
        for row in facts.topics
    ]
    content = _table(("topic", "sources", "events", "payloads", "p95 appended after it happened"), cells, numbers=4)
    return _section("Topics", "The largest ones.", content)


def _table(head: tuple[str, ...], rows: list[list[Any]], *, numbers: int = 1) -> str:
    """Return a table whose last ``numbers`` columns are numbers."""

    def cells(tag: str, values: Any) -> str:
        kinds = [' class="n"' if place >= len(head) - numbers else "" for place in range(len(head))]
        return "".join(
            f"<{tag}{kind}>{escape('' if value is None else str(value))}</{tag}>"
            for kind, value in zip(kinds, values, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{cells("th", head)}</tr>{body}</table></div>'
