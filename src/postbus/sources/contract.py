"""The contract between a source host and the kinds of source."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from postbus.envelope import draft
from postbus.model import Draft, Invalid, PostbusError, Trust

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postbus.model import Source

__all__ = ["BAD", "Common", "NotReady", "Polled", "Poller", "Received", "Receiver", "bad", "made", "read_settings"]

BAD = "source.bad"
SAMPLE_CHARS = 1_000
ID_CHARS_MAX = 100
S = TypeVar("S")


class NotReady(PostbusError):
    """A source lacks something that its operator has to give it, such as a secret in the environment."""

    code = "not_ready"


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that every kind of source has.

    ``stream``: an existing stream of the tenant to write to instead of one of its own. ``topic``: the topic of its
    events instead of the kind's own. ``trusted``: its text may reach a prompt as it is.
    """

    stream: str | None = None
    topic: str | None = None
    trusted: bool = False


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at the outside brought: events in order, and the checkpoint from which to go on after them.

    ``again``: more is waiting. ``due_at_us``: when to look next by the wall clock, ``wait_s``: after how long at the
    earliest; neither: after the interval. ``problem``: what went wrong behind that checkpoint; it counts as a failure.
    """

    drafts: list[Draft]
    checkpoint: Any
    again: bool = False
    due_at_us: int | None = None
    wait_s: float | None = None
    problem: str | None = None


class Poller(Protocol):
    """A source that is looked at. It keeps nothing between polls that the checkpoint does not say."""

    interval_s: float
    """How long to wait between polls that brought everything there was."""

    async def poll(self, checkpoint: Any) -> Polled:
        """Return what is new since the checkpoint (None: since ever, or since the source was made).

        Asked again with the same checkpoint it returns the same events with the same native ids, or further ones.
        Raises ``Unreachable`` (or any error) when there is nothing to show for it; the host waits longer each time.
        """


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What came in by itself. ``digest``: of a body whose signature does not cover its id, to know it again."""

    drafts: list[Draft]
    digest: bytes | None = None


class Receiver(Protocol):
    """A source that is called from outside."""

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """Return the event of a call; names of headers are in lower case. Raises ``Unauthenticated`` or ``Invalid``."""


def read_settings(kind: type[S], given: Any) -> S:
    """Return settings as the kind declares them, or refuse them with what is wrong where."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"settings: {error}") from None


def made(source: Source, common: Common, topic: str, payload: Any, *, native_id: str, **facts: Any) -> Draft:
    """Return an event of a source; one that no event can be becomes an event about that, so that nothing stops."""
    trust = Trust.TRUSTED if common.trusted else Trust.UNTRUSTED
    try:
        return draft(common.topic or topic, f"source:{source.id}", payload, native_id=native_id, trust=trust, **facts)
    except Invalid as error:
        sample = payload.decode(errors="replace") if isinstance(payload, bytes) else str(payload)
        return bad(source, native_id, error.message, sample)


def bad(source: Source, native_id: str, error: str, sample: str) -> Draft:
    """Return the event that says what could not become an event."""
    name = (
        native_id if len(native_id) <= ID_CHARS_MAX else hashlib.sha256(native_id.encode(errors="replace")).hexdigest()
    )
    payload = {"error": error, "native_id": name, "sample": sample[:SAMPLE_CHARS], "chars": len(sample)}
    clean = {key: _clean(value) if isinstance(value, str) else value for key, value in payload.items()}
    return draft(BAD, f"source:{source.id}", clean, native_id=_clean(f"bad:{name}"), trust=Trust.UNTRUSTED)


def _clean(text: str) -> str:
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
