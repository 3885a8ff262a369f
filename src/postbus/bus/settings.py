"""The settings of a bus and of a subscription: refused with a sentence, before anything is changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from postbus.bus.places import DISPATCH
from postbus.bus.registry import Registered
from postbus.delivery.dead import SUFFIX
from postbus.envelope import parse_instant
from postbus.filters import compile_filter
from postbus.log.cursors import check_start
from postbus.model import Invalid, Ordering, Overflow, RetryPolicy, Start, StartPolicy
from postbus.topics import check_id, check_pattern, check_stream_name

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["check_numbers", "check_retry", "parse_ordering", "parse_overflow", "parse_start", "registration"]


def check_numbers(*, whole: bool = False, least: float | None = None, **values: Any) -> None:
    """Refuse settings that are no numbers above 0, or of at least ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and not isinstance(value, int)):
            raise Invalid(f"{name} is a {'whole ' if whole else ''}number, not {value!r}")
        if not math.isfinite(value) or value < (least or 0) or (least is None and value == 0):
            raise Invalid(f"{name} is {'above 0' if least is None else f'at least {least:g}'}, not {value}")


def check_retry(policy: RetryPolicy) -> RetryPolicy:
    """Refuse a policy that makes no sense."""
    if not isinstance(policy, RetryPolicy):
        raise Invalid(f"retry is a RetryPolicy, not {type(policy).__name__}")
    check_numbers(whole=True, max_attempts=policy.max_attempts)
    check_numbers(least=0, backoff_s=policy.backoff_s, backoff_s_max=policy.backoff_s_max, jitter=policy.jitter)
    if policy.jitter > 1:
        raise Invalid(f"jitter is at most 1, not {policy.jitter}")
    return policy


def parse_ordering(value: Ordering | str) -> Ordering:
    """Return an ordering by its name."""
    try:
        return Ordering(value)
    except ValueError:
        raise Invalid(f"ordering is 'key' or 'strict', not {value!r}") from None


def parse_overflow(value: Overflow | str, max_backlog: int | None) -> Overflow:
    """Return what to do on overflow by its name; it goes with a bound, and a bound with it."""
    try:
        overflow = Overflow(value)
    except ValueError:
        raise Invalid(f"overflow is 'wait' or 'drop_oldest', not {value!r}") from None
    if overflow is Overflow.DROP_OLDEST:
        if max_backlog is None:
            raise Invalid("overflow='drop_oldest' needs max_backlog, the number of events that may wait")
        check_numbers(whole=True, max_backlog=max_backlog)
    elif max_backlog is not None:
        raise Invalid("max_backlog goes with overflow='drop_oldest'; without it nothing is ever dropped")
    return overflow


def parse_start(start: Start | str | datetime | None) -> Start | None:
    """Return where to start: ``latest``, ``earliest``, an instant, or a ``Start``."""
    if start is None:
        return None
    if isinstance(start, Start):
        return check_start(start)
    if start in (StartPolicy.LATEST, StartPolicy.EARLIEST):
        return Start(policy=StartPolicy(str(start)))
    return Start(policy=StartPolicy.AT_TIME, time_us=parse_instant(start))


def registration(
    tenant: str,
    subscriber_id: str,
    topic: str,
    *,
    retry: RetryPolicy | None,
    ordering: Ordering | str,
    concurrency: int,
    timeout: float,
    dead_letter_stream: str | None,
    overflow: Overflow | str,
    max_backlog: int | None,
    filter: dict[str, Any] | None,  # noqa: A002 - the word of the model
) -> Registered:
    """Return a subscription as it is kept, after every setting was checked."""
    check_id(subscriber_id, "subscriber_id")
    if subscriber_id == DISPATCH:
        raise Invalid(f"{DISPATCH} is the bus's own reader")
    check_pattern(topic)
    check_numbers(whole=True, concurrency=concurrency)
    check_numbers(timeout=timeout)
    if dead_letter_stream is not None:
        check_stream_name(dead_letter_stream)
        if not dead_letter_stream.startswith(f"{tenant}.") or not dead_letter_stream.endswith(SUFFIX):
            name = f"{tenant}.<name>{SUFFIX}"
            raise Invalid(f"a dead-letter stream of {tenant} is called {name}, not {dead_letter_stream}")
    return Registered(
        id=subscriber_id,
        patterns=(topic,),
        retry=check_retry(retry or RetryPolicy()),
        ordering=parse_ordering(ordering),
        concurrency=concurrency,
        timeout_s=timeout,
        dead_letter_stream=dead_letter_stream,
        overflow=parse_overflow(overflow, max_backlog),
        max_backlog=max_backlog,
        filter=compile_filter({} if filter is None else filter).spec,
    )
