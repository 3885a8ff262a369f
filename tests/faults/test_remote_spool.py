"""Many events spooled while the remote is away: sent in order when it is back, in memory that does not grow."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from postbus.log import open_log
from tests.faults.campaign import FULL
from tests.faults.spooling import STREAM, Spooled
from tests.services import fresh_prefix, running_kafka, running_nats

EVENTS = 100_000 if FULL else 5_000
# Of the last thirds against the first: pages and caches of SQLite fill up to their caps at first.
GROWTH_KIB = 64 * 1024
WAIT_S = 1800
PAGE = 1000


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("nats", marks=pytest.mark.xdist_group("nats")),
        pytest.param("kafka", marks=pytest.mark.xdist_group("kafka")),
    ],
)
async def test_a_long_outage_is_made_good_in_order(kind: str, ground: Path) -> None:
    server = running_nats() if kind == "nats" else running_kafka()
    remote = f"{server.url}/{fresh_prefix()}"
    words = [sys.executable, "-m", "tests.faults.spooling", f"{remote}?data={ground / 'node'}", str(EVENTS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as child:  # noqa: ASYNC220 - nothing else goes on
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            server.kill()
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "spooled\n"
            server.start()
            out, _ = child.communicate("\n", timeout=WAIT_S)
            assert child.returncode == 0
        finally:
            child.kill()
    found = msgspec.json.decode(out, type=Spooled)
    sys.stderr.write(
        f"\n{kind}: {EVENTS:,} events spooled at {EVENTS / found.spool_s:,.0f}/s and sent at"
        f" {EVENTS / found.drain_s:,.0f}/s; KiB {found.spooling_kib} {found.draining_kib}\n"
    )
    for taken in (found.spooling_kib, found.draining_kib):
        assert statistics.median(taken[-3:]) - statistics.median(taken[:3]) < GROWTH_KIB
    other = await open_log(f"{remote}?data={ground / 'other'}", catch_up_s=WAIT_S)
    at = 0
    while page := await other.fetch(STREAM, 0, at, PAGE):
        assert [event.payload["n"] for event in page] == list(range(at, at + len(page)))
        at += len(page)
    assert at == EVENTS
    await other.close()
