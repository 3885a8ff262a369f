"""The kind ``webhook``: calls from outside, taken only under a signature over exactly the bytes that came."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from typing import TYPE_CHECKING, Any, Literal

from standardwebhooks import Webhook

from postbus import strict_json
from postbus.model import Invalid, Unauthenticated, instant
from postbus.outside import check_url
from postbus.sources.contract import Common, NotReady, Received, made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["WebhookSettings", "WebhookSource", "check_github", "check_secret_env", "secret_of"]

TOPIC = "webhook.received"
TOLERANCE_S = 300
EVENT = re.compile("[a-z_]{1,60}")
GITHUB = "x-hub-signature-256"


class WebhookSettings(Common, frozen=True, kw_only=True):
    """``scheme``: how calls are signed; ``secret_env``: the environment variable that holds the secret.

    The scheme ``hmac`` is a hexadecimal HMAC-SHA-256 of the body in ``signature_header``, perhaps after
    ``signature_prefix``; with ``timestamp_header`` it is of the timestamp, a dot and the body. ``id_header`` names what
    tells calls apart, and ``reply_url`` where a reply to its events goes.
    """

    scheme: Literal["standard", "github", "hmac"] = "standard"
    secret_env: str
    signature_header: str = "x-signature"
    signature_prefix: str = ""
    timestamp_header: str | None = None
    id_header: str | None = None
    reply_url: str | None = None
    allow_private: bool = False


class WebhookSource:
    """Replay-safe: a call is known again by its signed id, or by its body where nothing signs the id."""

    def __init__(self, source: Source, settings: WebhookSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock

    @staticmethod
    def check(settings: WebhookSettings) -> None:
        """Refuse settings that could never work."""
        check_secret_env(settings.secret_env)
        for name in (settings.signature_header, settings.timestamp_header, settings.id_header):
            if name is not None and not name.replace("-", "").isalnum():
                raise Invalid(f"{name!r} is no name of a header")
        if settings.reply_url is not None:
            check_url(settings.reply_url, allow_private=settings.allow_private)

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """See ``Receiver.receive``."""
        settings = self._settings
        secret = secret_of(settings.secret_env)
        if settings.scheme == "standard":
            name, digest = self._standard(headers, body, secret), None
        elif settings.scheme == "github":
            name, digest = check_github(headers, body, secret)
        else:
            name, digest = self._hmac(headers, body, secret)
        value = strict_json.parse(body)
        known = value if isinstance(value, dict) else {}
        topic, variant = TOPIC, known.get("type")
        event = headers.get("x-github-event", "")
        if settings.scheme == "github" and EVENT.fullmatch(event):
            topic, variant = f"github.{event}", known.get("action")
        facts: dict[str, Any] = {"variant": variant if isinstance(variant, str) else ""}
        if settings.reply_url is not None:
            facts["delivery_handle"] = {"kind": "webhook", "url": settings.reply_url, "source": self._source.id}
        return Received(drafts=[made(self._source, settings, topic, body, native_id=name, **facts)], digest=digest)

    def _standard(self, headers: Mapping[str, str], body: bytes, secret: bytes) -> str:
        name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
        given = headers.get("webhook-signature", "").split(" ")
        if not name:
            raise Unauthenticated("the header webhook-id is missing")
        at_s = self._fresh(stamp, "webhook-timestamp")
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise Invalid("the body is not UTF-8") from None
        wanted = Webhook(secret).sign(name, instant(at_s * 1_000_000), text)
        if not any(hmac.compare_digest(wanted.encode(), one.encode()) for one in given):
            raise Unauthenticated("no signature of the call is right")
        return name

    def _hmac(self, headers: Mapping[str, str], body: bytes, secret: bytes) -> tuple[str, bytes]:
        settings, signed = self._settings, body
        if settings.timestamp_header is not None:
            stamp = headers.get(settings.timestamp_header.lower(), "")
            self._fresh(stamp, settings.timestamp_header)
            signed = stamp.encode() + b"." + body
        _compare(headers.get(settings.signature_header.lower(), ""), settings.signature_prefix, signed, secret)
        digest = hashlib.sha256(signed).digest()
        given = headers.get((settings.id_header or "").lower(), "")
        return given or digest.hex(), digest

    def _fresh(self, stamp: str, header: str) -> int:
        if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= len("9999999999")):
            raise Unauthenticated(f"the header {header} is no number of seconds")
        if abs(self._clock.now_us() / 1e6 - int(stamp)) > TOLERANCE_S:
            raise Unauthenticated(f"the call is more than {TOLERANCE_S} s away from now")
        return int(stamp)


def check_github(headers: Mapping[str, str], body: bytes, secret: bytes) -> tuple[str, bytes]:
    """Check GitHub's signature; return the delivery's id, which nothing signs, and the digest of the body."""
    _compare(headers.get(GITHUB, ""), "sha256=", body, secret)
    name = headers.get("x-github-delivery", "")
    if not name:
        raise Invalid("the header x-github-delivery is missing")
    return name, hashlib.sha256(body).digest()


def _compare(given: str, prefix: str, signed: bytes, secret: bytes) -> None:
    wanted = prefix + hmac.new(secret, signed, hashlib.sha256).hexdigest()
    if not given:
        raise Unauthenticated("the call is not signed")
    if not hmac.compare_digest(wanted.encode(), given.encode()):
        raise Unauthenticated("the signature of the call is wrong")


def check_secret_env(name: str) -> None:
    """Refuse what is no name of an environment variable."""
    if not name.replace("_", "").isalnum() or not name.isascii() or name[0].isdigit():
        raise Invalid(f"{name!r} is no name of an environment variable")


def secret_of(name: str) -> bytes:
    """Return the secret in an environment variable: ``whsec_`` and base64, or the text itself."""
    text = os.environ.get(name, "")
    if not text:
        raise NotReady(f"the environment variable {name} is not set", hint="set it where the sources run")
    if text.startswith("whsec_"):
        try:
            return base64.b64decode(text.removeprefix("whsec_") + "==")
        except binascii.Error:
            raise NotReady(f"the secret in {name} is not base64 after whsec_") from None
    return text.encode()
