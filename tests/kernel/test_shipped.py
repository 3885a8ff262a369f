"""The extensions that come with Postbus, and the example: their manifests load, and mail is looked at with care."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from postbus.kernel import ExtensionState, inspect_extensions
from postbus.kernel.discovery import SHIPPED
from postbus.model import Trust
from tests.kernel.kernel_kit import KernelKit
from tests.kernel.real_kernel import settings_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "assistant"
NAMES = sorted(path.parent.name for path in SHIPPED.glob("*/manifest.yaml"))


def test_every_shipped_extension_and_the_example_load() -> None:
    assert NAMES == ["echo", "http", "mcp", "openai", "scheduler", "terminal"]
    there = [name for name in NAMES if name != "mcp" or importlib.util.find_spec("mcp") is not None]
    settings = settings_of(kernel={"shipped": there}, models={"model": "m"})
    statuses = inspect_extensions(EXAMPLE / "extensions", settings).extensions
    assert {status.id: (status.state.value, status.reason) for status in statuses} == dict.fromkeys(
        [*there, "email_checker", "mail_agent"], ("loaded", "")
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_extension_is_not_loaded_unasked(name: str) -> None:
    assert name not in {status.id for status in inspect_extensions(None).extensions}


def test_the_shipped_agent_needs_a_model() -> None:
    (status,) = inspect_extensions(None, settings_of(kernel={"shipped": ["openai"]})).extensions
    assert status.state is ExtensionState.ERROR
    assert "no model is named" in status.reason


# --- the example's mail -----------------------------------------------------------------------------------------------


def checker(tmp_path: Path, **config: Any) -> KernelKit:
    mail = {"maildir": str(tmp_path / "mail"), "poll_s": 1.0, **config}
    settings = settings_of(extensions={"email_checker": mail}, kernel={"disabled": ["mail_agent"]})
    return KernelKit(EXAMPLE / "extensions", settings)


async def test_each_mail_is_told_once_as_text_from_outside(tmp_path: Path) -> None:
    async with checker(tmp_path) as kit:
        instance = kit.kernel.instance("email_checker")
        assert (await instance.health()).ok is False
        new = tmp_path / "mail" / "new"
        new.mkdir(parents=True)
        assert (await instance.health()).ok is True
        (new / "1").write_bytes(b"From: a@example.org\nSubject: one\n\nhello\n")
        (new / "2").write_bytes(b"\xff\xfe\x00 no mail at all")
        (new / "3").write_bytes(b"Subject: =?utf-8?b?w4k=?=\nContent-Type: text/html; charset=nope\n\n<b>\xe9</b>")
        await told(kit, instance, 3)
        payloads = await kit.payloads("email.received")
        assert [payload["file"] for payload in payloads] == ["1", "2", "3"]
        assert payloads[0] == {"file": "1", "from": "a@example.org", "subject": "one", "text": "hello\n"}
        assert payloads[2]["subject"] == "É"
        assert {event.trust for event in await kit.events("email.received")} == {Trust.UNTRUSTED.value}

        instance._seen.clear()  # as after a crash between telling and remembering
        (new / "4").write_bytes(b"Subject: four\n\n")
        await told(kit, instance, 4)
        assert [payload["file"] for payload in await kit.payloads("email.received")] == ["1", "2", "3", "4"]


async def told(kit: KernelKit, instance: Any, count: int) -> None:
    """Look once, as the loop does at each turn."""
    for path in instance._unseen():
        await instance._tell(path)
    await kit.settle()
    assert len(instance._seen) == count
