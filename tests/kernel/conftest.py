from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    """A folder for extensions."""
    made = tmp_path / "extensions"
    made.mkdir()
    return made
