"""Schedules: one instant, every so many seconds from an anchor, or five fields of cron in a zone."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from postbus.envelope import parse_instant
from postbus.model import Invalid, instant

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FIELDS", "schedule"]

FIELDS = 5
CRON_CHARS_MAX = 200


def schedule(
    at: str | None, every_s: float | None, cron: str | None, zone: str, anchor_us: int
) -> Callable[[int], int | None]:
    """Return the schedule that exactly one of ``at``, ``every_s`` and ``cron`` describes, or refuse it.

    A schedule gives the first fire time after an instant, both in microseconds; None: never again. ``every_s``
    counts from the anchor, so that it does not drift.
    """
    if sum(one is not None for one in (at, every_s, cron)) != 1:
        raise Invalid("a timer has exactly one of at, every_s and cron")
    if at is not None:
        once_us = parse_instant(at)
        return lambda after_us: once_us if once_us > after_us else None
    if every_s is not None:
        if not math.isfinite(every_s) or every_s < 1:
            raise Invalid(f"every_s is at least 1, not {every_s:g}")
        step_us = round(every_s * 1e6)
        return lambda after_us: anchor_us + max((after_us - anchor_us) // step_us + 1, 1) * step_us
    return _cron(cron or "", zone)


def _cron(text: str, zone: str) -> Callable[[int], int | None]:
    try:
        place = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise Invalid(f"there is no zone {zone!r}", hint="name one of the IANA database, as in Europe/Berlin") from None
    if len(text) > CRON_CHARS_MAX or len(text.split()) != FIELDS:
        raise Invalid(f"cron {text[:60]!r} does not have {FIELDS} fields", hint="minute hour day month weekday")

    def following(after_us: int) -> int | None:
        begin = instant(after_us).astimezone(place)
        try:
            found: datetime = next(CronSim(text, begin))
        except StopIteration:
            return None
        return (found - _EPOCH) // timedelta(microseconds=1)

    try:
        first = following(0)
    except CronSimError as error:
        raise Invalid(f"cron {text!r} is wrong: {error}") from None
    if first is None:
        raise Invalid(f"cron {text!r} never comes")
    return following


_EPOCH = instant(0)
