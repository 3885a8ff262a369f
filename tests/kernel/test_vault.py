from __future__ import annotations

import asyncio
import base64
import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.kernel.system import System
from postbus.kernel.vault import SECRET_BYTES_MAX, Vault
from postbus.model import Conflict, Forbidden, Invalid, LimitExceeded, NotFound, StorageError
from postbus.store.backup import backup
from postbus.testing import BusKit, FakeClock
from tests.kernel.kernel_kit import CHANNEL, KernelKit, write_extension

CANARY = "kanarie-7f3a91c2d4-ëéñ"

DESK = """
    from postbus.kernel import SecretDeclined

    class Desk:
        channel_id = "desk"

        def __init__(self):
            self.sent, self.asked, self.answers = [], [], []

        async def initialize(self, context):
            self.ctx = context

        async def send(self, message):
            self.sent.append(message.text)

        async def read_secret(self, request):
            self.asked.append(request)
            answer = self.answers.pop(0)
            if answer is None:
                raise SecretDeclined(f"not telling")
            if isinstance(answer, Exception):
                raise answer
            return answer
"""

MAILER = """
    class Mailer:
        def __init__(self):
            self.told, self.used = [], []

        async def initialize(self, context):
            self.ctx = context
            context.subscribe_event("system.channel.secure_input_response", self.on_answer)
            context.subscribe_event("mail.send", self.on_send)

        async def on_answer(self, event):
            self.told.append(event.payload)

        async def on_send(self, event):
            self.used.append(await self.ctx.secret(event.payload["secret_id"]))
            raise ConnectionError("the mail server is away")
"""


@pytest.fixture
def host(extensions: Path) -> Path:
    write_extension(extensions, "desk", DESK)
    write_extension(extensions, "mailer", MAILER)
    write_extension(extensions, "chat", CHANNEL)
    return extensions


async def passes(kit: KernelKit, what: Callable[[], bool]) -> None:
    """Let time pass until something holds. Files are written beside the loop: the kit cannot know when that is done."""
    for _ in range(6000):
        await kit.settle()
        if what():
            return
        kit.kit.clock.advance(0.5)
        await asyncio.sleep(0.01)
    raise TimeoutError


async def told(kit: KernelKit, count: int = 1) -> list[dict[str, Any]]:
    """Wait for the answers the mailer gets."""
    mailer = kit.kernel.instance("mailer")
    await passes(kit, lambda: len(mailer.told) >= count)
    found: list[dict[str, Any]] = mailer.told
    return found


async def request(kit: KernelKit, *answers: Any, secret: str = "smtp", channel: str = "desk") -> None:  # noqa: S107 - a name
    kit.kernel.instance("desk").answers += answers
    await kit.kernel.instance("mailer").ctx.request_secret(secret, "Password?", channel)


# --- from the channel to the vault ------------------------------------------------------------------------------------


async def test_a_secret_goes_to_the_vault_and_only_its_handle_further(host: Path) -> None:
    async with KernelKit(host) as kit:
        await request(kit, CANARY)
        assert await told(kit) == [{"secret_id": "smtp", "status": "stored"}]
        [asked] = kit.kernel.instance("desk").asked
        assert (asked.secret_id, asked.prompt, asked.target_channel) == ("smtp", "Password?", "desk")
        assert await kit.kernel.instance("mailer").ctx.secret("smtp") == CANARY
        for other in ("desk", "chat"):
            with pytest.raises(Forbidden, match="belongs to mailer"):
                await kit.kernel.instance(other).ctx.secret("smtp")
        with pytest.raises(NotFound, match="no secret nothing"):
            await kit.kernel.instance("mailer").ctx.secret("nothing")


async def test_a_user_may_decline(host: Path) -> None:
    async with KernelKit(host) as kit:
        await request(kit, None)
        assert await told(kit) == [{"secret_id": "smtp", "status": "declined"}]
        assert await kit.kit.dead() == []


async def test_a_channel_that_stumbles_is_asked_again_and_its_words_are_not_told(
    host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with KernelKit(host) as kit:
        await request(kit, ValueError(f"cannot show {CANARY}"), CANARY)
        assert await told(kit) == [{"secret_id": "smtp", "status": "stored"}]
        assert "could not take the secret (ValueError)" in caplog.text
        assert CANARY not in caplog.text


async def test_a_channel_that_never_manages_is_given_up_on(host: Path) -> None:
    async with KernelKit(host) as kit:
        await request(kit, *(ValueError(CANARY) for _ in range(3)))
        [answer] = await told(kit)
        assert (answer["status"], CANARY in str(answer)) == ("failed", False)
        await kit.settle()
        [letter] = await kit.kit.dead()
        assert CANARY not in str(letter)


@pytest.mark.parametrize(
    ("secret", "channel", "answers", "reason"),
    [
        ("smtp", "chat", [], "cannot ask for a secret"),
        ("smtp", "nowhere", [], "no channel nowhere"),
        ("no/such id", "desk", [], "secret_id"),
        ("smtp", "desk", ["", "", ""], "Invalid"),
        ("smtp", "desk", ["\ud800"] * 3, "Invalid"),
        ("smtp", "desk", ["x" * (SECRET_BYTES_MAX + 1)] * 3, "LimitExceeded"),
        ("smtp", "desk", [5, 5, 5], "Invalid"),
    ],
)
async def test_what_cannot_work_is_told(host: Path, secret: str, channel: str, answers: list[Any], reason: str) -> None:
    async with KernelKit(host) as kit:
        await request(kit, *answers, secret=secret, channel=channel)
        [answer] = await told(kit)
        assert answer["status"] == "failed"
        assert reason in answer["reason"]


async def test_the_secret_of_another_is_not_replaced(host: Path) -> None:
    async with KernelKit(host) as kit:
        await request(kit, CANARY)
        await told(kit)
        await kit.kernel.instance("chat").ctx.request_secret("smtp", "Password?", "desk")
        answers = await told(kit, 2)
        assert answers[1]["status"] == "failed"
        assert "belongs to mailer" in answers[1]["reason"]
        assert len(kit.kernel.instance("desk").asked) == 1
        await request(kit, "new one")  # its owner may
        await told(kit, 3)
        assert await kit.kernel.instance("mailer").ctx.secret("smtp") == "new one"


async def test_a_crash_after_the_secret_is_stored_does_not_ask_again(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with KernelKit(host) as kit:
        stored = asyncio.Event()

        async def die(*_: Any) -> None:
            stored.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(System, "_respond", die)
            await request(kit, CANARY)
            await asyncio.wait_for(stored.wait(), 60)
        await kit.crash()
        assert await told(kit) == [{"secret_id": "smtp", "status": "stored"}]
        assert kit.kernel.instance("desk").asked == []
        assert await kit.kernel.instance("mailer").ctx.secret("smtp") == CANARY


# --- nowhere else -----------------------------------------------------------------------------------------------------


def spellings(secret: str) -> Iterator[bytes]:
    """The ways a text may be written into a file."""
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "latin-1"):
        raw = secret.encode(encoding)
        yield raw
        yield base64.b64encode(raw).rstrip(b"=")[:-2]
        yield raw.hex().encode()
    yield secret.encode("ascii", "backslashreplace")
    yield secret[:18].encode()


def traces(folder: Path, secret: str) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if any(one in path.read_bytes() for one in spellings(secret))]


async def test_no_trace_of_a_secret_anywhere_on_disk(host: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    logs = logging.FileHandler(tmp_path / "logs" / "app.log", encoding="utf-8")
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(logs)
    root.setLevel(logging.DEBUG)
    data = tmp_path / "data"
    write_extension(host, "agent", "class Agent:\n    async def invoke(self, task, context):\n        return task\n")
    try:
        async with KernelKit(host, bus=BusKit(data, clock=FakeClock())) as kit:
            await request(kit, ValueError(f"bad input: {CANARY}"), CANARY)
            await told(kit)
            # It is used, and what uses it fails: retries, a dead letter, errors in the log, agents, notifications.
            await kit.publish("mail.send", {"secret_id": "smtp"}, source="desk")
            await kit.kernel.instance("desk").ctx.request_agent_task("send the mail with smtp")
            mailer = kit.kernel.instance("mailer")
            await passes(kit, lambda: len(mailer.used) == 3)
            assert mailer.used == [CANARY] * 3
            await kit.settle()
            assert [letter.topic for letter in await kit.kit.dead()] == ["mail.send"]
            vault = data / "kernel" / "vault" / "smtp.secret"
            assert (data / "postbus.db-wal").stat().st_size > 0
            assert traces(tmp_path, CANARY) == []  # while it runs: the WAL, the log, the report, the vault itself
            backup(data, tmp_path / "backup")
    finally:
        root.removeHandler(logs)
        root.setLevel(level)
        logs.close()
    assert "mail server is away" in (tmp_path / "logs" / "app.log").read_text("utf-8")
    assert traces(tmp_path, CANARY) == []
    assert stat.S_IMODE(vault.stat().st_mode) == 0o600
    assert stat.S_IMODE(vault.parent.with_suffix(".key").stat().st_mode) == 0o600
    assert stat.S_IMODE(vault.parent.stat().st_mode) == 0o700


# --- the vault itself -------------------------------------------------------------------------------------------------


async def test_put_get_delete(tmp_path: Path) -> None:
    vault = Vault(lambda: tmp_path / "vault")
    await vault.put("a", "one", owner="x")
    await vault.put("a", "two", owner="x")
    assert await vault.get("a", reader="x") == await vault.get("a", reader="kernel") == "two"
    with pytest.raises(Conflict, match="belongs to x"):
        await vault.put("a", "three", owner="y")
    assert [path.name for path in (tmp_path / "vault").iterdir()] == ["a.secret"]
    (tmp_path / "vault" / ".a.secret.x1y2").write_text(CANARY, "utf-8")  # of a process that was killed
    assert await vault.delete("a") is True
    assert list((tmp_path / "vault").iterdir()) == []
    assert await vault.delete("a") is False
    with pytest.raises(NotFound):
        await vault.get("a", reader="x")


async def test_without_its_key_a_secret_is_not_to_be_read(tmp_path: Path) -> None:
    vault = Vault(lambda: tmp_path / "vault")
    await vault.put("a", CANARY, owner="x")
    assert traces(tmp_path, CANARY) == []
    key = tmp_path / "vault.key"
    kept = key.read_bytes()
    key.write_bytes(b"rubbish")
    with pytest.raises(StorageError, match=r"vault\.key is not the key"):
        await vault.get("a", reader="x")
    key.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        await vault.get("a", reader="x")
    key.write_bytes(kept)
    assert await vault.get("a", reader="x") == CANARY


async def test_two_at_once_leave_one_whole_secret(tmp_path: Path) -> None:
    vault = Vault(lambda: tmp_path / "vault")
    values = [str(n) * 10_000 for n in range(8)]
    await asyncio.gather(*(vault.put("a", value, owner="x") for value in values))
    assert await vault.get("a", reader="x") in values
    assert len(list((tmp_path / "vault").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("../a", "one", Invalid),
        ("", "one", Invalid),
        ("a", "", Invalid),
        ("a", "\udfff", Invalid),
        ("a", "x" * (SECRET_BYTES_MAX + 1), LimitExceeded),
    ],
)
async def test_what_is_no_secret_is_refused(tmp_path: Path, name: str, value: str, kind: type[Exception]) -> None:
    vault = Vault(lambda: tmp_path / "vault")
    with pytest.raises(kind) as refused:
        await vault.put(name, value, owner="x")
    assert not (tmp_path / "vault").exists()
    assert refused.value.__context__ is None
    assert not value or value not in str(refused.value)


async def test_a_file_that_cannot_be_read_or_written_is_told_without_its_content(tmp_path: Path) -> None:
    vault = Vault(lambda: tmp_path / "vault")
    await vault.put("a", CANARY, owner="x")
    (tmp_path / "vault" / "a.secret").write_text(f'{{"value": "{CANARY}', "utf-8")
    with pytest.raises(StorageError, match="cannot be read") as refused:
        await vault.get("a", reader="x")
    assert CANARY not in repr(refused.value)
    (tmp_path / "file").write_text("in the way", "ascii")
    with pytest.raises(StorageError, match="cannot be"):
        await Vault(lambda: tmp_path / "file" / "vault").put("a", CANARY, owner="x")
