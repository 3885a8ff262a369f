"""What is written in every benchmark: JSON payloads of exactly 500 bytes, the same for every contender."""

from __future__ import annotations

import json
import random
import string
import time

from postbus.envelope import draft
from postbus.model import Draft

__all__ = ["DRAFTS", "PAYLOADS", "PAYLOAD_BYTES", "Stopwatch", "full_draft"]

PAYLOAD_BYTES = 500
DISTINCT = 1_000

_random = random.Random(20_240_607)


def _payload(number: int) -> bytes:
    head = {"order": number, "customer": f"c-{number % 97}", "total": round(_random.uniform(1, 900), 2), "note": ""}
    room = PAYLOAD_BYTES - len(json.dumps(head).encode())
    head["note"] = "".join(_random.choices(string.ascii_letters + " ", k=room))
    return json.dumps(head).encode()


PAYLOADS: list[bytes] = [_payload(number) for number in range(DISTINCT)]
DRAFTS: list[Draft] = [draft("bench.orders.created", "bench:load", payload) for payload in PAYLOADS]
assert all(len(payload) == PAYLOAD_BYTES for payload in PAYLOADS)


def full_draft(number: int) -> Draft:
    """Return a draft that also has a key, a correlation and an identity of its own."""
    return draft(
        "bench.orders.created",
        "bench:load",
        PAYLOADS[number % DISTINCT],
        key=f"customer-{number % 997}",
        correlation_id=f"order-{number // 4:012d}",
        native_id=f"delivery-{number:016d}",
    )


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def over(self, seconds: float) -> bool:
        """Say whether that much wall time has passed."""
        return time.perf_counter() - self._wall >= seconds

    def rate(self, events: int) -> dict[str, float]:
        """Return events per second and processor time of this process per event, for events done by now."""
        wall = time.perf_counter() - self._wall
        cpu = time.process_time() - self._cpu
        return {"events_s": events / wall, "cpu_us": cpu / events * 1e6}
