from __future__ import annotations

import asyncio
from pathlib import Path

from postbus.broker import Spool
from postbus.envelope import draft
from postbus.log import SqliteLog
from tests.broker.nats_server import nats_server
from tests.cli.command_line import Run

STREAM = "local.default.orders"


def fill(data: Path, *topics: str) -> None:
    async def work() -> None:
        log = SqliteLog.open(data)
        spool = Spool(log)
        for number, topic in enumerate(topics):
            await spool.put(STREAM, f"id-{number}", draft(topic, "shop", number))
        await log.close()

    asyncio.run(work())


def test_status_says_what_waits(run: Run, data: Path) -> None:
    assert "there is no store" in run("spool", "status", code=4).err
    fill(data)
    assert run("spool", "status").out == "nothing is waiting\n"
    fill(data, "orders.a", "orders.b")
    assert run("spool", "status").out.startswith("2 events waiting, ")
    facts = run("spool", "status", "--json").json
    assert (facts["rows"], facts["dead"], facts["rows_max"]) == (2, 0, 100_000)
    assert facts["oldest_at"].endswith("Z")
    assert not facts.keys() & {"oldest_at_us"}


def test_drain_sends_what_waits_and_what_nobody_takes_becomes_a_dead_letter(
    run: Run, data: Path, tmp_path: Path
) -> None:
    fill(data, "orders.a", "elsewhere.x", "orders.b")
    with nats_server(tmp_path / "nats") as server:

        async def make() -> None:
            from postbus.broker.nats_link import NatsLink  # noqa: PLC0415 - as a user of the extra does
            from postbus.broker.nats_remote import NatsRemote  # noqa: PLC0415 - as above

            link = NatsLink(server.url)
            await link.start()
            await link.ready(20)
            await NatsRemote(link, stream="ORDERS").ensure(["orders.>"])
            await link.close()

        asyncio.run(make())
        words = ("spool", "drain", "--to", server.url, "--stream", "ORDERS")
        assert run(*words, "--json").json == {"sent": 2, "dead": 1, "left": 0}
        assert run(*words).out == "sent 0 events\n"
    letter = run("dlq", "list", "--subscription", "_spool", "--json").json["dead_letters"][0]
    assert (letter["topic"], letter["reason"], letter["attempts"]) == ("elsewhere.x", "refused", 3)
    assert "1 dead letter" in run("spool", "status").out
    assert run("dlq", "replay", letter["id"]).out == "replayed 1 dead letter\n"
    assert run("spool", "status").out.startswith("1 event waiting, ")


def test_drain_without_a_server_changes_nothing(run: Run, data: Path) -> None:
    fill(data, "orders.a")
    words = ("spool", "drain", "--to", "nats://127.0.0.1:9", "--timeout", "0.3")
    assert "NATS cannot be reached" in run(*words, code=7).err
    assert "not the address of a NATS server" in run("spool", "drain", "--to", "http://x", code=2).err
    assert run("spool", "status").out.startswith("1 event waiting, ")
