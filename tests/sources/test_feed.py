from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.sources import SourceHost, Sources
from tests.sources.conftest import TENANT, Call, Reply, Web, events

RSS = b"""<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:dc="http://purl.org/dc/elements/1.1/"
     xmlns:content="http://purl.org/rss/1.0/modules/content/">
  <channel>
    <title>News &amp; Views</title>
    <item>
      <title>Second</title><link>https://example.com/2</link><guid isPermaLink="false">n-2</guid>
      <pubDate>Tue, 03 Mar 2026 10:00:00 +0100</pubDate><dc:creator>Ada</dc:creator>
      <description><![CDATA[<b>two</b>]]></description><category>x</category>
    </item>
    <item><title>First</title><link>https://example.com/1</link></item>
  </channel>
</rss>"""
ATOM = """<?xml version="1.0" encoding="utf-8"?>
<feed xmlns="http://www.w3.org/2005/Atom">
  <title>Blög</title><id>urn:feed</id>
  <entry>
    <id>urn:1</id><title>One</title><updated>2026-03-01T10:00:00Z</updated>
    <link rel="self" href="https://example.com/self"/><link href="https://example.com/one"/>
    <author><name>Bo</name></author><summary>short</summary><content type="text">long</content>
  </entry>
</feed>""".encode()
BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<rss><channel><title>&b;</title></channel></rss>"""
OUTSIDE = b"""<?xml version="1.0"?><!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/passwd">]><rss><channel><title>&x;</title></channel></rss>"""


@pytest.fixture
async def feed(sources: Sources, web: Web) -> Web:
    await sources.add("news", "feed", {"url": f"{web.url}/feed", "allow_private": True})
    return web


async def error_of(host: SourceHost) -> str:
    return str((await host.poll(TENANT, "news")).error)


async def test_rss_entries_become_events_oldest_first_once(host: SourceHost, log: SqliteLog, feed: Web) -> None:
    feed.answer = lambda _: (200, {}, RSS)
    await host.poll(TENANT, "news")
    again = await host.poll(TENANT, "news")
    found = await events(log, "news")
    assert [event.native_id for event in found] == ["https://example.com/1", "n-2"]
    assert again.duplicates == 2
    second = found[1]
    assert second.topic == "feed.entry"
    assert second.metadata == {
        "feed": "News & Views",
        "title": "Second",
        "author": "Ada",
        "url": "https://example.com/2",
    }
    assert second.payload["summary"] == "<b>two</b>"
    assert second.occurred_at.isoformat() == "2026-03-03T09:00:00+00:00"


async def test_atom_entries_become_events(host: SourceHost, log: SqliteLog, feed: Web) -> None:
    feed.answer = lambda _: (200, {"content-encoding": "gzip"}, gzip.compress(ATOM))
    await host.poll(TENANT, "news")
    (event,) = await events(log, "news")
    assert (event.native_id, event.metadata["url"], event.metadata["feed"]) == (
        "urn:1",
        "https://example.com/one",
        "Blög",
    )
    assert (event.payload["content"], event.payload["author"]) == ("long", "Bo")


async def test_an_edited_entry_is_no_new_event(host: SourceHost, log: SqliteLog, feed: Web) -> None:
    feed.answer = lambda _: (200, {}, ATOM)
    await host.poll(TENANT, "news")
    feed.answer = lambda _: (200, {}, ATOM.replace(b"One", b"Uno"))
    turn = await host.poll(TENANT, "news")
    assert (turn.error, turn.duplicates) == (None, 1)
    assert [event.payload["title"] for event in await events(log, "news")] == ["One"]


async def test_an_unchanged_feed_is_not_sent_again(host: SourceHost, feed: Web) -> None:
    def answer(call: Call) -> Reply:
        if call.headers.get("if-none-match") == '"v1"' and call.headers.get("if-modified-since") == "then":
            return 304, {}, b""
        return 200, {"etag": '"v1"', "last-modified": "then"}, ATOM

    feed.answer = answer
    await host.poll(TENANT, "news")
    turn = await host.poll(TENANT, "news")
    assert (turn.error, turn.receipts) == (None, [])
    await host.poll(TENANT, "news")
    assert [("if-none-match" in call.headers) for call in feed.calls] == [False, True, True]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (BOMB, "document type"),
        (OUTSIDE, "document type"),
        (b"<html><body>hi</body></html>", "no feed"),
        (b"<rss><channel>", "no XML"),
        (b"", "no XML"),
        (b"\x00\x01", "no XML"),
        (b"<rss>" + b"<a>" * 500 + b"</a>" * 500 + b"</rss>", "deeper"),
    ],
)
async def test_what_is_no_safe_feed_is_refused(
    host: SourceHost, log: SqliteLog, feed: Web, body: bytes, why: str
) -> None:
    feed.answer = lambda _: (200, {}, body)
    assert why in await error_of(host)
    assert await events(log, "news") == []


async def test_an_answer_that_unpacks_to_too_much_is_refused(host: SourceHost, feed: Web) -> None:
    feed.answer = lambda _: (200, {"content-encoding": "gzip"}, gzip.compress(b" " * 50_000_000))
    assert "larger than" in await error_of(host)


async def test_errors_are_visible_and_a_wish_to_wait_is_kept(
    host: SourceHost, feed: Web, sources: Sources, log: SqliteLog
) -> None:
    feed.answer = lambda _: (503, {"retry-after": "120"}, b"busy")
    before_us = log.store.clock.now_us()
    assert "503" in await error_of(host)
    source = await sources.get("news")
    assert source.next_due_at_us is not None
    assert source.next_due_at_us - before_us >= 119_000_000


async def test_a_move_is_followed_and_judged_again(
    host: SourceHost, log: SqliteLog, sources: Sources, web: Web
) -> None:
    def answer(call: Call) -> Reply:
        if call.path == "/old":
            return 301, {"location": "/new"}, b""
        if call.path == "/away":
            return 302, {"location": "file:///etc/passwd"}, b""
        if call.path == "/round":
            return 302, {"location": "/round"}, b""
        return 200, {}, ATOM

    web.answer = answer
    for name in ("old", "away", "round"):
        await sources.add(name, "feed", {"url": f"{web.url}/{name}", "allow_private": True})
        await host.poll(TENANT, name)
    assert len(await events(log, "old")) == 1
    assert "no http" in str((await sources.get("away")).last_error)
    assert "more than 3 times" in str((await sources.get("round")).last_error)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost:8000/",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.1.2.3/",
        "http://[::ffff:10.0.0.1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://0.0.0.0/",
        "file:///etc/passwd",
        "ftp://example.com/",
        "http://user:secret@example.com/",
        "no url",
        "http://",
    ],
)
async def test_addresses_inside_are_refused_at_once(sources: Sources, url: str) -> None:
    with pytest.raises(Invalid):
        await sources.add("inside", "feed", {"url": url})
    assert await sources.all() == []


async def test_a_name_that_leads_inside_is_refused_when_it_is_resolved(
    host: SourceHost, sources: Sources, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sources.add("turned", "feed", {"url": web.url.replace("127.0.0.1", "feed.example")})

    async def resolve(_: Any, *_args: Any, **_more: Any) -> list[Any]:
        return [(2, 1, 6, "", ("93.184.216.34", 80)), (2, 1, 6, "", ("127.0.0.1", 80))]

    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)
    turn = await host.poll(TENANT, "turned")
    assert "private address 127.0.0.1" in str(turn.error)
    assert web.calls == []
