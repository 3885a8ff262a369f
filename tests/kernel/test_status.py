from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from postbus.kernel import KernelReport
from postbus.kernel.status import is_alive, read_report, write_report

REPORT = KernelReport(pid=1, running=True, written_at_us=5, orchestrator=None, channels=(), extensions=())


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none") is None
    write_report(tmp_path / "kernel", REPORT)
    assert read_report(tmp_path / "kernel") == REPORT
    assert [path.name for path in (tmp_path / "kernel").iterdir()] == ["status.json"]
    (tmp_path / "kernel" / "status.json").write_text("{")
    assert read_report(tmp_path / "kernel") is None


def test_a_process_that_is_gone_is_not_alive() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not is_alive(msgspec.structs.replace(REPORT, pid=gone.pid))
    assert not is_alive(msgspec.structs.replace(REPORT, running=False))
    assert is_alive(REPORT)  # the first process of the machine, perhaps of another user
