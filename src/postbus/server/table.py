"""The route table: every method on every path. The fixed paths that are asked most come first."""

from __future__ import annotations

from postbus.server import (
    agents,
    deliveries,
    dlq,
    events,
    inbox,
    probes,
    publish,
    pull,
    schemas,
    search,
    sources,
    sse,
    stats,
    subscriptions,
    targets,
    timers,
    topics,
)

__all__ = ["ROUTES"]

ROUTES = (
    *publish.ROUTES,
    *pull.ROUTES,
    *sse.ROUTES,
    *subscriptions.ROUTES,
    *inbox.ROUTES,
    *agents.ROUTES,
    *targets.ROUTES,
    *timers.ROUTES,
    *sources.ROUTES,
    *deliveries.ROUTES,
    *dlq.ROUTES,
    *topics.ROUTES,
    *schemas.ROUTES,
    *search.ROUTES,
    *events.ROUTES,
    *stats.ROUTES,
    *probes.ROUTES,
)
