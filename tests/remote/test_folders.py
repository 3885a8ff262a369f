"""Folders that follow a remote, and the addresses that name both."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.bus.opening import open_node
from postbus.log import ReplicaLog, SqliteLog, open_log
from postbus.log.address import parse_address
from postbus.model import Conflict, Invalid
from tests.conformance.log_suite import EARLIEST, batch
from tests.memory_upstream import MemoryUpstream, serve
from tests.remote.nodes import STREAM, node, payloads


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


# --- folders ----------------------------------------------------------------------------------------------------------


async def test_a_folder_with_a_log_of_its_own_follows_nothing(tmp_path: Path) -> None:
    _, url = serve()
    own = SqliteLog.open(tmp_path / "own")
    await own.ensure_stream(STREAM)
    await own.close()
    with pytest.raises(Conflict, match=r"has streams of its own and cannot follow .*: local\.default\.orders"):
        await open_log(f"{url}?data={tmp_path / 'own'}")
    log = await open_log(str(tmp_path / "own"))
    assert not isinstance(log, ReplicaLog)
    await log.close()


async def test_a_folder_that_follows_is_opened_as_that_by_its_name(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(2))
    again = await open_log(str(tmp_path / "a"))
    assert isinstance(again, ReplicaLog)
    assert again.upstream.url == url
    assert await payloads(again) == [0, 1]
    await again.close()


async def test_a_folder_does_not_change_to_another_remote_with_other_streams(tmp_path: Path) -> None:
    _, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(2))
        await payloads(log)
    server, other = serve()
    await MemoryUpstream(server, lambda: 7).ensure_stream(STREAM)
    with pytest.raises(Conflict, match="is not of the stream that is there now"):
        await open_node(parse_address(f"{other}?data={tmp_path / 'a'}"))


async def test_a_remote_that_has_lost_events_is_not_followed(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(3))
        await payloads(log)
    del server.lives[STREAM].partitions[0].events[1:]
    with pytest.raises(Conflict, match=r"the copy of local\.default\.orders/0 has events that .* has not"):
        await open_node(parse_address(f"{url}?data={tmp_path / 'a'}"))


async def test_a_trim_goes_to_the_remote_when_it_is_back(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(5))
        await payloads(log)
        server.stop()
        assert (await log.trim(STREAM, 2)).first_offsets == (2,)
        assert server.lives[STREAM].partitions[0].first == 0
        await server.restart()
        await log.trim(STREAM, 2)
        assert server.lives[STREAM].partitions[0].first == 2


async def test_readers_hold_back_a_trim_on_the_remote(tmp_path: Path) -> None:
    server, url = serve()
    async with node(url, tmp_path / "a") as log:
        await log.ensure_stream(STREAM)
        await log.append(STREAM, batch(5))
        await log.ensure_consumer(STREAM, "slow", EARLIEST)
        await log.commit(STREAM, "slow", 1)
        result = await log.trim(STREAM, 4)
        assert (result.first_offsets, result.held_back_by, result.gaps) == ((2,), ("slow",), ())
        assert server.lives[STREAM].partitions[0].first == 2


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://host", "no log kind is called 'ftp'"),
        ("nats://", "names a host"),
        ("nats://host#x", "nothing behind a #"),
        ("nats://host?data=", "data names one folder"),
        ("nats://host?data=a&data=b", "data names one folder"),
        ("nats://[host", "nats:// address"),
    ],
)
def test_a_bad_address_is_refused(text: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        parse_address(text)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nats://127.0.0.1:1?colour=red", "has no option 'colour'"),
        ("nats://127.0.0.1:1?answer_s=soon", "answer_s is a number above 0"),
        ("nats://127.0.0.1:1?replicas=0", "replicas is a number above 0"),
        ("nats://127.0.0.1:1?sync=never", "sync is always"),
        ("nats://127.0.0.1:1/a.b", "the prefix 'a.b'"),
    ],
)
async def test_a_bad_option_of_a_remote_is_refused(tmp_path: Path, url: str, says: str) -> None:
    separator = "&" if "?" in url else "?"
    with pytest.raises(Invalid, match=says):
        await open_log(f"{url}{separator}data={tmp_path / 'a'}")


def test_an_address_is_shown_without_its_password() -> None:
    address = parse_address("nats://me:secret@one:4222,you:other@two:4222/mine?data=./here&answer_s=2")
    assert address.folder == "./here"
    assert address.remote == "nats://me:secret@one:4222,you:other@two:4222/mine?answer_s=2"
    assert address.public == "nats://one:4222,two:4222/mine?answer_s=2"
    assert parse_address("nats://host").folder == "./postbus-data"
    assert parse_address("sqlite:///a%20b").folder == "/a b"
