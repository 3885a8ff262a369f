"""What the server counts, in a registry of its own, and what it reads from the store when it is asked.

A tenant's key only sees samples with its own tenant; the operator sees everything.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from postbus.bus.outlet import NAME, outlet_of
from postbus.bus.places import DISPATCH
from postbus.model import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from postbus.bus.outlet import RemoteOutlet
    from postbus.model import Receipt
    from postbus.server.hub import Hub

__all__ = ["Metrics", "render"]

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

BREAKER_STATES = ("closed", "half_open", "open")

# Events that were given up on and not replayed yet.
DEAD = """
    SELECT s.name, d.consumer, count(*) FROM delivery_rows d JOIN stream_registry s USING (stream_id)
    WHERE d.status = 'failed' GROUP BY s.name, d.consumer
"""


class Metrics:
    """The counters of one hub."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.published = self._counter("published_events", "Events that were appended over HTTP.", "tenant")
        self.duplicates = self._counter("duplicate_events", "Publishes of events that were there already.", "tenant")
        self.delivered = self._counter("delivered_events", "Events handed to consumers over HTTP.", "tenant")
        self.acked = self._counter("acked_events", "Events that consumers over HTTP acknowledged.", "tenant")
        self.requests = self._counter("http_requests", "Requests by route and status.", "method", "route", "status")
        self.commit_seconds = Histogram(
            "postbus_commit_seconds",
            "How long a publish waited until its commit was on disk.",
            buckets=SECONDS,
            registry=self.registry,
        )

        self.breakers = Gauge(
            "postbus_breaker_state",
            "Circuit breakers: 0 closed, 1 half-open, 2 open.",
            ("name",),
            registry=self.registry,
        )
        self._published: dict[str, Counter] = {}
        self._requests: dict[tuple[str, str, int], Counter] = {}

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"postbus_{name}", meaning, labels, registry=self.registry)

    def breaker(self, name: str, state: str) -> None:
        """Show the state of a circuit breaker."""
        self.breakers.labels(name).set(BREAKER_STATES.index(state))

    def answered(self, method: str, route: str, status: int) -> None:
        """Count a request."""
        key = (method, route, status)
        found = self._requests.get(key)
        if found is None:
            found = self._requests[key] = self.requests.labels(*key)
        found.inc()

    def appended(self, tenant: str, receipts: Sequence[Receipt], took_s: float) -> None:
        """Count what a publish did."""
        duplicates = sum([receipt.duplicate for receipt in receipts])
        if duplicates:
            self.duplicates.labels(tenant).inc(duplicates)
        published = self._published.get(tenant)
        if published is None:
            published = self._published[tenant] = self.published.labels(tenant)
        published.inc(len(receipts) - duplicates)
        self.commit_seconds.observe(took_s)


class _Page:
    """What is shown to one caller; has the one method that rendering needs."""

    def __init__(self, families: Iterable[Metric], tenant: str | None) -> None:
        self._families = families
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            family.samples = [
                one
                for one in family.samples
                if not one.name.endswith("_created") and self._tenant in (None, one.labels.get("tenant"))
            ]
            if family.samples:
                yield family


async def render(hub: Hub, tenant: str | None) -> bytes:
    """Return the numbers of one tenant, or of all, in Prometheus' text format."""
    families = [*await _subscriptions(hub, tenant), *await _dead(hub), _connections(hub), *_store(hub)]
    outlet = outlet_of(hub.log)
    if outlet is not None:
        hub.metrics.breaker(NAME, outlet.state)
        families += await _spool(outlet)
    return generate_latest(_Page([*hub.metrics.registry.collect(), *families], tenant))


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"postbus_{name}", meaning, labels=labels)


def _tenant(stream: str) -> str:
    return stream.rpartition(".")[0]


async def _subscriptions(hub: Hub, tenant: str | None) -> list[Metric]:
    labels = ("tenant", "topic", "subscription")
    lags = _gauge("subscription_lag", "Events a subscription has not passed yet.", *labels)
    ages = _gauge("subscription_oldest_unacked_seconds", "Age of the oldest event not passed yet; 0: none.", *labels)
    now = hub.clock.now_us()
    for consumer in await hub.log.consumers():
        if consumer.id == DISPATCH or tenant not in (None, _tenant(consumer.stream)):
            continue
        try:
            lag = await hub.log.get_consumer_lag(consumer.stream, consumer.id)
            oldest = now
            for part in lag.partitions:
                if part.lag:
                    found = await hub.log.fetch(
                        consumer.stream, part.partition, part.high_water_mark - part.lag, limit=1
                    )
                    oldest = min([oldest, *(event.created_at_us for event in found)])
        except NotFound:  # removed since it was listed
            continue
        names = (_tenant(consumer.stream), consumer.stream, consumer.id)
        lags.add_metric(names, lag.total)
        ages.add_metric(names, (now - oldest) / 1e6)
    return [lags, ages]


async def _dead(hub: Hub) -> list[Metric]:
    family = _gauge("dlq_depth", "Dead letters that wait for somebody.", "tenant", "topic", "subscription")
    for stream, consumer, number in await hub.log.store.read(lambda db: list(db.execute(DEAD))):
        family.add_metric((_tenant(stream), stream, consumer), number)
    return [family]


async def _spool(outlet: RemoteOutlet) -> list[Metric]:
    found = await outlet.relay.spool.status()
    waiting = _gauge("spool_events", "Events that wait on disk for the remote log.")
    waiting.add_metric((), found.rows)
    size = _gauge("spool_bytes", "Size of the events that wait on disk for the remote log.")
    size.add_metric((), found.bytes)
    return [waiting, size]


def _connections(hub: Hub) -> Metric:
    family = _gauge("sse_connections", "Open SSE connections.", "tenant")
    for tenant, number in hub.quotas.connections().items():
        family.add_metric((tenant,), number)
    return family


def _store(hub: Hub) -> list[Metric]:
    database = hub.log.store.folder.database
    wal = database.with_name(f"{database.name}-wal")
    info = _gauge("info", "The version that runs.", "version")
    info.add_metric((version("postbus"),), 1)
    size = _gauge("store_bytes", "Size of the database file.")
    size.add_metric((), database.stat().st_size)
    ahead = _gauge("wal_bytes", "Size of what is written but not merged into the file yet.")
    ahead.add_metric((), wal.stat().st_size if wal.exists() else 0)
    full = _gauge("store_full", "1 while the disk is full.")
    full.add_metric((), int(hub.log.store.writer.full))
    failed = _gauge("store_failed", "1 after a write failed.")
    failed.add_metric((), int(hub.log.store.writer.failed))
    return [info, size, ahead, full, failed]
