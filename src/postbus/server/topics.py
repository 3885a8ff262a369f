"""``/topics``: the streams of a tenant, made, shown and removed."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec

from postbus.model import Conflict, NotFound, Retention, StreamSettings, instant
from postbus.server.publish import Name, outside
from postbus.server.routes import Call, Named, Route, Scope, tenant_in_query, topic_in_body, topic_in_path

if TYPE_CHECKING:
    from postbus.model import StreamStats

__all__ = ["ROUTES", "Topic", "shown"]

JOURNAL = ".journal"
PAGE_MAX = 1_000


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A topic to be registered, named by ``topic``, or by ``namespace``, ``tenant`` and ``name``."""

    topic: Annotated[str | None, msgspec.Meta(description="The full name: namespace.tenant.name.")] = None
    namespace: Name = None
    tenant: Name = None
    name: Name = None
    partitions: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": 1024})] = 1
    retention: Retention = Retention()
    retention_beats_consumers: bool = False
    identity_window_s: float | None = None
    labels: dict[str, str] = {}


class Extent(msgspec.Struct, frozen=True):
    """What one partition holds: offsets from ``first_offset`` up to before ``high_water_mark``.

    ``chain`` is the head of the partition's hash chain.
    """

    partition: int
    first_offset: int
    high_water_mark: int
    bytes: int
    chain: str


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A registered topic. ``epoch`` counts how often it was removed and made again."""

    topic: str
    namespace: str
    tenant: str
    name: str
    partitions: int
    retention: Retention
    retention_beats_consumers: bool
    identity_window_s: float | None
    labels: dict[str, str]
    epoch: int
    created_at: datetime
    events: int
    bytes: int
    extents: list[Extent]


class Topics(msgspec.Struct, frozen=True):
    """Topics by name. ``next``: give it as ``after`` to see more."""

    topics: list[Topic]
    next: str | None = None


class TopicsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which topics to list."""

    namespace: str | None = None
    tenant: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


def shown(stats: StreamStats) -> Topic:
    """Return a stream as it is shown."""
    stream = stats.stream
    namespace, tenant, name = stream.name.split(".")
    settings = stream.settings
    extents = [
        Extent(part.partition, part.first_offset, part.high_water_mark, part.bytes, part.chain)
        for part in stats.partitions
    ]
    return Topic(
        topic=stream.name,
        namespace=namespace,
        tenant=tenant,
        name=name,
        partitions=settings.partitions,
        retention=settings.retention,
        retention_beats_consumers=settings.retention_beats_consumers,
        identity_window_s=settings.identity_window_s,
        labels=settings.labels,
        epoch=stream.epoch,
        created_at=instant(stream.created_at_us),
        events=stats.count,
        bytes=stats.bytes,
        extents=extents,
    )


def _new(call: Call) -> Named:
    return outside(topic_in_body(call))


def _old(call: Call) -> Named:
    return outside(topic_in_path(call))


async def create_topic(call: Call) -> Topic:
    """Register a topic; exactly one of many concurrent callers succeeds."""
    body: CreateTopic = call.body
    assert call.topic is not None  # noqa: S101 - named
    settings = StreamSettings(
        partitions=body.partitions,
        retention=body.retention,
        retention_beats_consumers=body.retention_beats_consumers,
        identity_window_s=body.identity_window_s,
        labels=body.labels,
    )
    await call.hub.quotas.topics(call.tenant or "", await call.hub.topic_count(call.tenant or ""))
    await call.log.create_stream(call.topic, settings)
    return shown(await call.log.get_stream_stats(call.topic))


async def list_topics(call: Call) -> Topics:
    """List the topics that the caller may see."""
    query: TopicsQuery = call.query
    names = [
        stream.name
        for stream in await call.log.streams()
        if (call.tenant is None or stream.name.startswith(f"{call.tenant}."))
        and (query.after is None or stream.name > query.after)
        and call.caller.may(Scope.SUBSCRIBE, stream.name)
    ]
    page = names[: query.limit]
    found = []
    for name in page:
        try:
            found.append(shown(await call.log.get_stream_stats(name)))
        except NotFound:  # removed since it was listed
            continue
    return Topics(found, page[-1] if len(names) > len(page) else None)


async def show_topic(call: Call) -> Topic:
    """Show one topic."""
    return shown(await call.log.get_stream_stats(call.topic or ""))


async def delete_topic(call: Call) -> None:
    """Remove a topic with its events."""
    name = call.topic or ""
    if name.endswith(JOURNAL):
        raise Conflict("a tenant's journal cannot be removed")
    await call.log.delete_stream(name)


ROUTES = (
    Route(
        method="POST",
        path="/v1/bus/topics",
        handler=create_topic,
        summary="Register a topic",
        tag="topics",
        scope=Scope.ADMIN,
        names=_new,
        body=CreateTopic,
        response=Topic,
        status=201,
        errors=(409, 429, 507),
    ),
    Route(
        method="GET",
        path="/v1/bus/topics",
        handler=list_topics,
        summary="List topics",
        tag="topics",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_query,
        query=TopicsQuery,
        response=Topics,
    ),
    Route(
        method="GET",
        path="/v1/bus/topics/{topic}",
        handler=show_topic,
        summary="Show a topic",
        tag="topics",
        scope=Scope.SUBSCRIBE,
        names=topic_in_path,
        response=Topic,
    ),
    Route(
        method="DELETE",
        path="/v1/bus/topics/{topic}",
        handler=delete_topic,
        summary="Remove a topic with its events",
        tag="topics",
        scope=Scope.ADMIN,
        names=_old,
        status=204,
        errors=(409,),
    ),
)
