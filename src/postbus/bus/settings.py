"""The settings of a bus and of a subscription: refused with a sentence, before anything is changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from postbus.envelope import parse_instant
from postbus.log.cursors import check_start
from postbus.model import Invalid, Ordering, RetryPolicy, Start, StartPolicy

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["check_numbers", "check_retry", "parse_ordering", "parse_start"]


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


def parse_start(start: Start | str | datetime | None) -> Start | None:
    """Return where to start: ``latest``, ``earliest``, an instant, or a ``Start``."""
    if start is None:
        return None
    if isinstance(start, Start):
        return check_start(start)
    if start in (StartPolicy.LATEST, StartPolicy.EARLIEST):
        return Start(policy=StartPolicy(str(start)))
    return Start(policy=StartPolicy.AT_TIME, time_us=parse_instant(start))
