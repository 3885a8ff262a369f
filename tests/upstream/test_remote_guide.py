"""What docs/guides/remote.md tells an operator to type, typed; and what it says is there, looked for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import nats
import pytest

from postbus import EventBus
from tests.services import NatsServer, fresh_prefix, running_nats

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "remote.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
WAIT_S = 120


class Guide:
    """The guide with a real server's address and real folders in the place of its examples."""

    def __init__(self, server: NatsServer, ground: Path) -> None:
        self.prefix = fresh_prefix()
        self.text = GUIDE.read_text(encoding="utf-8")
        self._places = {
            "10.0.0.5:4222/shop": f"{server.address}/{self.prefix}",
            "./node-a": str(ground / "node-a"),
            "/var/lib/postbus": str(ground / "node"),
            "./postbus-data": str(ground / "old"),
        }

    def placed(self, text: str) -> str:
        for place, real in self._places.items():
            text = text.replace(place, real)
        return text

    def command(self, name: str) -> list[str]:
        """Return the first command of that name in a block, in words."""
        lines = [line for kind, body in BLOCK.findall(self.text) if kind == "text" for line in body.splitlines()]
        line = next(line for line in lines if line.startswith(f"postbus {name} "))
        return [sys.executable, "-m", *self.placed(line).replace("'", "").split()]


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def guide(tmp_path: Path) -> Guide:
    return Guide(running_nats(), tmp_path)


@pytest.mark.xdist_group("nats")
async def test_from_one_file_to_a_remote_as_the_guide_says(guide: Guide, tmp_path: Path) -> None:
    async with EventBus(tmp_path / "old") as old:
        for number in range(3):
            await old.publish("order.paid", "shop", {"order": number}, native_id=f"n{number}")

    assert "3 events" in run(guide.command("copy"))

    with subprocess.Popen([*guide.command("serve"), "--port", "0", "--json"], stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - short
        try:
            assert child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            assert httpx2.get(f"{url}/readyz").json() == {"status": "ready", "remote": "closed"}
            metrics = httpx2.get(f"{url}/metrics").text
            for name in ("postbus_spool_events", "postbus_spool_bytes"):
                assert f"\n{name}" in metrics
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()

    assert [line.count("order.paid") for line in run(guide.command("tail")).splitlines()].count(1) >= 3

    code = next(body for kind, body in BLOCK.findall(guide.text) if kind == "python")
    names: dict[str, EventBus] = {}
    exec(guide.placed(code), names)  # noqa: S102 - our own guide
    async with names["bus"] as bus:
        receipt = await bus.publish("order.paid", "shop", {"order": 0}, native_id="n0")
    assert (receipt.duplicate, receipt.offset) == (True, 0)

    client = await nats.connect(running_nats().url)
    try:
        for named in re.findall(r"^\| `(postbus=[^`]+)` \|", guide.text, re.MULTILINE)[:2]:
            name = named.replace("postbus=", f"{guide.prefix}=", 1)
            assert (await client.jetstream().stream_info(name)).config.name == name
    finally:
        await client.close()
