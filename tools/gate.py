"""Runs the tests; what failed beside others is run once more by itself, and that is said at the end.

Hundreds of tests start real servers, kill processes and share two cores with the rest. One that needed more patience
than it had is not a reason to refuse a change, one that fails alone as well is. A test that passes only alone is a bug
all the same: it is listed, so that somebody mends it. More than a few are never tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
AGAIN_MAX = 3
TESTS_FAILED = 1  # pytest's own word for it; any other says that the run itself went wrong


def main(arguments: list[str]) -> int:
    """Return what the process is to end with."""
    FAILED.unlink(missing_ok=True)  # of an earlier run
    ended = _pytest(arguments)
    if ended != TESTS_FAILED:
        return ended
    failed = sorted(json.loads(FAILED.read_text("utf-8"))) if FAILED.exists() else []
    if not 0 < len(failed) <= AGAIN_MAX:
        return ended
    again = _pytest(["-p", "no:cacheprovider", *failed])
    if again == 0:
        _say("passed only alone, which is a bug to be mended:", *failed)
    return again


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode  # noqa: S603 - the tests


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
