"""Remotes that want TLS and to know who comes: what an address says of it, and servers that insist."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus import EventBus
from postbus.broker.contract import Message
from postbus.broker.nats import NatsBroker
from postbus.clock import SystemClock
from postbus.log.address import open_upstream, parse_address, parse_remote
from postbus.log.jetstream.connection import Servers
from postbus.log.security import PASSWORD as PASSWORD_NAME
from postbus.log.security import USER as USER_NAME
from postbus.log.security import Security
from postbus.model import Event, Invalid, Unreachable
from tests.conformance.upstream_suite import PATIENCE_S, SHORT_S
from tests.listening import Listener
from tests.services import fresh_prefix, running
from tests.upstream.secure import PASSWORD, USER, WHO, Papers, SecureKafka, SecureNats


@pytest.fixture(scope="module")
def kafka() -> Iterator[SecureKafka]:
    server = running(SecureKafka)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def nats() -> Iterator[SecureNats]:
    server = running(SecureNats)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


def own(papers: Papers) -> str:
    return f"tls={papers.authority}&cert={papers.client}&key={papers.client_key}"


async def comes_through(url: str) -> None:
    bus, seen = EventBus(url), asyncio.Queue[Event]()

    @bus.on("orders.*", start="earliest")
    async def take(event: Event) -> None:
        seen.put_nowait(event)

    await bus.start()
    receipt = await bus.publish("orders.made", "shop", {"n": 1})
    assert not receipt.spooled
    async with asyncio.timeout(PATIENCE_S):
        assert (await seen.get()).payload == {"n": 1}
    await bus.stop()


async def refused(url: str) -> str:
    remote = parse_address(f"{url}&answer_s={SHORT_S}").remote
    assert remote is not None
    upstream = await open_upstream(remote, SystemClock(), "")
    try:
        with pytest.raises(Unreachable) as told:
            await upstream.streams()
        return str(told.value)
    finally:
        await upstream.close()


@pytest.mark.xdist_group("kafka")
@pytest.mark.parametrize("who", [f"{WHO}@|&sasl=SCRAM-SHA-512", "plain:plain@|", "plain:plain@|&cert"])
async def test_kafka_lets_in_who_has_the_password(who: str, kafka: SecureKafka, tmp_path: Path) -> None:
    user, _, more = who.partition("|")
    tls = own(kafka.papers) if more == "&cert" else f"tls={kafka.papers.authority}{more}"
    await comes_through(f"kafka://{user}{kafka.secure}/{fresh_prefix()}?{tls}&data={tmp_path / 'node'}")


@pytest.mark.xdist_group("kafka")
async def test_kafka_says_why_it_lets_nobody_in(kafka: SecureKafka, papers: Papers) -> None:
    authority = kafka.papers.authority
    assert "Invalid username or password" in await refused(f"kafka://plain:wrong@{kafka.secure}?tls={authority}")
    assert "certificate verify failed" in await refused(f"kafka://plain:plain@{kafka.secure}?tls={papers.authority}")


@pytest.mark.xdist_group("nats")
async def test_nats_lets_in_who_has_the_password_and_a_certificate(nats: SecureNats, tmp_path: Path) -> None:
    await comes_through(
        f"nats://{WHO}@{nats.address}/{fresh_prefix()}?{own(nats.papers)}&sync=always&data={tmp_path / 'node'}"
    )


@pytest.mark.xdist_group("nats")
async def test_nats_says_why_it_lets_nobody_in(nats: SecureNats, papers: Papers) -> None:
    tls = own(nats.papers)
    assert "Authorization" in await refused(f"nats://somebody:else@{nats.address}?{tls}")
    other = tls.replace(str(nats.papers.authority), str(papers.authority))
    assert "certificate verify failed" in await refused(f"nats://{WHO}@{nats.address}?{other}")


@pytest.mark.xdist_group("nats")
async def test_the_environment_says_who_we_are_where_the_address_does_not(
    nats: SecureNats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(USER_NAME, USER)
    monkeypatch.setenv(PASSWORD_NAME, PASSWORD)
    await comes_through(
        f"nats://{nats.address}/{fresh_prefix()}?{own(nats.papers)}&sync=always&data={tmp_path / 'node'}"
    )
    assert parse_remote("nats://somebody:else@host:1").security.user == "somebody"


@pytest.mark.xdist_group("nats")
async def test_the_broker_has_the_same_address(nats: SecureNats) -> None:
    broker = NatsBroker(f"nats://{WHO}@{nats.address}?{own(nats.papers)}")
    await broker.start(wait_s=PATIENCE_S)
    heard = await broker.subscribe("orders.*")
    await broker.publish("orders.made", {"n": 1})
    async with asyncio.timeout(PATIENCE_S):
        found = await anext(aiter(heard))
    assert isinstance(found, Message)
    assert found.payload == {"n": 1}
    await broker.close()


class Bare(Listener):
    """Says it is a NATS server without TLS, and keeps what it is told then."""

    def __init__(self) -> None:
        super().__init__()
        self.told = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See ``Listener.serve``."""
        writer.write(b'INFO {"auth_required":true,"version":"2.15.0","headers":true,"max_payload":1048576}\r\n')
        while data := await reader.read(4096):
            self.told += data
            writer.write(b"PONG\r\n")


@pytest.mark.parametrize("who", ["user:secret", "secret"])
async def test_no_password_goes_to_a_server_that_has_no_tls(who: str, papers: Papers) -> None:
    async with Bare() as server:
        assert "has no TLS" in await refused(f"nats://{who}@{server.address}?tls={papers.authority}")
        assert b"secret" not in server.told


def test_what_an_address_says_of_it(papers: Papers) -> None:
    target = parse_remote(f"kafka://a%40b:c%3Ad@one:1,two:2/shop?{own(papers)}&sasl=SCRAM-SHA-256")
    assert target.address == "one:1,two:2"
    assert target.security.kafka() == {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(papers.authority),
        "ssl.certificate.location": str(papers.client),
        "ssl.key.location": str(papers.client_key),
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "a@b",
        "sasl.password": "c:d",
    }
    assert parse_remote("kafka://host:1").security.kafka() == {}
    assert parse_remote("kafka://u:p@host:1").security.kafka()["sasl.mechanism"] == "SCRAM-SHA-512"
    assert parse_remote("kafka://u:p@host:1?tls=on").security.kafka()["sasl.mechanism"] == "PLAIN"
    assert parse_remote("kafka://host:1?tls=on").security.kafka() == {"security.protocol": "SSL"}
    assert parse_address("kafka://u:p@host:1/x?tls=on&data=d").public == "kafka://host:1/x?tls=on"
    assert Servers("nats://u:p@one:1,u:p@two:2").url == "nats://one:1,two:2"


def test_no_password_is_shown() -> None:
    assert "secret" not in repr(Security(user="secret", password="secret"))  # noqa: S106 - it is none


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("tls=", "name files"),
        ("tls=/nowhere.pem", "No such file"),
        ("tls=KEY", "no certificates"),
        ("cert=CERT", "with its key"),
        ("cert=CERT&key=KEY", "is for TLS"),
        ("tls=CA&cert=KEY&key=CERT", "no certificate with its key"),
    ],
)
@pytest.mark.parametrize("kind", ["nats", "kafka"])
async def test_what_does_not_do_is_refused_at_once(kind: str, options: str, why: str, papers: Papers) -> None:
    for name, path in {"CA": papers.authority, "CERT": papers.client, "KEY": papers.client_key}.items():
        options = options.replace(name, str(path))
    with pytest.raises(Invalid, match=why):
        await open_upstream(f"{kind}://host:1?{options}", SystemClock(), "")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("kafka://user@host:1", "wants a password"),
        ("kafka://u:p@host:1?sasl=GSSAPI", "sasl is one of"),
        ("nats://u:p@host:1?sasl=PLAIN", "no option 'sasl'"),
    ],
)
async def test_what_a_kind_does_not_know_is_refused(url: str, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        await open_upstream(url, SystemClock(), "")
