"""Copying logs between places: the same events at the same offsets, broken off and resumed, compared at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postbus.log import SqliteLog, open_log
from postbus.log.address import Address, parse_address
from postbus.log.copying import Copied, copy_log
from postbus.model import Conflict, CorruptLog, Event, Invalid, NotFound, StreamSettings
from tests.conformance.log_append import ODD_FIELDS, ODD_PAYLOADS
from tests.conformance.log_suite import EARLIEST, batch, fact
from tests.memory_upstream import MemoryServer, serve
from tests.remote.conftest import REMOTES, remote_url

ODD, WIDE, TRIMMED, DEAD = (f"local.default.{leaf}" for leaf in ("odd", "wide", "trimmed", "odd-dlq"))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture
async def source(tmp_path: Path) -> Path:
    """A folder with a log that has something of everything."""
    log = SqliteLog.open(tmp_path / "source")
    for name, settings in (
        (ODD, StreamSettings(labels={"é": "ß"})),
        (WIDE, StreamSettings(partitions=3)),
        (TRIMMED, StreamSettings()),
        (DEAD, StreamSettings()),
    ):
        await log.ensure_stream(name, settings)
    odd = [fact(number, **{"native_id": f"n{number}", **fields}) for number, fields in enumerate(ODD_FIELDS)]
    await log.append(ODD, odd + [fact(payload) for payload in ODD_PAYLOADS])
    for number in range(40):
        await log.append(WIDE, [fact(number, key=f"k{number % 7}")])
        await log.append(WIDE, [fact(number), fact(number, native_id=f"n{number}")])  # without a key: in turn
    await log.append(TRIMMED, batch(700))
    await log.trim(TRIMMED, 600)
    await log.append(DEAD, batch(1))
    await log.ensure_consumer(ODD, "reader", EARLIEST)
    await log.close()
    return tmp_path / "source"


async def copied(source: Path | str, target: Path | str, **options: Any) -> Copied:
    return await copy_log(parse_address(str(source)), parse_address(str(target)), **options)


async def picture(place: Path | str) -> dict[str, list[Event]]:
    """Return everything in a log."""
    log = await open_log(str(place), create=False)
    found = {}
    for stream in await log.streams():
        for partition in range(stream.settings.partitions):
            page = await log.fetch(stream.name, partition, 0, 10_000)
            found[f"{stream.name}/{partition}"] = page
    await log.close()
    return found


async def stats(place: Path, stream: str) -> Any:
    log = SqliteLog.open(place)
    found = await log.get_stream_stats(stream)
    await log.close()
    return found


async def test_a_folder_is_copied_to_a_folder(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    done = await copied(source, tmp_path / "target", progress=lambda *step: seen.append(step))
    total = sum(map(len, (await picture(source)).values()))
    assert (done.streams, done.events, done.known, done.left_out) == (4, total, 0, ())
    assert len(done.heads) == 6
    assert await picture(tmp_path / "target") == await picture(source)
    for stream in (ODD, WIDE, DEAD):  # a trimmed stream's chain begins where the stream does
        assert await stats(tmp_path / "target", stream) == await stats(source, stream)
    assert seen[-1] == ("verifying", total, total)
    assert ("copying", total, total) in seen
    again = await copied(source, tmp_path / "target")
    assert (again.events, again.known, again.heads) == (0, total, done.heads)


@pytest.mark.parametrize("kind", REMOTES)
async def test_a_folder_goes_to_a_remote_and_back(source: Path, tmp_path: Path, kind: str) -> None:
    url = remote_url(kind)
    there = await copied(source, url)
    assert there.left_out == (DEAD,)
    back = await copied(url, tmp_path / "back")
    assert back.heads == there.heads
    before, after = await picture(source), await picture(tmp_path / "back")
    del before[f"{DEAD}/0"]
    assert after == before
    log = await open_log(f"{url}?data={tmp_path / 'node'}")
    (again,) = await log.append(ODD, [fact(0, **{"native_id": "n0", **ODD_FIELDS[0]})])
    assert (again.duplicate, again.offset) == (True, 0)
    (new,) = await log.append(TRIMMED, [fact("new")])
    assert new.offset == 700
    await log.close()


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", ["folder", "memory"])
async def test_a_copy_that_was_broken_off_goes_on(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target" if kind == "folder" else serve()[1]
    for limit in (1, 30, 90):

        def stop(_what: str, done: int, _total: int, limit: int = limit) -> None:
            if done >= limit:
                raise Broken

        with pytest.raises(Broken):
            await copied(source, target, progress=stop)
    done = await copied(source, target)
    assert done.known > 0
    assert done.events > 0
    assert (await copied(source, target)).events == 0


async def test_a_target_that_holds_something_else_is_refused_and_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    async def refused(says: str) -> None:
        before = await picture(tmp_path / "target")
        with pytest.raises(Conflict, match=says):
            await copied(source, tmp_path / "target")
        assert await picture(tmp_path / "target") == before

    log = SqliteLog.open(tmp_path / "target")
    await log.ensure_stream("local.default.mine")
    await log.close()
    await refused("has a stream local.default.mine that .* has not")
    log = SqliteLog.open(tmp_path / "target")
    await log.delete_stream("local.default.mine")
    await log.ensure_stream(ODD)
    await log.close()
    await refused(f"has another stream {ODD}")


async def test_a_target_with_other_or_more_events_is_refused(source: Path, tmp_path: Path) -> None:
    await copied(source, tmp_path / "target")
    log = SqliteLog.open(tmp_path / "target")
    await log.append(DEAD, batch(1))
    await log.close()
    with pytest.raises(Conflict, match=f"has 0 to 2 of {DEAD}/0, .* has 0 to 1"):
        await copied(source, tmp_path / "target")
    log = SqliteLog.open(source)
    await log.append(DEAD, [fact("another")])
    await log.append(DEAD, [fact("more")])
    await log.close()
    with pytest.raises(Conflict, match=f"has another event at {DEAD}/0/1"):
        await copied(source, tmp_path / "target")


async def test_a_difference_is_found_at_the_end(source: Path) -> None:
    server, url = serve()
    await copied(source, url)
    spoil(server, WIDE)
    with pytest.raises(CorruptLog, match=rf"{WIDE}/1/0 is not the same") as caught:
        await copied(source, url)
    assert (caught.value.stream, caught.value.partition, caught.value.offset) == (WIDE, 1, 0)


def spoil(server: MemoryServer, stream: str) -> None:
    partition = server.lives[stream].partitions[1]
    first = partition.events[0]
    facts = {name: getattr(first, name) for name in first.__struct_fields__}
    partition.events[0] = Event(**(facts | {"payload_json": b"[]"}))


async def test_a_copy_of_a_remote_takes_no_other_log(source: Path, tmp_path: Path) -> None:
    _, url = serve()
    await (await open_log(f"{url}?data={tmp_path / 'node'}")).close()
    with pytest.raises(Conflict, match="is a copy of test://"):
        await copied(source, tmp_path / "node")


async def test_nonsense_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Invalid):
        await copied(source, source)
    with pytest.raises(Invalid):
        await copied("memory:", tmp_path / "target")
    with pytest.raises(NotFound):
        await copied(tmp_path / "nowhere", tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "nowhere").exists()
    assert parse_address("memory:") == Address()
