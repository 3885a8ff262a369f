"""How an agent is woken: signed webhooks, programs, terminals; and what happens when it does not work."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from postbus.inbox import Target
from postbus.inbox.targets import check_targets
from postbus.inbox.wakes import reachable
from postbus.model import Invalid, NotFound
from tests.handlers import eventually
from tests.inbox.wake_kit import TENANT, Receiver, WakeKit

SIGNING_KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
VARIABLE = "ALPHA_SIGNING_KEY"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as running:
        yield running


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[WakeKit]:
    async with WakeKit(tmp_path / "data") as running:
        yield running


def webhook(receiver: Receiver, **settings: Any) -> Target:
    return Target(kind="webhook", url=receiver.url, allow_private=True, **settings)


# --- webhooks ---------------------------------------------------------------------------------------------------------


async def test_a_webhook_is_signed_as_standard_webhooks_says(
    kit: WakeKit, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SIGNING_KEY)
    kit.clock.set_wall(int(datetime.now(UTC).timestamp() * 1e6))  # the verifier looks at the real clock
    await kit.agent(webhook(receiver, secret_env=VARIABLE))
    await kit.send()
    await kit.advance(3)
    told = Webhook(SIGNING_KEY).verify(receiver.bodies[0], receiver.headers[0])
    assert told["type"] == "inbox.activation"
    assert told["data"]["new_item_count"] == 1
    assert receiver.headers[0]["webhook-id"] == told["data"]["activation"]
    with pytest.raises(WebhookVerificationError):
        Webhook(SIGNING_KEY).verify(receiver.bodies[0].replace(b"alpha", b"gamma"), receiver.headers[0])


@pytest.mark.parametrize(("secret", "why"), [(None, "is not set"), ("whsec_", "not base64"), ("whsec_a", "not base64")])
async def test_without_its_secret_nothing_is_sent(
    kit: WakeKit, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, secret: str | None, why: str
) -> None:
    if secret is not None:
        monkeypatch.setenv(VARIABLE, secret)
    await kit.agent(webhook(receiver, secret_env=VARIABLE))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert (receiver.counts, state.state) == ([], "retrying")
    assert state.why is not None
    assert why in state.why
    assert VARIABLE in state.why


async def test_items_are_sent_along_when_asked_for(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, mode="activation_with_items"))
    await kit.inboxes.send(TENANT, "alpha", {"text": "hello"}, sender="kate")
    await kit.advance(3)
    [item] = receiver.received[0]["items"]
    assert (item["id"], item["payload"], item["source"]) == ("itm_1", {"text": "hello"}, "kate")
    assert receiver.received[0]["items_left_out"] == 0


async def test_items_sent_along_are_bounded(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver, mode="activation_with_items", buffer_items=40))
    await kit.send(30)
    await kit.advance(3)
    told = receiver.received[0]
    assert (told["new_item_count"], len(told["items"]), told["items_left_out"]) == (30, 20, 10)
    await kit.ack(everything=True)
    for _ in range(3):
        await kit.inboxes.send(TENANT, "alpha", "x" * 100_000)
    await kit.advance(3)
    told = receiver.received[1]
    assert (told["new_item_count"], len(told["items"]), told["items_left_out"]) == (3, 2, 1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://[::1]/", "http://10.1.2.3/", "http://localhost/"])
def test_a_private_address_is_refused(url: str) -> None:
    with pytest.raises(Invalid, match="private"):
        check_targets((Target(kind="webhook", url=url),))


async def test_a_name_that_turns_out_private_is_not_called(kit: WakeKit, receiver: Receiver) -> None:
    port = receiver.url.split(":")[2].partition("/")[0]
    await kit.agent(Target(kind="webhook", url=f"http://{_own_name()}:{port}/"))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert (receiver.counts, state.state) == ([], "offline")
    assert "private address" in (state.why or "")


def _own_name() -> str:
    """Return a name without dots that resolves to a private address."""
    names = (line.split("#")[0].split() for line in Path("/etc/hosts").read_text("ascii").splitlines())
    found = [name for _, *aliases in filter(None, names) for name in aliases if not name.startswith("localhost")]
    if not found:
        pytest.skip("this machine has no name of its own in /etc/hosts")
    return found[0]


async def test_redirects_are_not_followed(kit: WakeKit, receiver: Receiver) -> None:
    async with Receiver() as elsewhere:
        receiver.statuses, receiver.answer_headers = [302], [f"location: {elsewhere.url}"]
        await kit.agent(webhook(receiver))
        await kit.send()
        await kit.advance(3)
        assert (receiver.counts, elsewhere.counts) == ([1], [])
        assert (await kit.state()).state == "retrying"


async def test_a_webhook_that_does_not_answer_in_time_has_failed(kit: WakeKit, receiver: Receiver) -> None:
    receiver.hold = asyncio.Event()
    await kit.agent(webhook(receiver, timeout_s=1.5))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert (receiver.counts, state.state, state.failures) == ([1], "retrying", 1)
    assert "did not answer within 1.5 s" in (state.why or "")


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failed_wake_is_tried_again_under_its_id(kit: WakeKit, receiver: Receiver) -> None:
    receiver.statuses = [500, 503]
    await kit.agent(webhook(receiver))
    await kit.send(2)
    await kit.advance(3)
    state = await kit.state()
    assert (state.state, state.failures, state.new_items) == ("retrying", 1, 2)
    assert "500" in (state.why or "")
    assert await kit.query("SELECT delivered_at FROM inbox_items") == [(None,), (None,)]
    await kit.advance(60)
    assert receiver.counts == [2, 2, 2]
    assert len(set(receiver.ids)) == 1
    assert [call["attempt"] for call in receiver.received] == [1, 2, 3]
    assert (await kit.state()).state == "leased"
    assert await kit.query("SELECT attempts, outcome FROM activations") == [(3, "woken")]
    counters = await kit.counters()
    assert (counters.wakes, counters.failures) == (1, 2)


async def test_a_retry_takes_along_what_came_meanwhile_under_a_new_id(kit: WakeKit, receiver: Receiver) -> None:
    receiver.statuses = [500]
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    await kit.send(2)
    await kit.advance(6)
    assert receiver.counts == [1, 3]
    assert receiver.ids[0] != receiver.ids[1]
    outcomes = dict(await kit.query("SELECT id, outcome FROM activations"))
    assert outcomes == {receiver.ids[0]: "replaced", receiver.ids[1]: "woken"}


async def test_what_is_acked_before_the_retry_needs_none(kit: WakeKit, receiver: Receiver) -> None:
    receiver.statuses = [500]
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    await kit.ack(everything=True)
    await kit.advance(3600)
    assert receiver.counts == [1]
    assert (await kit.counters()).avoided == {"acked": 1}
    assert await kit.query("SELECT outcome FROM activations") == [("avoided",)]


async def test_an_hour_of_failures_costs_few_calls(
    kit: WakeKit, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 500
    await kit.agent(webhook(receiver))
    with caplog.at_level(logging.ERROR, "postbus.inbox.wakes"):
        for _ in range(60):
            await kit.send()
            await kit.advance(60)
    assert len(receiver.counts) == 12
    state = await kit.state()
    assert (state.state, state.failures, state.new_items) == ("offline", 12, 60)
    assert "12 times in a row" in caplog.text
    [event] = await kit.log.fetch(f"{TENANT}.journal", 0, 0)
    assert event.topic == "system.agent.offline"
    assert (event.payload["agent"], event.payload["target"], event.payload["failures"]) == ("alpha", "default", 12)


@pytest.mark.parametrize("status", [404, 409, 410, 422])
async def test_a_target_that_is_gone_is_offline_at_once(
    kit: WakeKit, receiver: Receiver, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    receiver.status = status
    await kit.agent(webhook(receiver))
    with caplog.at_level(logging.ERROR, "postbus.inbox.wakes"):
        await kit.send()
        await kit.advance(7200)
    assert receiver.counts == [1]
    assert (await kit.state()).state == "offline"
    assert str(status) in ((await kit.state()).why or "")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert [event.topic for event in await kit.log.fetch(f"{TENANT}.journal", 0, 0)] == ["system.agent.offline"]
    agent = await kit.inboxes.agents.get(TENANT, "alpha")
    assert not await kit.log.store.read(lambda db: reachable(db, agent.no, agent.targets))


async def test_an_operator_revives_a_target(kit: WakeKit, receiver: Receiver) -> None:
    receiver.statuses = [410]
    await kit.agent(webhook(receiver))
    await kit.send(2)
    await kit.advance(600)
    assert await kit.waker.revive(TENANT, "alpha", "default")
    assert not await kit.waker.revive(TENANT, "alpha", "default")
    await kit.advance(3)
    assert receiver.counts == [2, 2]
    assert (await kit.state()).state == "leased"
    with pytest.raises(NotFound, match="no target other"):
        await kit.waker.revive(TENANT, "alpha", "other")
    with pytest.raises(NotFound, match="beta"):
        await kit.waker.revive(TENANT, "beta", "default")


async def test_a_target_that_moved_is_tried_again(kit: WakeKit, receiver: Receiver) -> None:
    await kit.agent(webhook(receiver))
    receiver.statuses = [410]
    await kit.send()
    await kit.advance(3)
    moved = Target(kind="webhook", url=receiver.url + "/new", allow_private=True)
    agent = await kit.inboxes.agents.retarget(TENANT, "alpha", (moved,))
    kit.inboxes.signals.changed([agent.no])
    await kit.advance(3)
    assert receiver.counts == [1, 1]


async def test_retry_after_is_respected(kit: WakeKit, receiver: Receiver) -> None:
    receiver.statuses, receiver.answer_headers = [503], ["retry-after: 120"]
    await kit.agent(webhook(receiver))
    await kit.send()
    await kit.advance(3)
    await kit.advance(119)
    assert receiver.counts == [1]
    await kit.advance(1)
    assert receiver.counts == [1, 1]


async def test_stopping_lets_a_wake_finish(tmp_path: Path, receiver: Receiver) -> None:
    async with WakeKit(tmp_path / "data") as kit:
        await kit.agent(webhook(receiver))
        await kit.send()
        receiver.hold = hold = asyncio.Event()
        kit.clock.advance(3)
        await eventually(lambda: len(receiver.received) == 1)
        stopping = asyncio.get_running_loop().create_task(kit.waker.stop())
        await asyncio.sleep(0.02)
        assert not stopping.done()
        hold.set()
        await stopping
        assert (await kit.state()).state == "leased"
        assert await kit.query("SELECT outcome FROM activations") == [("woken",)]


# --- programs ---------------------------------------------------------------------------------------------------------


def program(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "agent.py"
    path.write_text(text)
    return (sys.executable, str(path), str(tmp_path / "told"), "$(touch /nowhere) ; no shell")


async def test_a_program_gets_the_activation_on_its_standard_input(kit: WakeKit, tmp_path: Path) -> None:
    argv = program(tmp_path, "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + sys.argv[2] + '\\n')")
    await kit.agent(Target(kind="command", argv=argv))
    await kit.send(3)
    await kit.advance(3)
    told, _, rest = (tmp_path / "told").read_text().partition("$")
    assert json.loads(told)["data"]["new_item_count"] == 3
    assert rest == "(touch /nowhere) ; no shell\n"
    assert (await kit.state()).state == "leased"


@pytest.mark.parametrize(
    ("text", "timeout_s", "why"),
    [
        ("import sys; sys.exit('no model today')", 60.0, "exit code 1: no model today"),
        ("import time; time.sleep(3600)", 0.5, "took longer than 0.5 s"),
    ],
)
async def test_a_program_that_fails_is_run_again(
    kit: WakeKit, tmp_path: Path, text: str, timeout_s: float, why: str
) -> None:
    await kit.agent(Target(kind="command", argv=program(tmp_path, text), timeout_s=timeout_s))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert (state.state, state.failures) == ("retrying", 1)
    assert why in (state.why or "")


async def test_a_program_that_is_missing_is_said(kit: WakeKit) -> None:
    await kit.agent(Target(kind="command", argv=("/nowhere/agent",)))
    await kit.send()
    await kit.advance(3)
    assert "/nowhere/agent cannot be started" in ((await kit.state()).why or "")


# --- terminals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmux server of its own with a session ``work``; what is typed there ends up in a file."""
    if shutil.which("tmux") is None:
        if os.environ.get("CI"):
            pytest.fail("tmux is missing")
        pytest.skip("tmux is not installed: apt-get install tmux")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    typed = tmp_path / "typed"
    subprocess.run(["tmux", "-f", "/dev/null", "new-session", "-d", "-s", "work", f"cat > {typed}"], check=True)
    yield typed
    subprocess.run(["tmux", "kill-server"], check=True)


async def test_a_line_is_typed_into_a_tmux_pane(kit: WakeKit, tmux: Path) -> None:
    await eventually(tmux.exists)
    await kit.agent(Target(kind="tmux", pane="work:0.0"))
    await kit.inboxes.send(TENANT, "alpha", "$(reboot); `reboot`")
    await kit.advance(3)
    assert (await kit.state()).state == "leased"
    await eventually(lambda: tmux.read_text() == "postbus: 1 new item in the inbox of alpha\n")


async def test_a_pane_that_is_gone_is_said(kit: WakeKit, tmux: Path) -> None:
    await eventually(tmux.exists)
    await kit.agent(Target(kind="tmux", pane="other:0.0"))
    await kit.send()
    await kit.advance(3)
    state = await kit.state()
    assert state.state == "retrying"
    assert "tmux could not type into pane other:0.0: can't find" in (state.why or "")
    await eventually(lambda: tmux.read_text() == "")


async def test_a_missing_tmux_is_said(kit: WakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    await kit.agent(Target(kind="tmux", pane="work:0.0"))
    await kit.send()
    await kit.advance(3)
    assert "tmux cannot be started" in ((await kit.state()).why or "")


# --- what is refused --------------------------------------------------------------------------------------------------

HOOK = {"kind": "webhook", "url": "https://example.com/"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "webhook"}, "needs `url`"),
        ({"kind": "webhook", "url": "ftp://example.com/"}, "no http or https"),
        ({"kind": "webhook", "url": "https://me:pw@example.com/"}, "user name"),
        ({**HOOK, "argv": ("true",)}, "takes no `argv`"),
        ({**HOOK, "secret_env": "a b"}, "environment variable"),
        ({**HOOK, "buffer_s": -1}, "buffer_s"),
        ({**HOOK, "buffer_s": float("nan")}, "buffer_s"),
        ({**HOOK, "lease_s": float("inf")}, "lease_s"),
        ({**HOOK, "min_unacked": 0}, "min_unacked"),
        ({**HOOK, "timeout_s": 3601}, "timeout_s"),
        ({**HOOK, "id": "a b"}, "target"),
        ({"kind": "command", "argv": ()}, "program"),
        ({"kind": "command", "argv": ("a\0b",)}, "NUL"),
        ({"kind": "command", "argv": ("true",), "secret_env": "A"}, "webhook"),
        ({"kind": "tmux", "pane": "-t x"}, "no tmux pane"),
        ({"kind": "tmux", "pane": "a", "mode": "activation_with_items"}, "never typed"),
        ({"kind": "pull", "url": "https://example.com/"}, "takes no `url`"),
    ],
)
def test_a_target_that_could_never_work_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        check_targets((Target(**settings),))


def test_an_agent_has_some_targets_each_with_its_own_id() -> None:
    with pytest.raises(Invalid, match="1 to 8"):
        check_targets(())
    with pytest.raises(Invalid, match="one id"):
        check_targets((Target(kind="pull"), Target(kind="tmux", pane="a")))
    both = (Target(kind="pull"), Target(kind="tmux", pane="a", id="screen"))
    assert check_targets(both) == both
