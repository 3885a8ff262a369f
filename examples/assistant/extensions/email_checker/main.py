"""Looks into the folder ``new`` of a maildir and emits one event per mail, once."""

from __future__ import annotations

import asyncio
import email
import email.policy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from postbus.kernel import Extension, Health, read_config

if TYPE_CHECKING:
    from email.message import EmailMessage

    from postbus.kernel import ExtensionContext

FILE_BYTES_MAX = 10 << 20
TEXT_CHARS_MAX = 20_000
LINE_CHARS_MAX = 500


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the mail is, and how often it is looked at."""

    maildir: str
    poll_s: Annotated[float, Meta(gt=0)] = 2.0


class EmailChecker(Extension):
    """The mails stay where they are; which were seen is remembered in the extension's own folder."""

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the config and what was seen before."""
        self._context = context
        self._config = read_config(context.config, Config)
        self._new = Path(self._config.maildir) / "new"
        self._seen_file = context.data_dir / "seen"
        self._seen = _lines(self._seen_file)

    async def run_background(self) -> None:
        """Look, and look again."""
        while True:
            for path in await asyncio.to_thread(self._unseen):
                await self._tell(path)
            await self._context.clock.sleep(self._config.poll_s)

    async def health(self) -> Health:
        """Say whether there is a maildir."""
        there = await asyncio.to_thread(self._new.is_dir)
        return Health(ok=there, detail="" if there else f"{self._new} is no folder")

    def _unseen(self) -> list[Path]:
        if not self._new.is_dir():
            return []
        return sorted(path for path in self._new.iterdir() if path.is_file() and path.name not in self._seen)

    async def _tell(self, path: Path) -> None:
        try:
            payload = await asyncio.to_thread(_read, path)
        except FileNotFoundError:  # a mail program was quicker
            return
        # Told twice, after a crash right here, it is one event: its native id is the mail's own name.
        await self._context.emit("email.received", payload, native_id=f"mail:{path.name}", key="mail")
        self._seen.add(path.name)
        with self._seen_file.open("a", encoding="utf-8") as file:
            file.write(f"{path.name}\n")


def _lines(path: Path) -> set[str]:
    return set(path.read_text("utf-8").splitlines()) if path.exists() else set()


def _read(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        message = email.message_from_bytes(file.read(FILE_BYTES_MAX), policy=email.policy.default)
    return {
        "file": path.name,
        "from": _clean(str(message.get("from", "")))[:LINE_CHARS_MAX],
        "subject": _clean(str(message.get("subject", "")))[:LINE_CHARS_MAX],
        "text": _clean(_text(message))[:TEXT_CHARS_MAX],
    }


def _text(message: EmailMessage) -> str:
    body = message.get_body(preferencelist=("plain", "html"))
    if body is None:
        return ""
    try:
        return str(body.get_content())
    except (LookupError, ValueError):  # a character set that does not exist
        raw = body.get_payload(decode=True)
        return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _clean(text: str) -> str:
    """Return text that is valid UTF-8, whatever the mail had in it."""
    return text.encode("utf-8", "replace").decode()
