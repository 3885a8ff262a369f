"""The parts of the kernel that have handlers of their own, built once per kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.kernel.approvals import Approvals
from postbus.kernel.crons import Crons
from postbus.kernel.schedules import Schedules
from postbus.kernel.system import System
from postbus.kernel.vault import Vault

if TYPE_CHECKING:
    from postbus.kernel.contract import KernelPart
    from postbus.kernel.kernel import Kernel

__all__ = ["Parts"]


class Parts:
    """What serves the system topics, asks humans, keeps secrets, and knows what comes due."""

    def __init__(self, kernel: Kernel) -> None:
        self.vault = Vault(lambda: kernel.state_dir / "vault")
        self.approvals = Approvals(kernel)
        self.schedules = Schedules(kernel.bus)
        self._system = System(kernel, self.vault)
        self._crons = Crons(kernel)

    def all(self) -> tuple[KernelPart, ...]:
        """Return every part, in the order they start."""
        return (self._system, self.approvals, self.schedules, self._crons)
