"""A failing disk: every call SQLite makes is failed once, and for good, with EIO and with a full disk.

Errors are typed, a failed write ends writing while reading goes on, and after opening again on a healthy disk
everything that was acknowledged is there and nothing is half there. A call that hangs fails the test.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.faults.campaign import FULL, dice
from tests.faults.scene import children, run_python

PATIENCE_S = 120.0
SAMPLES = 30
SAMPLES_FULL_FOR_GOOD = 8  # the store gives a full disk half a second before it tries again


def feed(pipe: TextIO, take: Callable[[str], None]) -> None:
    for line in pipe:
        take(line)


def runs(ground: Path, start: str, kind: str, once: str, at: list[int]) -> list[dict[str, Any]]:
    """Run the script once per call number in a process of its own."""
    arguments = [str(ground), start, kind, once, *map(str, at)]
    results: list[dict[str, Any]] = []
    with children(run_python("tests.faults.disk_script", *arguments, stderr=subprocess.PIPE)) as (process,):
        lines: queue.Queue[str] = queue.Queue()
        noise: list[str] = []
        feeders = [
            threading.Thread(target=feed, args=(process.stdout, lines.put), daemon=True),
            threading.Thread(target=feed, args=(process.stderr, noise.append), daemon=True),
        ]
        for feeder in feeders:
            feeder.start()
        for number in at:
            try:
                results.append(json.loads(lines.get(timeout=PATIENCE_S)))
            except queue.Empty:
                pytest.fail(
                    f"the store hangs when call {number} fails ({start}, {kind}, {once}): {''.join(noise[-20:])}"
                )
        process.wait(PATIENCE_S)
        for feeder in feeders:
            feeder.join()
    return results


@pytest.mark.parametrize("once", ["once", "for good"])
@pytest.mark.parametrize("kind", ["eio", "full"])
@pytest.mark.parametrize("start", ["fresh", "built"])
def test_every_failing_call_is_survived(ground: Path, start: str, kind: str, once: str) -> None:
    rolls = dice(f"disk {start} {kind} {once}")
    (healthy,) = runs(ground, start, kind, once, [-1])
    assert healthy["verdict"] == "ok"
    assert healthy["refused"] == []
    calls = list(range(healthy["calls"] + 10))
    if not FULL:
        count = SAMPLES_FULL_FOR_GOOD if (kind, once) == ("full", "for good") else SAMPLES
        calls = sorted(rolls.sample(calls, count))
    fired: Counter[str] = Counter()
    for result in runs(ground, start, kind, once, calls):
        assert result["verdict"] == "ok", f"call {result['at']} ({result['fired']}): {result['verdict']}"
        fired[result["fired"].partition(" ")[0]] += 1
    print(dict(fired))  # noqa: T201 - what the campaign did
    assert fired.total() - fired[""] > 0
