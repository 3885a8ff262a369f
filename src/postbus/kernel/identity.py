"""Ids that are the same when the same work is done again."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING

from postbus.bus.context import current
from postbus.model import Trust

if TYPE_CHECKING:
    from postbus.bus import Context
    from postbus.clock import Clock

__all__ = ["ambient_correlation", "ambient_trust", "new_work", "stable_id", "work_id"]


class _Work:
    """One handler at work on one delivery; the steps it takes are counted."""

    def __init__(self, delivery: Context, handler: int) -> None:
        self.delivery = delivery
        self.handler = handler
        self.steps = count()


_work: ContextVar[_Work | None] = ContextVar("postbus_kernel_work", default=None)


def stable_id(*parts: object) -> str:
    """Return 32 hexadecimal digits that stand for these parts, and for no others."""
    digest = hashlib.sha256()
    for part in parts:
        raw = str(part).encode()
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()[:32]


def new_work(delivery: Context) -> None:
    """Begin to count the steps of the next handler of a delivery."""
    before = _work.get()
    _work.set(_Work(delivery, before.handler + 1 if before is not None and before.delivery is delivery else 0))


def work_id(clock: Clock) -> str:
    """Return an id for the next step of the handler that runs: the same when its event is handled again."""
    context, work = current.get(), _work.get()
    if context is None or work is None or work.delivery is not context:
        return clock.new_id()
    return stable_id("work", context.event.id, context.subscription, work.handler, next(work.steps))


def ambient_correlation(clock: Clock) -> str:
    """Return the correlation of the event being handled, or a new one."""
    context = current.get()
    return clock.new_id() if context is None else context.event.correlation_id or context.event.id


def ambient_trust() -> Trust:
    """Return the trust of the event being handled."""
    context = current.get()
    return Trust.TRUSTED if context is None else Trust(context.event.trust)
