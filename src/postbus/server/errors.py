"""Refusals as HTTP: which status an error has, and the one shape of an error's body."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from postbus.model import (
    Backpressure,
    Conflict,
    Forbidden,
    IdempotencyConflict,
    Invalid,
    InvalidPayload,
    LeaseLost,
    LoopDetected,
    NotFound,
    PostbusError,
    QuotaExceeded,
    Refused,
    RequestTimeout,
    StorageError,
    StorageFull,
    Unauthenticated,
    Unreachable,
)

__all__ = ["ErrorBody", "Problem", "Refusal", "refused"]

# The first kind an error is an instance of gives its status.
STATUSES: tuple[tuple[type[PostbusError], int], ...] = (
    (Invalid, 400),
    (LoopDetected, 400),
    (Unauthenticated, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (LeaseLost, 409),
    (QuotaExceeded, 429),
    (Backpressure, 503),
    (RequestTimeout, 504),
    (StorageFull, 507),
    (StorageError, 503),
    (Unreachable, 503),
    (Refused, 409),
)


class Problem(msgspec.Struct, omit_defaults=True):
    """What went wrong: a stable code, a sentence, often a hint that fixes it, and facts of that kind of error."""

    code: str
    message: str
    hint: str | None = None
    position: int | None = None
    offset: int | None = None
    issues: list[Any] | None = None


class ErrorBody(msgspec.Struct):
    """The body of every refusal."""

    error: Problem


class Refusal(PostbusError):
    """A refusal that only exists over HTTP, with its own status."""

    def __init__(
        self, status: int, code: str, message: str, *, hint: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.headers = headers or {}


def refused(error: PostbusError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body for an error; nothing in it tells of paths, SQL or code."""
    status = getattr(error, "status", None) or next((code for kind, code in STATUSES if isinstance(error, kind)), 500)
    problem = Problem(error.code, error.message, error.hint, issues=getattr(error, "issues", None))
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, InvalidPayload):
        problem.position = error.position
    elif isinstance(error, IdempotencyConflict):
        problem.offset = error.offset
    elif isinstance(error, QuotaExceeded):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    elif isinstance(error, Refusal):
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    elif isinstance(error, Backpressure):
        headers.append((b"retry-after", b"1"))
    elif isinstance(error, StorageError):
        problem.message, problem.hint = _plain(error), None
        headers.append((b"retry-after", b"5"))
    elif isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b'Bearer realm="postbus"'))
    return status, headers, msgspec.json.encode(ErrorBody(problem))


def _plain(error: StorageError) -> str:
    """Return the sentence of an error of the store without the names of its files."""
    if isinstance(error, StorageFull):
        return "the disk is full: nothing was written; reads and acknowledgements go on"
    return "the store cannot do this now; the operator finds the reason in the server's log"
