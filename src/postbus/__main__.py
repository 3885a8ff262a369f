"""``python -m postbus`` is ``postbus``."""

from __future__ import annotations

import sys

from postbus.cli import main

if __name__ == "__main__":
    sys.exit(main())
