"""A clock whose wall time stands still until a test moves it."""

from postbus.clock import SystemClock

__all__ = ["FakeClock"]

START_US = 2_000_000_000_000_000


class FakeClock(SystemClock):
    """Wall time is set by hand; monotonic time, sleeping and ids are real, so that waiting still works."""

    def __init__(self, now_us: int = START_US) -> None:
        self.wall_us = now_us

    def now_us(self) -> int:
        return self.wall_us

    def advance(self, seconds: float) -> None:
        self.wall_us += round(seconds * 1_000_000)
