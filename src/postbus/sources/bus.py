"""The kind ``bus``: follows a topic of another Postbus over its HTTP API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from postbus.model import Draft, Unreachable
from postbus.outside import check_url, refused, request
from postbus.sources.contract import Common, NotReady, Polled, made
from postbus.sources.webhook import check_secret_env
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["BusSettings", "BusSource"]

OK = 200
BATCH = 200
BYTES_MAX = 64 << 20
ORIGIN_ID, ORIGIN_SOURCE = "origin_id", "origin_source"
HEADERS_MAX = 20
RESERVED = "postbus."


class BusSettings(Common, frozen=True, kw_only=True):
    """``url``: the other server. ``remote_topic``: the full name of its topic. ``key_env``: where its key is.

    ``start``: whether to begin with what is there, or with what comes.
    """

    url: str
    remote_topic: str
    key_env: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    interval_s: Annotated[float, msgspec.Meta(ge=0.05)] = 1.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 30.0
    allow_private: bool = False


class _Extent(msgspec.Struct):
    partition: int
    first_offset: int
    high_water_mark: int


class _Topic(msgspec.Struct):
    epoch: int
    extents: list[_Extent]


class _Event(msgspec.Struct):
    id: str
    offset: int
    topic: str
    source: str
    variant: str
    key: str | None
    payload: msgspec.Raw
    metadata: msgspec.Raw
    headers: dict[str, str]
    correlation_id: str | None
    occurred_at: str


class _Events(msgspec.Struct):
    events: list[_Event]


class BusSource:
    """Reads by offset, each partition from its own place. Events keep their bytes; the first bus names them.

    A reply to such an event would be one to the other bus, so delivery handles stay there.
    """

    def __init__(self, source: Source, settings: BusSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self.interval_s = settings.interval_s

    @staticmethod
    def check(settings: BusSettings) -> None:
        """Refuse settings that could never work."""
        check_url(settings.url, allow_private=settings.allow_private)
        check_stream_name(settings.remote_topic)
        if settings.key_env is not None:
            check_secret_env(settings.key_env)

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``; a topic that was removed and made again is read from its beginning."""
        topic = await self._get("", _Topic)
        before = checkpoint if checkpoint is not None and checkpoint["epoch"] == topic.epoch else None
        places: dict[str, int] = {} if before is None else dict(before["places"])
        drafts: list[Draft] = []
        again = False
        for extent in topic.extents:
            name = str(extent.partition)
            begin = extent.first_offset
            if checkpoint is None and self._settings.start == "latest":
                begin = extent.high_water_mark
            place = places[name] = max(places.get(name, begin), extent.first_offset)
            if place < extent.high_water_mark:
                query = f"/events?partition={extent.partition}&offset={place}&limit={BATCH}"
                found = (await self._get(query, _Events)).events
                drafts += [self._event(event, topic.epoch) for event in found]
                places[name] = found[-1].offset + 1 if found else place
                again = again or (bool(found) and places[name] < extent.high_water_mark)
        return Polled(drafts=drafts, checkpoint={"epoch": topic.epoch, "places": places}, again=again)

    def _event(self, event: _Event, epoch: int) -> Draft:
        origin = event.headers.get(ORIGIN_ID, f"{event.id}@{epoch}")
        headers = {name: value for name, value in event.headers.items() if not name.startswith(RESERVED)}
        if len(headers) + 2 <= HEADERS_MAX:
            headers = {ORIGIN_SOURCE: event.source} | headers | {ORIGIN_ID: origin}
        return made(
            self._source,
            self._settings,
            event.topic,
            bytes(event.payload),
            native_id=origin,
            variant=event.variant,
            key=event.key,
            metadata=bytes(event.metadata),
            headers=headers,
            correlation_id=event.correlation_id,
            occurred_at=event.occurred_at,
        )

    async def _get(self, path: str, kind: Any) -> Any:
        settings, headers = self._settings, {"accept": "application/json"}
        if settings.key_env is not None:
            key = os.environ.get(settings.key_env, "").strip()
            if not key:
                raise NotReady(f"the environment variable {settings.key_env} is not set")
            headers["authorization"] = f"Bearer {key}"
        url = f"{settings.url.rstrip('/')}/v1/bus/topics/{quote(settings.remote_topic)}{path}"
        answer = await request(
            "GET",
            url,
            headers=headers,
            allow_private=settings.allow_private,
            timeout_s=settings.timeout_s,
            bytes_max=BYTES_MAX,
        )
        if answer.status != OK:
            raise refused(answer, "the other bus", self._clock.now_us())
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as error:
            raise Unreachable(f"the other bus does not answer as a Postbus does: {error}") from None
