from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.sources import SourceHost, Sources
from tests.sources.conftest import TENANT, events


@pytest.fixture
async def path(tmp_path: Path, sources: Sources) -> Path:
    file = tmp_path / "lines.jsonl"
    await sources.add("lines", "file", {"path": str(file)})
    return file


async def poll(host: SourceHost, times: int = 4) -> None:
    for _ in range(times):
        await host.poll(TENANT, "lines")


async def payloads(log: SqliteLog) -> list[Any]:
    return [event.payload for event in await events(log, "lines")]


def fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def move(path: Path, suffix: str) -> Path:
    return path.rename(path.with_suffix(suffix))


def write(path: Path, *values: Any) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


async def test_lines_become_events_in_order_with_bytes_as_written(host: SourceHost, log: SqliteLog, path: Path) -> None:
    fill(path, b'{"a":   1.50}\r\n\n  [2]\n"drei"\n')
    await poll(host)
    found = await events(log, "lines")
    assert [event.payload_json for event in found] == [b'{"a":   1.50}', b"[2]", b'"drei"']
    assert {(event.topic, event.source, event.trust) for event in found} == {("file.line", "source:lines", "untrusted")}


async def test_an_unfinished_line_waits_for_its_end(host: SourceHost, log: SqliteLog, path: Path) -> None:
    fill(path, b'{"n": 1}\n{"n": ')
    await poll(host)
    assert await payloads(log) == [{"n": 1}]
    with path.open("ab") as file:
        file.write(b"2}\n")
    await poll(host)
    assert await payloads(log) == [{"n": 1}, {"n": 2}]


async def test_a_bad_line_becomes_an_event_about_it_and_stops_nothing(
    host: SourceHost, log: SqliteLog, path: Path, sources: Sources
) -> None:
    fill(path, b'1\nnot json\n\xff\xfe\n{"a": NaN}\n2\n')
    await poll(host)
    found = await events(log, "lines")
    assert [event.topic for event in found] == ["file.line", *["source.bad"] * 3, "file.line"]
    assert found[1].payload["sample"] == "not json"
    assert (await sources.get("lines")).last_error is None


async def test_rotation_by_rename_reads_the_rest_of_the_old_file_first(
    host: SourceHost, log: SqliteLog, path: Path
) -> None:
    write(path, 1, 2)
    await poll(host)
    write(path, 3)
    with path.open("a") as file:
        file.write("4")  # a last line without its end
    move(path, ".jsonl.1")
    write(path, 5, 6)
    await poll(host)
    assert await payloads(log) == [1, 2, 3, 4, 5, 6]


async def test_between_rename_and_recreation_the_old_file_is_still_followed(
    host: SourceHost, log: SqliteLog, path: Path
) -> None:
    write(path, 1)
    await poll(host)
    old = move(path, ".old")
    write(old, 2)
    await poll(host)
    assert await payloads(log) == [1, 2]
    write(path, 3)
    await poll(host)
    assert await payloads(log) == [1, 2, 3]


async def test_several_rotations_while_nobody_looked_miss_nothing(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path
) -> None:
    file = tmp_path / "app.log"
    await sources.add("lines", "file", {"path": str(file), "rotated": "app.log.*"})
    write(tmp_path / "app.log.unread", "older than the source")
    await asyncio.sleep(0.02)
    write(file, 1)
    await poll(host)
    for number in range(2, 6):
        write(file, number)
        move(file, f".log.{10 - number}")
        await asyncio.sleep(0.02)
        write(file, number * 10)
    await poll(host, 20)
    assert await payloads(log) == [1, 2, 20, 3, 30, 4, 40, 5, 50]


@pytest.mark.parametrize("after", [(7,), (70, 71, 72, 73, 74)], ids=["shorter", "longer"])
async def test_truncation_starts_over(host: SourceHost, log: SqliteLog, path: Path, after: tuple[int, ...]) -> None:
    write(path, 10, 20, 30)
    await poll(host)
    with path.open("r+") as file:
        file.truncate(0)
    write(path, *after)
    await poll(host)
    assert await payloads(log) == [10, 20, 30, *after]


async def test_a_line_beyond_the_limit_is_passed_over_and_named(host: SourceHost, log: SqliteLog, path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'1\n"' + b"x" * 5_000_000 + b'"\n2\n')
    await poll(host, 10)
    found = await events(log, "lines")
    assert [event.topic for event in found] == ["file.line", "source.bad", "file.line"]
    assert found[2].payload == 2


async def test_ids_of_their_own_keep_lines_from_coming_twice(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path
) -> None:
    file = tmp_path / "ids.jsonl"
    await sources.add("ids", "file", {"path": str(file), "id_field": "meta.id"})
    write(
        file, {"meta": {"id": "a"}, "n": 1}, {"meta": {"id": "a"}, "n": 1}, {"meta": {"id": 7}}, {"meta": {"id": "a"}}
    )
    turn = await host.poll(TENANT, "ids")
    assert [event.native_id for event in await events(log, "ids")] == ["id:a", "id:7"]
    assert (len(turn.receipts), turn.duplicates) == (2, 2)


async def test_a_source_may_begin_at_the_end(
    host: SourceHost, log: SqliteLog, sources: Sources, tmp_path: Path
) -> None:
    file = tmp_path / "late.jsonl"
    write(file, 1, 2)
    with file.open("a") as more:
        more.write("3")
    await sources.add("late", "file", {"path": str(file), "start": "latest"})
    await host.poll(TENANT, "late")
    with file.open("a") as more:
        more.write("3\n")
    await host.poll(TENANT, "late")
    assert [event.payload for event in await events(log, "late")] == [33]


async def test_a_missing_file_is_visible_and_picked_up_when_it_comes(
    host: SourceHost, log: SqliteLog, path: Path, sources: Sources
) -> None:
    turn = await host.poll(TENANT, "lines")
    assert "No such file" in str(turn.error)
    assert (await sources.get("lines")).failures == 1
    write(path, 1)
    await poll(host)
    assert await payloads(log) == [1]
    source = await sources.get("lines")
    assert (source.last_error, source.failures) == (None, 0)


async def test_a_pipe_is_no_file(host: SourceHost, path: Path) -> None:
    os.mkfifo(path)
    assert "no regular file" in str((await host.poll(TENANT, "lines")).error)


@pytest.mark.parametrize(
    "settings", [{}, {"path": "relative"}, {"path": "/x", "colour": 1}, {"path": 3}, {"path": "/x", "rotated": "/y/*"}]
)
async def test_bad_settings_are_refused_and_change_nothing(sources: Sources, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await sources.add("bad", "file", settings)
    assert await sources.all() == []
