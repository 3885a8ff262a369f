"""The kind ``feed``: RSS and Atom, asked politely and parsed without entities."""

from __future__ import annotations

import hashlib
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urljoin
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import msgspec

from postbus.envelope import parse_instant
from postbus.model import Invalid, Unreachable, instant
from postbus.outside import check_url, refused, request
from postbus.sources.contract import Common, Polled, made

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.model import Draft, Source
    from postbus.outside import Answer

__all__ = ["FeedSettings", "FeedSource", "entries"]

TOPIC = "feed.entry"
REDIRECTS_MAX = 3
DEPTH_MAX = 100
TEXT_CHARS_MAX = 100_000
ENTRIES_MAX = 1_000
OK, NOT_MODIFIED = 200, 304
MOVED = (301, 302, 303, 307, 308)


class FeedSettings(Common, frozen=True, kw_only=True):
    """``url``: the feed. ``allow_private``: it may be inside your network."""

    url: str
    interval_s: Annotated[float, msgspec.Meta(ge=1)] = 900.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 30.0
    allow_private: bool = False


class FeedSource:
    """Each entry becomes one event, known by its guid or id; later edits of an entry are no new events."""

    def __init__(self, source: Source, settings: FeedSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self.interval_s = settings.interval_s

    @staticmethod
    def check(settings: FeedSettings) -> None:
        """Refuse settings that could never work."""
        check_url(settings.url, allow_private=settings.allow_private)

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``."""
        before = checkpoint or {}
        answer = await self._get(before)
        if answer.status == NOT_MODIFIED:
            return Polled(drafts=[], checkpoint=before)
        title, found = entries(answer.body)
        drafts = [self._event(title, entry) for entry in reversed(found)]
        kept = {name: answer.headers[name] for name in ("etag", "last-modified") if name in answer.headers}
        return Polled(drafts=drafts, checkpoint=kept)

    async def _get(self, before: dict[str, str]) -> Answer:
        """Ask for the feed, as unchanged if it is; each place it was moved to is judged like the first."""
        headers = {"accept": "application/atom+xml, application/rss+xml, application/xml;q=0.9, text/xml;q=0.8"}
        for name, condition in (("etag", "if-none-match"), ("last-modified", "if-modified-since")):
            if name in before:
                headers[condition] = before[name]
        url, settings = self._settings.url, self._settings
        for _ in range(REDIRECTS_MAX + 1):
            answer = await request(
                "GET", url, headers=headers, allow_private=settings.allow_private, timeout_s=settings.timeout_s
            )
            if answer.status in (OK, NOT_MODIFIED):
                return answer
            if answer.status not in MOVED or "location" not in answer.headers:
                raise refused(answer, "the feed", self._clock.now_us())
            url = urljoin(url, answer.headers["location"])
        raise Unreachable(f"the feed was moved more than {REDIRECTS_MAX} times")

    def _event(self, feed: str, entry: dict[str, Any]) -> Draft:
        name = entry["id"] or hashlib.sha256(msgspec.json.encode(entry, order="sorted")).hexdigest()
        facts = {"feed": feed, "title": entry["title"], "author": entry["author"], "url": entry["url"]}
        return made(
            self._source,
            self._settings,
            TOPIC,
            entry | {"feed": feed},
            native_id=name,
            metadata={key: value for key, value in facts.items() if value},
            occurred_at=entry["published"] or entry["updated"],
        )


# --- the format -------------------------------------------------------------------------------------------------------


def entries(document: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Return the title of a feed and its entries in their order; raises ``Unreachable`` for what is no feed."""
    root = _parse(document)
    kind = _name(root)
    if kind not in ("rss", "feed", "RDF"):
        raise Unreachable(f"the answer is no feed: its root is {kind[:60]!r}")
    channel = root if kind == "feed" else next((one for one in root if _name(one) == "channel"), root)
    found = [one for one in root.iter() if _name(one) in ("item", "entry")][:ENTRIES_MAX]
    return _text(channel, "title"), [_entry(one) for one in found]


def _entry(item: Element) -> dict[str, Any]:
    url = _link(item)
    return {
        "id": _text(item, "guid") or _text(item, "id") or url,
        "title": _text(item, "title"),
        "url": url,
        "author": _author(item),
        "published": _instant(_text(item, "published") or _text(item, "pubDate") or _text(item, "date")),
        "updated": _instant(_text(item, "updated")),
        "summary": _text(item, "summary") or _text(item, "description"),
        "content": _text(item, "content") or _text(item, "encoded"),
        "categories": [one.get("term") or one.text or "" for one in item if _name(one) == "category"],
    }


def _name(element: Element) -> str:
    return element.tag.rpartition(" ")[2]


def _text(parent: Element, name: str) -> str:
    for child in parent:
        if _name(child) == name:
            return "".join(child.itertext()).strip()[:TEXT_CHARS_MAX]
    return ""


def _link(item: Element) -> str:
    links = [one for one in item if _name(one) == "link"]
    best = [one for one in links if one.get("rel", "alternate") == "alternate"] or links
    return (best[0].get("href") or best[0].text or "").strip()[:TEXT_CHARS_MAX] if best else ""


def _author(item: Element) -> str:
    for child in item:
        if _name(child) == "author":
            return _text(child, "name") or "".join(child.itertext()).strip()[:TEXT_CHARS_MAX]
    return _text(item, "creator")


def _instant(text: str) -> str | None:
    """Return an instant of either format as RFC 3339; None for what is none."""
    if not text:
        return None
    try:
        return f"{instant(parse_instant(text)):%Y-%m-%dT%H:%M:%SZ}"
    except Invalid:
        pass
    try:
        found = parsedate_to_datetime(text)
        aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return f"{instant(parse_instant(aware)):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, Invalid):
        return None


def _parse(document: bytes) -> Element:
    """Parse XML that declares no document type, so that nothing in it can grow or reach elsewhere."""
    parser = expat.ParserCreate(namespace_separator=" ")
    builder = TreeBuilder()
    depth = 0

    def begin(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > DEPTH_MAX:
            raise Unreachable(f"the feed is nested deeper than {DEPTH_MAX}")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_: object) -> None:
        raise Unreachable("the feed declares a document type, which is not read")

    parser.StartElementHandler = begin
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(document, True)
        return builder.close()
    except (expat.ExpatError, AssertionError, LookupError, ValueError) as error:
        raise Unreachable(f"the feed is no XML: {error}") from None
