"""The kinds of target: how a wake is made at each, and when it has failed."""

from __future__ import annotations

import binascii
import os
from typing import TYPE_CHECKING

from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook

from postbus.inbox.wakes.records import Failure
from postbus.model import Invalid, Unreachable, instant
from postbus.outside import refused, request, run_program

if TYPE_CHECKING:
    from postbus.inbox.wakes.records import Attempt

__all__ = ["dispatch"]

PERMANENT = {404, 409, 410, 422}
SAID_CHARS_MAX = 500


async def dispatch(attempt: Attempt, body: bytes, now_us: int) -> Failure | None:
    """Make a wake; return why it failed, or None."""
    try:
        if attempt.target.kind == "webhook":
            return await _webhook(attempt, body, now_us)
        if attempt.target.kind == "command":
            return await _command(attempt, body)
        return await _tmux(attempt)
    except Unreachable as error:
        return Failure(error.message)
    except Invalid as error:  # an address that may not be called
        return Failure(error.message, permanent=True)


async def _webhook(attempt: Attempt, body: bytes, now_us: int) -> Failure | None:
    """POST the activation, signed as Standard Webhooks says; any 2xx is an arrival."""
    target = attempt.target
    assert target.url is not None  # noqa: S101 - checked when it was registered
    headers = {
        "content-type": "application/json",
        "user-agent": "postbus",
        "webhook-id": attempt.activation,
        "webhook-timestamp": str(now_us // 1_000_000),
    }
    if target.secret_env is not None:
        secret = os.environ.get(target.secret_env)
        if not secret:
            return Failure(f"the environment variable {target.secret_env} with the webhook's secret is not set")
        try:
            signature = Webhook(secret).sign(attempt.activation, instant(now_us), body.decode())
        except (binascii.Error, ValueError, EmptyWebhookSecretError):
            return Failure(f"the secret in {target.secret_env} is not base64, with or without whsec_ before it")
        headers["webhook-signature"] = signature
    answer = await request(
        "POST",
        target.url,
        headers=headers,
        body=body,
        allow_private=target.allow_private,
        timeout_s=target.timeout_s,
    )
    if 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP
        return None
    refusal = refused(answer, "the webhook", now_us)
    return Failure(refusal.message, answer.status in PERMANENT, refusal.retry_after_s or 0.0)


async def _command(attempt: Attempt, body: bytes) -> Failure | None:
    """Run the program with the activation on its standard input; exit code 0 is an arrival."""
    target = attempt.target
    assert target.argv is not None  # noqa: S101 - checked when it was registered
    ended = await run_program(target.argv, given=body, timeout_s=target.timeout_s)
    if ended.code == 0:
        return None
    return Failure(_said(f"{target.argv[0]} ended with exit code {ended.code}", ended.err))


async def _tmux(attempt: Attempt) -> Failure | None:
    """Type one line into the pane. Only names and numbers are in it, nothing that somebody else wrote."""
    target = attempt.target
    assert target.pane is not None  # noqa: S101 - checked when it was registered
    count = attempt.new_item_count
    text = f"postbus: {count} new item{'' if count == 1 else 's'} in the inbox of {attempt.agent}"
    for keys in (("-l", text), ("Enter",)):
        ended = await run_program(["tmux", "send-keys", "-t", target.pane, *keys], timeout_s=target.timeout_s)
        if ended.code != 0:
            return Failure(_said(f"tmux could not type into pane {target.pane}", ended.err))
    return None


def _said(what: str, complaint: str) -> str:
    return f"{what}: {complaint[-SAID_CHARS_MAX:]}" if complaint else what
