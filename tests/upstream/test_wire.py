"""What travels through a remote log comes back as it was, and what others send never stops a reader."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.envelope import draft
from postbus.log.wire import event_of, pack, unpack
from postbus.model import Draft, Trust

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, min_size=1, max_size=3)
PRETTY = OBJECT.map(lambda value: b" " + msgspec.json.format(msgspec.json.encode(value), indent=2))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    return draft(
        "orders.paid",
        "suite",
        draw(JSON),
        variant=draw(st.just("") | TEXT),
        key=draw(st.none() | TEXT),
        metadata=draw(st.none() | OBJECT | PRETTY),
        headers=draw(st.none() | st.dictionaries(st.just("h"), TEXT, min_size=1)),
        correlation_id=draw(st.none() | TEXT),
        native_id=draw(st.none() | TEXT),
        delivery_handle=draw(st.none() | OBJECT | PRETTY),
        occurred_at=draw(st.none() | st.just("1969-12-31T23:59:59.999999Z")),
        trust=draw(st.sampled_from(Trust)),
    )


@given(drafts(), TEXT, st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_draft_comes_back_as_it_was(sent: Draft, append_id: str, created_at_us: int) -> None:
    header, body = pack(sent, append_id, created_at_us)
    assert header.decode("ascii").isprintable()
    assert body == sent.payload_json
    carried = unpack(header, body)
    assert carried is not None
    assert (carried.draft, carried.append_id, carried.created_at_us) == (sent, append_id, created_at_us)
    event = event_of("a.b.c", 1, 7, header, body, "far", 5)
    assert event.id == "a.b.c/1/7"
    assert event.created_at_us == created_at_us
    assert event.occurred_at_us == (created_at_us if sent.occurred_at_us is None else sent.occurred_at_us)
    for field in ("topic", "key", "metadata_json", "headers_json", "delivery_handle_json", "native_id", "trust"):
        assert getattr(event, field) == getattr(sent, field)


def test_facts_too_large_for_a_header_travel_behind_the_payload() -> None:
    sent = draft("orders.paid", "suite", [1], metadata={"m": "x" * 60_000}, delivery_handle={"h": "\u20ac" * 20_000})
    header, body = pack(sent, "id", 3)
    assert header == b"~3"
    assert body.startswith(b"[1]")
    carried = unpack(header, body)
    assert carried is not None
    assert carried.draft == sent


GOOD, _ = pack(draft("orders.paid", "suite", 1), "id", 3)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"rubbish",
        b"\xff",
        b"[]",
        b"{}",
        b"~",
        b"~1",
        b"~99",
        b"~-1",
        b"~" + b"9" * 20,
        GOOD[:-1],
        GOOD.replace(b"[1,", b"[2,", 1),
        GOOD.replace(b"orders.paid", b"orders..paid"),
        GOOD.replace(b"orders.paid", b"\\ud800"),
        GOOD.replace(b",3,", b",99999999999999999999,"),
        GOOD.replace(b'"trusted"', b'"holy"'),
        GOOD.replace(b'"suite"', b"7"),
    ],
)
def test_what_is_not_ours_is_read_as_somebody_elses(header: bytes | None) -> None:
    assert header != GOOD
    assert unpack(header, b"1") is None
    event = event_of("a.b.c", 0, 3, header, b"1", "far", 5)
    assert (event.topic, event.source, event.payload, event.trust) == ("a.b.c", "far", 1, "untrusted")
    assert event.occurred_at_us == event.created_at_us == 5


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"a":1,"a":2}', b"NaN", b"[" * 100 + b"]" * 100])
def test_a_body_that_is_not_json_is_kept_as_base64(body: bytes) -> None:
    for header in (None, b"rubbish"):
        event = event_of("a.b.c", 0, 3, header, body, "far", 5)
        assert msgspec.json.decode(event.payload_json, type=bytes) == body
        assert event.metadata == {"encoding": "base64"}


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_nothing_stops_a_reader(header: bytes, body: bytes) -> None:
    for tried in (header, GOOD[: len(header)], GOOD + header, b"~" + header, b"[1," + header):
        event = event_of("a.b.c", 0, 3, tried, body, "far", 5)
        msgspec.json.decode(event.to_json())
