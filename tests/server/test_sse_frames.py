"""Events as frames: what a reader's id says at every point, what is encoded once, and what is remembered."""

from __future__ import annotations

import msgspec
import pytest

from postbus.model import Event
from postbus.server import frames as module
from postbus.server.frames import Frames, error_frame, parse_places
from postbus.server.readers import CHUNK_BYTES, EVENTS_MAX, Connection


def event(offset: int, partition: int = 0, payload: bytes = b"1", created: int = 7) -> Event:
    facts = ("a.b.c", partition, offset, "a.b.c", "test", "", None, payload, None, None, None, None, None)
    return Event(*facts, created, created)


def ids(piece: bytes) -> list[str]:
    return [line.removeprefix("id: ") for line in piece.decode().splitlines() if line.startswith("id: ")]


def test_places_are_what_a_reader_has_at_each_event() -> None:
    places = {0: 4, 1: -1, 2: 9}
    piece = Frames().chunk([event(0, 1), event(5), event(6), event(1, 1)], places, 3)
    assert ids(piece) == ["0:4,1:0,2:9", "0:5,1:0,2:9", "0:6,1:0,2:9", "0:6,1:1,2:9"]
    assert places == {0: 6, 1: 1, 2: 9}


def test_an_event_that_comes_again_does_not_move_a_place_back_or_too_far() -> None:
    places = {0: 5}
    assert ids(Frames().chunk([event(2), event(6), event(8)], places, 1)) == ["0:5", "0:6", "0:8"]
    assert places == {0: 8}


def test_readers_at_one_place_share_a_piece_and_others_do_not() -> None:
    frames = Frames()
    events = [event(offset) for offset in range(3)]
    first = frames.chunk(events, {}, 1)
    assert frames.chunk(events, {0: -1}, 1) is first
    assert ids(frames.chunk(events, {0: 1}, 1)) == ["0:1", "0:1", "0:2"]
    made_again = [event(offset, payload=b"2", created=8) for offset in range(3)]
    assert b'"payload":2' in frames.chunk(made_again, {}, 1)
    assert frames.body(events[0]) is not frames.body(made_again[0])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 10_000)
    frames = Frames()
    for offset in range(1000):
        frames.chunk([event(offset)], {0: offset - 1}, 1)
    assert sum(len(body) for _, body in frames._bodies.values()) <= 10_000
    assert len(frames._chunks) <= module.CHUNKS_MAX


def test_errors_are_events_without_an_id() -> None:
    kind, data = error_frame("gap", "two lines\nhere", missed=3).decode().splitlines()[:2]
    assert kind == "event: bus.error"
    assert msgspec.json.decode(data.removeprefix("data: ")) == {
        "code": "gap",
        "message": "two lines\nhere",
        "missed": 3,
    }


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("0:41", {0: 41}),
        (" 0:41,1:-1,12:7 ", {0: 41, 1: -1, 12: 7}),
        ("0:-9", {0: -1}),
        ("", None),
        ("0", None),
        ("0:1,,1:2", None),
        ("-1:0", None),
        ("0:1.5", None),
        ("\u0660:1", None),
        (",".join(f"{n}:1" for n in range(2000)), None),
    ],
)
def test_last_event_ids(text: str, places: dict[int, int] | None) -> None:
    assert parse_places(text) == places


def test_a_connection_knows_what_it_was_given() -> None:
    connection = Connection("secret")
    connection.begin({0: 4, 1: 7})
    connection.give([event(5), event(6), event(9), event(8, 1)])
    assert connection.given(0, 5) == [(6, 6), (9, 9)]
    assert connection.given(1, -1) == [(8, 8)]
    assert connection.had({0: 6, 1: 7})
    assert connection.had({0: 9, 1: 8})
    assert not connection.had({0: 7, 1: 7})
    assert not connection.had({0: 6, 1: 9})
    assert not connection.had({})


def test_a_piece_is_bounded_by_bytes_and_learns_how_large_events_are() -> None:
    connection = Connection("secret")
    assert connection.limit > 64
    large = [event(offset, payload=b"1" * 20_000) for offset in range(10)]
    assert len(connection.fitting(large)) == 1
    assert connection.limit == 4 * CHUNK_BYTES // 20_512
    assert len(connection.fitting([event(0, payload=b"1" * 10 * CHUNK_BYTES)])) == 1
    assert connection.limit == 1
    connection.learn([event(0)])
    assert connection.limit == min(EVENTS_MAX, 4 * CHUNK_BYTES // 513)
