"""A bus under load for a while: memory, file handles, tasks and the WAL do not grow, and the lag goes back to 0."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

from tests.faults.bus_soak import Sample, Soak
from tests.faults.campaign import FULL
from tests.faults.scene import children, run_python

SECONDS = 60.0 if FULL else 5.0
WAL_BYTES_MAX = 128 * 1024 * 1024

pytestmark = [pytest.mark.xdist_group("bus soak"), pytest.mark.slow]


def median(samples: list[Sample], field: str) -> float:
    return float(statistics.median(getattr(sample, field) for sample in samples))


def test_a_loaded_bus_neither_grows_nor_falls_behind(tmp_path: Path) -> None:
    with children(run_python("tests.faults.bus_soak", str(tmp_path / "store"), str(SECONDS))) as (process,):
        output, _ = process.communicate(timeout=4 * SECONDS + 120)
        assert process.returncode == 0
    soak = msgspec.json.decode(output, type=Soak)
    third = len(soak.samples) // 3
    middle, last = soak.samples[third : 2 * third], soak.samples[2 * third :]
    ratios = {name: median(last, name) / median(middle, name) for name in ("rss_kib", "handles", "tasks")}
    print(ratios, max(sample.wal_bytes for sample in soak.samples), soak.published, soak.handled, soak.lag_s)  # noqa: T201
    assert soak.lag == 0
    assert soak.failed > 0
    assert soak.dead > 0
    assert max(ratios.values()) < 1.1, ratios
    assert max(sample.wal_bytes for sample in soak.samples) < WAL_BYTES_MAX
