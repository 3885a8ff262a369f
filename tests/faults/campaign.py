"""How long a campaign is and which dice it throws."""

from __future__ import annotations

import os
import random
import sys

__all__ = ["FULL", "dice"]

FULL = os.environ.get("POSTBUS_CAMPAIGN") == "full"


def dice(name: str) -> random.Random:
    """Return the campaign's random numbers and print the seed that gives them again; a short one throws the same."""
    seed = int(os.environ.get("POSTBUS_FAULT_SEED") or (random.SystemRandom().randrange(1 << 32) if FULL else 1))
    sys.stderr.write(f"\n{name}: POSTBUS_FAULT_SEED={seed}\n")
    return random.Random(f"{name} {seed}")
