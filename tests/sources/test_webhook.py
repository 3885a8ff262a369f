from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks import Webhook

from postbus.log import SqliteLog
from postbus.model import Conflict, Invalid, PostbusError, Unauthenticated
from postbus.sources import SourceHost, Sources
from postbus.sources.contract import NotReady
from postbus.testing import FakeClock
from tests.sources.conftest import TENANT, events

SECRET = base64.b64encode(b"a secret of some length").decode()
BODY = b'{"type": "invoice.paid",  "data": {"n": 1}}'


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", f"whsec_{SECRET}")
    monkeypatch.setenv("GITHUB_SECRET", "It's a Secret to Everybody")


def signed(clock: FakeClock, name: str = "msg_1", body: bytes = BODY, shift_s: float = 0) -> dict[str, str]:
    at = datetime.fromtimestamp(int(clock.now_us() / 1e6 + shift_s), UTC)
    signature = Webhook(SECRET).sign(name, at, body.decode())
    return {"webhook-id": name, "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}


def github(body: bytes, name: str = "72d3162e", event: str = "issues") -> dict[str, str]:
    digest = hmac.new(b"It's a Secret to Everybody", body, hashlib.sha256).hexdigest()
    return {"x-hub-signature-256": f"sha256={digest}", "x-github-delivery": name, "x-github-event": event}


class Hook:
    def __init__(self, log: SqliteLog, clock: FakeClock) -> None:
        self.log = log
        self.clock = clock
        self.host = SourceHost(log, clock)
        self.sources = Sources(log, TENANT)

    async def add(self, **settings: Any) -> None:
        await self.sources.add("hook", "webhook", {"secret_env": "HOOK_SECRET"} | settings)

    async def call(self, headers: dict[str, str], body: bytes = BODY) -> int:
        """Return how many events a call made."""
        return len((await self.host.receive(TENANT, "hook", headers, body)).receipts)


@pytest.fixture
def hook(fake_log: SqliteLog, clock: FakeClock) -> Hook:
    return Hook(fake_log, clock)


async def test_a_standard_webhook_becomes_one_event_with_its_bytes(hook: Hook) -> None:
    await hook.add()
    headers = signed(hook.clock)
    assert [await hook.call(headers), await hook.call(headers)] == [1, 0]
    (event,) = await events(hook.log, "hook")
    assert (event.topic, event.variant, event.native_id) == ("webhook.received", "invoice.paid", "msg_1")
    assert (event.payload_json, event.trust) == (BODY, "untrusted")
    source = await hook.sources.get("hook")
    assert (source.events, source.duplicates) == (1, 1)


async def test_several_signatures_may_be_given(hook: Hook) -> None:
    await hook.add()
    headers = signed(hook.clock)
    headers["webhook-signature"] = f"v1a,xyz v1,AAAA {headers['webhook-signature']}"
    assert await hook.call(headers) == 1


@pytest.mark.parametrize("shift_s", [-301, 301])
async def test_an_old_or_early_call_is_refused(hook: Hook, shift_s: float) -> None:
    await hook.add()
    assert await hook.call(signed(hook.clock, "in", shift_s=shift_s * 0.99)) == 1
    with pytest.raises(Unauthenticated, match="300 s"):
        await hook.call(signed(hook.clock, "out", shift_s=shift_s))
    assert len(await events(hook.log, "hook")) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-id": "other"},
        {"webhook-id": ""},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "nonsense ,,, v1,%%%"},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "1e9"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-timestamp": "-1"},
    ],
)
async def test_a_call_that_is_not_signed_as_it_is_is_refused(hook: Hook, change: dict[str, str]) -> None:
    await hook.add()
    with pytest.raises(Unauthenticated):
        await hook.call(signed(hook.clock) | change)
    assert await events(hook.log, "hook") == []


async def test_the_signature_is_over_the_raw_bytes(hook: Hook) -> None:
    await hook.add()
    with pytest.raises(Unauthenticated):
        await hook.call(signed(hook.clock), json.dumps(json.loads(BODY)).encode())


@pytest.mark.parametrize("body", [b"no json", b'{"a": 1, "a": 2}', b""])
async def test_a_signed_body_that_is_no_strict_json_is_refused(hook: Hook, body: bytes) -> None:
    await hook.add()
    with pytest.raises(Invalid):
        await hook.call(signed(hook.clock, body=body), body)
    assert await events(hook.log, "hook") == []


def test_github_signs_as_it_documents() -> None:
    """The example of GitHub's documentation."""
    digest = hmac.new(b"It's a Secret to Everybody", b"Hello, World!", hashlib.sha256).hexdigest()
    assert digest == "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"


async def test_a_github_webhook_becomes_an_event(hook: Hook) -> None:
    await hook.add(scheme="github", secret_env="GITHUB_SECRET")  # noqa: S106 - a name
    body = b'{"action": "opened", "issue": {"number": 1}}'
    assert [await hook.call(github(body), body), await hook.call(github(body), body)] == [1, 0]
    (event,) = await events(hook.log, "hook")
    assert (event.topic, event.variant, event.native_id) == ("github.issues", "opened", "72d3162e")


async def test_a_github_body_under_another_delivery_id_is_a_replay(hook: Hook) -> None:
    await hook.add(scheme="github", secret_env="GITHUB_SECRET")  # noqa: S106 - a name
    body = b'{"action": "opened"}'
    assert [await hook.call(github(body), body), await hook.call(github(body, "forged"), body)] == [1, 0]


async def test_a_github_call_without_its_signature_is_refused(hook: Hook) -> None:
    await hook.add(scheme="github", secret_env="GITHUB_SECRET")  # noqa: S106 - a name
    headers = github(b"{}")
    for change in ({"x-hub-signature-256": ""}, {"x-hub-signature-256": "sha256=00"}):
        with pytest.raises(Unauthenticated):
            await hook.call(headers | change, b"{}")
    with pytest.raises(Invalid, match="x-github-delivery"):
        await hook.call(headers | {"x-github-delivery": ""}, b"{}")


async def test_a_plain_hmac_with_a_timestamp(hook: Hook) -> None:
    names = {"signature_header": "X-Sig", "signature_prefix": "v0=", "timestamp_header": "X-At", "id_header": "X-Id"}
    await hook.add(scheme="hmac", secret_env="GITHUB_SECRET", **names)  # noqa: S106 - a name

    def headers(shift_s: int, name: str) -> dict[str, str]:
        stamp = str(int(hook.clock.now_us() / 1e6) + shift_s)
        key = b"It's a Secret to Everybody"
        digest = hmac.new(key, stamp.encode() + b"." + BODY, hashlib.sha256).hexdigest()
        return {"x-sig": f"v0={digest}", "x-at": stamp, "x-id": name}

    assert await hook.call(headers(0, "a")) == 1
    assert await hook.call(headers(0, "b")) == 0  # the id is not signed: the same call under another name
    assert await hook.call(headers(1, "c")) == 1
    with pytest.raises(Unauthenticated):
        await hook.call(headers(400, "d"))
    with pytest.raises(Unauthenticated):
        await hook.call(headers(0, "e") | {"x-at": headers(2, "e")["x-at"]})


async def test_a_secret_that_is_not_set_takes_nothing(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    await hook.add()
    monkeypatch.delenv("HOOK_SECRET")
    with pytest.raises(NotReady, match="HOOK_SECRET"):
        await hook.call(signed(hook.clock))


async def test_a_paused_or_unknown_source_takes_nothing(hook: Hook) -> None:
    await hook.add()
    await hook.sources.pause("hook")
    with pytest.raises(Conflict, match="paused"):
        await hook.call(signed(hook.clock))
    await hook.sources.resume("hook")
    assert await hook.call(signed(hook.clock)) == 1
    await hook.sources.remove("hook")
    with pytest.raises(PostbusError, match="no source"):
        await hook.call(signed(hook.clock))


async def test_a_reply_url_goes_along_as_the_handle(hook: Hook) -> None:
    await hook.add(reply_url="https://example.com/back")
    await hook.call(signed(hook.clock))
    (event,) = await events(hook.log, "hook")
    assert event.delivery_handle == {"kind": "webhook", "url": "https://example.com/back", "source": "hook"}


@pytest.mark.parametrize(
    "settings",
    [
        {"secret_env": "not a name"},
        {"secret_env": ""},
        {"scheme": "none"},
        {"secret": "in the clear"},
        {"reply_url": "http://127.0.0.1/"},
        {"scheme": "hmac", "signature_header": "x y"},
    ],
)
async def test_bad_settings_are_refused(hook: Hook, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await hook.add(**settings)
